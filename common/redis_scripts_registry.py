"""The scripts of the request registry.

Invariants and semantics: each function is one atomic act. An id belongs to the first content it is registered with
until the request is withdrawn, or its time to live has passed after completion.

Not here: what a record means (``redis_registry``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.redis_scripts import Argument, Script, ScriptRunner


class RegisterState(StrEnum):
    """What became of a registration."""

    NEW = "new"
    SAME = "same"
    """Exactly this request is there."""
    CONFLICT = "conflict"
    """The id belongs to a request with other content."""
    FULL = "full"


REGISTER = """
-- Set a record, whose registration starts at an argument, unless its id is taken: what became of it.
local function register_from(first)
  local request_id, digest, token, envelope = unpack(ARGV, first, first + 3)
  local first_timeout_ms, ttl_ms, num_questions, max_requests = unpack(ARGV, first + 4, first + 7)
  local request = REQUEST .. request_id
  local known = redis.call('HMGET', request, 'digest', 'token')
  if known[1] then
    if known[1] ~= digest then return 'conflict' end
    return known[2] == token and 'new' or 'same'
  end
  if redis.call('ZCARD', DEADLINES) >= tonumber(max_requests) then return 'full' end
  local now = now_ms()
  redis.call('DEL', QUESTIONS .. request_id, EVENTS .. request_id)
  redis.call('HSET', request, 'digest', digest, 'token', token, 'e', envelope, 'ms', whole(now), 'open', num_questions)
  redis.call('PEXPIRE', request, ttl_ms)
  redis.call('ZADD', DEADLINES, whole(now + tonumber(first_timeout_ms)), request_id)
  keep(DEADLINES, ttl_ms)
  return 'new'
end
"""
"""For scripts that register requests."""
REGISTRATION_SIZE = 8
"""Arguments of a ``Registration``."""

_REGISTER = Script.of(REGISTER + "return register_from(1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A request to register."""

    request_id: str
    digest: str
    token: str
    """Names this call: after a lost reply its repetition is told that it was new."""
    envelope: bytes
    first_timeout_ms: int
    """Time budget of the question that runs out first."""
    ttl_ms: int
    """How long an unfinished request is kept at most."""
    num_questions: int
    """With the last one's outcome the request is complete."""
    max_requests: int
    """So many unfinished requests are kept."""

    def arguments(self) -> tuple[Argument, ...]:
        """In the order in which ``register_from`` reads them; ``REGISTRATION_SIZE`` of them."""
        return (
            self.request_id,
            self.digest,
            self.token,
            self.envelope,
            self.first_timeout_ms,
            self.ttl_ms,
            self.num_questions,
            self.max_requests,
        )


async def register(runner: ScriptRunner, registration: Registration) -> RegisterState:
    """Set the record unless the id is taken; a new request finds no trace of an earlier one under its id."""
    return RegisterState((await runner.run(_REGISTER, *registration.arguments())).decode())


_RESTORE = Script.of("""
local request_id, digest, token, envelope, first_timeout_ms, ttl_ms, num_questions = unpack(ARGV, 1, 7)
local request, registered_ms = REQUEST .. request_id, now_ms() - ARGV[9]
local known = redis.call('HGET', request, 'digest')
if known then return known == digest and 'same' or 'conflict' end
local num_open = tonumber(num_questions)
for _, name in ipairs(redis.call('HKEYS', QUESTIONS .. request_id)) do
  if string.find(name, '^r:') then num_open = num_open - 1 end
end
redis.call('HSET', request, 'digest', digest, 'token', token, 'e', envelope, 'ms', whole(registered_ms))
redis.call('HSET', request, 'open', whole(num_open))
redis.call('PEXPIRE', request, ttl_ms)
redis.call('ZADD', DEADLINES, whole(registered_ms + first_timeout_ms), request_id)
keep(DEADLINES, ttl_ms)
return 'new'
""")


async def restore(runner: ScriptRunner, registration: Registration, age_ms: int) -> RegisterState:
    """Set the record that was lost of a request which is under way, as of ``age_ms`` ago.

    What is known of its questions stays; it was accepted once, so no limit keeps it out.
    """
    return RegisterState((await runner.run(_RESTORE, *registration.arguments(), age_ms)).decode())


_UNREGISTERED = Script.of(
    """
local unregistered = {}
for i, request_id in ipairs(ARGV) do
  if redis.call('EXISTS', REQUEST .. request_id) == 0 then unregistered[#unregistered + 1] = i - 1 end
end
return unregistered
""",
    frees_room=True,
)


async def unregistered(runner: ScriptRunner, request_ids: Sequence[str]) -> list[str]:
    """Which of the requests there is no record of."""
    return [request_ids[place] for place in await runner.run(_UNREGISTERED, *request_ids)]


_TOKEN = Script.of("return redis.call('HGET', REQUEST .. ARGV[1], 'token')", frees_room=True)


async def is_registered_by(runner: ScriptRunner, request_id: str, token: str) -> bool:
    """Whether the request is there and this call registered it."""
    return bool(await runner.run(_TOKEN, request_id) == token.encode())


_DIGEST = Script.of("return redis.call('HGET', REQUEST .. ARGV[1], 'digest')", frees_room=True)


async def digest(runner: ScriptRunner, request_id: str) -> str | None:
    """What the id stands for; ``None``: the id is free."""
    found = await runner.run(_DIGEST, request_id)
    return None if found is None else str(found.decode())


_STORE_AGE = """
-- Milliseconds since the store began anew: empty, restarted, or another server.
local function store_age_ms()
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or ''
  local known = redis.call('HMGET', STORE, 'run_id', 'ms')
  if known[1] == run_id then return now_ms() - known[2] end
  redis.call('HSET', STORE, 'run_id', run_id, 'ms', whole(now_ms()))
  return 0
end
"""

_FIND = Script.of(
    _STORE_AGE
    + """
local found = redis.call('HMGET', REQUEST .. ARGV[1], 'e', 'ms')
if not found[1] then return whole(store_age_ms()) end
local events = {}
for _, entry in ipairs(redis.call('XRANGE', EVENTS .. ARGV[1], '-', '+')) do
  local ms = string.match(entry[1], '^%d+')
  events[#events + 1] = math.max(0, ms - found[2])
  events[#events + 1] = field_of(entry[2], 'e') or ''
end
return {found[1], whole(math.max(0, now_ms() - found[2])), events}
""",
    frees_room=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A registered request as it is kept."""

    envelope: bytes
    age_ms: int
    """Since its registration, by Redis' clock."""
    events: list[tuple[int, bytes]]
    """Milliseconds from the registration to the event, and its envelope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFound:
    """There is no such request."""

    store_age_ms: int
    """Since the store began anew: what was known before may be lost."""


async def find(runner: ScriptRunner, request_id: str) -> Found | NotFound:
    """The request with its whole event log."""
    found = await runner.run(_FIND, request_id)
    if isinstance(found, bytes):
        return NotFound(store_age_ms=int(found))
    envelope, age_ms, events = found
    return Found(envelope=envelope, age_ms=int(age_ms), events=list(zip(events[::2], events[1::2], strict=True)))


_COMPLETE = Script.of("complete(ARGV[1], ARGV[2])", frees_room=True)


async def complete(runner: ScriptRunner, request_id: str, ttl_ms: int) -> None:
    """Take a request off the deadlines and let everything about it expire ``ttl_ms`` from now."""
    await runner.run(_COMPLETE, request_id, ttl_ms)


_OVERDUE = Script.of(
    _STORE_AGE
    + """
store_age_ms()
local overdue = {}
for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', whole(now_ms()), 'LIMIT', 0, ARGV[1])) do
  if redis.call('EXISTS', REQUEST .. request_id) == 1 then overdue[#overdue + 1] = request_id
  else redis.call('ZREM', DEADLINES, request_id) end
end
return overdue
""",
    frees_room=True,
)


async def overdue(runner: ScriptRunner, max_requests: int) -> list[str]:
    """Ids of requests that are not complete and of which a question has run out of time, earliest deadline first.

    Expired ones are dropped from the deadlines. Also notes which server the store is.
    """
    return [request_id.decode() for request_id in await runner.run(_OVERDUE, max_requests)]
