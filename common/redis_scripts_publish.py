"""The scripts of a channel's writer: publish, withdraw, count, find what was lost.

Invariants and semantics: each function is one atomic act; repeating it after a lost reply does no harm. A question has
at most one entry. An entry leaves its stream together with its outcome, or because it was withdrawn.

Not here: what the bytes mean (``redis_streams``), who works on an entry (``redis_scripts_lease``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import InvariantError
from common.redis_scripts import Argument, Script, ScriptRunner


class PublishState(StrEnum):
    """What became of a publication."""

    ADDED = "added"
    THERE = "there"
    """The question's item waits or is leased already."""
    ANSWERED = "answered"
    """The same question has its outcome already; it is reported again if its event is gone."""
    FULL = "full"


_PUBLISH = Script.of("""
local channel_id, request_id, index, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local envelope, max_entries, ttl_ms = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local work, questions = WORK .. channel_id, QUESTIONS .. request_id
if is_live(questions, index) then return 'there' end
local outcome = redis.call('HGET', questions, 'r:' .. index)
if outcome and redis.call('HGET', questions, 'd:' .. index) == digest then
  if not exists(RESULTS, redis.call('HGET', questions, 'v:' .. index)) then
    redis.call('HSET', questions, 'v:' .. index, report(request_id, outcome, ttl_ms))
  end
  return 'answered'
end
if redis.call('XLEN', work) >= max_entries then return 'full' end
if redis.call('EXISTS', work) == 0 then make_group(work, WORK_GROUP) end
local last_ms = tonumber(redis.call('HGET', ORDER, 'ms') or 0)
local ms = whole(math.max(now_ms(), last_ms))
local id = ms .. '-' .. whole(redis.call('HINCRBY', ORDER, 'number', 1))
redis.call('HSET', ORDER, 'ms', ms)
redis.call('PEXPIRE', ORDER, ORDER_TTL)
redis.call('XADD', work, id, 'r', request_id, 'i', index, 'e', envelope)
redis.call('HDEL', questions, 'r:' .. index, 'v:' .. index, 'g:' .. index, 'w:' .. index)
redis.call('HSET', questions, 'i:' .. index, channel_id .. ':' .. id, 'd:' .. index, digest)
keep(questions, ttl_ms)
redis.call('SADD', ACTIVE, channel_id)
ring(WORK_BELL, WORK_BELL_TTL)
return 'added'
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """An item to append."""

    channel_id: int
    request_id: str
    question_index: int
    digest: bytes
    """Of the question's content: tells a repeated publication from a new use of the same id."""
    envelope: bytes
    ttl_ms: int
    """How long the question's state is kept at least: its time budget plus retention."""


async def publish(runner: ScriptRunner, publication: Publication, max_entries: int) -> PublishState:
    """Append an item unless its question is there or the channel is full; remember where it is; wake the nodes.

    Entry ids grow across all channels, so that the oldest head is known without looking at payloads. They are made
    from Redis' clock, which therefore tells an item's age.
    """
    state = await runner.run(
        _PUBLISH,
        publication.channel_id,
        publication.request_id,
        publication.question_index,
        publication.digest,
        publication.envelope,
        max_entries,
        publication.ttl_ms,
    )
    return PublishState(state.decode())


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
  local ref = redis.call('HGET', questions, 'i:' .. index)
  if ref then
    local work, id = place_of(ref)
    local rows = pending(work, id, id, 1)
    local owner = rows and rows[1] and rows[1][2]
    if owner and owner ~= UNOWNED then
      local notices = NOTICES .. owner
      redis.call('XADD', notices, 'MAXLEN', '~', MAX_NOTICES, '*', 'r', request_id, 'i', index, 'id', id)
      redis.call('PEXPIRE', notices, NOTICES_TTL)
    end
    remove(work, id)
    redis.call('HDEL', questions, 'i:' .. index, 'g:' .. index, 'd:' .. index)
  end
  redis.call('HSET', questions, 'w:' .. index, 1)
  keep(questions, NOTICES_TTL)
end
if forget == '1' then redis.call('DEL', questions, EVENTS .. request_id, REQUEST .. request_id) end
if forget == '1' then redis.call('ZREM', DEADLINES, request_id) end
return #indexes
""",
    frees_room=True,
)


async def withdraw(
    runner: ScriptRunner, request_id: str, question_indexes: Sequence[int] | None, *, forget: bool = False
) -> None:
    """Remove the entries of questions without outcome (``None``: all) and leave notices for those who hold them.

    With ``forget`` the request leaves no trace: its id is free again.
    """
    if question_indexes is not None and not question_indexes:
        return
    indexes: Sequence[Argument] = question_indexes or ()
    await runner.run(_WITHDRAW, request_id, int(forget), *indexes)


_DEPTHS = Script.of("""
local depths = {}
for channel_id = 0, ARGV[1] - 1 do depths[#depths + 1] = redis.call('XLEN', WORK .. channel_id) end
return depths
""")


async def depths(runner: ScriptRunner, num_channels: int) -> list[int]:
    """Entries per channel, at one moment."""
    lengths = await runner.run(_DEPTHS, num_channels)
    if len(lengths) != num_channels:
        raise InvariantError(f"{len(lengths)} depths for {num_channels} channels")
    return [int(length) for length in lengths]


_LOST = Script.of("""
local lost = {}
for i = 1, #ARGV, 2 do
  local questions, index = QUESTIONS .. ARGV[i], ARGV[i + 1]
  local event_id = redis.call('HGET', questions, 'v:' .. index)
  local is_underway = is_live(questions, index) or (event_id and exists(RESULTS, event_id))
  is_underway = is_underway or redis.call('HEXISTS', questions, 'w:' .. index) == 1
  if not is_underway then lost[#lost + 1] = (i - 1) / 2 end
end
return lost
""")


async def lost(runner: ScriptRunner, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Which of the questions have neither an entry nor an outcome on its way to the reader, and were not withdrawn."""
    arguments = [part for key in questions for part in key]
    return [questions[place] for place in await runner.run(_LOST, *arguments)]


_SETTLED = Script.of("""
local settled = {}
for i = 1, #ARGV, 2 do
  local questions, index = QUESTIONS .. ARGV[i], ARGV[i + 1]
  local marks = redis.call('HMGET', questions, 'r:' .. index, 'w:' .. index)
  if marks[1] or marks[2] then settled[#settled + 1] = (i - 1) / 2 end
end
return settled
""")


async def settled(runner: ScriptRunner, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Which of the questions have an outcome or were withdrawn."""
    arguments = [part for key in questions for part in key]
    return [questions[place] for place in await runner.run(_SETTLED, *arguments)]
