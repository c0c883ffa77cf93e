"""What the inference nodes of a deployment tell about themselves, kept in Redis.

Invariants and semantics: a node tells every ``TELL_INTERVAL_S``; one that was silent for ``_SILENCE_MS`` no longer
counts for the counters, and for the isolation only until another one has spoken. Redis' clock is the only one. What
isolation can be promised is asked for once per ``TELL_INTERVAL_S`` at most: no node tells anything new before.

Not here: leases and heartbeats of work (``redis_upkeep``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.codec.nodes import dump_node, load_node
from common.errors import ServiceUnavailableError
from common.redis_link import RedisLink
from common.redis_scripts import Script
from common.types import IsolationReport, NodeStats

TELL_INTERVAL_S = 1.0
_SILENCE_MS = 5_000

_TELL = Script.of("""
local node_id = ARGV[1]
redis.call('HSET', REPORTS, 't:' .. node_id, whole(now_ms()), 'r:' .. node_id, ARGV[2], 's:' .. node_id, ARGV[3])
redis.call('PEXPIRE', REPORTS, REPORTS_TTL)
""")

_LEAVE = Script.of("redis.call('HDEL', REPORTS, 't:' .. ARGV[1], 'r:' .. ARGV[1], 's:' .. ARGV[1])", frees_room=True)

_NODES = Script.of("""
local nodes = {}
local fields = redis.call('HGETALL', REPORTS)
for i = 1, #fields, 2 do
  local node_id = string.match(fields[i], '^t:(.+)$')
  if node_id then
    local parts = redis.call('HMGET', REPORTS, 'r:' .. node_id, 's:' .. node_id)
    if parts[1] and parts[2] then
      nodes[#nodes + 1] = {whole(now_ms() - tonumber(fields[i + 1])), parts[1], parts[2]}
    end
  end
end
return nodes
""")


@dataclass(frozen=True, slots=True)
class _Told:
    silent_ms: int
    report: IsolationReport
    stats: NodeStats


class RedisNodes:
    """The nodes of one deployment."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._promised: IsolationReport | None = None
        self._promised_until_s = 0.0

    async def tell(self, report: IsolationReport, stats: NodeStats) -> None:
        """Say, as a node, what can be promised and what is going on."""
        await self._link.unbroken(self._link.run(_TELL, stats.node_id, *dump_node(report, stats)))

    async def leave(self, node_id: str) -> None:
        """A node that stops is no longer spoken of."""
        await self._link.unbroken(self._link.run(_LEAVE, node_id))

    async def stats(self) -> list[NodeStats]:
        """Counters of the nodes that live, by node id."""
        return [told.stats for told in await self._nodes() if told.silent_ms <= _SILENCE_MS]

    async def isolation(self) -> IsolationReport:
        """What every node can promise: the report of one that can promise least.

        Raises:
            ServiceUnavailableError: no node has been known yet.
        """
        now_s = asyncio.get_running_loop().time()
        if self._promised is None or now_s >= self._promised_until_s:
            self._promised = _least(await self._nodes())
            self._promised_until_s = now_s + TELL_INTERVAL_S
        return self._promised

    async def _nodes(self) -> list[_Told]:
        rows = await self._link.unbroken(self._link.run(_NODES))
        told = [_Told(int(silent_ms), *load_node(report, stats)) for silent_ms, report, stats in rows]
        return sorted(told, key=lambda node: node.stats.node_id)


def _least(nodes: Sequence[_Told]) -> IsolationReport:
    living = [told.report for told in nodes if told.silent_ms <= _SILENCE_MS]
    reports = living or [told.report for told in nodes]
    if not reports:
        raise ServiceUnavailableError("no inference node has been known yet; start one, or try again in a moment")
    return next((report for report in reports if report.reason), reports[0])
