"""Text to token ids and back: prompts with their boundaries, and incremental detokenization.

Invariants and semantics: what a caller wrote never becomes a control token; a control token is every added token but
white space, and the model's bos, eos, pad and other named tokens. Ordinary text gets exactly the ids of the stock
tokenizer. A prompt has one BOS, at position 0, if the tokenizer uses one at all. Parts of a prompt are joined as ids,
never as text, where a reusable prefix ends. Objects are shared by threads: nothing on them changes after loading, and
padding and truncation of the library are switched off for good.

Not here: byte limits and surrogates (``common.request``), text layout (``common.prompt_layout``), stop strings
(``inference_svc.stopping``). No torch and no transformers: the router tokenizes without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from common.clock import SystemClock
from common.errors import InvalidRequestError, ModelError
from common.heap import give_back
from common.ports import Clock
from common.prompt_layout import ChatLayout, Chunk, Origin, Piece, PlainLayout, PromptLayout
from common.tokenizer_files import TokenizerFiles, TokenRoles
from common.types import Prompt, Truncate

Span = tuple[int, int]
"""First character and the one after the last, in the text of a chunk."""

_REPLACEMENT = "\ufffd"


class TooManyTokens(Exception):
    """A prompt does not fit, or would not fit even without its question.

    Attributes:
        num_tokens: tokens of the prompt; when cutting was allowed, the tokens that may not be cut.
        max_tokens: tokens there is room for.
    """

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        super().__init__(f"the prompt needs {num_tokens} tokens and there is room for {max_tokens}")


class _Encoded(NamedTuple):
    ids: list[int]
    spans: list[Span]


class Tokenizer:
    """The tokenizer of one model, with its prompt layout.

    Attributes:
        fingerprint: SHA-256 over every file and setting that decides which ids a prompt has.
        bos_id: the token that this tokenizer puts at the start by itself, if it does.
        eos_ids: tokens that end an answer.
        control_ids: tokens that no caller's text can produce.
        vocab_size: one more than the largest id.
        uses_chat_template: the model brings a chat template, and it is used.
    """

    def __init__(self, full: tokenizers.Tokenizer, roles: TokenRoles, layout: PromptLayout, fingerprint: str) -> None:
        """Use ``from_dir``; this only puts the parts together and takes ``full`` over."""
        full.no_truncation()
        full.no_padding()
        # BOS is put in place by ``render``; without its post-processor the library reports spans untrimmed.
        full.post_processor = None
        added = dict(sorted(full.get_added_tokens_decoder().items()))
        self.fingerprint = fingerprint
        self.uses_chat_template = isinstance(layout, ChatLayout)
        self.bos_id = roles.lead_ids[0] if roles.lead_ids else None
        self.eos_ids = roles.eos_ids
        self.vocab_size = max([full.get_vocab_size(with_added_tokens=False), *(token_id + 1 for token_id in added)])
        self.control_ids = frozenset(
            token_id
            for token_id in {*added, *roles.named_ids.values(), *roles.eos_ids}
            if not _is_blank(full.decode([token_id], skip_special_tokens=False))
            and not (token_id in added and _is_harmless(added[token_id]))
        )
        self.byte_ids = _byte_ids(full)
        self._full = full
        self._layout = layout
        self._lead = roles.lead_ids
        self._silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._plain, self._kept_ids = _plain_twin(full, [token for token in added.values() if _is_harmless(token)])
        self._unk_id = roles.pure_unk_id

    @classmethod
    def from_dir(
        cls, path: Path | str, *, prompt_template: str, knowledge_prefix: str = "", clock: Clock | None = None
    ) -> Tokenizer:
        """Load the tokenizer of a model directory.

        ``prompt_template`` is used when the model has no chat template; ``knowledge_prefix`` is the operator's text
        before every prompt. ``clock`` tells the date to templates that ask for it.

        Raises:
            ModelError: a file is missing or unreadable, or the chat template cannot be used.
            ConfigError: ``prompt_template`` is wrong.
        """
        files = TokenizerFiles(Path(path))
        serialized = files.tokenizer_json()
        try:
            full = tokenizers.Tokenizer.from_buffer(serialized)
        except Exception as error:  # The library raises bare Exception for whatever is wrong with the file.
            raise ModelError(f"tokenizer.json in {path} cannot be read as a tokenizer: {error}") from error
        roles = files.roles(full)
        layout: PromptLayout = PlainLayout(prompt_template, knowledge_prefix)
        if files.chat_template is not None:
            layout = ChatLayout(files.chat_template, files.named_tokens, knowledge_prefix, clock or SystemClock())
        template = files.chat_template or prompt_template
        settings = [template, knowledge_prefix, files.named_tokens, roles.lead_ids, sorted(roles.eos_ids)]
        fingerprint = hashlib.sha256(serialized + b"\0" + json.dumps(settings, sort_keys=True).encode()).hexdigest()
        made = cls(full, roles, layout, fingerprint)
        del serialized
        give_back()
        return made

    def render(self, question: str, system_prompt: str, *, max_prompt_tokens: int, truncate: Truncate) -> Prompt:
        """The prompt of one question.

        Only the question's own tokens are ever cut, at whole characters.

        Raises:
            TooManyTokens: it does not fit and may not be cut, or the rest alone does not fit.
            InvalidRequestError: a character can only be read as a control token by this model.
        """
        *prefixes, asked = self._layout.chunks(question, system_prompt)
        ids: list[int] = []
        boundaries: list[int] = []
        for chunk in prefixes:
            ids += self._encode(chunk).ids
            boundaries.append(len(ids))
        last = self._encode(asked)
        lead = () if (*ids, *last.ids)[:1] == self._lead[:1] else self._lead
        excess = len(lead) + len(ids) + len(last.ids) - max_prompt_tokens
        kept, num_truncated = last.ids, 0
        if excess > 0:
            if truncate is Truncate.NONE:
                raise TooManyTokens(max_prompt_tokens + excess, max_prompt_tokens)
            drop = _cut(last.spans, _question_span(asked), excess, truncate)
            num_truncated = drop.stop - drop.start
            if num_truncated < excess:
                raise TooManyTokens(max_prompt_tokens + excess - num_truncated, max_prompt_tokens)
            kept = last.ids[: drop.start] + last.ids[drop.stop :]
        return Prompt(
            ids=(*lead, *ids, *kept),
            boundaries=tuple(len(lead) + end for end in boundaries),
            num_truncated=num_truncated,
        )

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text alone: no BOS, no template, no control token.

        Raises:
            InvalidRequestError: a character can only be read as a control token by this model.
        """
        return self._read_plain(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._full.decode(ids, skip_special_tokens=True)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never shows in decoded text: special, or not in the vocabulary."""
        return token_id in self._silent_ids or self._full.id_to_token(token_id) is None

    def _encode(self, chunk: Chunk) -> _Encoded:
        """Ids of a chunk: as the stock tokenizer reads it, unless that lets a caller's text name a control token."""
        text = "".join(piece.text for piece in chunk)
        encoding = self._full.encode(text, add_special_tokens=False)
        if all(_is_trusted(chunk, span) for _, span in self._controls(text, encoding.ids, encoding.offsets)):
            return _Encoded(encoding.ids, encoding.offsets)
        return self._encode_apart(chunk)

    def _encode_apart(self, chunk: Chunk) -> _Encoded:
        """Control tokens come from template pieces only; whatever stands between two of them is read as plain text."""
        found = _Encoded([], [])
        run, start = "", 0
        for piece in chunk:
            position = 0
            for token_id, (first, end) in self._named_in(piece):
                run += piece.text[position:first]
                self._append_plain(found, run, start)
                start += len(run)
                found.ids.append(token_id)
                found.spans.append((start, start + end - first))
                start += end - first
                run, position = "", end
            run += piece.text[position:]
        self._append_plain(found, run, start)
        return found

    def _named_in(self, piece: Piece) -> list[tuple[int, Span]]:
        """Control tokens that a piece may name."""
        if piece.origin is not Origin.TEMPLATE:
            return []
        encoding = self._full.encode(piece.text, add_special_tokens=False)
        return self._controls(piece.text, encoding.ids, encoding.offsets)

    def _controls(self, text: str, ids: list[int], spans: list[Span]) -> list[tuple[int, Span]]:
        if self.control_ids.isdisjoint(ids):
            return []
        return [(i, span) for i, span in zip(ids, spans, strict=True) if self._is_control(i, text[span[0] : span[1]])]

    def _is_control(self, token_id: int, surface: str) -> bool:
        # A character the model has no piece for reads as "unknown"; only the name written out would be a forgery.
        if token_id == self._unk_id:
            return surface == self._full.id_to_token(token_id)
        return token_id in self.control_ids

    def _append_plain(self, found: _Encoded, text: str, start: int) -> None:
        encoded = self._read_plain(text)
        found.ids.extend(encoded.ids)
        found.spans.extend((start + first, start + end) for first, end in encoded.spans)

    def _read_plain(self, text: str) -> _Encoded:
        ids, spans = self._plain_ids(text)
        if not self._controls(text, ids, spans):
            return _Encoded(ids, spans)
        # Some models (unigram ones above all) hold control tokens as ordinary pieces and read them in plain text too.
        respelled = _Encoded([], [])
        for token_id, (first, end) in zip(ids, spans, strict=True):
            if not self._is_control(token_id, text[first:end]):
                respelled.ids.append(token_id)
                respelled.spans.append((first, end))
                continue
            for position in range(first, end):
                spelled = self._spell(text[position])
                respelled.ids.extend(spelled)
                respelled.spans.extend([(position, position + 1)] * len(spelled))
        return respelled

    def _plain_ids(self, text: str) -> _Encoded:
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self._kept_ids:
            ids = [self._kept_ids.get(token_id, token_id) for token_id in ids]
        return _Encoded(ids, encoding.offsets)

    def _spell(self, character: str) -> list[int]:
        """Ids of one character, without a control token among them."""
        whole = self._full.token_to_id(character)
        ids = [whole] if whole is not None and whole not in self.control_ids else self._plain_ids(character).ids
        for token_id in ids:
            if self._is_control(token_id, character):
                name = self._full.id_to_token(token_id)
                message = f"the character {character!r} is the control token {name!r} of this model; leave it out"
                raise InvalidRequestError.of("text", message)
        return ids


class Detokenizer:
    """Text of one answer, token by token.

    Everything ``push`` returns is final, and all of it together with ``flush`` is the decoding of all ids at once,
    special tokens left out. Held back: an unfinished character, and bytes of a byte-fallback model until their run
    ends, because one bad byte turns the whole run into replacement characters. Each token costs the same however long
    the answer is.

    Source: sliding window of ids whose decoding is compared with what was sent, as vLLM's detokenizer and TGI do.
    """

    _MAX_WINDOW_TOKENS = 32
    _CONTEXT_TOKENS = 8
    """Kept when the window is cut: more than the 3 bytes that an unfinished character can have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._run: list[int] = []
        self._num_sent = 0
        """Characters of the window's text that were returned."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became final, often none."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._run.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        return self._release()

    def flush(self) -> str:
        """End of the answer: everything that was held back, an unfinished character as U+FFFD."""
        rest = self._tokenizer.decode(self._window + self._run)[self._num_sent :]
        self._window, self._run, self._num_sent = [], [], 0
        return rest

    def _release(self) -> str:
        self._window += self._run
        self._run = []
        text = self._settled()
        new = text[self._num_sent :]
        if len(self._window) > self._MAX_WINDOW_TOKENS:
            del self._window[: -self._CONTEXT_TOKENS]
            text = self._settled()
        self._num_sent = len(text)
        return new

    def _settled(self) -> str:
        """Text of the window that later tokens cannot change: a U+FFFD at the end may yet become a character."""
        text = self._tokenizer.decode(self._window)
        return text[:-1] if text.endswith(_REPLACEMENT) else text


def _is_blank(text: str) -> bool:
    # U+2581 is how sentencepiece vocabularies write a space.
    return not text.replace("\u2581", " ").strip()


def _is_harmless(token: tokenizers.AddedToken) -> bool:
    """White space, or one ordinary character: text that cannot be written any other way."""
    return _is_blank(token.content) or (len(token.content) == 1 and not token.special)


def _plain_twin(
    full: tokenizers.Tokenizer, kept: list[tokenizers.AddedToken]
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """A tokenizer over the same model that knows no added tokens but ``kept``, and its ids of these as ``full``'s."""
    plain = tokenizers.Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        plain.pre_tokenizer = full.pre_tokenizer
    plain.add_tokens(kept)
    pairs = [(plain.token_to_id(token.content), full.token_to_id(token.content)) for token in kept]
    return plain, {own: other for own, other in pairs if own is not None and other is not None and own != other}


def _byte_ids(full: tokenizers.Tokenizer) -> frozenset[int]:
    """Tokens that stand for one byte each, if the decoder joins them to characters; else none."""
    ids = [full.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    sample = [ids[byte] for byte in "é".encode()]
    known = [token_id for token_id in ids if token_id is not None]
    joins = None not in sample and full.decode([i for i in sample if i is not None]).strip() == "é"
    return frozenset(known if joins else ())


def _question_span(chunk: Chunk) -> Span:
    start = 0
    for piece in chunk:
        if piece.origin is Origin.QUESTION:
            return start, start + len(piece.text)
        start += len(piece.text)
    return start, start


def _is_trusted(chunk: Chunk, span: Span) -> bool:
    """Whether the span lies inside one template piece."""
    start = 0
    for piece in chunk:
        end = start + len(piece.text)
        if piece.origin is Origin.TEMPLATE and start <= span[0] and span[1] <= end:
            return True
        start = end
    return False


def _cut(spans: list[Span], question: Span, excess: int, side: Truncate) -> range:
    """Indexes of the question's own tokens to drop: ``excess`` of them if there are so many, plus broken characters."""
    own = [i for i, (first, end) in enumerate(spans) if question[0] <= first < end <= question[1]]
    if not own:
        return range(0)
    low, high = own[0], own[-1] + 1
    if side is Truncate.LEFT:
        stop = min(low + excess, high)
        while stop < high and spans[stop][0] < spans[stop - 1][1]:
            stop += 1
        return range(low, stop)
    start = max(high - excess, low)
    while start > low and spans[start - 1][1] > spans[start][0]:
        start -= 1
    return range(start, high)
