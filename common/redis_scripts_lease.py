"""The scripts of an entry's holder: lease, renew, report, hand back, dead-letter, hear of withdrawals.

Invariants and semantics: each function is one atomic act; repeating it after a lost reply does no harm. Who acts on a
leased entry is the consumer for whom it is pending, in the delivery that was granted to it; everybody else is refused
(a bare XCLAIM or XACK asks nobody). What is done to several entries in one call is done to each as if it were alone.

Not here: what the bytes mean (``redis_streams``), what is done on a timer (``redis_scripts_upkeep``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.ports import ReportState
from common.redis_scripts import HOLD_SIZE, Argument, Entry, Hold, Script, ScriptRunner, entry_of

_LEASE = Script.of("""
local consumer, max_items, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_deliveries, grant, ttl_ms = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local now = now_ms()
redis.call('ZADD', NODES, now, consumer)
redis.call('PEXPIRE', NODES, NODES_TTL)

local granted, poisonous, was_looked_at = {}, {}, {}
local leased, emptied, marks = {}, {}, {}
local num_held = 0
if #ARGV > 6 then
  local refs = {unpack(ARGV, 7)}
  for i, seen_ms in ipairs(redis.call('ZMSCORE', LEASED, unpack(refs))) do
    if seen_ms and tonumber(seen_ms) > now - lease_ms then
      was_looked_at[place_of(refs[i])] = true
      num_held = num_held + 1
    end
  end
end

local function note(channel_id, deliveries, entry)
  granted[#granted + 1] = {channel_id, entry[1], deliveries, entry[2]}
  was_looked_at[channel_id] = true
end

-- What an earlier execution of this very call was granted: its reply was lost.
local latest = redis.call('GET', GRANTS .. consumer)
if latest and string.sub(latest, 1, #grant + 1) == grant .. ' ' then
  for ref in string.gmatch(string.sub(latest, #grant + 2), '%S+') do
    local channel_id, id = place_of(ref)
    local rows = pending(WORK .. channel_id, id, id, 1)
    local entry = redis.call('XRANGE', WORK .. channel_id, id, id)[1]
    local request_id = entry and field_of(entry[2], 'r')
    if request_id and rows and rows[1] and rows[1][2] == consumer
      and redis.call('HGET', QUESTIONS .. request_id, 'g:' .. field_of(entry[2], 'i')) == grant then
      note(channel_id, rows[1][4], entry)
    end
  end
end

-- Give the entry of a pending row, or without one the next unread entry, to the consumer.
local function take(channel_id, row)
  local work, entry = WORK .. channel_id, nil
  if row then entry = redis.call('XCLAIM', work, WORK_GROUP, consumer, 0, row[1])[1]
  else
    local streams = redis.call('XREADGROUP', 'GROUP', WORK_GROUP, consumer, 'COUNT', 1, 'STREAMS', work, '>')
    entry = streams and streams[1][2][1]
  end
  if not entry or not entry[2] then
    if row then remove(channel_id, row[1]) end
    return nil
  end
  leased[#leased + 1] = now
  leased[#leased + 1] = channel_id .. ':' .. entry[1]
  note(channel_id, (row and row[4] or 0) + 1, entry)
  local request_id, index = field_of(entry[2], 'r'), field_of(entry[2], 'i')
  if request_id and index then
    local its_marks = marks[request_id] or {}
    its_marks[#its_marks + 1] = 'g:' .. index
    its_marks[#its_marks + 1] = grant
    marks[request_id] = its_marks
  end
  return entry[1]
end

-- The channel's first row in line, whether the consumer holds something there, and how many rows there are.
local function look(channel_id)
  local work = WORK .. channel_id
  local rows = pending(work, '-', '+', 1000)
  if not rows then
    if redis.call('XLEN', work) > 0 then make_group(work, WORK_GROUP) end
    rows = {}
  end
  local unowned
  for _, row in ipairs(rows) do
    if row[2] == consumer and row[3] < lease_ms then return nil, true, #rows end
    if row[2] == UNOWNED then unowned = unowned or row end
  end
  return unowned, false, #rows
end

local function set_poisonous_aside(channel_id, row)
  local found = redis.call('XRANGE', WORK .. channel_id, row[1], row[1])[1]
  was_looked_at[channel_id] = true
  if found then poisonous[#poisonous + 1] = {channel_id, row[1], row[4], found[2]}
  else remove(channel_id, row[1]) end
end

local function take_expired(ref)
  local channel_id, id = place_of(ref)
  if was_looked_at[channel_id] then return end
  local rows = pending(WORK .. channel_id, id, id, 1)
  local row = rows and rows[1]
  if not row or row[2] == UNOWNED then
    redis.call('ZREM', LEASED, ref)
    requeue(channel_id)
  elseif row[3] < lease_ms then redis.call('ZADD', LEASED, now - row[3], ref)
  else
    local _, holds_another = look(channel_id)
    if holds_another then return end
    if row[4] >= max_deliveries then
      disown(channel_id, id, 0, row[4])
      set_poisonous_aside(channel_id, row)
    else take(channel_id, row) end
  end
end

for _, ref in ipairs(redis.call('ZRANGE', LEASED, '-inf', now - lease_ms, 'BYSCORE', 'LIMIT', 0, 1000)) do
  if #granted >= max_items then break end
  take_expired(ref)
end

local function take_waiting(channel_id)
  local work = WORK .. channel_id
  local row, holds_another, num_rows = look(channel_id)
  if holds_another then return end
  if row and row[4] >= max_deliveries then return set_poisonous_aside(channel_id, row) end
  local id
  if row or num_rows > 0 or redis.call('XLEN', work) > 0 then id = take(channel_id, row) end
  if row or not id then return requeue(channel_id) end
  local following
  if redis.call('XLEN', work) > num_rows + 1 then
    following = redis.call('XRANGE', work, '(' .. id, '+', 'COUNT', 1)[1]
  end
  if following then redis.call('ZADD', WAITING, whole(rank_of(following[1])), channel_id)
  else emptied[#emptied + 1] = channel_id end
end

-- Channels that were looked at stay at the head of the line, so look past as many.
local num_passed = num_held + #granted + #poisonous
local first = 0
while #granted < max_items do
  local heads = redis.call('ZRANGE', WAITING, first, first + num_passed + max_items - 1)
  for _, channel_id in ipairs(heads) do
    if #granted >= max_items then break end
    if not was_looked_at[channel_id] then
      was_looked_at[channel_id] = true
      take_waiting(channel_id)
    end
  end
  first = first + #heads
  if #heads < num_passed + max_items then break end
end

if #leased > 0 then redis.call('ZADD', LEASED, unpack(leased)) end
if #emptied > 0 then redis.call('ZREM', WAITING, unpack(emptied)) end
for request_id, its_marks in pairs(marks) do
  redis.call('HSET', QUESTIONS .. request_id, unpack(its_marks))
  keep(QUESTIONS .. request_id, ttl_ms)
end
if #granted > 0 then
  local words = {grant}
  for _, row in ipairs(granted) do words[#words + 1] = row[1] .. ':' .. row[2] end
  redis.call('SET', GRANTS .. consumer, table.concat(words, ' '), 'PX', lease_ms)
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
    held: Sequence[tuple[int, str]],
) -> Grants:
    """Grant up to ``max_items`` entries, at most one per channel and none of a channel in which the consumer holds one.

    Expired leases come first, then what waits, oldest first. Counts as a sign of life. An expired entry that was
    delivered ``max_deliveries`` times is put back in line and handed out as poisonous. ``held``, (channel id, entry id)
    of what the consumer believes to hold, only saves looking at those channels closely.
    """
    refs = [f"{channel_id}:{entry_id}" for channel_id, entry_id in held]
    reply = await runner.run(_LEASE, consumer, max_items, lease_ms, max_deliveries, grant, ttl_ms, *refs)
    now_ms, granted, poisonous = reply
    return Grants(
        now_ms=int(now_ms),
        granted=[entry_of(row) for row in granted],
        poisonous=[entry_of(row) for row in poisonous],
    )


_EACH_HOLD = f"""
local function for_each_hold(first, act)
  local answers = {{}}
  for i = first, #ARGV, {HOLD_SIZE} do answers[#answers + 1] = act(hold_at(i)) end
  return answers
end
"""

_RENEW = Script.of_holder(
    _EACH_HOLD
    + """
local now = now_ms()
return for_each_hold(2, function(hold)
  if not is_held(hold) then return 0 end
  keep(hold.questions, ARGV[1])
  redis.call('ZADD', LEASED, 'XX', now, hold.channel_id .. ':' .. hold.id)
  return #redis.call('XCLAIM', hold.work, WORK_GROUP, hold.owner, 0, hold.id, 'IDLE', 0, 'JUSTID')
end)
""",
    frees_room=True,
)


async def renew(runner: ScriptRunner, holds: Sequence[Hold], ttl_ms: int) -> list[bool]:
    """Set the entries' idle time to 0 where they are held.

    JUSTID leaves the delivery count alone; without the check a stalled holder would steal the entry back.
    """
    renewed = await runner.run(_RENEW, ttl_ms, *_arguments_of(holds))
    return [bool(answer) for answer in renewed]


_REPORT_BODY = f"""
local max_events, hold_ttl_ms, outcome_ttl_ms = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local num_unread, freed, num_outcomes = redis.call('XLEN', RESULTS), {{}}, {{}}

local function end_question(hold, was_lost, outcome, envelopes, ending)
  if was_lost then remove(hold.channel_id, hold.id)
  else
    delete(hold.channel_id, hold.id)
    freed[#freed + 1] = hold.channel_id .. ':' .. hold.id
  end
  if outcome then return 'already_committed' end
  set_outcome(hold.request_id, hold.index, envelopes, ending, outcome_ttl_ms)
  num_outcomes[hold.request_id] = (num_outcomes[hold.request_id] or 0) + 1
  return 'committed'
end

local function take_in(hold, ending, envelopes)
  local is_end = ending ~= ''
  local holds, row, outcome = is_held(hold)
  if not holds and not (is_end and is_bereft(hold, row)) then
    if not is_end or is_live(hold.questions, hold.index) or exists(hold.work, hold.id) then return 'stale' end
    return 'already_committed'
  end
  if is_end then return end_question(hold, not holds, outcome, envelopes, ending) end
  if num_unread >= max_events then return 'full' end
  report(hold.request_id, envelopes, hold_ttl_ms)
  num_unread = num_unread + #envelopes
  return 'held'
end

local states, i = {{}}, 4
while i <= #ARGV do
  local first = i + {HOLD_SIZE + 2}
  local last = first + ARGV[first - 1] - 1
  local envelopes = {{}}
  for place = first, last do envelopes[#envelopes + 1] = ARGV[place] end
  states[#states + 1] = take_in(hold_at(i), ARGV[first - 2], envelopes)
  i = last + 1
end
if #freed > 0 then redis.call('ZREM', LEASED, unpack(freed)) end
for request_id, number in pairs(num_outcomes) do count_outcomes(request_id, number, outcome_ttl_ms) end
return states
"""
_REPORT = Script.of_holder(_REPORT_BODY)
_REPORT_OUTCOMES = Script.of_holder(_REPORT_BODY, frees_room=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldReport:
    """What is reported under a hold."""

    hold: Hold
    envelopes: Sequence[bytes]
    """At least one."""
    ending: str
    """How the question ended (``common.ending``), if the last one is its outcome; else empty."""

    def arguments(self) -> tuple[Argument, ...]:
        """In the order in which the script reads them."""
        return (*self.hold.arguments(), self.ending, len(self.envelopes), *self.envelopes)


async def report(
    runner: ScriptRunner, reports: Sequence[HoldReport], *, max_events: int, hold_ttl_ms: int, outcome_ttl_ms: int
) -> list[ReportState]:
    """Report under each hold that is held; an outcome is set if there is none, and its entry removed.

    An outcome whose holder lost only the bookkeeping (group or stream destroyed, and nobody took the item since)
    counts. The result stream's limit does not hold outcomes back: they are bounded by what was admitted. Outcomes
    alone may be reported when the server is out of memory.
    """
    script = _REPORT_OUTCOMES if all(report.ending for report in reports) else _REPORT
    arguments = [argument for report in reports for argument in report.arguments()]
    states = await runner.run(script, max_events, hold_ttl_ms, outcome_ttl_ms, *arguments)
    return [ReportState(state.decode()) for state in states]


_HAND_BACK = Script.of_holder(
    _EACH_HOLD
    + """
local answers = for_each_hold(2, function(hold)
  if not is_held(hold) then return 0 end
  disown(hold.channel_id, hold.id, 0, hold.attempt - 1)
  redis.call('HSET', hold.questions, 'g:' .. hold.index, '')
  keep(hold.questions, ARGV[1])
  return 1
end)
ring(WORK_BELL, WORK_BELL_TTL)
return answers
""",
    frees_room=True,
)


async def hand_back(runner: ScriptRunner, holds: Sequence[Hold], ttl_ms: int) -> list[bool]:
    """Put held entries back in line with one delivery less, and make their grants worthless."""
    return [bool(answer) for answer in await runner.run(_HAND_BACK, ttl_ms, *_arguments_of(holds))]


_DEAD_LETTER = Script.of_holder(
    """
local reason, message, envelope, ending, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local hold = hold_at(6)
if not is_held(hold) then return 0 end
local found = redis.call('XRANGE', hold.work, hold.id, hold.id)[1]
set_aside(hold.work, hold.id, hold.attempt, found and found[2] or {}, reason, message)
if envelope ~= '' then settle(hold.request_id, hold.index, {envelope}, ending, ttl_ms) end
remove(hold.channel_id, hold.id)
return 1
""",
    frees_room=True,
)


async def dead_letter(
    runner: ScriptRunner, hold: Hold, *, reason: str, message: str, envelope: bytes, ending: str, ttl_ms: int
) -> bool:
    """Copy a held entry to the dead letters as it is, set and report its error outcome, remove it.

    An empty ``envelope`` reports nothing: the entry does not say whose it was.
    """
    return bool(await runner.run(_DEAD_LETTER, reason, message, envelope, ending, ttl_ms, *hold.arguments()))


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


def _arguments_of(holds: Sequence[Hold]) -> list[Argument]:
    return [argument for hold in holds for argument in hold.arguments()]
