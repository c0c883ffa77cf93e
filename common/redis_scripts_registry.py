"""The scripts of the request registry.

Invariants and semantics: each function is one atomic act. An id belongs to the first content it is registered with
until the request is withdrawn, or its time to live has passed after completion.

Not here: what a record means (``redis_registry``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.redis_scripts import Script, ScriptRunner


class RegisterState(StrEnum):
    """What became of a registration."""

    NEW = "new"
    SAME = "same"
    """Exactly this request is there."""
    CONFLICT = "conflict"
    """The id belongs to a request with other content."""
    FULL = "full"


_REGISTER = Script.of("""
local request_id, digest, token, envelope = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local first_timeout_ms, ttl_ms, max_requests = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local request = REQUEST .. request_id
local known = redis.call('HMGET', request, 'digest', 'token')
if known[1] then
  if known[1] ~= digest then return 'conflict' end
  return known[2] == token and 'new' or 'same'
end
if redis.call('ZCARD', DEADLINES) >= max_requests then return 'full' end
local now = now_ms()
redis.call('DEL', QUESTIONS .. request_id, EVENTS .. request_id)
redis.call('HSET', request, 'digest', digest, 'token', token, 'e', envelope, 'ms', whole(now))
redis.call('PEXPIRE', request, ttl_ms)
redis.call('ZADD', DEADLINES, whole(now + first_timeout_ms), request_id)
keep(DEADLINES, ttl_ms)
return 'new'
""")


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


async def register(runner: ScriptRunner, registration: Registration, max_requests: int) -> RegisterState:
    """Set the record unless the id is taken; a new request finds no trace of an earlier one under its id."""
    state = await runner.run(
        _REGISTER,
        registration.request_id,
        registration.digest,
        registration.token,
        registration.envelope,
        registration.first_timeout_ms,
        registration.ttl_ms,
        max_requests,
    )
    return RegisterState(state.decode())


_FIND = Script.of("""
local found = redis.call('HMGET', REQUEST .. ARGV[1], 'digest', 'e', 'ms')
if not found[1] then return nil end
return {found[1], found[2], whole(now_ms() - found[3])}
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A registered request as it is kept."""

    digest: str
    envelope: bytes
    age_ms: int
    """Since its registration, by Redis' clock."""


async def find(runner: ScriptRunner, request_id: str) -> Found | None:
    """The request; ``None``: the id is free."""
    found = await runner.run(_FIND, request_id)
    if found is None:
        return None
    digest, envelope, age_ms = found
    return Found(digest=digest.decode(), envelope=envelope, age_ms=max(0, int(age_ms)))


_COMPLETE = Script.of(
    """
local request_id, ttl_ms = ARGV[1], ARGV[2]
redis.call('ZREM', DEADLINES, request_id)
for _, key in ipairs({REQUEST .. request_id, QUESTIONS .. request_id, EVENTS .. request_id}) do
  redis.call('PEXPIRE', key, ttl_ms)
end
""",
    frees_room=True,
)


async def complete(runner: ScriptRunner, request_id: str, ttl_ms: int) -> None:
    """Take a request off the deadlines and let everything about it expire ``ttl_ms`` from now."""
    await runner.run(_COMPLETE, request_id, ttl_ms)


_UNFINISHED = Script.of(
    """
local last, max_requests = ARGV[1], tonumber(ARGV[2])
if last == 'now' then last = whole(now_ms()) end
local unfinished = {}
for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', last, 'LIMIT', 0, max_requests)) do
  if redis.call('EXISTS', REQUEST .. request_id) == 1 then unfinished[#unfinished + 1] = request_id
  else redis.call('ZREM', DEADLINES, request_id) end
end
return unfinished
""",
    frees_room=True,
)


async def unfinished(runner: ScriptRunner, max_requests: int, *, overdue_only: bool) -> list[str]:
    """Ids of requests that are not complete, earliest deadline first; expired ones are dropped from the deadlines."""
    return [
        request_id.decode()
        for request_id in await runner.run(_UNFINISHED, "now" if overdue_only else "+inf", max_requests)
    ]
