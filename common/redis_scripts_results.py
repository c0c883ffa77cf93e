"""The scripts of the result stream's readers.

Invariants and semantics: each function is one atomic act. Every reader is given every event and keeps its own position;
an event stays until all readers that gave a sign of life within ``READERS_TTL`` have read it. A reader that was silent
for longer is told that it may have missed something, as is one whose store began anew. A question's outcome is set
once, whoever sets it: a node that commits, or an aggregator that settles.

Not here: decoding (``redis_source``), commits (``redis_scripts_lease``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.redis_scripts import Argument, Script, ScriptRunner

_READ = Script.of(
    """
local reader, position, max_events = ARGV[1], ARGV[2], ARGV[3]

local function parts_of(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function is_before(a, b)
  local a_ms, a_number = parts_of(a)
  local b_ms, b_number = parts_of(b)
  return a_ms < b_ms or (a_ms == b_ms and a_number < b_number)
end

local now = now_ms()
local is_known = redis.call('HEXISTS', READERS, reader) == 1
if not is_known then position = '0-0' end
redis.call('HSET', READERS, reader, whole(now) .. ' ' .. position)
redis.call('PEXPIRE', READERS, READERS_TTL)

local oldest, readers = position, redis.call('HGETALL', READERS)
for i = 1, #readers, 2 do
  local seen_ms, its_position = string.match(readers[i + 1], '^(%d+) (.+)$')
  if now - seen_ms > READERS_TTL then redis.call('HDEL', READERS, readers[i])
  elseif is_before(its_position, oldest) then oldest = its_position end
end
local ms, number = parts_of(oldest)
redis.call('XTRIM', RESULTS, 'MINID', whole(ms) .. '-' .. whole(number + 1))

local events = {}
for _, entry in ipairs(redis.call('XRANGE', RESULTS, '(' .. position, '+', 'COUNT', max_events)) do
  events[#events + 1] = entry[1]
  events[#events + 1] = field_of(entry[2], 'e') or ''
  events[#events + 1] = field_of(entry[2], 'w') or ''
end
return {is_known and 1 or 0, events}
""",
    frees_room=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEntry:
    """An event as it lies in the result stream."""

    entry_id: str
    envelope: bytes
    """Empty when the entry has no payload."""
    withdrawn: str
    """Id of a request that was withdrawn; empty in all other entries."""


def event_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> EventEntry:
    """An entry as the server knows it."""
    return EventEntry(
        entry_id=entry_id.decode(),
        envelope=fields.get(b"e", b""),
        withdrawn=fields.get(b"w", b"").decode(errors="replace"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvents:
    """What a reader is given."""

    is_known: bool
    """False: the reader is new, or was away for so long that it may have missed events; it begins anew."""
    entries: list[EventEntry]


async def read(runner: ScriptRunner, reader: str, position: str, max_events: int) -> ReadEvents:
    """Note that the reader has read up to its position, delete what all have read, hand out what comes next."""
    is_known, events = await runner.run(_READ, reader, position, max_events)
    rows = zip(events[::3], events[1::3], events[2::3], strict=True)
    entries = [event_entry(entry_id, {b"e": envelope, b"w": withdrawn}) for entry_id, envelope, withdrawn in rows]
    return ReadEvents(is_known=bool(is_known), entries=entries)


_DISCARD = Script.of(
    """
local id = ARGV[1]
local found = redis.call('XRANGE', RESULTS, id, id)[1]
if not found then return end
set_aside(RESULTS, id, 1, found[2], ARGV[2], ARGV[3])
redis.call('XDEL', RESULTS, id)
""",
    frees_room=True,
)


async def discard(runner: ScriptRunner, entry_id: str, *, reason: str, message: str) -> None:
    """Move an event that cannot be read to the dead letters as it is, unless another reader has done so."""
    await runner.run(_DISCARD, entry_id, reason, message)


_SETTLE = Script.of(
    """
local request_id, ttl_ms = ARGV[1], ARGV[2]
local questions = QUESTIONS .. request_id
local settled = {}
for i = 3, #ARGV, 3 do
  local index, envelope, ending = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local outcome = redis.call('HGET', questions, 'r:' .. index)
  if not outcome then
    withdraw_item(request_id, index)
    settle(request_id, index, {envelope}, ending, ttl_ms)
  end
  if not outcome or outcome == envelope then settled[#settled + 1] = tonumber(index) end
end
return settled
""",
    frees_room=True,
)


async def settle(
    runner: ScriptRunner, request_id: str, outcomes: Sequence[tuple[int, bytes, str]], ttl_ms: int
) -> list[int]:
    """Set the outcomes (question index, envelope, ending) of questions that have none, and withdraw their items.

    Returns the indexes of those for which these very outcomes stand.
    """
    arguments: list[Argument] = [part for outcome in outcomes for part in outcome]
    return [int(index) for index in await runner.run(_SETTLE, request_id, ttl_ms, *arguments)]
