"""What a model's files say about its tokens: which end an answer, which one starts a prompt, which chat template.

Invariants and semantics: read once, at load; an absent optional file says nothing, a broken one is an error.
Generation settings count before the model's configuration, and the tokenizer's own end token always counts.

Not here: encoding (``common.tokenization``), the template engine (``common.prompt_layout``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from common.errors import ModelError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoles:
    """Ids with a job of their own."""

    named_ids: dict[str, int]
    """Ids by name, such as ``pad_token``."""
    eos_ids: frozenset[int]
    """Tokens that end an answer."""
    lead_ids: tuple[int, ...]
    """What the tokenizer itself puts before a text: BOS, or nothing."""

    @property
    def pure_unk_id(self) -> int | None:
        """The id for characters without a piece, if it has no other job."""
        unk_id = self.named_ids.get("unk_token")
        others = {token_id for name, token_id in self.named_ids.items() if name != "unk_token"}
        return None if unk_id in others | self.eos_ids else unk_id


class TokenizerFiles:
    """The tokenizer files of one model directory.

    Attributes:
        named_tokens: text of bos, eos, unk and the like, by name.
        chat_template: source of the chat template, if there is one.
    """

    def __init__(self, directory: Path) -> None:
        """Read everything but ``tokenizer.json``.

        Raises:
            ModelError: a file is there but cannot be read.
        """
        self._directory = directory
        self._config = _read_json(directory / "tokenizer_config.json")
        self._model = _read_json(directory / "config.json")
        self._generation = _read_json(directory / "generation_config.json")
        older = _read_json(directory / "special_tokens_map.json")
        tokens = {name: _content(self._config.get(name) or older.get(name)) for name in _NAMED_TOKENS}
        self.named_tokens = {name: content for name, content in tokens.items() if content}
        file = directory / "chat_template.jinja"
        self.chat_template = file.read_text("utf-8") if file.is_file() else self._inline_template()

    def tokenizer_json(self) -> bytes:
        """The serialized tokenizer.

        Raises:
            ModelError: there is none.
        """
        try:
            return (self._directory / "tokenizer.json").read_bytes()
        except OSError as error:
            raise ModelError(f"{self._directory} has no readable tokenizer.json") from error

    def roles(self, full: tokenizers.Tokenizer) -> TokenRoles:
        """The ids that the files give a job; ``full`` still has its post-processor."""
        named_ids = self._named_ids(full)
        return TokenRoles(
            named_ids=named_ids, eos_ids=self._eos_ids(named_ids), lead_ids=self._lead_ids(full, named_ids)
        )

    def _named_ids(self, full: tokenizers.Tokenizer) -> dict[str, int]:
        ids = {name: full.token_to_id(content) for name, content in self.named_tokens.items()}
        unk_token = getattr(full.model, "unk_token", None)
        if "unk_token" not in ids and isinstance(unk_token, str):
            ids["unk_token"] = full.token_to_id(unk_token)
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def _eos_ids(self, named_ids: dict[str, int]) -> frozenset[int]:
        nested = self._model.get("text_config")
        sources = [self._generation, self._model, nested if isinstance(nested, dict) else {}]
        given: object = next((found for source in sources if (found := source.get("eos_token_id")) is not None), [])
        listed = given if isinstance(given, list) else [given]
        named = [named_ids["eos_token"]] if "eos_token" in named_ids else []
        return frozenset(named + [token_id for token_id in listed if isinstance(token_id, int) and token_id >= 0])

    def _lead_ids(self, full: tokenizers.Tokenizer, named_ids: dict[str, int]) -> tuple[int, ...]:
        # An explicit setting counts before the post-processor, as it does for the stock tokenizer classes.
        setting = self._config.get("add_bos_token")
        if isinstance(setting, bool):
            return (named_ids["bos_token"],) if setting and "bos_token" in named_ids else ()
        encoding = full.encode("a")
        own_text = [i for i, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
        return tuple(encoding.ids[: own_text[0]]) if own_text else ()

    def _inline_template(self) -> str | None:
        """The template inside ``tokenizer_config.json``: one, or a list of named ones."""
        found = self._config.get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None


def _read_json(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return found


def _content(token: object) -> str:
    """Text of a token as configuration files write it: plain, or an object with its flags."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
