"""What the Lua scripts have in common: their prelude, how they are run, and the proof that a lease is held.

Invariants and semantics: a script is one atomic act, and Redis' own clock is the only one it knows. Every script is
given the deployment's prefix as its one key, since all keys of a deployment live in one slot, and builds the rest of
the names from it. A script that meets a stream without its group makes the group again, from the first entry on.
Scripts that only give room back may run when the server is out of memory.

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

-- Let the key live for at least so long from now.
local function keep(key, ttl_ms)
  if redis.call('PTTL', key) < tonumber(ttl_ms) then redis.call('PEXPIRE', key, ttl_ms) end
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

-- Stream and id of the entry that a question's state refers to.
local function place_of(ref)
  local channel_id, id = string.match(ref, '^(%d+):(.+)$')
  return WORK .. channel_id, id
end

-- Whether the question's item waits or is leased.
local function is_live(questions, index)
  local ref = redis.call('HGET', questions, 'i:' .. index)
  if not ref then return false end
  local work, id = place_of(ref)
  return exists(work, id)
end

local function field_of(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return false
end

local function remove(work, id)
  redis.call('XACK', work, WORK_GROUP, id)
  redis.call('XDEL', work, id)
end

-- Put an entry that is pending back in line, its deliveries as given.
local function disown(work, id, idle_ms, deliveries)
  redis.call('XCLAIM', work, WORK_GROUP, UNOWNED, 0, id, 'IDLE', idle_ms, 'RETRYCOUNT', deliveries, 'JUSTID')
end

-- Append an event for the reader and to the request's own log.
local function report(request_id, envelope, ttl_ms)
  local event_id = redis.call('XADD', RESULTS, '*', 'e', envelope)
  redis.call('XADD', EVENTS .. request_id, '*', 'e', envelope)
  keep(EVENTS .. request_id, ttl_ms)
  ring(RESULTS_BELL, RESULTS_BELL_TTL)
  return event_id
end

-- Set the question's outcome if it has none, and report it; false: it has one.
local function settle(request_id, index, envelope, ttl_ms)
  local questions = QUESTIONS .. request_id
  if redis.call('HSETNX', questions, 'r:' .. index, envelope) == 0 then return false end
  redis.call('HSET', questions, 'v:' .. index, report(request_id, envelope, ttl_ms))
  redis.call('HDEL', questions, 'i:' .. index, 'g:' .. index)
  keep(questions, ttl_ms)
  return true
end

local function set_aside(source, id, deliveries, fields, reason, message)
  local letter = {'source', source, 'id', id, 'deliveries', deliveries, 'reason', reason, 'message', message}
  for _, field in ipairs(fields) do letter[#letter + 1] = field end
  redis.call('XADD', DEAD_LETTERS, 'MAXLEN', MAX_DEAD_LETTERS, '*', unpack(letter))
end
"""

_HOLD_PRELUDE = """
local channel_id, id, request_id, index = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local owner, attempt, grant = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local work, questions = WORK .. channel_id, QUESTIONS .. request_id

-- Whether the entry is pending for this owner, in this delivery, under this grant; the row follows.
local function held()
  local rows = pending(work, id, id, 1)
  local row = rows and rows[1]
  if not row or row[2] ~= owner or row[4] ~= attempt then return false, row end
  local granted = redis.call('HGET', questions, 'g:' .. index)
  return not granted or grant == '' or granted == grant, row
end

-- Whether the entry's pending row is gone although nobody took or withdrew the item: the group, the stream or the entry
-- was destroyed. Its holder is still the last one to whom it was granted.
local function bereft(row)
  return not row and redis.call('HGET', questions, 'g:' .. index) == grant
    and redis.call('HGET', questions, 'i:' .. index) == channel_id .. ':' .. id
end
"""


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
        """A script whose first arguments are those of a ``Hold``."""
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
        """In the order in which ``Script.of_holder`` expects them."""
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
