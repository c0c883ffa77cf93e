"""How much waits in the store: the queues of a deployment in numbers.

Invariants and semantics: one script, one moment. Entries of a work stream are what KEDA's triggers count; an entry is
leased while a node holds it, and waits otherwise, whether it was delivered before or not. Dead letters are counted by
the store itself, trimmed ones included.

Not here: the streams themselves (``redis_streams``), the names of metrics (``common.metrics.catalogue``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import KevError
from common.metrics import catalogue as names
from common.metrics.port import Reading, by_channel
from common.redis_link import RedisLink
from common.redis_scripts import Script

_BACKLOG = Script.of("""
local depths, leased, oldest_ms = {}, 0, nil
for channel_id = 0, ARGV[1] - 1 do
  local work = WORK .. channel_id
  depths[#depths + 1] = redis.call('XLEN', work)
  local summary = redis.pcall('XPENDING', work, WORK_GROUP)
  for _, owner in ipairs(not summary.err and summary[4] or {}) do
    if owner[1] ~= UNOWNED then leased = leased + tonumber(owner[2]) end
  end
  local first = redis.call('XRANGE', work, '-', '+', 'COUNT', 1)[1]
  if first then
    local published_ms = tonumber(string.match(first[1], '^(%d+)'))
    oldest_ms = math.min(oldest_ms or published_ms, published_ms)
  end
end
local letters = redis.pcall('XINFO', 'STREAM', DEAD_LETTERS)
local num_dead = not letters.err and field_of(letters, 'entries-added') or 0
local age_ms = oldest_ms and math.max(0, now_ms() - oldest_ms) or 0
return {depths, leased, whole(age_ms), num_dead}
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The queues of a deployment at one moment."""

    depths: tuple[int, ...]
    """Entries per channel, waiting or leased; index = channel id."""
    num_leased: int
    oldest_s: float
    """Age of the oldest entry; 0 without one."""
    num_dead_letters: int
    """Entries ever set aside."""


class BacklogGauge:
    """Looks at the queues, and says what it saw last."""

    def __init__(self, link: RedisLink, num_channels: int) -> None:
        self._link = link
        self._num_channels = num_channels
        self._seen: Backlog | None = None

    async def refresh(self) -> None:
        """Look again; when the store is away there is nothing to say."""
        self._seen = None
        try:
            self._seen = await self.read()
        except KevError:
            return

    async def read(self) -> Backlog:
        """The queues now.

        Raises:
            StoreUnavailableError: the store is away.
        """
        reply = await self._link.interruptible(self._link.run(_BACKLOG, self._num_channels))
        depths, num_leased, age_ms, num_dead = reply
        return Backlog(
            depths=tuple(int(depth) for depth in depths),
            num_leased=int(num_leased),
            oldest_s=int(age_ms) / 1000,
            num_dead_letters=int(num_dead),
        )

    def readings(self) -> Iterable[Reading]:
        """What was seen last."""
        seen = self._seen
        yield Reading(names.STORE_UP, seen is not None)
        if seen is None:
            return
        yield from by_channel(names.QUEUE_ENTRIES, seen.depths)
        yield Reading(names.QUEUE_WAITING, max(0, sum(seen.depths) - seen.num_leased))
        yield Reading(names.QUEUE_LEASED, seen.num_leased)
        yield Reading(names.QUEUE_LAG, seen.oldest_s)
        yield Reading(names.DEAD_LETTERS, seen.num_dead_letters)
