"""What one question costs the store: processor time, commands and memory of Redis, without any model.

    python -m bench.store_cost [--questions 400] [--tokens 64] [--channels 16 64 256] [--together 1 8] [--json out.json]

One process is router, node and aggregator at once over the real transport and a private server; the server's own
counters say what it spent, so the speed of this process does not matter. A question has one delta per token; questions
that are together are published, leased and reported together, as those of one request in one forward are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.clock import SystemClock
from common.ports import Lease, Report
from common.redis_link import RedisLink
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_source import RedisSource
from common.redis_streams import RedisTransport
from common.types import (
    ChannelDelta,
    ChannelEvent,
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
    num_together: int
    """Questions of one request, on channels of their own."""
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

    def __init__(self, router: RedisTransport, node: RedisTransport, reader: RedisSource) -> None:
        self.router, self.node, self.reader = router, node, reader

    async def answer(self, items: Sequence[WorkItem], num_tokens: int) -> None:
        """Questions from publication to outcome, read."""
        await self.router.publish(items)
        leases = await self.node.lease(len(items), 5.0)
        await self._report(leases, started_of)
        for seq in range(num_tokens):
            await self._report(leases, partial(delta_of, seq=seq))
        await self._report(leases, partial(answer_of, num_tokens=num_tokens))
        await self.reader.read(10_000, 0.0)

    async def _report(self, leases: Sequence[Lease], event_of: Callable[[Lease], ChannelEvent]) -> None:
        await self.node.report([Report(lease=lease, events=(event_of(lease),)) for lease in leases])


def item_of(number: int, question_index: int, channel_id: int, prompt_tokens: int = PROMPT_TOKENS) -> WorkItem:
    """A question like those of the measured run."""
    return WorkItem(
        request_id=f"{number:032x}",
        question_index=question_index,
        channel_id=channel_id,
        prompt=Prompt(ids=tuple((7919 * i) % 30_000 for i in range(prompt_tokens))),
        num_shared=0,
        sampling=SamplingParams(max_tokens=64),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=600_000,
        fingerprint="f" * 64,
    )


def started_of(lease: Lease) -> ChannelStarted:
    """Its first event."""
    item = lease.item
    return ChannelStarted(
        request_id=item.request_id,
        question_index=item.question_index,
        channel_id=item.channel_id,
        attempt=lease.attempt,
        slot=0,
        node_id="node-0",
    )


def delta_of(lease: Lease, seq: int) -> ChannelDelta:
    """A token of it."""
    item = lease.item
    return ChannelDelta(
        request_id=item.request_id,
        question_index=item.question_index,
        channel_id=item.channel_id,
        attempt=lease.attempt,
        seq=seq,
        text=" word",
        num_tokens=seq + 1,
    )


def answer_of(lease: Lease, num_tokens: int) -> ChannelResult:
    """Its outcome."""
    item = lease.item
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
        attempt=lease.attempt,
        node_id="node-0",
        receipt=Receipt(
            level=IsolationLevel.STRICT, verdict=Verdict.BITWISE, mask_digest="a" * 64, fingerprint="f" * 64
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked."""

    num_channels: int
    num_questions: int
    num_together: int
    num_tokens: int
    num_waiting: int
    """Other questions that wait meanwhile, each on a channel of its own."""


async def measure(kind: str, load: Load) -> StoreCost:
    """Answer questions while others wait."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            RedisServer(Path(folder), kind, "--appendonly", "no") as server,
            server.client() as client,
            _deployment(server.url, load.num_channels) as deployment,
        ):
            for number in range(5):
                await deployment.answer([item_of(number, 0, 0)], load.num_tokens)
            first_waiting = load.num_channels - load.num_waiting
            await deployment.router.publish(
                [item_of(10_000_000 + number, 0, first_waiting + number) for number in range(load.num_waiting)]
            )
            before = await _counters(client)
            for number in range(0, load.num_questions, load.num_together):
                # The oldest heads are leased, so the ones that wait are answered and published anew in turn.
                channels = [(number + index) % load.num_channels for index in range(load.num_together)]
                items = [item_of(1_000_000 + number, index, channel) for index, channel in enumerate(channels)]
                await deployment.answer(items, load.num_tokens)
            after = await _counters(client)
    spent = {name: after[name] - before[name] for name in after}
    return StoreCost(
        server=kind,
        num_channels=load.num_channels,
        num_active=load.num_waiting + load.num_together,
        num_questions=load.num_questions,
        num_together=load.num_together,
        answer_tokens=load.num_tokens,
        cpu_us=spent["cpu_us"] / load.num_questions,
        scripts=spent["calls"] / load.num_questions,
        script_us=spent["usec"] / spent["calls"],
        bytes_kept=spent["bytes"] / load.num_questions,
    )


@asynccontextmanager
async def _deployment(url: str, num_channels: int) -> AsyncIterator[Deployment]:
    settings = RedisTransportSettings(num_channels=num_channels, node_id="router", heartbeat_ttl_s=30.0)
    links = [await RedisLink.connect(LinkSettings(url=url, deployment="bench")) for _ in range(3)]
    router = RedisTransport(link=links[0], clock=SystemClock(), settings=settings)
    node = RedisTransport(link=links[1], clock=SystemClock(), settings=replace(settings, node_id="node"))
    reader = RedisSource(link=links[2], settings=replace(settings, node_id="aggregator"))
    await reader.read(1, 0.0)
    try:
        yield Deployment(router, node, reader)
    finally:
        for transport in (router, node):
            await transport.close()
        for link in links:
            await link.close()


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
    loads = [
        Load(
            num_channels=channels,
            num_questions=arguments.questions,
            num_together=together,
            num_tokens=tokens,
            num_waiting=channels - together if is_busy else 0,
        )
        for channels in arguments.channels
        for is_busy in (False, True)
        for together in arguments.together
        for tokens in sorted({0, arguments.tokens})
    ]
    return [await measure(arguments.server, load) for load in loads]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--server", default="valkey")
    parser.add_argument("--json", type=Path, help="write the readings here")
    arguments = parser.parse_args(argv)
    costs = asyncio.run(_run(arguments))
    table = Table(
        "channels", "active", "together", "answer tokens", "CPU us/question", "scripts", "us/script", "bytes kept"
    )
    for cost in costs:
        table.add_row(
            str(cost.num_channels),
            str(cost.num_active),
            str(cost.num_together),
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
