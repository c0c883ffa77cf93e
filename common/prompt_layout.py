"""How knowledge prefix, system prompt and question are laid out as text: plain template or the model's chat template.

Invariants and semantics: a layout is a list of chunks; after each chunk but the last a reusable prefix ends, and the
text before that place does not depend on what follows it. Every piece says where it comes from, so that only a
template's own text can name control tokens. What a caller wrote never passes through the template engine: templates
are rendered with markers in its place, so nothing in it can be taken for template code or for a marker.

Not here: token ids (``common.tokenization``).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, ModelError
from common.ports import Clock

_GAP = "\n\n"
"""Stands between knowledge prefix, system prompt and question."""

_MARKERS = {"knowledge": "KevMark7f3aKnowledge", "system": "KevMark7f3aSystem", "question": "KevMark7f3aQuestion"}
"""Letters and digits only: templates that trim, split or escape content leave them whole."""

_MARKER_PATTERN = re.compile("(" + "|".join(_MARKERS.values()) + ")")


class Origin(StrEnum):
    """Who wrote a piece of a prompt."""

    TEMPLATE = "template"
    """The model's or the operator's template: may name control tokens."""
    TEXT = "text"
    """Knowledge prefix or system prompt: plain characters."""
    QUESTION = "question"
    """The question itself: plain characters, and the only piece that may be cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of prompt text from one writer."""

    text: str
    origin: Origin


Chunk = list[Piece]
"""Pieces that are encoded together; a prefix may end after it."""


class PromptLayout(Protocol):
    """Turns the parts of a prompt into chunks."""

    def chunks(self, question: str, system_prompt: str) -> list[Chunk]:
        """The prompt in order; the question is in the last chunk."""
        ...


class PlainLayout:
    """Knowledge, system prompt and a formatted question, one after the other."""

    def __init__(self, prompt_template: str, knowledge_prefix: str) -> None:
        """Check and split the template.

        Raises:
            ConfigError: ``prompt_template`` is not a format string with ``{question}`` exactly once.
        """
        self._before, self._after = split_template(prompt_template)
        self._knowledge = knowledge_prefix

    def chunks(self, question: str, system_prompt: str) -> list[Chunk]:
        """The prompt in order; the question is in the last chunk."""
        prefixes = [[Piece(text + _GAP, Origin.TEXT)] for text in (self._knowledge, system_prompt) if text]
        asked = [
            Piece(self._before, Origin.TEMPLATE),
            Piece(question, Origin.QUESTION),
            Piece(self._after, Origin.TEMPLATE),
        ]
        return [*prefixes, asked]


class ChatLayout:
    """The model's chat template; knowledge and system prompt form the system message.

    A template without a system role gets both in front of the question, in the user's turn.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], knowledge_prefix: str, clock: Clock) -> None:
        """Compile the template and try it once with and once without a system prompt.

        Raises:
            ModelError: the template is broken, or does not carry the question exactly once.
        """
        self._special_tokens = dict(special_tokens)
        self._knowledge = knowledge_prefix
        try:
            self._template = _environment(clock).from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._has_system_role = self._accepts_system_role()
        for system_prompt in ("", "s"):
            self.chunks("q", system_prompt)

    def chunks(self, question: str, system_prompt: str) -> list[Chunk]:
        """The prompt in order; the question is in the last chunk."""
        names = [name for name, text in (("knowledge", self._knowledge), ("system", system_prompt)) if text]
        texts = {_MARKERS["knowledge"]: self._knowledge, _MARKERS["system"]: system_prompt}
        chunks: list[Chunk] = [[]]
        for part in self._rendered(names):
            if part == _MARKERS["question"]:
                if system_prompt:
                    chunks.append([])
                chunks[-1].append(Piece(question, Origin.QUESTION))
            elif part in texts:
                chunks[-1].append(Piece(texts[part], Origin.TEXT))
                if part == _MARKERS["knowledge"]:
                    chunks.append([])
            elif part:
                chunks[-1].append(Piece(part, Origin.TEMPLATE))
        return chunks

    def _rendered(self, names: list[str]) -> list[str]:
        """Template text and markers in turn.

        Raises:
            ModelError: the template failed, or lost, repeated or reordered a marker.
        """
        lead = _GAP.join(_MARKERS[name] for name in names)
        asked = _MARKERS["question"]
        if not self._has_system_role and lead:
            lead, asked = "", lead + _GAP + asked
        messages = [{"role": "system", "content": lead}] if lead else []
        messages.append({"role": "user", "content": asked})
        try:
            parts = _MARKER_PATTERN.split(self._render(messages))
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"the model's chat template failed on a single question: {error}") from error
        if parts[1::2] != [_MARKERS[name] for name in (*names, "question")]:
            raise ModelError(
                "the model's chat template does not carry the caller's text exactly once and unchanged; "
                "edit chat_template.jinja in the model's directory, or remove it to use core.prompt_template"
            )
        return parts

    def _accepts_system_role(self) -> bool:
        self._has_system_role = True
        try:
            self._rendered(["system"])
        except ModelError:
            return False
        return True

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
        )


def split_template(prompt_template: str) -> tuple[str, str]:
    """Text before and after ``{question}``, with doubled braces undone.

    Raises:
        ConfigError: the template is not a format string with ``{question}`` exactly once and no other field.
    """
    rule = f"core.prompt_template must contain {{question}} exactly once and no other field, got {prompt_template!r}"
    sides = [""]
    try:
        for literal, field, spec, conversion in string.Formatter().parse(prompt_template):
            sides[-1] += literal
            if field is None:
                continue
            if field != "question" or spec or conversion:
                raise ConfigError(rule)
            sides.append("")
    except ValueError as error:
        raise ConfigError(f"{rule} ({error}; write a literal brace twice)") from error
    if len(sides) != 2:
        raise ConfigError(rule)
    return sides[0], sides[1]


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    """What published chat templates expect of their engine, sandboxed because they come with the weights."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception

    def strftime_now(pattern: str) -> str:
        return datetime.fromtimestamp(clock.time()).strftime(pattern)

    environment.globals["strftime_now"] = strftime_now
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a training loss covers; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 (declared as an instance attribute by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
