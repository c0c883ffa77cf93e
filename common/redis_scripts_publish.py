"""The scripts of a channel's writer: publish, withdraw, count, find what was lost.

Invariants and semantics: each function is one atomic act; repeating it after a lost reply does no harm. A question has
at most one entry. An entry leaves its stream together with its outcome, or because it was withdrawn.

Not here: what the bytes mean (``redis_streams``), who works on an entry (``redis_scripts_lease``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.ending import Ending
from common.errors import InvariantError
from common.redis_keys import HEAD_START_MS, HEAD_STARTS
from common.redis_scripts import Argument, Script, ScriptRunner
from common.types import FinishReason

APPEND = """
local max_entries, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local latest = redis.call('HMGET', ORDER, 'ms', 'number')
local ms = whole(math.max(now_ms(), tonumber(latest[1] or 0)))
local number, has_added = ms == latest[1] and tonumber(latest[2]) or 0, false

local function append(channel_id, request_id, index, digest, head_start, envelope, ttl_ms)
  local work, questions = WORK .. channel_id, QUESTIONS .. request_id
  local names = {'r:' .. index, 'v:' .. index, 'd:' .. index, 'i:' .. index, 'g:' .. index, 'w:' .. index}
  local marks = redis.call('HMGET', questions, unpack(names))
  local outcome, event_id, known_digest = marks[1], marks[2], marks[3]
  if marks[4] and is_live(questions, index) then return {'there', 0} end
  -- Without a digest it was settled before it was ever published.
  if outcome and (known_digest or digest) == digest then
    if not exists(RESULTS, event_id) then
      redis.call('HSET', questions, 'v:' .. index, report(request_id, {outcome}, ttl_ms))
    end
    return {'answered', 0}
  end
  local num_entries = redis.call('XLEN', work)
  if num_entries >= max_entries then return {'full of entries', num_entries} end
  if num_entries > 0 then
    local num_bytes = redis.call('MEMORY', 'USAGE', work, 'SAMPLES', 0)
    if num_bytes >= max_bytes then return {'full of bytes', num_bytes} end
  end
  number = number + 1
  local id = ms .. '-' .. whole((FIRST_NUMBER + number) * HEAD_STARTS + HEAD_STARTS / 2 + head_start)
  redis.call('XADD', work, id, 'r', request_id, 'i', index, 'e', envelope)
  if outcome or event_id or marks[5] or marks[6] then
    redis.call('HDEL', questions, 'r:' .. index, 'v:' .. index, 'f:' .. index, 'g:' .. index, 'w:' .. index)
  end
  redis.call('HSET', questions, 'i:' .. index, channel_id .. ':' .. id, 'd:' .. index, digest)
  keep(questions, ttl_ms)
  -- Whatever waits in the channel already stands before it.
  redis.call('ZADD', WAITING, 'NX', whole(rank_of(id)), channel_id)
  has_added = true
  return {'added', num_entries + 1}
end

-- Append the publications from an argument on; their states, in their order.
local function append_from(first)
  local states = {}
  for i = first, #ARGV, 7 do states[#states + 1] = append(unpack(ARGV, i, i + 6)) end
  if has_added then
    redis.call('HSET', ORDER, 'ms', ms, 'number', whole(number))
    redis.call('PEXPIRE', ORDER, ORDER_TTL)
    ring(WORK_BELL, WORK_BELL_TTL)
  end
  return states
end
"""
"""For scripts that append publications; their first two arguments are the limits of a channel, in entries and bytes."""

_PUBLISH = Script.of(APPEND + "return append_from(3)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """An item to append."""

    channel_id: int
    request_id: str
    question_index: int
    digest: bytes
    """Of the question's content: tells a repeated publication from a new use of the same id."""
    head_start_ms: float
    """How far ahead of its time it stands in line; below 0 behind."""
    envelope: bytes
    ttl_ms: int
    """How long the question's state is kept at least: its time budget plus retention."""

    def arguments(self) -> tuple[Argument, ...]:
        """In the order in which the script reads them."""
        most = HEAD_STARTS // 2 - 1
        head_start = max(-most, min(most, round(self.head_start_ms / HEAD_START_MS)))
        key = self.channel_id, self.request_id, self.question_index
        return (*key, self.digest, head_start, self.envelope, self.ttl_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What became of a publication."""

    state: PublishState
    num_held: int
    """Of a full channel: what it holds, in entries or bytes."""


class PublishState(StrEnum):
    """What became of a publication."""

    ADDED = "added"
    THERE = "there"
    """The question's item waits or is leased already."""
    ANSWERED = "answered"
    """The same question has its outcome already; it is reported again if its event is gone."""
    FULL_OF_ENTRIES = "full of entries"
    FULL_OF_BYTES = "full of bytes"


async def publish(
    runner: ScriptRunner, publications: Sequence[Publication], max_entries: int, max_bytes: int
) -> list[Published]:
    """Append items unless their question is there or their channel is full; remember where they are; wake the nodes.

    Entry ids grow across all channels and tell each entry's head start, so that who is first in line is known without
    looking at payloads. They are made from Redis' clock, which therefore tells an item's age. A channel's bytes are the
    memory of its stream.
    """
    arguments = [argument for publication in publications for argument in publication.arguments()]
    states = await runner.run(_PUBLISH, max_entries, max_bytes, *arguments)
    return [Published(state=PublishState(state.decode()), num_held=int(num_held)) for state, num_held in states]


_WITHDRAW = Script.of(
    """
local request_id, forget = ARGV[1], ARGV[2]
local questions = QUESTIONS .. request_id
local indexes = {}
if #ARGV == 2 then
  for _, name in ipairs(redis.call('HKEYS', questions)) do
    local index = string.match(name, '^i:(.+)$')
    if index then indexes[#indexes + 1] = index end
  end
else
  for i = 3, #ARGV do indexes[#indexes + 1] = ARGV[i] end
end
for _, index in ipairs(indexes) do
  if withdraw_item(request_id, index) then redis.call('HDEL', questions, 'd:' .. index) end
  redis.call('HSET', questions, 'w:' .. index, 1)
  keep(questions, NOTICES_TTL)
end
if forget == '1' then
  if redis.call('EXISTS', REQUEST .. request_id) == 1 then redis.call('XADD', RESULTS, '*', 'w', request_id) end
  redis.call('DEL', questions, EVENTS .. request_id, REQUEST .. request_id)
  redis.call('ZREM', DEADLINES, request_id)
end
return #indexes
""",
    frees_room=True,
)


async def withdraw(
    runner: ScriptRunner, request_id: str, question_indexes: Sequence[int] | None, *, forget: bool = False
) -> None:
    """Remove the entries of questions without outcome (``None``: all) and leave notices for those who hold them.

    With ``forget`` the request leaves no trace: its id is free again, and readers of events are told.
    """
    if question_indexes is not None and not question_indexes:
        return
    indexes: Sequence[Argument] = question_indexes or ()
    await runner.run(_WITHDRAW, request_id, int(forget), *indexes)


_DEPTHS = Script.of(
    """
local depths = {}
for channel_id = 0, ARGV[1] - 1 do depths[#depths + 1] = redis.call('XLEN', WORK .. channel_id) end
return depths
""",
    frees_room=True,
)


async def depths(runner: ScriptRunner, num_channels: int) -> list[int]:
    """Entries per channel, at one moment."""
    lengths = await runner.run(_DEPTHS, num_channels)
    if len(lengths) != num_channels:
        raise InvariantError(f"{len(lengths)} depths for {num_channels} channels")
    return [int(length) for length in lengths]


_LOST = Script.of(
    """
local lost = {}
for i = 1, #ARGV, 2 do
  local questions, index = QUESTIONS .. ARGV[i], ARGV[i + 1]
  local marks = redis.call('HMGET', questions, 'r:' .. index, 'w:' .. index)
  if not (marks[1] or marks[2] or is_live(questions, index)) then lost[#lost + 1] = (i - 1) / 2 end
end
return lost
""",
    frees_room=True,
)


async def lost(runner: ScriptRunner, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Which of the questions have neither an entry nor an outcome, and were not withdrawn."""
    arguments = [part for key in questions for part in key]
    return [questions[place] for place in await runner.run(_LOST, *arguments)]


_SETTLED = Script.of(
    f"local WITHDRAWN = '{Ending(FinishReason.CANCELLED).mark}'"
    """
local settled, first = {}, 1
while first <= #ARGV do
  -- Questions of one request that follow each other are looked up together.
  local names, last = {}, first
  while ARGV[last] == ARGV[first] and #names < 999 do
    names[#names + 1] = 'r:' .. ARGV[last + 1]
    names[#names + 1] = 'w:' .. ARGV[last + 1]
    names[#names + 1] = 'f:' .. ARGV[last + 1]
    last = last + 2
  end
  local marks = redis.call('HMGET', QUESTIONS .. ARGV[first], unpack(names))
  for i = 1, #marks, 3 do
    if marks[i] or marks[i + 1] then
      settled[#settled + 1] = (first - 1) / 2 + (i - 1) / 3
      settled[#settled + 1] = marks[i] and (marks[i + 2] or '') or WITHDRAWN
    end
  end
  first = last
end
return settled
""",
    frees_room=True,
)


async def settled(runner: ScriptRunner, questions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Ending]:
    """Which of the questions have an outcome or were withdrawn, and how they ended."""
    arguments = [part for key in questions for part in key]
    found = await runner.run(_SETTLED, *arguments)
    marks = (mark.decode(errors="replace") for mark in found[1::2])
    return {questions[place]: Ending.read(mark) for place, mark in zip(found[::2], marks, strict=True)}
