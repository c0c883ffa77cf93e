"""The questions of the goal table and of the growth sweeps, the same for every system and every run.

Invariants and semantics: pure. Everything follows from seeds written here; texts are prose of a small grammar, so that
a model finds more to say than on random words. What is measured in tokens has exactly that many.

W1: 8 short questions, 64 tokens each. W2: 8 questions over one text of 1,922 tokens, 16 each. W3: 64 questions of 8 to
300 words, 1 to 128 tokens each. W5: 8 prompts of 1,500 tokens, 32 each. W6: the questions of W1, for what ``strict``
costs over ``shared`` when nothing is common. W4 (typed decisions) is not built.

Not here: who answers them (``catalogue``), when (``rounds``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.compare.wire import Ask, RunOrder
from common.types import Prompt

Render = Callable[[str, str], Prompt]
"""(question, system prompt) -> the prompt as Kev tokenizes it."""

SHORT_QUESTIONS = (
    "Question: What is the capital of France?\nAnswer:",
    "Question: How do I get a refund for an order that arrived damaged?\nAnswer:",
    "The three primary colors are",
    "def quicksort(arr):\n",
    "Question: Explain what a KV cache is in a transformer model.\nAnswer:",
    "Once upon a time, in a small village near the sea, there lived",
    "Translate English to French:\nsea otter => loutre de mer\ncheese =>",
    "Question: Who wrote the play Romeo and Juliet, and in which century was it written?\nAnswer:",
)
SHARED_TEXT_TOKENS = 1_922
LONG_PROMPT_TOKENS = 1_500

_NOUNS = tuple(
    "harbour letter garden engine river teacher market bridge winter doctor window captain forest road".split()
)
_ADJECTIVES = tuple("old quiet heavy bright narrow patient broken distant green careful small famous".split())
_VERBS = tuple("followed carried remembered repaired crossed described watched painted sold answered".split())
_ENDS = ("before the rain came", "after a long day", "without a word", "in the early morning", "for the first time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Questions that are given to a system at once."""

    name: str
    title: str
    asks: tuple[Ask, ...]
    system_prompt: str = ""
    reuse_prefix: bool = False

    @property
    def num_tokens(self) -> int:
        """Useful tokens: those that were asked for."""
        return sum(ask.max_tokens for ask in self.asks)

    def order(self, level: str) -> RunOrder:
        """All questions together."""
        return RunOrder(asks=self.asks, level=level, system_prompt=self.system_prompt, reuse_prefix=self.reuse_prefix)

    def alone(self, index: int, level: str) -> RunOrder:
        """One question without company."""
        return replace(self.order(level), asks=(self.asks[index],))

    def clipped(self, max_tokens: int | None) -> Work:
        """The same with at most so many new tokens for each question: quick tries, not for publishing."""
        if max_tokens is None:
            return self
        asks = tuple(replace(ask, max_tokens=min(ask.max_tokens, max_tokens)) for ask in self.asks)
        return replace(self, asks=asks, title=f"{self.title}; CLIPPED to {max_tokens} new tokens")


class WorkError(Exception):
    """A text of the wanted length cannot be made with this tokenizer."""


def prose(seed: int, num_words: int) -> str:
    """So many words of sentences."""
    draw = random.Random(seed)
    words: list[str] = []
    while len(words) < num_words:
        subject, verb, other = draw.choice(_NOUNS), draw.choice(_VERBS), draw.choice(_NOUNS)
        sentence = f"The {draw.choice(_ADJECTIVES)} {subject} {verb} the {draw.choice(_ADJECTIVES)} {other}"
        words += f"{sentence} {draw.choice(_ENDS)}.".split()
    return " ".join(words[:num_words])


def text_of_tokens(seed: int, num_tokens: int, count: Callable[[str], int]) -> str:
    """Prose of exactly ``num_tokens``, as ``count`` counts them.

    Raises:
        WorkError: no number of words and fill words comes to that.
    """
    words = prose(seed, num_tokens + 1).split()
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(" ".join(words[:middle])) <= num_tokens else (low, middle - 1)
    for dropped in range(min(low, 4) + 1):
        text = " ".join(words[: low - dropped])
        while count(text) < num_tokens:
            text += " a"
        if count(text) == num_tokens:
            return text
    raise WorkError(f"no text of exactly {num_tokens} tokens; the tokenizer splits the fill words")


def short_work(render: Render, name: str, num_questions: int, max_tokens: int) -> Work:
    """Short questions, repeated with a number in front when there are more than eight."""
    num_known = len(SHORT_QUESTIONS)
    texts = [
        SHORT_QUESTIONS[i % num_known] if i < num_known else f"({i + 1}) {SHORT_QUESTIONS[i % num_known]}"
        for i in range(num_questions)
    ]
    asks = tuple(_ask(render, text, "", max_tokens) for text in texts)
    return Work(name=name, title=f"{num_questions} short questions, {max_tokens} tokens each", asks=asks)


def shared_text_work(render: Render) -> Work:
    """W2."""
    text = text_of_tokens(2, SHARED_TEXT_TOKENS, lambda text: render("?", text).boundaries[0])
    questions = [f"Question: What does the text say about the {noun}?\nAnswer:" for noun in _NOUNS[:8]]
    asks = tuple(_ask(render, question, text, 16) for question in questions)
    title = f"8 questions over one text of {SHARED_TEXT_TOKENS:,} tokens, 16 tokens each"
    return Work(name="W2", title=title, asks=asks, system_prompt=text, reuse_prefix=True)


def mixed_work(render: Render) -> Work:
    """W3."""
    draw = random.Random(3)
    sizes = [(draw.randint(8, 300), draw.randint(1, 128)) for _ in range(64)]
    asks = tuple(
        _ask(render, f"({i + 1}) {prose(300 + i, num_words - 1)}", "", max_tokens)
        for i, (num_words, max_tokens) in enumerate(sizes)
    )
    return Work(name="W3", title="64 questions of 8 to 300 words, 1 to 128 tokens each", asks=asks)


def long_work(render: Render, name: str, num_questions: int, num_tokens: int, max_tokens: int) -> Work:
    """Prompts of one length."""
    texts = [text_of_tokens(500 + i, num_tokens, lambda text: len(render(text, "").ids)) for i in range(num_questions)]
    asks = tuple(_ask(render, text, "", max_tokens) for text in texts)
    title = f"{num_questions} prompts of {num_tokens:,} tokens, {max_tokens} new tokens each"
    return Work(name=name, title=title, asks=asks)


def level_work(render: Render) -> Work:
    """W6."""
    work = short_work(render, "W6", 8, 64)
    return replace(work, title="strict against shared without a common prefix; questions of W1")


WORKS: dict[str, Callable[[Render], Work]] = {
    "w1": lambda render: short_work(render, "W1", 8, 64),
    "w2": shared_text_work,
    "w3": mixed_work,
    "w5": lambda render: long_work(render, "W5", 8, LONG_PROMPT_TOKENS, 32),
    "w6": level_work,
}
"""By the name on the command line."""


def spread(num_items: int, num_chosen: int) -> Sequence[int]:
    """At most ``num_chosen`` indices, evenly spread over all items."""
    if num_items <= num_chosen:
        return range(num_items)
    return [i * num_items // num_chosen for i in range(num_chosen)]


def _ask(render: Render, text: str, system_prompt: str, max_tokens: int) -> Ask:
    return Ask(ids=render(text, system_prompt).ids, text=text, max_tokens=max_tokens)
