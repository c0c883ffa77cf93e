"""What happens around every gRPC call of a server: errors, metrics, trace, credentials, drain, deadline.

Invariants and semantics: a ``KevError`` becomes its status with details (``common.codec.status``); any other exception
becomes INTERNAL with an id, under which the log has the traceback: its text never leaves the process. With API keys
configured every method is denied without one, health alone excepted. A call runs until its deadline at most; one
without a deadline gets Kev's default; one that has none left is refused. While draining, health excepted, nothing new
is taken. Bytes that are no message are the sender's mistake. All of this is one interceptor, which wraps each method
once: every further one costs every call.

Not here: what the methods do (servicers), the server (``common.grpc_server``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from collections.abc import Set as AbstractSet
from contextlib import aclosing, contextmanager
from inspect import isasyncgen
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
import grpc.aio

from common.api_keys import ApiKeys, current_caller
from common.codec.status import DETAILS_KEY, encode_status
from common.errors import DeadlineExceededError, DrainingError, InvalidRequestError, InvariantError, KevError
from common.tracing.context import HEADER as TRACE_HEADER
from common.tracing.context import accept, current_trace
from common.wakeup import WakeUp

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_BEARER = "bearer "

_log = logging.getLogger("kev.grpc")

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:  # generic in its stubs only
    Context = grpc.aio.ServicerContext
    _ServerInterceptor = grpc.aio.ServerInterceptor


class CallWatcher(Protocol):
    """Is told of calls; must neither raise nor wait."""

    def began(self, method: str) -> None:
        """A call has arrived."""
        ...

    def ended(self, method: str, reason: str, seconds: float) -> None:
        """It is over: OK, CANCELLED or the reason of its error."""
        ...


class Admission:
    """Counts the calls that run, and takes no more once the drain has begun."""

    def __init__(self) -> None:
        self._num_running = 0
        self._draining = False
        self._changed = WakeUp()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A call runs.

        Raises:
            DrainingError: the drain has begun.
        """
        if self._draining:
            raise DrainingError("this server is shutting down and takes no new calls; send it to another instance")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._changed.wake_all()

    def begin_drain(self) -> None:
        """Take nothing new."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call runs; False: some still did after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_running:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class CallGuard(_ServerInterceptor):
    """Runs every method within what every call needs."""

    def __init__(
        self,
        *,
        keys: ApiKeys,
        operator_services: AbstractSet[str],
        admission: Admission,
        default_deadline_s: float,
        watcher: CallWatcher | None = None,
    ) -> None:
        """Guard a server.

        Args:
            keys: who may call.
            operator_services: full names of the services that keys of tenants do not reach.
            admission: counts the calls.
            default_deadline_s: of calls that come without one.
            watcher: is told of every call, health excepted.
        """
        self._keys = keys
        self._operator_services = operator_services
        self._admission = admission
        self._default_deadline_s = default_deadline_s
        self._watcher = watcher
        self._guarded: dict[str, Any] = {}
        """By method; only methods that exist."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, guarded."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            handler: Any = await continuation(handler_call_details)
            if handler is None:
                return None
            guarded = self._guarded[method] = self._guard(method, handler)
        return guarded

    def _guard(self, method: str, handler: Any) -> Any:
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        respond = _stream if handler.response_streaming else _answer
        is_health = method.startswith(_HEALTH_PREFIX)

        async def behavior(request: Any, context: Context) -> Any:
            try:
                work = respond(inner, request, context)
                return await (work if is_health else self._run(method, work, context))
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, error, method)

        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        deserialize = handler.request_deserializer
        if not handler.request_streaming:
            deserialize = _forgiving(deserialize)
        return make(behavior, request_deserializer=deserialize, response_serializer=handler.response_serializer)

    async def _run(self, method: str, work: Coroutine[Any, Any, Any], context: Context) -> Any:
        """The call, watched from its first moment to its end."""
        name = method.rpartition("/")[2]
        started_s, reason = time.monotonic(), "OK"
        if self._watcher is not None:
            self._watcher.began(name)
        try:
            return await self._admit(method, work, context)
        except KevError as error:
            reason = error.reason
            raise
        except asyncio.CancelledError:
            reason = "CANCELLED"
            raise
        except Exception:
            reason = InvariantError.reason
            raise
        finally:
            work.close()  # of one that was refused nobody has awaited anything
            if self._watcher is not None:
                self._watcher.ended(name, reason, time.monotonic() - started_s)

    async def _admit(self, method: str, work: Coroutine[Any, Any, Any], context: Context) -> Any:
        """The call, if its caller may make it, until its deadline."""
        authorization, traceparent = _metadata(context, "authorization", TRACE_HEADER)
        current_trace.set(accept(traceparent))
        caller = self._keys.identify(_key_in(authorization))
        if method.split("/")[1] in self._operator_services:
            caller.require_operator()
        current_caller.set(caller)
        with self._admission.one_more():
            remaining_s: float | None = context.time_remaining()
            budget_s = self._default_deadline_s if remaining_s is None else remaining_s
            if budget_s <= 0:
                raise DeadlineExceededError("the deadline of the call had passed when it arrived; give it more time")
            try:
                async with asyncio.timeout(budget_s) as scope:
                    return await work
            except TimeoutError:
                if not scope.expired():
                    raise
                raise DeadlineExceededError(f"the call did not end within its {budget_s:.3g} s") from None


async def _answer(inner: Callable[..., Awaitable[Any]], request: Any, context: Context) -> Any:
    return await inner(_checked(request), context)


async def _stream(inner: Callable[..., Any], request: Any, context: Context) -> None:
    events = inner(_checked(request), context)
    if not isasyncgen(events):
        await events
        return
    async with aclosing(events):
        async for event in events:
            await context.write(event)


class _Undecodable:
    """Stands for bytes that were no message, until somebody can answer."""


def _forgiving(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:
            return _Undecodable()

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise InvalidRequestError.of("request", "is not a serialized message of this method; it is damaged or foreign")
    return request


async def _abort(context: Context, error: Exception, method: str) -> NoReturn:
    if not isinstance(error, KevError) or isinstance(error, InvariantError) or type(error) is KevError:
        bug_id = secrets.token_hex(8)
        _log.error("internal error %s in %s", bug_id, method, exc_info=error)
        error = InvariantError(f"internal error, id {bug_id}")
    message, status = encode_status(error)
    await context.abort(grpc.StatusCode[error.grpc_code], message, ((DETAILS_KEY, status),))


def _metadata(context: Context, *keys: str) -> list[str | None]:
    """The first text under each key."""
    found: dict[str, str] = {}
    metadata: Any = context.invocation_metadata()
    for name, value in metadata or ():
        if name in keys and isinstance(value, str):
            found.setdefault(name, value)
    return [found.get(key) for key in keys]


def _key_in(authorization: str | None) -> str | None:
    if authorization is None or not authorization.lower().startswith(_BEARER):
        return None
    return authorization[len(_BEARER) :].strip()
