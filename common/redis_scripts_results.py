"""The scripts of the result stream's reader.

Invariants and semantics: each function is one atomic act. One consumer reads at a time, so that events keep their
order; another one stands by until the reader gives no sign of life, or is an earlier incarnation of the same node.
Taking over takes the former reader's unacknowledged events along, before anything new.

Not here: decoding (``redis_streams``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.redis_scripts import Script, ScriptRunner

_READ = Script.of(
    """
local consumer, node_id, max_events = ARGV[1], ARGV[2], ARGV[3]
local reader = redis.call('GET', READER)
if reader and reader ~= consumer and string.sub(reader, 1, #node_id + 1) ~= node_id .. '/' then return {} end
redis.call('SET', READER, consumer, 'PX', READER_TTL)

if reader ~= consumer then
  make_group(RESULTS, RESULTS_GROUP)
  local cursor = '0-0'
  repeat
    local page = redis.call('XAUTOCLAIM', RESULTS, RESULTS_GROUP, consumer, 0, cursor, 'COUNT', 100, 'JUSTID')
    cursor = page[1]
  until cursor == '0-0'
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', RESULTS, RESULTS_GROUP)) do
    local name = field_of(info, 'name')
    if name ~= consumer and field_of(info, 'pending') == 0 then
      redis.call('XGROUP', 'DELCONSUMER', RESULTS, RESULTS_GROUP, name)
    end
  end
end
for i = 4, #ARGV do
  redis.call('XACK', RESULTS, RESULTS_GROUP, ARGV[i])
  redis.call('XDEL', RESULTS, ARGV[i])
end

local events = {}
local function read(first)
  local count = max_events - #events
  if count <= 0 then return end
  local command = {'XREADGROUP', 'GROUP', RESULTS_GROUP, consumer, 'COUNT', count, 'STREAMS', RESULTS, first}
  local streams = redis.pcall(unpack(command))
  if streams and streams.err then
    make_group(RESULTS, RESULTS_GROUP)
    streams = redis.call(unpack(command))
  end
  for _, entry in ipairs(streams and streams[1][2] or {}) do
    if entry[2] then events[#events + 1] = {entry[1], field_of(entry[2], 'e') or ''}
    else redis.call('XACK', RESULTS, RESULTS_GROUP, entry[1]) end
  end
end
read('0')
if #events == 0 then read('>') end
return events
""",
    frees_room=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEntry:
    """An event as it lies in the result stream."""

    entry_id: str
    envelope: bytes
    """Empty when the entry has no payload."""


async def read(
    runner: ScriptRunner, consumer: str, node_id: str, max_events: int, acknowledged: Sequence[str]
) -> list[EventEntry]:
    """Delete what is acknowledged and hand out up to ``max_events`` events, unacknowledged ones first.

    Nothing is handed out while another consumer is the reader.
    """
    events = await runner.run(_READ, consumer, node_id, max_events, *acknowledged)
    return [EventEntry(entry_id=entry_id.decode(), envelope=envelope) for entry_id, envelope in events]


_DISCARD = Script.of(
    """
local id = ARGV[1]
local found = redis.call('XRANGE', RESULTS, id, id)[1]
if found then set_aside(RESULTS, id, 1, found[2], ARGV[2], ARGV[3]) end
redis.call('XACK', RESULTS, RESULTS_GROUP, id)
redis.call('XDEL', RESULTS, id)
""",
    frees_room=True,
)


async def discard(runner: ScriptRunner, entry_id: str, *, reason: str, message: str) -> None:
    """Copy an event that cannot be read to the dead letters as it is, and remove it."""
    await runner.run(_DISCARD, entry_id, reason, message)


_HISTORY = Script.of("""
local envelopes = {}
for _, entry in ipairs(redis.call('XRANGE', EVENTS .. ARGV[1], '-', '+')) do
  envelopes[#envelopes + 1] = field_of(entry[2], 'e') or ''
end
return envelopes
""")


async def history(runner: ScriptRunner, request_id: str) -> list[bytes]:
    """Envelopes of all events of a request so far."""
    return list(await runner.run(_HISTORY, request_id))
