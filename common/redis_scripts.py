"""What the Lua scripts have in common: their prelude, how they are run, and the proof that a lease is held.

Invariants and semantics: a script is one atomic act, and Redis' own clock is the only one it knows. Every script is
given the deployment's prefix as its one key, since all keys of a deployment live in one slot, and builds the rest of
the names from it. A script that meets a stream without its group makes the group again, from the first entry on.
Scripts that only look or give room back may run when the server is out of memory.

Not here: the scripts (``redis_scripts_publish``, ``_lease``, ``_upkeep``, ``_results``, ``_registry``), retries and
connections (``redis_link``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

from common.redis_keys import lua_names

Argument = str | bytes | int

_PRELUDE = """
-- Milliseconds since 1970.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number) return string.format('%.0f', number) end

-- Let the key live for at least so long from now; asks once per key.
local kept = {}
local function keep(key, ttl_ms)
  ttl_ms = tonumber(ttl_ms)
  if (kept[key] or 0) >= ttl_ms then return end
  if redis.call('PTTL', key) >= ttl_ms or redis.call('PEXPIRE', key, ttl_ms) == 1 then kept[key] = ttl_ms end
end

local function ring(bell, ttl_ms)
  redis.call('XADD', bell, 'MAXLEN', 1, '*', 'rung', '')
  redis.call('PEXPIRE', bell, ttl_ms)
end

local function make_group(stream, group)
  redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
end

-- Rows {id, owner, idle_ms, deliveries} of a work stream; nil: it has no group, or does not exist.
local function pending(work, first, last, count, owner)
  local rows
  if owner then rows = redis.pcall('XPENDING', work, WORK_GROUP, first, last, count, owner)
  else rows = redis.pcall('XPENDING', work, WORK_GROUP, first, last, count) end
  if rows.err then
    if string.find(rows.err, 'NOGROUP', 1, true) then return nil end
    error(rows.err)
  end
  return rows
end

local function exists(stream, id) return #redis.call('XRANGE', stream, id, id) > 0 end

-- Channel and id of the entry that a question's state refers to.
local function place_of(ref) return string.match(ref, '^(%d+):(.+)$') end

-- Whether the question's item waits or is leased.
local function is_live(questions, index)
  local ref = redis.call('HGET', questions, 'i:' .. index)
  if not ref then return false end
  local channel_id, id = place_of(ref)
  return exists(WORK .. channel_id, id)
end

local function field_of(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return false
end

-- Where an entry stands in line among those of all channels: when it was published, less its head start.
local function rank_of(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  local head_start = 0
  number = tonumber(number)
  if number >= FIRST_NUMBER * HEAD_STARTS then
    head_start = number % HEAD_STARTS - HEAD_STARTS / 2
    number = math.floor(number / HEAD_STARTS)
  end
  return (ms - head_start * HEAD_START_MS) * 4096 + number % 4096
end

-- Something in the channel waits, and no entry before this one.
local function queue(channel_id, id) redis.call('ZADD', WAITING, 'LT', whole(rank_of(id)), channel_id) end

-- Note what waits in the channel now: put back in line, or never read.
local function requeue(channel_id)
  local work = WORK .. channel_id
  local rows, first = pending(work, '-', '+', 1, UNOWNED), nil
  if rows and rows[1] then first = rows[1][1]
  elseif redis.call('XLEN', work) > 0 then
    if not rows then make_group(work, WORK_GROUP) end
    local group = redis.call('XINFO', 'GROUPS', work)[1]
    local unread = redis.call('XRANGE', work, '(' .. field_of(group, 'last-delivered-id'), '+', 'COUNT', 1)[1]
    first = unread and unread[1]
  end
  if first then redis.call('ZADD', WAITING, whole(rank_of(first)), channel_id)
  else redis.call('ZREM', WAITING, channel_id) end
end

local function delete(channel_id, id)
  local work = WORK .. channel_id
  redis.call('XACK', work, WORK_GROUP, id)
  redis.call('XDEL', work, id)
end

local function remove(channel_id, id)
  delete(channel_id, id)
  redis.call('ZREM', LEASED, channel_id .. ':' .. id)
  if tonumber(redis.call('ZSCORE', WAITING, channel_id) or -1) == rank_of(id) then requeue(channel_id) end
end

-- Put an entry that is pending back in line, its deliveries as given.
local function disown(channel_id, id, idle_ms, deliveries)
  local work = WORK .. channel_id
  redis.call('XCLAIM', work, WORK_GROUP, UNOWNED, 0, id, 'IDLE', idle_ms, 'RETRYCOUNT', deliveries, 'JUSTID')
  redis.call('ZREM', LEASED, channel_id .. ':' .. id)
  queue(channel_id, id)
end

-- Append events for the reader and to the request's own log; the id of the last one.
local function report(request_id, envelopes, ttl_ms)
  local event_id
  for _, envelope in ipairs(envelopes) do
    event_id = redis.call('XADD', RESULTS, '*', 'e', envelope)
    redis.call('XADD', EVENTS .. request_id, '*', 'e', envelope)
  end
  keep(EVENTS .. request_id, ttl_ms)
  return event_id
end

-- Remove the question's item and tell whoever holds it; false: it has none.
local function withdraw_item(request_id, index)
  local questions = QUESTIONS .. request_id
  local ref = redis.call('HGET', questions, 'i:' .. index)
  if not ref then return false end
  local channel_id, id = place_of(ref)
  local rows = pending(WORK .. channel_id, id, id, 1)
  local owner = rows and rows[1] and rows[1][2]
  if owner and owner ~= UNOWNED then
    local notices = NOTICES .. owner
    redis.call('XADD', notices, 'MAXLEN', '~', MAX_NOTICES, '*', 'r', request_id, 'i', index, 'id', id)
    redis.call('PEXPIRE', notices, NOTICES_TTL)
  end
  remove(channel_id, id)
  redis.call('HDEL', questions, 'i:' .. index, 'g:' .. index)
  return true
end

-- Nobody needs to look after the request any more: it and all that belongs to it expires.
local function complete(request_id, ttl_ms)
  redis.call('ZREM', DEADLINES, request_id)
  for _, kind in ipairs({REQUEST, QUESTIONS, EVENTS}) do redis.call('PEXPIRE', kind .. request_id, ttl_ms) end
end

-- Set the outcome, the last of the events, of a question that has none, and how it ended; and report the events.
local function set_outcome(request_id, index, envelopes, ending, ttl_ms)
  local questions, event_id = QUESTIONS .. request_id, report(request_id, envelopes, ttl_ms)
  redis.call('HSET', questions, 'r:' .. index, envelopes[#envelopes], 'v:' .. index, event_id, 'f:' .. index, ending)
  redis.call('HDEL', questions, 'i:' .. index, 'g:' .. index)
  keep(questions, ttl_ms)
end

-- Note that questions of a request have their outcome.
local function count_outcomes(request_id, num_outcomes, ttl_ms)
  local request = REQUEST .. request_id
  if redis.call('HEXISTS', request, 'open') == 1 and redis.call('HINCRBY', request, 'open', -num_outcomes) == 0 then
    complete(request_id, ttl_ms)
  end
end

-- Set the question's outcome, the last of the events, if it has none, and report them; false: it has one.
local function settle(request_id, index, envelopes, ending, ttl_ms)
  if redis.call('HEXISTS', QUESTIONS .. request_id, 'r:' .. index) == 1 then return false end
  set_outcome(request_id, index, envelopes, ending, ttl_ms)
  count_outcomes(request_id, 1, ttl_ms)
  return true
end

local function set_aside(source, id, deliveries, fields, reason, message)
  local letter = {'source', source, 'id', id, 'deliveries', deliveries, 'reason', reason, 'message', message}
  for _, field in ipairs(fields) do letter[#letter + 1] = field end
  redis.call('XADD', DEAD_LETTERS, 'MAXLEN', MAX_DEAD_LETTERS, '*', unpack(letter))
end
"""

_HOLD_PRELUDE = """
-- What a holder shows, from this argument on.
local function hold_at(first)
  local channel_id, request_id = ARGV[first], ARGV[first + 2]
  return {
    channel_id = channel_id, id = ARGV[first + 1], work = WORK .. channel_id,
    request_id = request_id, index = ARGV[first + 3], questions = QUESTIONS .. request_id,
    owner = ARGV[first + 4], attempt = tonumber(ARGV[first + 5]), grant = ARGV[first + 6],
  }
end

-- Whether the entry is pending for this owner, in this delivery, under this grant; its row, and the question's outcome.
local function is_held(hold)
  local rows = pending(hold.work, hold.id, hold.id, 1)
  local row = rows and rows[1]
  if not row or row[2] ~= hold.owner or row[4] ~= hold.attempt then return false, row, false end
  local marks = redis.call('HMGET', hold.questions, 'g:' .. hold.index, 'r:' .. hold.index)
  return not marks[1] or hold.grant == '' or marks[1] == hold.grant, row, marks[2]
end

-- Whether the entry's pending row is gone although nobody took or withdrew the item: the group, the stream or the entry
-- was destroyed. Its holder is still the last one to whom it was granted.
local function is_bereft(hold, row)
  return not row and redis.call('HGET', hold.questions, 'g:' .. hold.index) == hold.grant
    and redis.call('HGET', hold.questions, 'i:' .. hold.index) == hold.channel_id .. ':' .. hold.id
end
"""
HOLD_SIZE = 7
"""Arguments of a ``Hold``."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the name under which the server keeps it."""

    source: str
    sha: str

    @classmethod
    def of(cls, body: str, *, frees_room: bool = False) -> Script:
        """A script with the common prelude; ``frees_room``: may run when the server is out of memory."""
        header = "#!lua flags=allow-oom\n" if frees_room else "#!lua\n"
        source = header + lua_names() + _PRELUDE + body
        return cls(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())

    @classmethod
    def of_holder(cls, body: str, *, frees_room: bool = False) -> Script:
        """A script that knows how to check a ``Hold``."""
        return cls.of(_HOLD_PRELUDE + body, frees_room=frees_room)


class ScriptRunner(Protocol):
    """Runs scripts against one deployment."""

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """The script's reply: integers, bytes, ``None`` and lists of these."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a holder must show to act on an entry of a work stream."""

    channel_id: int
    entry_id: str
    request_id: str
    question_index: int
    owner: str
    """Consumer for whom the entry is pending."""
    attempt: int
    """Delivery count of the entry."""
    grant: str
    """Names this one delivery, deployment-wide; empty: not looked at."""

    def arguments(self) -> tuple[Argument, ...]:
        """In the order in which ``hold_at`` of ``Script.of_holder`` reads them; ``HOLD_SIZE`` of them."""
        return (
            self.channel_id,
            self.entry_id,
            self.request_id,
            self.question_index,
            self.owner,
            self.attempt,
            self.grant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry as a script hands it out: not decoded yet, maybe not even well-formed."""

    channel_id: int
    entry_id: str
    deliveries: int
    fields: dict[bytes, bytes]

    @property
    def request_id(self) -> str:
        """As written beside the payload; empty when it is missing or damaged."""
        return self.fields.get(b"r", b"").decode(errors="replace")

    @property
    def question_index(self) -> int:
        """As written beside the payload; -1 when it is missing or damaged."""
        digits = self.fields.get(b"i", b"")
        return int(digits) if digits.isdigit() else -1

    def hold(self, owner: str, grant: str = "") -> Hold:
        """What ``owner`` must show to act on the entry."""
        return Hold(
            channel_id=self.channel_id,
            entry_id=self.entry_id,
            request_id=self.request_id,
            question_index=self.question_index,
            owner=owner,
            attempt=self.deliveries,
            grant=grant,
        )


def entry_of(row: list[Any]) -> Entry:
    """The entry of a row {channel id, entry id, deliveries, fields} in a script's reply."""
    channel_id, entry_id, deliveries, fields = row
    return Entry(
        channel_id=int(channel_id),
        entry_id=entry_id.decode(),
        deliveries=int(deliveries),
        fields=dict(zip(fields[::2], fields[1::2], strict=True)),
    )
