"""Budgets: what fits into a channel's context, and what may be shared."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest

from common.errors import InvalidRequestError, PromptTooLongError
from common.tokenization import Tokenizer, TooManyTokens
from common.types import (
    AggregateMode,
    IsolationLevel,
    NormalizeLevel,
    Prompt,
    QuestionSpec,
    RequestSpec,
    SamplingParams,
    Strategy,
    Truncate,
)
from router_svc.settings import RouterSettings
from router_svc.strategies import LengthAware, RoundRobin
from router_svc.tokens import PromptTokenizer, num_shared_tokens, prepare

SETTINGS = RouterSettings(max_context=20)


class CharacterTokenizer:
    """One token per character, a BOS, and a boundary after the system prompt."""

    fingerprint = "characters"

    def render(self, question: str, system_prompt: str, *, max_prompt_tokens: int, truncate: Truncate) -> Prompt:
        if "\ue000" in question:
            raise InvalidRequestError.of("text", "a private character")
        head = (1, *map(ord, system_prompt))
        room = max_prompt_tokens - len(head)
        excess = max(0, len(question) - room)
        if excess and (truncate is Truncate.NONE or room < 1):
            raise TooManyTokens(len(head) + (len(question) if truncate is Truncate.NONE else 0), max_prompt_tokens)
        kept = question[: len(question) - excess] if truncate is Truncate.RIGHT else question[excess:]
        boundaries = (len(head),) if system_prompt else ()
        return Prompt(ids=head + tuple(map(ord, kept)), boundaries=boundaries, num_truncated=excess)

    def encode_plain(self, text: str) -> list[int]:
        return list(map(ord, text))


def spec_of(
    *texts: str,
    max_tokens: int = 8,
    truncate: Truncate = Truncate.NONE,
    system_prompt: str = "",
    isolation: IsolationLevel = IsolationLevel.STRICT,
) -> RequestSpec:
    return RequestSpec(
        request_id="r",
        questions=tuple(
            QuestionSpec(text=t, sampling=SamplingParams(max_tokens=max_tokens), timeout_ms=1000, truncate=truncate)
            for t in texts
        ),
        isolation=isolation,
        strategy=Strategy.ROUND_ROBIN,
        mode=AggregateMode.SLOT_MAP,
        max_parallel=8,
        system_prompt=system_prompt,
    )


def prepared_prompts(spec: RequestSpec, settings: RouterSettings = SETTINGS) -> list[Prompt]:
    return [p.prompt for p in prepare(spec, CharacterTokenizer(), RoundRobin(4), settings)]


@pytest.mark.parametrize("method", ["render", "encode_plain"])
def test_the_real_tokenizer_is_a_prompt_tokenizer(method: str) -> None:
    """The router would call the tokenizer in a way it does not know."""
    wanted, found = (signature(getattr(cls, method)).parameters.values() for cls in (PromptTokenizer, Tokenizer))
    assert [(p.name, p.kind) for p in wanted] == [(p.name, p.kind) for p in found]


@pytest.mark.parametrize(("num_chars", "fits"), [(10, True), (11, True), (12, False)])
def test_prompt_and_answer_fit_exactly(num_chars: int, fits: bool) -> None:
    """Off by one: an answer would be cut, or a question that fits refused. BOS counts."""
    if fits:
        assert len(prepared_prompts(spec_of("x" * num_chars))[0].ids) + 8 <= 20
        return
    with pytest.raises(PromptTooLongError):
        prepared_prompts(spec_of("x" * num_chars))


def test_a_refusal_names_every_question_both_numbers_and_the_way_out() -> None:
    """A caller would repair one question per attempt, or not know how."""
    with pytest.raises(PromptTooLongError) as caught:
        prepared_prompts(spec_of("short", "x" * 30, "fine", "y" * 13))
    assert [violation.field for violation in caught.value.violations] == ["queries[1]", "queries[3]"]
    message = caught.value.violations[0].message
    assert "31 tokens" in message
    assert "only 12 fit" in message
    assert "truncate" in message


def test_max_tokens_that_leave_no_room_are_named() -> None:
    """The tokenizer would be asked for a prompt of no tokens."""
    with pytest.raises(PromptTooLongError, match=r"queries\[0\]\.max_tokens: 20 leaves no room"):
        prepared_prompts(spec_of("q", max_tokens=20))


def test_cuts_only_when_asked_and_says_so() -> None:
    """The end of a question (the question itself) would be lost silently."""
    left, right = (
        prepared_prompts(spec_of("abcdefghijklmnop", truncate=side))[0] for side in (Truncate.LEFT, Truncate.RIGHT)
    )
    assert (left.ids[1], right.ids[1], left.num_truncated, right.num_truncated) == (ord("f"), ord("a"), 5, 5)


def test_a_cut_that_cannot_help_is_refused() -> None:
    """A system prompt over the context would end in an empty question."""
    with pytest.raises(PromptTooLongError, match="shorten the system prompt"):
        prepared_prompts(spec_of("q", system_prompt="s" * 15, truncate=Truncate.LEFT))


def test_an_unreadable_character_is_named_by_question() -> None:
    """The caller would not learn which question; or length errors beside it would be lost."""
    with pytest.raises(InvalidRequestError) as caught:
        prepared_prompts(spec_of("fine", "bad \ue000", "x" * 30))
    assert [violation.field for violation in caught.value.violations] == ["queries[1]", "queries[2]"]
    assert not isinstance(caught.value, PromptTooLongError)


def test_normalized_text_is_what_is_rendered() -> None:
    """Tokens would be spent on noise although it was reported as removed."""
    settings = RouterSettings(max_context=40, normalize=NormalizeLevel.FULL)
    ready = prepare(spec_of("嗯，怎么退款！！！！"), CharacterTokenizer(), RoundRobin(4), settings)[0]
    assert ready.prompt.ids[1:] == tuple(map(ord, "怎么退款！"))
    assert ready.normalized.removed == ("嗯，", "！！！")


def test_length_counts_the_question_without_the_common_prefix() -> None:
    """With a long system prompt every question would be routed as long."""
    settings = RouterSettings(max_context=100)
    strategy = LengthAware(16, (8, 20))
    ready = prepare(spec_of("short", system_prompt="s" * 30), CharacterTokenizer(), strategy, settings)[0]
    assert ready.routing_key == 0


BOTH, ONE, NO_PREFIX = (5, 9), (5,), ()


@pytest.mark.parametrize(
    ("isolation", "boundaries", "knowledge", "system_prompt", "expected"),
    [
        (IsolationLevel.STRICT, BOTH, True, "s", 0),
        (IsolationLevel.LOOSE, BOTH, True, "s", 5),
        (IsolationLevel.LOOSE, ONE, True, "", 5),
        (IsolationLevel.LOOSE, ONE, False, "s", 0),
        (IsolationLevel.LOOSE, ONE, True, "s", 0),
        (IsolationLevel.LOOSE, NO_PREFIX, True, "", 0),
        (IsolationLevel.SHARED, BOTH, True, "s", 9),
        (IsolationLevel.SHARED, ONE, False, "s", 5),
        (IsolationLevel.SHARED, NO_PREFIX, False, "", 0),
    ],
)
def test_shares_what_the_level_allows(
    isolation: IsolationLevel, boundaries: tuple[int, ...], knowledge: bool, system_prompt: str, expected: int
) -> None:
    """A caller's prefix would be stored for others in strict or loose."""
    prompt = Prompt(ids=tuple(range(12)), boundaries=boundaries)
    spec = spec_of("q", isolation=isolation, system_prompt=system_prompt)
    assert num_shared_tokens(prompt, spec, RouterSettings(has_knowledge_prefix=knowledge)) == expected
    off = RouterSettings(has_knowledge_prefix=knowledge, shared_prefix=False)
    assert num_shared_tokens(prompt, spec, off) == 0


# ---- budgets of a question and of a request


def test_a_question_has_a_budget_of_its_own() -> None:
    """A deployment could not keep questions shorter than its context."""
    small = replace(SETTINGS, max_question_tokens=12)
    assert prepared_prompts(spec_of("abc"), small)[0].ids == (1, 97, 98, 99)
    with pytest.raises(PromptTooLongError) as caught:
        prepared_prompts(spec_of("abc", "abcd"), small)
    (violation,) = caught.value.violations
    assert violation.field == "queries[1]"
    assert "5 tokens, but only 4 fit (max_question_tokens 12 - max_tokens 8)" in violation.message
    assert prepared_prompts(spec_of("abcdef", truncate=Truncate.RIGHT), small)[0].num_truncated == 3
    with pytest.raises(PromptTooLongError, match=r"queries\[0\].max_tokens: 12 leaves no room .* of 12 tokens \(max_q"):
        prepared_prompts(spec_of("a", max_tokens=12), small)
    assert prepared_prompts(spec_of("abc"), replace(SETTINGS, max_question_tokens=99)), "the context is smaller"


def test_a_request_has_a_budget_for_all_of_it() -> None:
    """One request could hold as many tokens as questions times context."""
    assert len(prepared_prompts(spec_of("ab", "abcd"), replace(SETTINGS, max_request_tokens=24))) == 2
    with pytest.raises(InvalidRequestError) as caught:
        prepared_prompts(spec_of("ab", "abcd"), replace(SETTINGS, max_request_tokens=23))
    assert not isinstance(caught.value, PromptTooLongError)
    (violation,) = caught.value.violations
    assert violation.field == "queries"
    assert "2 questions have 24 tokens" in violation.message
    assert "may have 23 (max_request_tokens)" in violation.message
    assert "queries[1] has the most, 13" in violation.message


def test_tokens_of_prompt_and_answer_are_counted() -> None:
    """Budgets would leave out prefixes or answers."""
    (prepared,) = prepare(spec_of("abc", system_prompt="sys"), CharacterTokenizer(), RoundRobin(4), SETTINGS)
    assert prepared.num_tokens == 1 + 3 + 3 + 8


@pytest.mark.parametrize(
    ("text", "saved"),
    [("abc", 0), ("退款！！！！", 3), ("\n\nabc  ", 4), ("x" * 5000 + "！！！", 2)],
)
def test_what_normalization_saves_is_told_in_tokens(text: str, saved: int) -> None:
    """Nobody could see what normalization is good for, or a long text would be read three times."""
    spec, settings = spec_of(text), RouterSettings(max_context=9000)
    (prepared,) = prepare(spec, CharacterTokenizer(), RoundRobin(4), settings)
    assert prepared.num_saved_tokens == saved


def test_an_unchanged_text_is_not_read_again() -> None:
    """Every question would be tokenized twice for a number that is 0."""

    class Counting(CharacterTokenizer):
        num_reads = 0

        def encode_plain(self, text: str) -> list[int]:
            self.num_reads += 1
            return super().encode_plain(text)

    tokenizer = Counting()
    prepare(spec_of("abc", "def"), tokenizer, RoundRobin(4), SETTINGS)
    assert tokenizer.num_reads == 0
    prepare(spec_of("ab  ", "def"), tokenizer, RoundRobin(4), SETTINGS)
    assert tokenizer.num_reads == 2
