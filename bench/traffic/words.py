"""A language in which one word is one token.

Invariants and semantics: the token id of a word depends on the word alone; a text has as many tokens as words. That is
all that routing looks at: the real projection, ring and tiers work on it as on any tokenizer's ids.

Not here: what is asked (``arrivals``).
"""

from __future__ import annotations

import zlib
from functools import cache

from common.tokenization import TooManyTokens
from common.types import Prompt, Truncate


class WordTokenizer:
    """``router_svc.tokens.PromptTokenizer``: token id = hash of the word; the prompt is the question alone."""

    fingerprint = "words"

    def render(self, question: str, system_prompt: str, *, max_prompt_tokens: int, truncate: Truncate) -> Prompt:
        """Token ids of a question; never cut.

        Raises:
            TooManyTokens: more than ``max_prompt_tokens``.
        """
        ids = tuple(self.encode_plain(question))
        if len(ids) > max_prompt_tokens:
            raise TooManyTokens(len(ids), max_prompt_tokens)
        return Prompt(ids=ids)

    def encode_plain(self, text: str) -> list[int]:
        """One id per word."""
        return [_token_id(word) for word in text.split()]


@cache
def _token_id(word: str) -> int:
    return zlib.crc32(word.encode())


class Vocabulary:
    """Words by number, and topics with words of their own."""

    def __init__(self, size: int = 20_000) -> None:
        self.size = size

    def word(self, number: int) -> str:
        """A word."""
        return f"w{number % self.size}"

    def topic(self, topic: int, length: int) -> list[str]:
        """The first ``length`` words that a question about a topic is made of."""
        return [f"t{topic}x{position}" for position in range(length)]
