"""The four kinds of question of the article that describes Kev, answered with all audit fields shown.

Invariants and semantics: greedy and repeatable. The demo model is a small base model: its answers show that channels
are isolated and how fast they are, not what a large model knows.

Not here: loading the model (``kev.cli``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from common.types import Result
from kev.gateway.backend import Backend
from kev.live_table import printable

QUESTIONS = (
    "Kev的隔离通道是如何实现的？",
    "帮我总结一下Transformer的注意力机制",
    "写出一个Python快速排序示例",
    "解释一下什么是KV Cache",
)
"""About Kev itself, a summary, code, and the explanation of a term."""

MAX_TOKENS = 64
_TIMEOUT_MS = 300_000  # a slow machine shall show the answers too


async def run_demo(engine: Backend, out: TextIO, max_tokens: int = MAX_TOKENS) -> bool:
    """Ask the questions and print every channel as it finishes; True when all were answered."""
    request_id = await engine.submit(
        list(QUESTIONS),
        isolation="strict",
        max_parallel=len(QUESTIONS),
        max_tokens=max_tokens,
        repetition_penalty=1.3,
        timeout_ms=_TIMEOUT_MS,
    )
    print(f"request {request_id}: {len(QUESTIONS)} questions, one forward pass per step, one channel each\n", file=out)
    results: list[Result] = []
    async for event in engine.stream(request_id):
        if event.result is not None:
            results.append(event.result)
            print(*describe(event.result), sep="\n", end="\n\n", file=out, flush=True)
    tokens = sum(result.tokens for result in results)
    slowest_ms = max(result.elapsed_ms for result in results)
    rate = f", {tokens * 1000 / slowest_ms:.1f} tokens/s" if slowest_ms else ""
    print(f"{len(results)} channels, {tokens} tokens in {slowest_ms} ms{rate}", file=out)
    return all(result.error is None and result.text for result in results)


def describe(result: Result) -> Iterator[str]:
    """One channel's answer and audit fields, as lines."""
    receipt = result.isolation
    first_token_ms = "none" if result.first_token_ms is None else result.first_token_ms
    yield f"[{result.question_index}] {QUESTIONS[result.question_index]}"
    yield (
        f"    channel={result.channel_id} slot={result.slot} hash_bucket={result.hash_bucket} "
        f"strategy={result.strategy} attempt={result.attempt} node={result.node_id}"
    )
    yield (
        f"    prompt_tokens={result.prompt_tokens} tokens={result.tokens} queued_ms={result.queued_ms} "
        f"first_token_ms={first_token_ms} elapsed_ms={result.elapsed_ms} finish_reason={result.finish_reason}"
    )
    yield f"    isolation={receipt.level} verdict={receipt.verdict} mask_digest={receipt.mask_digest or 'none'}"
    text = result.error.message if result.error else result.text
    yield from (f"    | {line}" for line in printable(text).strip().splitlines())
