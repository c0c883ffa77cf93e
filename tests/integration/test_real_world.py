"""What went wrong in other engines, tried on this one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from common.clock import SystemClock
from common.config import load_config
from common.errors import PromptTooLongError
from common.types import FinishReason, Result
from kev import Question
from kev.engine import AsyncEngine, Engine
from kev.parts import EngineParts, load_parts
from kev.testing import scripted_engine
from tests.integration.crowd import Ask, run_alone, run_together
from tests.integration.scripted_runners import GuidedRunner, until, until_idle
from tests.integration.tiny_checkpoint import greedy_ids, prompt_ids, save_checkpoint, settings_for
from tests.integration.tiny_models import MAX_CONTEXT, WINDOW, loaded_model, stock_model

Model = tuple[Path, PreTrainedModel]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text_of(num_bytes: int, seed: int) -> str:
    """A question of so many tokens that normalization leaves alone."""
    letters = random.Random(seed)
    return "q" + "".join(letters.choice(LETTERS) for _ in range(num_bytes - 1))


def same(one: Result, other: Result) -> bool:
    """Tokens, text and every log-probability are equal."""
    return (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with sliding and full layers, on disk."""
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, save_checkpoint(folder, "gemma3")


@pytest.fixture(scope="module")
def parts(gemma: Model) -> EngineParts:
    """The model loaded and probed once; an engine of its own for every test."""
    return load_parts(load_config(settings_for(gemma[0]), env={}), SystemClock(), print)


@pytest.fixture
def engine(gemma: Model, parts: EngineParts) -> Iterator[Engine]:
    """A blocking engine over the real model."""
    with Engine(AsyncEngine(load_config(settings_for(gemma[0]), env={}), parts)) as engine:
        yield engine


# ---- windows, positions, slots


def test_a_window_is_measured_in_the_questions_own_positions(engine: Engine, gemma: Model) -> None:
    """Packed into one row, questions lose their sliding window, or the row's end falls out of the first one's."""
    for lengths in ([150], [40] * 8, [100, 100], [30, 5, 90, WINDOW, WINDOW + 1, 3, 60, 1]):
        questions = [text_of(n, seed=n + i) for i, n in enumerate(lengths)]
        together = engine.ask(questions, max_tokens=60, logprobs=3, ignore_eos=True)
        for question, result in zip(questions, together, strict=True):
            assert same(engine.ask([question], max_tokens=60, logprobs=3, ignore_eos=True)[0], result)
        for question, result in list(zip(questions, together, strict=True))[-1:]:
            expected = greedy_ids(gemma[1], question, 60)
            assert list(result.token_ids[: len(expected)]) == expected


def test_neighbours_that_end_early_take_nothing_with_them(engine: Engine) -> None:
    """The cache of the row forgets what its first question still needs, once the row has outgrown the window."""
    questions = [Question(text_of(100, seed=i), max_tokens=60 if i in (0, 3) else 1 + i) for i in range(6)]
    results = engine.ask(questions, logprobs=0, ignore_eos=True)
    for question, result in zip(questions, results, strict=True):
        assert result.tokens == question.max_tokens
        assert same(engine.ask([question], logprobs=0, ignore_eos=True)[0], result)


def test_a_question_reads_the_same_at_every_place_of_the_request(engine: Engine, gemma: Model) -> None:
    """Positions are counted along the row, so that all but the longest question are garbage."""
    target = text_of(21, seed=1)
    prefix = text_of(37, seed=2)
    others = [text_of(n, seed=n) for n in (5, 80, 33, 12, 50, 7, 64)]
    for options in ({}, {"system_prompt": prefix}, {"system_prompt": prefix, "isolation": "shared"}):
        alone = engine.ask([target], max_tokens=31, logprobs=2, ignore_eos=True, **{**options, "isolation": "strict"})[
            0
        ]
        for place in (0, 3, 7):
            questions = [*others[:place], target, *others[place:]]
            placed = engine.ask(questions, max_tokens=31, logprobs=2, ignore_eos=True, **options)[place]
            assert same(alone, placed), (place, options)
    assert alone.prompt_tokens > len(target) + len(prefix)
    assert list(engine.ask([target], max_tokens=5)[0].token_ids) == greedy_ids(gemma[1], target, 5)


def test_ids_that_look_like_padding_are_read_all_the_same() -> None:
    """The mask is derived from ``ids != pad``, so that a question with such an id is half invisible."""
    model, stock = loaded_model("llama"), stock_model("llama")
    asks = [
        Ask((1, 7, 0, 0, 9, 2, 11, 0, 2, 30, 4), max_tokens=6),
        Ask((0, 0, 0, 5), max_tokens=6),
        Ask((2, 2, 2), max_tokens=6),
    ]
    for ask, trace in zip(asks, run_together(model, asks), strict=True):
        whole = torch.tensor([[*ask.ids, *trace.token_ids]])
        with torch.inference_mode():
            logits = stock(whole, attention_mask=torch.ones_like(whole)).logits[0, len(ask.ids) - 1 : -1]
        torch.testing.assert_close(torch.stack(trace.logits), logits, atol=1e-4, rtol=0)
    without = run_alone(model, replace(asks[0], ids=tuple(i for i in asks[0].ids if i)))
    assert not torch.equal(without.logits[0], run_alone(model, asks[0]).logits[0])


def test_control_tokens_in_a_question_are_plain_text(engine: Engine, gemma: Model) -> None:
    """A user closes a turn, pads, or ends the question by writing the name of a control token."""
    questions = ["<eos>", "<bos>a<pad><pad>", "before<eos>after", "plain"]
    results = engine.ask(questions, max_tokens=6)
    for question, result in zip(questions, results, strict=True):
        assert result.prompt_tokens == len(prompt_ids(question)), "exactly one token per byte, and one BOS"
        assert list(result.token_ids) == greedy_ids(gemma[1], question, 6)


# ---- each question's own rules


async def test_every_question_ends_by_its_own_rules() -> None:
    """The stop rules of row 0 hold for everybody: one finished row ends all, or none ends."""
    script = {"ends at once": "", "short": "abc", "long": "abcdefghij" * 8}
    async with scripted_engine(lambda prompt: script[prompt]) as engine:
        questions = [
            Question("ends at once", max_tokens=50),
            Question("long", max_tokens=1),
            Question("long", max_tokens=5),
            Question("long", max_tokens=50),
            Question("long", stop="cd"),
            Question("long", stop=["j", "ghi"]),
            Question("short", ignore_eos=True, max_tokens=9),
            Question("long", stop_token_ids=[ord("e") + 3]),
            Question("long", stop="b", min_tokens=11),
        ]
        results = await engine.ask(questions, max_tokens=100)
        assert [(result.text, result.tokens, result.finish_reason.value) for result in results] == [
            ("", 1, "stop"),
            ("a", 1, "length"),
            ("abcde", 5, "length"),
            ("abcdefghij" * 5, 50, "length"),
            ("ab", 4, "stop"),
            ("abcdef", 9, "stop"),
            ("abc", 9, "length"),
            ("abcd", 5, "stop"),
            ("abcdefghija", 12, "stop"),
        ]
        for question, result in zip(questions, results, strict=True):
            assert (await engine.ask([question], max_tokens=100))[0].text == result.text


def test_a_seed_belongs_to_its_question(engine: Engine) -> None:
    """A seed is ignored, shared or consumed by the neighbours, and unseeded calls repeat themselves."""
    target = Question(text_of(12, seed=1), seed=42)
    others = [Question(text_of(5 + i, seed=i)) for i in range(7)]
    options = {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    alone = engine.ask([target], **options)[0].token_ids
    for place in (0, 5):
        assert engine.ask([*others[:place], target, *others[place:]], **options)[place].token_ids == alone
    copies = engine.ask([target.text] * 8, seed=42, **options)
    assert len({result.token_ids for result in copies}) == 8, "one seed gave every question the same noise"
    for index, result in enumerate(copies):
        assert engine.ask([Question(target.text, seed=42 + index)], **options)[0].token_ids == result.token_ids
    assert copies[0].token_ids == alone
    unseeded = {engine.ask([target.text], **options)[0].token_ids for _ in range(5)}
    assert len(unseeded) == 5
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


# ---- limits


def test_the_border_of_the_context_is_exact(engine: Engine, gemma: Model) -> None:
    """A question over the limit is cut in silence or waits for ever; or the limit is off by one, or the tokenizer's."""
    room = MAX_CONTEXT - 8
    for num_tokens in (room - 1, room):
        result = engine.ask([text_of(num_tokens - 1, seed=1)], max_tokens=8)[0]
        assert (result.prompt_tokens, result.num_truncated) == (num_tokens, 0)
        assert list(result.token_ids) == greedy_ids(gemma[1], text_of(num_tokens - 1, seed=1), 8)
    over = text_of(room, seed=1)
    with pytest.raises(
        PromptTooLongError, match=f"queries\\[1\\]: the prompt has {room + 1} tokens, but only {room} fit"
    ):
        engine.ask(["fits", over], max_tokens=8)
    cut = engine.ask([over], max_tokens=8, truncate="left")[0]
    assert (cut.prompt_tokens, cut.num_truncated) == (room, 1)
    assert list(cut.token_ids) == list(engine.ask([over[1:]], max_tokens=8)[0].token_ids)


def test_the_limit_is_the_models_where_that_is_smaller(gemma: Model) -> None:
    """A configured limit above the model's own is believed, and long questions run into nonsense."""
    with Engine.from_config(settings_for(gemma[0], core={"max_context": 100_000})) as engine:
        with pytest.raises(PromptTooLongError, match=f"max_context {MAX_CONTEXT} - max_tokens 8"):
            engine.ask([text_of(MAX_CONTEXT, seed=1)])
        assert engine.ask([text_of(100, seed=1)])[0].tokens > 0


async def test_a_marker_at_the_very_end_of_a_far_too_long_question() -> None:
    """The end of an over-long question, which is the question, is lost without a word."""
    async with scripted_engine(
        lambda prompt: prompt[-6:],
        {"kev": {"core": {"max_context": 500, "max_tokens": 10}, "aggregator": {"timeout_ms": 60_000}}},
    ) as engine:
        text = "x" * 250_000 + "MARKER"
        with pytest.raises(PromptTooLongError, match="has 250007 tokens"):
            await engine.ask([text], max_tokens=10)
        left = (await engine.ask([text], max_tokens=10, truncate="left"))[0]
        right = (await engine.ask([text], max_tokens=10, truncate="right"))[0]
        assert (left.text, left.num_truncated) == ("MARKER", 250_007 - 490)
        assert (right.text, right.num_truncated) == ("xxxxxx", 250_007 - 490)


async def test_texts_without_spaces_hold_up_nobody() -> None:
    """Hundreds of kilobytes without a space keep the tokenizer, and the event loop with it, busy for seconds."""
    texts = ["x" * 100_000, "_" * 50_000, "隔" * 40_000, "🫨" * 25_000]
    async with scripted_engine(lambda prompt: prompt[-6:]) as engine:
        lags: list[float] = []

        async def watch() -> None:
            loop = asyncio.get_running_loop()
            while True:
                began = loop.time()
                await asyncio.sleep(0.005)
                lags.append(loop.time() - began - 0.005)

        watching = asyncio.ensure_future(watch())
        for text in texts:
            with pytest.raises(PromptTooLongError, match=r"the prompt has \d+ tokens, but only \d+ fit"):
                await engine.ask([text] * 4)
        cut = await engine.ask(texts, truncate="left", max_tokens=30)
        assert [result.text for result in cut] == [text[-6:] for text in texts]
        watching.cancel()
        assert max(lags) < 2.0


def test_one_tokenizer_serves_sixteen_threads() -> None:
    """Calls that truncate change the tokenizer under calls that do not: "Already borrowed", or a question cut."""
    config = {"kev": {"core": {"max_context": 200, "max_tokens": 20}}}
    with Engine(scripted_engine(lambda prompt: prompt[-10:], config)) as engine:

        def work(thread: int) -> None:
            for call in range(8):
                end = f"{thread:03} {call:03}"
                text = ("y" * 5000 if call % 2 else "short ") + end
                result = engine.ask([text], truncate="left" if call % 2 else "none")[0]
                assert result.text == text[-10:]
                assert (result.num_truncated > 0) == bool(call % 2)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))


# ---- memory


@pytest.mark.parametrize(
    ("level", "kv_cache"),
    [
        ("strict", "split"),
        ("loose", "split"),
        ("shared", "shared_readonly"),
        ("strict", "unified"),
        ("shared", "unified"),
    ],
)
def test_a_question_that_wants_all_the_memory_ends_nobody(gemma: Model, level: str, kv_cache: str) -> None:
    """The slot that fills a shared pool takes every running answer down with it."""
    position_bytes = 3 * 2 * 16 * 4
    pool = MAX_CONTEXT + 64
    settings = settings_for(
        gemma[0],
        core={"kv_cache_bytes": pool * position_bytes},
        isolation={"level": level, "kv_cache": kv_cache, "knowledge_prefix": "known: "},
    )
    questions = [
        Question("greedy one", max_tokens=120, ignore_eos=True),
        *(Question(text_of(n, seed=n), max_tokens=10) for n in (20, 30, 40)),
    ]
    with Engine.from_config(settings) as engine:
        together = engine.ask(questions, system_prompt="system", timeout_ms=60_000)
        assert [result.finish_reason for result in together if result.error] == []
        assert together[0].tokens == 120
        for question, result in zip(questions, together, strict=True):
            alone = engine.ask([question], system_prompt="system", timeout_ms=60_000)[0]
            assert (alone.token_ids, alone.text) == (result.token_ids, result.text)


def test_a_question_larger_than_the_memory_fails_alone_and_at_once(gemma: Model) -> None:
    """A question that can never fit waits for ever and holds up all behind it."""
    settings = settings_for(gemma[0], core={"kv_cache_bytes": 128 * 3 * 2 * 16 * 4})
    with Engine.from_config(settings) as engine:
        small, large, other = engine.ask([Question("a"), Question("b", max_tokens=200), Question("c")])
        assert large.finish_reason is FinishReason.ERROR and large.error is not None
        assert large.error.reason == "PROMPT_TOO_LONG" and "core.kv_cache_bytes" in large.error.message
        assert small.error is other.error is None and small.tokens and other.tokens


def test_an_overflow_in_fp16_is_an_error_and_no_empty_success(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model trained in bf16 overflows in fp16: the answer is empty or padding, and looks like a success."""
    save_checkpoint(tmp_path, "llama", torch.bfloat16)
    config = load_config(settings_for(tmp_path, core={"precision": "fp16"}), env={})
    assert any("fp16" in warning for warning in config.warnings())
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        parts = load_parts(config, SystemClock(), print)
    assert "core.precision is fp16" in caplog.text
    module = parts.nodes[0].model.module  # type: ignore[attr-defined]
    with torch.no_grad():  # one word of large activations, as trained models have them
        module.get_input_embeddings().weight[prompt_ids("Z")[1]] = 65_504.0
        module.model.layers[0].self_attn.o_proj.weight *= 100
    with Engine(AsyncEngine(config, parts)) as engine:
        good = ["a good question", "another one"]
        alone = [engine.ask([question])[0] for question in good]
        sick_first, first, second, sick_last = engine.ask(["Z at the start", *good, "at the end Z"])
        assert [first.token_ids, second.token_ids] == [result.token_ids for result in alone]
        for result in (sick_first, sick_last):
            assert result.finish_reason is FinishReason.ERROR and result.error is not None
            assert result.error.reason == "NON_FINITE_LOGITS" and "bf16" in result.error.message


# ---- one behind the other


async def test_short_questions_are_answered_before_the_long_ones_beside_them() -> None:
    """One answer of a thousand tokens, or one huge prompt, holds up all who run with it."""
    step_s = 0.0005  # a thousand forwards that take no time may end before the loop has told of the short ones
    runner = GuidedRunner(lambda prompt: "long " * 200 if prompt == "long" else prompt[:5], step_s)
    async with scripted_engine(str, {"kev": {"core": {"max_context": 30_000}}}, runner=runner) as engine:
        request_id = await engine.submit([Question("long", max_tokens=1000), *["short"] * 7])
        order = [event.question_index async for event in engine.stream(request_id) if event.result is not None]
        assert order[-1] == 0
        huge = asyncio.ensure_future(engine.ask(["y" * 20_000], timeout_ms=60_000))
        await until(lambda: runner.num_forwards_of("y" * 20_000) > 1)
        for strategy in ("length_aware", "semantic_hash"):
            results = await engine.ask(["short"] * 10, strategy=strategy)
            assert {result.text for result in results} == {"short"}
        assert not huge.done(), "the short ones were held to the end of the long one"
        assert (await huge)[0].text == "y" * 5


async def test_a_long_question_is_not_starved_by_short_ones() -> None:
    """Endless short questions pass a long one again and again."""
    config = {"kev": {"router": {"max_parallel_queries": 2, "channel_pool_size": 4, "strategy": "length_aware"}}}
    async with scripted_engine(lambda prompt: prompt[:5], config) as engine:
        ended = asyncio.Event()

        async def client(number: int) -> int:
            count = 0
            while not ended.is_set():
                await engine.ask([f"short {number}"], timeout_ms=60_000)
                count += 1
            return count

        clients = [asyncio.ensure_future(client(number)) for number in range(8)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            assert (await engine.ask(["z" * 3000], timeout_ms=60_000))[0].text == "zzzzz"
        ended.set()
        assert min(await asyncio.gather(*clients)) > 0
        await until_idle(engine)
