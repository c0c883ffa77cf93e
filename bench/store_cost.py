"""What one question costs the store: processor time, commands and memory of Redis, without any model.

    python -m bench.store_cost [--questions 400] [--tokens 64] [--channels 16 64 256] [--json out.json]

One process is router, node and aggregator at once over the real transport and a private server; the server's own
counters say what it spent, so the speed of this process does not matter. A question has one delta per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.clock import SystemClock
from common.ports import Lease
from common.redis_link import RedisLink
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_streams import RedisTransport
from common.types import (
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    FinishReason,
    IsolationLevel,
    Prompt,
    Receipt,
    SamplingParams,
    Verdict,
    WorkItem,
)
from tests.chaos.redis_server import RedisServer

PROMPT_TOKENS = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCost:
    """What the server spent per question."""

    server: str
    num_channels: int
    num_active: int
    """Channels that had something waiting."""
    num_questions: int
    answer_tokens: int
    cpu_us: float
    """Processor time of the whole server."""
    scripts: float
    """Scripts run."""
    script_us: float
    """Time inside one script, mean."""
    bytes_kept: float
    """Growth of used memory while everything is kept."""


class Deployment:
    """Router, node and aggregator of a deployment, in this process."""

    def __init__(self, router: RedisTransport, node: RedisTransport, reader: RedisTransport) -> None:
        self.router, self.node, self.reader = router, node, reader

    async def answer(self, item: WorkItem, num_tokens: int) -> None:
        """One question from publication to outcome, read."""
        await self.router.publish(item)
        for lease in await self.node.lease(1, 5.0):
            await self._work_on(lease, num_tokens)
        await self.reader.read(1_000, 0.0)

    async def _work_on(self, lease: Lease, num_tokens: int) -> None:
        key = {
            "request_id": lease.item.request_id,
            "question_index": lease.item.question_index,
            "channel_id": lease.item.channel_id,
            "attempt": lease.attempt,
        }
        await self.node.emit(lease, ChannelStarted(**key, slot=0, node_id="node-0"))
        for seq in range(num_tokens):
            await self.node.emit(lease, ChannelDelta(**key, seq=seq, text=" word", num_tokens=seq + 1))
        await self.node.commit(lease, answer_of(lease.item, num_tokens, lease.attempt))


def item_of(number: int, channel_id: int, prompt_tokens: int = PROMPT_TOKENS) -> WorkItem:
    """A question like those of the measured run."""
    return WorkItem(
        request_id=f"{number:032x}",
        question_index=0,
        channel_id=channel_id,
        prompt=Prompt(ids=tuple((7919 * i) % 30_000 for i in range(prompt_tokens))),
        num_shared=0,
        sampling=SamplingParams(max_tokens=64),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=600_000,
        fingerprint="f" * 64,
    )


def answer_of(item: WorkItem, num_tokens: int, attempt: int = 1) -> ChannelResult:
    """Its outcome."""
    return ChannelResult(
        request_id=item.request_id,
        question_index=item.question_index,
        channel_id=item.channel_id,
        finish_reason=FinishReason.LENGTH,
        slot=3,
        text=" word" * num_tokens,
        token_ids=tuple((7919 * i) % 30_000 for i in range(num_tokens)),
        num_prompt_tokens=len(item.prompt.ids),
        queued_ms=1.5,
        first_token_ms=20.5,
        started_at=1_795_000_000.25,
        finished_at=1_795_000_001.5,
        attempt=attempt,
        node_id="node-0",
        receipt=Receipt(
            level=IsolationLevel.STRICT, verdict=Verdict.BITWISE, mask_digest="a" * 64, fingerprint="f" * 64
        ),
    )


async def measure(kind: str, num_channels: int, num_questions: int, num_tokens: int, num_waiting: int) -> StoreCost:
    """Answer questions while ``num_waiting`` others wait, each on a channel of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with RedisServer(Path(folder), kind, "--appendonly", "no") as server, server.client() as client:
            links: list[RedisLink] = []
            transports: list[RedisTransport] = []
            for name in ("router", "node", "aggregator"):
                links.append(await RedisLink.connect(LinkSettings(url=server.url, deployment="bench")))
                settings = RedisTransportSettings(num_channels=num_channels, node_id=name, heartbeat_ttl_s=30.0)
                transports.append(RedisTransport(link=links[-1], clock=SystemClock(), settings=settings))
            deployment = Deployment(*transports)
            first_waiting = num_channels - num_waiting
            for number in range(5):
                await deployment.answer(item_of(number, 0), num_tokens)
            for number in range(num_waiting):
                await deployment.router.publish(item_of(10_000_000 + number, first_waiting + number))
            before = await _counters(client)
            for number in range(num_questions):
                # The oldest head is leased, so the ones that wait are answered and published anew in turn.
                await deployment.answer(item_of(1_000_000 + number, number % num_channels), num_tokens)
            after = await _counters(client)
            for transport in transports:
                await transport.close()
            for link in links:
                await link.close()
    spent = {name: after[name] - before[name] for name in after}
    return StoreCost(
        server=kind,
        num_channels=num_channels,
        num_active=num_waiting + 1,
        num_questions=num_questions,
        answer_tokens=num_tokens,
        cpu_us=spent["cpu_us"] / num_questions,
        scripts=spent["calls"] / num_questions,
        script_us=spent["usec"] / spent["calls"],
        bytes_kept=spent["bytes"] / num_questions,
    )


async def _counters(client: Any) -> dict[str, float]:
    scripts = (await client.info("commandstats")).get("cmdstat_evalsha", {"calls": 0, "usec": 0})
    cpu = await client.info("cpu")
    memory = await client.info("memory")
    return {
        "calls": scripts["calls"],
        "usec": scripts["usec"],
        "cpu_us": 1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]),
        "bytes": memory["used_memory"],
    }


async def _run(arguments: argparse.Namespace) -> list[StoreCost]:
    return [
        await measure(arguments.server, channels, arguments.questions, tokens, channels - 1 if is_busy else 0)
        for channels in arguments.channels
        for is_busy in (False, True)
        for tokens in sorted({0, arguments.tokens})
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--server", default="valkey")
    parser.add_argument("--json", type=Path, help="write the readings here")
    arguments = parser.parse_args(argv)
    costs = asyncio.run(_run(arguments))
    table = Table("channels", "active", "answer tokens", "CPU us/question", "scripts", "us/script", "bytes kept")
    for cost in costs:
        table.add_row(
            str(cost.num_channels),
            str(cost.num_active),
            str(cost.answer_tokens),
            f"{cost.cpu_us:.0f}",
            f"{cost.scripts:.1f}",
            f"{cost.script_us:.1f}",
            f"{cost.bytes_kept:.0f}",
        )
    Console().print(table)
    if arguments.json:
        report = {"machine": platform.processor() or platform.machine(), "readings": [asdict(cost) for cost in costs]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
