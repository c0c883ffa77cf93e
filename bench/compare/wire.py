"""What the bench and a peer's process say to each other: one JSON object a line.

Invariants and semantics: the bench speaks first; every order gets exactly one reply. Times are seconds on the peer's
own clock, counted from the moment it took up the order, so that pipes and JSON cost nobody anything. Standard library
only: this file runs in every peer's environment.

Not here: starting and stopping processes (``peer_process``), the peer's loop (``worker``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


class WireError(Exception):
    """A line that is none of the messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Get ready to answer."""

    model_dir: str
    """config.json, safetensors weights, tokenizer."""
    gguf: str
    """The same model as one GGUF file; empty if there is none."""
    precision: str
    """``bf16`` or ``int8``; a peer with formats of its own ignores it."""
    num_threads: int
    max_slots: int
    """Most questions computed at a time."""
    max_context: int
    """Positions of one question, prompt and answer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question: exactly ``max_tokens`` greedy tokens are to follow ``ids``."""

    ids: tuple[int, ...]
    text: str
    """What follows ``RunOrder.system_prompt`` as text; with it, it has exactly these ids."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """Answer all of these, given at once, with nothing remembered from earlier orders."""

    asks: tuple[Ask, ...]
    level: str = "strict"
    """Kev's isolation level."""
    system_prompt: str = ""
    """Text that all prompts start with."""
    reuse_prefix: bool = False
    """Whether questions of this order may share the computation of a common prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one question got."""

    output: str
    """Token ids joined by blanks, or the text where a peer tells no ids: equal exactly when the answers are."""
    num_tokens: int
    first_token_s: float | None
    """None: the peer cannot tell."""
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The peer is ready."""

    versions: dict[str, str] = field(default_factory=dict)
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """All questions of an order, in its order."""

    answers: tuple[Answer, ...]
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The order was not carried out."""

    message: str
    offered: bool = True
    """False: this peer does not do such things at all."""


Message = LoadOrder | RunOrder | Loaded | Answered | Failed
_KINDS: dict[str, type[Message]] = {
    "load": LoadOrder,
    "run": RunOrder,
    "loaded": Loaded,
    "answered": Answered,
    "failed": Failed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> str:
    """One line, without its end."""
    return json.dumps({"kind": _NAMES[type(message)], **asdict(message)})


def decode(line: str) -> Message:
    """The message of a line.

    Raises:
        WireError: it is none.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("kind")]
        if kind is RunOrder:
            fields["asks"] = tuple(Ask(**{**ask, "ids": tuple(ask["ids"])}) for ask in fields["asks"])
        if kind is Answered:
            fields["answers"] = tuple(Answer(**answer) for answer in fields["answers"])
        return kind(**fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WireError(f"not a message: {line[:200]!r} ({error!r})") from error
