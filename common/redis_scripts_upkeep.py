"""The scripts that run on a timer: signs of life, the end of dead consumers, the sweep.

Invariants and semantics: each function is one atomic act. A consumer is removed only together with the proof that
nothing is pending for it; deleting one with pending entries would lose them. What a dead consumer held waits again
with its delivery count, so that a poisonous item is still recognised.

Not here: when they run (``redis_streams``).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.redis_scripts import Entry, Script, ScriptRunner, entry_of

_BURY = """
-- Put whatever the consumer holds back in line and remove it from every group.
local function bury(consumer, num_channels)
  local num_moved = 0
  for channel_id = 0, num_channels - 1 do
    local work = WORK .. channel_id
    local rows = pending(work, '-', '+', 1000, consumer)
    for _, row in ipairs(rows or {}) do
      if exists(work, row[1]) then
        disown(channel_id, row[1], row[3], row[4])
        num_moved = num_moved + 1
      else
        remove(channel_id, row[1])
      end
    end
    if rows and #pending(work, '-', '+', 1, consumer) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', work, WORK_GROUP, consumer)
    end
  end
  redis.call('ZREM', NODES, consumer)
  redis.call('DEL', NOTICES .. consumer, GRANTS .. consumer)
  if num_moved > 0 then ring(WORK_BELL, WORK_BELL_TTL) end
end
"""

_BEAT = Script.of(
    _BURY
    + """
local consumer, ttl_ms, num_channels = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
redis.call('ZADD', NODES, now, consumer)
redis.call('PEXPIRE', NODES, NODES_TTL)
local dead = redis.call('ZRANGEBYSCORE', NODES, '-inf', whole(now - ttl_ms), 'LIMIT', 0, 8)
for _, gone in ipairs(dead) do bury(gone, num_channels) end
return dead
""",
    frees_room=True,
)


async def beat(runner: ScriptRunner, consumer: str, *, ttl_ms: int, num_channels: int) -> list[str]:
    """Give a sign of life, and bury up to eight consumers that gave none for ``ttl_ms``; returns those."""
    return [gone.decode() for gone in await runner.run(_BEAT, consumer, ttl_ms, num_channels)]


_RETIRE = Script.of(_BURY + "bury(ARGV[1], tonumber(ARGV[2]))", frees_room=True)


async def retire(runner: ScriptRunner, consumer: str, num_channels: int) -> None:
    """Let go of whatever the consumer still holds and remove it."""
    await runner.run(_RETIRE, consumer, num_channels)


_SWEEP = Script.of(
    """
local lease_ms, max_deliveries, num_channels = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local deleted, poisonous, num_moved = {}, {}, 0

local function sweep(channel_id)
  local work, cursor = WORK .. channel_id, '0-0'
  repeat
    local page = redis.pcall('XAUTOCLAIM', work, WORK_GROUP, UNOWNED, lease_ms, cursor, 'COUNT', 100, 'JUSTID')
    if page.err then
      if not string.find(page.err, 'NOGROUP', 1, true) then error(page.err) end
      if redis.call('EXISTS', work) == 1 then make_group(work, WORK_GROUP) end
      return
    end
    num_moved = num_moved + #page[2]
    for _, id in ipairs(page[2]) do redis.call('ZREM', LEASED, channel_id .. ':' .. id) end
    for _, id in ipairs(page[3]) do
      redis.call('ZREM', LEASED, channel_id .. ':' .. id)
      deleted[#deleted + 1] = id
    end
    cursor = page[1]
  until cursor == '0-0'
end

-- Consumers that gave their last sign of life before anybody here can remember.
local function remove_strangers(work)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', work, WORK_GROUP)
  for _, info in ipairs(consumers.err and {} or consumers) do
    local name = field_of(info, 'name')
    if name ~= UNOWNED and field_of(info, 'pending') == 0 and not redis.call('ZSCORE', NODES, name) then
      redis.call('XGROUP', 'DELCONSUMER', work, WORK_GROUP, name)
    end
  end
end

for channel_id = 0, num_channels - 1 do
  local work = WORK .. channel_id
  sweep(channel_id)
  remove_strangers(work)
  requeue(channel_id)
  for _, row in ipairs(pending(work, '-', '+', 100, UNOWNED) or {}) do
    local found = row[4] >= max_deliveries and redis.call('XRANGE', work, row[1], row[1])[1]
    if found then poisonous[#poisonous + 1] = {channel_id, row[1], row[4], found[2]} end
  end
end
if num_moved > 0 then ring(WORK_BELL, WORK_BELL_TTL) end
return {deleted, poisonous}
""",
    frees_room=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found."""

    deleted: list[str]
    """Ids that were pending although their entries are gone: trimmed or deleted by somebody else."""
    poisonous: list[Entry]
    """Delivered too often; in line, to be set aside by the caller."""


async def sweep(runner: ScriptRunner, *, lease_ms: int, max_deliveries: int, num_channels: int) -> Swept:
    """Put every expired lease back in line, its delivery count unchanged, and drop pending ids without an entry.

    Follows each stream's cursor to its end (a page may be empty before that), makes missing groups again, and removes
    consumers that hold nothing and are no nodes any more.
    """
    deleted, poisonous = await runner.run(_SWEEP, lease_ms, max_deliveries, num_channels)
    return Swept(deleted=[id_.decode() for id_ in deleted], poisonous=[entry_of(row) for row in poisonous])
