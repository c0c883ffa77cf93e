"""From a validated question to token ids within the budgets of a channel and a request.

Invariants and semantics: the tokens of a question are ``len(prompt.ids) + sampling.max_tokens``, BOS and prefixes
included; they are at most ``max_context``, and at most ``max_question_tokens`` where that is set, for every question
that passes. All questions of a request together have at most ``max_request_tokens``. Each question is rendered and
tokenized once, here. A question that does not fit is refused with both numbers and the way out, and cut only if its
``truncate`` says so. All questions of a request are looked at before any is refused.

Not here: rendering and tokenizing itself (``common.tokenization``), which channel (``strategies``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import FieldViolation, InvalidRequestError, PromptTooLongError
from common.tokenization import TooManyTokens
from common.types import IsolationLevel, Prompt, QuestionSpec, RequestSpec, Truncate
from router_svc.normalize import Normalized, normalize
from router_svc.settings import RouterSettings
from router_svc.strategies import RoutingStrategy, RoutingView

_MAX_RECOUNTED_CHARS = 4096


class PromptTokenizer(Protocol):
    """What the router needs of a tokenizer. All methods may be called from any thread."""

    @property
    def fingerprint(self) -> str:
        """Model and tokenizer the ids belong to."""
        ...

    def render(self, question: str, system_prompt: str, *, max_prompt_tokens: int, truncate: Truncate) -> Prompt:
        """Token ids of a question with all its prefixes.

        Raises:
            TooManyTokens: more than ``max_prompt_tokens``, and ``truncate`` does not allow a cut or a cut of the
                question cannot help.
            InvalidRequestError: a character that this tokenizer cannot read as text.
        """
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of bare text, without template, BOS or prefix."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A question that is ready to be routed."""

    normalized: Normalized
    prompt: Prompt
    num_shared: int
    """Leading tokens whose KV may be stored once."""
    routing_key: int
    """From the request's strategy."""
    num_tokens: int
    """Of prompt and answer: what the question counts in budgets."""
    num_saved_tokens: int
    """By how much normalization made the text shorter; 0 at least."""


def prepare(
    spec: RequestSpec, tokenizer: PromptTokenizer, strategy: RoutingStrategy, settings: RouterSettings
) -> list[Prepared]:
    """Normalize, render and budget all questions of a request; may run on any thread.

    Raises:
        PromptTooLongError: questions do not fit; names each of them.
        InvalidRequestError: at least one question cannot be read as text; names every question at fault.
    """
    prepared: list[Prepared] = []
    errors: list[InvalidRequestError] = []
    for index, question in enumerate(spec.questions):
        normalized = normalize(question.text, settings.normalize)
        try:
            prompt = _render(normalized.text, question, index, spec.system_prompt, tokenizer, settings)
        except InvalidRequestError as error:
            errors.append(error)
            continue
        view = routing_view(question, normalized, prompt)
        prepared.append(
            Prepared(
                normalized=normalized,
                prompt=prompt,
                num_shared=num_shared_tokens(prompt, spec, settings),
                routing_key=strategy.key(view),
                num_tokens=len(prompt.ids) + question.sampling.max_tokens,
                num_saved_tokens=_num_saved_tokens(question.text, normalized, tokenizer),
            )
        )
    if errors:
        violations = [violation for error in errors for violation in error.violations]
        all_too_long = all(isinstance(error, PromptTooLongError) for error in errors)
        raise (PromptTooLongError if all_too_long else InvalidRequestError)(violations)
    _check_request(prepared, settings.max_request_tokens)
    return prepared


def routing_view(question: QuestionSpec, normalized: Normalized, prompt: Prompt) -> RoutingView:
    """What strategies see of a question; a common prefix says nothing about it."""
    return RoutingView(
        text=normalized.text,
        num_tokens=len(prompt.ids) - max(prompt.boundaries, default=0),
        category=question.category,
    )


def num_shared_tokens(prompt: Prompt, spec: RequestSpec, settings: RouterSettings) -> int:
    """Leading tokens of a prompt whose KV the request's isolation level allows to be stored once."""
    if not settings.shared_prefix or not prompt.boundaries:
        return 0
    match spec.isolation:
        case IsolationLevel.STRICT:
            return 0
        case IsolationLevel.LOOSE:
            # One boundary for two prefixes cannot be told apart; sharing less is always right.
            is_knowledge = settings.has_knowledge_prefix and (len(prompt.boundaries) > 1 or not spec.system_prompt)
            return prompt.boundaries[0] if is_knowledge else 0
        case IsolationLevel.SHARED:
            return prompt.boundaries[-1]


def _render(
    text: str,
    question: QuestionSpec,
    index: int,
    system_prompt: str,
    tokenizer: PromptTokenizer,
    settings: RouterSettings,
) -> Prompt:
    field, max_tokens = f"queries[{index}]", question.sampling.max_tokens
    limit, name = _question_limit(settings)
    max_prompt_tokens = limit - max_tokens
    if max_prompt_tokens < 1:
        raise PromptTooLongError.of(
            f"{field}.max_tokens",
            f"{max_tokens} leaves no room for a prompt in a context of {limit} tokens ({name}); "
            f"ask for fewer than {limit}",
        )
    try:
        return tokenizer.render(text, system_prompt, max_prompt_tokens=max_prompt_tokens, truncate=question.truncate)
    except TooManyTokens as error:
        budget = f"only {error.max_tokens} fit ({name} {limit} - max_tokens {max_tokens})"
        if question.truncate is Truncate.NONE:
            way_out = "shorten the question, lower max_tokens, or set truncate to left or right"
            message = f"the prompt has {error.num_tokens} tokens, but {budget}; {way_out}"
        else:
            way_out = "shorten the system prompt or lower max_tokens"
            message = f"the prompt has {error.num_tokens} tokens that may not be cut, but {budget}; {way_out}"
        raise PromptTooLongError.of(field, message) from error
    except InvalidRequestError as error:
        raise InvalidRequestError(
            [FieldViolation(field, violation.message) for violation in error.violations]
        ) from error


def _question_limit(settings: RouterSettings) -> tuple[int, str]:
    """Most tokens of one question, and the name of the limit."""
    own = settings.max_question_tokens
    return (own, "max_question_tokens") if 0 < own < settings.max_context else (settings.max_context, "max_context")


def _check_request(prepared: list[Prepared], max_request_tokens: int) -> None:
    """Raises ``InvalidRequestError`` when all questions together have too many tokens."""
    num_tokens = sum(question.num_tokens for question in prepared)
    if max_request_tokens and num_tokens > max_request_tokens:
        largest = max(range(len(prepared)), key=lambda index: prepared[index].num_tokens)
        told = (
            f"the {len(prepared)} questions have {num_tokens} tokens, prompts and max_tokens, but a request may have "
            f"{max_request_tokens} (max_request_tokens); send fewer at a time or lower max_tokens "
            f"(queries[{largest}] has the most, {prepared[largest].num_tokens})"
        )
        raise InvalidRequestError.of("queries", told)


def _num_saved_tokens(text: str, normalized: Normalized, tokenizer: PromptTokenizer) -> int:
    """Tokens that normalization saved: only a changed text is read again, of a long one the removed pieces alone."""
    if not normalized.removed:
        return 0
    try:
        if len(text) > _MAX_RECOUNTED_CHARS:
            return sum(len(tokenizer.encode_plain(piece)) for piece in normalized.removed)
        return max(0, len(tokenizer.encode_plain(text)) - len(tokenizer.encode_plain(normalized.text)))
    except InvalidRequestError:  # what normalization removed cannot be read as text
        return 0
