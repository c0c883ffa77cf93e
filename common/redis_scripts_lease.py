"""The scripts of an entry's holder: lease, renew, emit, commit, hand back, dead-letter, hear of withdrawals.

Invariants and semantics: each function is one atomic act; repeating it after a lost reply does no harm. Who acts on a
leased entry is the consumer for whom it is pending, in the delivery that was granted to it; everybody else is refused
(a bare XCLAIM or XACK asks nobody).

Not here: what the bytes mean (``redis_streams``), what is done on a timer (``redis_scripts_upkeep``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.ports import CommitState
from common.redis_scripts import Entry, Hold, Script, ScriptRunner, entry_of

_LEASE = Script.of("""
local consumer, max_items, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_deliveries, grant, ttl_ms = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local now = now_ms()
redis.call('ZADD', NODES, now, consumer)
redis.call('PEXPIRE', NODES, NODES_TTL)

-- What an earlier execution of this very call was granted: its reply was lost.
local granted = {}
local function grant_again(channel_id, row)
  local entry = redis.call('XRANGE', WORK .. channel_id, row[1], row[1])[1]
  local request_id = entry and field_of(entry[2], 'r')
  if not request_id then return end
  if redis.call('HGET', QUESTIONS .. request_id, 'g:' .. field_of(entry[2], 'i')) == grant then
    granted[#granted + 1] = {channel_id, row[1], row[4], entry[2]}
  end
end

local function head_of(channel_id)
  local work = WORK .. channel_id
  if redis.call('XLEN', work) == 0 then
    redis.call('SREM', ACTIVE, channel_id)
    return nil
  end
  local rows = pending(work, '-', '+', 1000)
  if not rows then make_group(work, WORK_GROUP) rows = {} end
  local expired, unowned
  for _, row in ipairs(rows) do
    if row[2] == UNOWNED then unowned = unowned or row
    elseif row[3] >= lease_ms then expired = expired or row
    elseif row[2] == consumer then
      grant_again(channel_id, row)
      return nil
    end
  end
  local row = expired or unowned
  if row then return {rank = expired and 0 or 1, id = row[1], deliveries = row[4]} end
  local info = redis.call('XINFO', 'GROUPS', work)[1]
  local unread = redis.call('XRANGE', work, '(' .. field_of(info, 'last-delivered-id'), '+', 'COUNT', 1)[1]
  return unread and {rank = 1, id = unread[1], deliveries = 0, unread = true}
end

local heads = {}
for _, channel_id in ipairs(redis.call('SMEMBERS', ACTIVE)) do
  local head = head_of(channel_id)
  if head then
    local ms, number = string.match(head.id, '^(%d+)-(%d+)$')
    head.channel_id, head.ms, head.number = channel_id, tonumber(ms), tonumber(number)
    heads[#heads + 1] = head
  end
end
table.sort(heads, function(a, b)
  if a.rank ~= b.rank then return a.rank < b.rank end
  if a.ms ~= b.ms then return a.ms < b.ms end
  return a.number < b.number
end)

local function take(head)
  local work = WORK .. head.channel_id
  if head.unread then
    local streams = redis.call('XREADGROUP', 'GROUP', WORK_GROUP, consumer, 'COUNT', 1, 'STREAMS', work, '>')
    return streams and streams[1][2][1]
  end
  return redis.call('XCLAIM', work, WORK_GROUP, consumer, 0, head.id)[1]
end

local poisonous = {}
for _, head in ipairs(heads) do
  if #granted >= max_items then break end
  local work = WORK .. head.channel_id
  if head.deliveries >= max_deliveries then
    local found = redis.call('XRANGE', work, head.id, head.id)[1]
    disown(work, head.id, 0, head.deliveries)
    if found then poisonous[#poisonous + 1] = {head.channel_id, head.id, head.deliveries, found[2]} end
  else
    local entry = take(head)
    if entry and entry[2] then
      granted[#granted + 1] = {head.channel_id, entry[1], head.deliveries + 1, entry[2]}
      local request_id, index = field_of(entry[2], 'r'), field_of(entry[2], 'i')
      if request_id and index then
        redis.call('HSET', QUESTIONS .. request_id, 'g:' .. index, grant)
        keep(QUESTIONS .. request_id, ttl_ms)
      end
    else
      redis.call('XACK', work, WORK_GROUP, head.id)
    end
  end
end
return {whole(now), granted, poisonous}
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """What a lease call got."""

    now_ms: int
    """Unix ms by Redis' clock."""
    granted: list[Entry]
    poisonous: list[Entry]
    """Delivered too often already; back in line, to be set aside by the caller."""


async def lease(
    runner: ScriptRunner,
    consumer: str,
    max_items: int,
    *,
    lease_ms: int,
    max_deliveries: int,
    grant: str,
    ttl_ms: int,
) -> Grants:
    """Grant up to ``max_items`` entries, at most one per channel and none of a channel in which the consumer holds one.

    Expired leases come first, then what waits, oldest first. Counts as a sign of life. An expired entry that was
    delivered ``max_deliveries`` times is put back in line and handed out as poisonous.
    """
    now_ms, granted, poisonous = await runner.run(_LEASE, consumer, max_items, lease_ms, max_deliveries, grant, ttl_ms)
    return Grants(
        now_ms=int(now_ms),
        granted=[entry_of(row) for row in granted],
        poisonous=[entry_of(row) for row in poisonous],
    )


_RENEW = Script.of_holder(
    """
if not held() then return 0 end
keep(questions, ARGV[8])
return #redis.call('XCLAIM', work, WORK_GROUP, owner, 0, id, 'IDLE', 0, 'JUSTID')
""",
    frees_room=True,
)


async def renew(runner: ScriptRunner, hold: Hold, ttl_ms: int) -> bool:
    """Set the entry's idle time to 0 if it is held.

    JUSTID leaves the delivery count alone; without the check a stalled holder would steal the entry back.
    """
    return bool(await runner.run(_RENEW, *hold.arguments(), ttl_ms))


class EmitState(StrEnum):
    """What became of an event."""

    REPORTED = "reported"
    STALE = "stale"
    FULL = "full"
    """The result stream waits for its reader."""


_EMIT = Script.of_holder("""
local envelope, max_events, ttl_ms = ARGV[8], tonumber(ARGV[9]), ARGV[10]
if not held() then return 'stale' end
if redis.call('XLEN', RESULTS) >= max_events then return 'full' end
report(request_id, envelope, ttl_ms)
return 'reported'
""")


async def emit(runner: ScriptRunner, hold: Hold, envelope: bytes, max_events: int, ttl_ms: int) -> EmitState:
    """Report an event if the entry is held and the result stream has room."""
    return EmitState((await runner.run(_EMIT, *hold.arguments(), envelope, max_events, ttl_ms)).decode())


_COMMIT = Script.of_holder(
    """
local envelope, ttl_ms = ARGV[8], ARGV[9]
local is_held, row = held()
if not is_held and not bereft(row) then
  if is_live(questions, index) or exists(work, id) then return 'stale' end
  return 'already_committed'
end
local is_first = settle(request_id, index, envelope, ttl_ms)
remove(work, id)
return is_first and 'committed' or 'already_committed'
""",
    frees_room=True,
)


async def commit(runner: ScriptRunner, hold: Hold, envelope: bytes, ttl_ms: int) -> CommitState:
    """Set the outcome if there is none, report it and remove the entry, if the entry is held.

    A commit whose holder lost only the bookkeeping (group or stream destroyed, and nobody took the item since) counts.
    The result stream's limit does not hold it back: outcomes are bounded by what was admitted.
    """
    return CommitState((await runner.run(_COMMIT, *hold.arguments(), envelope, ttl_ms)).decode())


_HAND_BACK = Script.of_holder(
    """
if not held() then return 0 end
disown(work, id, 0, attempt - 1)
redis.call('HSET', questions, 'g:' .. index, '')
keep(questions, ARGV[8])
ring(WORK_BELL, WORK_BELL_TTL)
return 1
""",
    frees_room=True,
)


async def hand_back(runner: ScriptRunner, hold: Hold, ttl_ms: int) -> bool:
    """Put a held entry back in line with one delivery less, and make its grant worthless."""
    return bool(await runner.run(_HAND_BACK, *hold.arguments(), ttl_ms))


_DEAD_LETTER = Script.of_holder(
    """
local reason, message, envelope, ttl_ms = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
if not held() then return 0 end
local found = redis.call('XRANGE', work, id, id)[1]
set_aside(work, id, attempt, found and found[2] or {}, reason, message)
if envelope ~= '' then settle(request_id, index, envelope, ttl_ms) end
remove(work, id)
return 1
""",
    frees_room=True,
)


async def dead_letter(
    runner: ScriptRunner, hold: Hold, *, reason: str, message: str, envelope: bytes, ttl_ms: int
) -> bool:
    """Copy a held entry to the dead letters as it is, set and report its error outcome, remove it.

    An empty ``envelope`` reports nothing: the entry does not say whose it was.
    """
    return bool(await runner.run(_DEAD_LETTER, *hold.arguments(), reason, message, envelope, ttl_ms))


_NOTICES = Script.of(
    """
local notices = redis.call('XRANGE', NOTICES .. ARGV[1], '-', '+', 'COUNT', 1000)
for _, notice in ipairs(notices) do redis.call('XDEL', NOTICES .. ARGV[1], notice[1]) end
local taken = {}
for _, notice in ipairs(notices) do
  local fields = notice[2]
  taken[#taken + 1] = {field_of(fields, 'r'), field_of(fields, 'i'), field_of(fields, 'id')}
end
return taken
""",
    frees_room=True,
)


async def take_notices(runner: ScriptRunner, consumer: str) -> list[tuple[str, int, str]]:
    """Take (request_id, question_index, entry_id) of the consumer's withdrawn leases, at most 1,000, oldest first."""
    taken = await runner.run(_NOTICES, consumer)
    return [(request_id.decode(), int(index), entry_id.decode()) for request_id, index, entry_id in taken]
