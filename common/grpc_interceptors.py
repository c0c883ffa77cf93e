"""What happens around every gRPC call of a server: errors, credentials, drain, deadline.

Invariants and semantics: a ``KevError`` becomes its status with details (``common.codec.status``); any other exception
becomes INTERNAL with an id, under which the log has the traceback: its text never leaves the process. With API keys
configured every method is denied without one, health alone excepted. A call runs until its deadline at most; one
without a deadline gets Kev's default; one that has none left is refused. While draining, health excepted, nothing new
is taken. Bytes that are no message are the sender's mistake.

Not here: what the methods do (servicers), the server (``common.grpc_server``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from inspect import isasyncgen
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from common.api_keys import ApiKeys, current_caller
from common.codec.status import DETAILS_KEY, encode_status
from common.errors import DeadlineExceededError, DrainingError, InvalidRequestError, InvariantError, KevError
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

Around = Callable[[grpc.HandlerCallDetails, Context], AbstractAsyncContextManager[None]]


class Interceptor(_ServerInterceptor):
    """Runs every method inside a context manager; ``around`` gets the details of the call and its context."""

    def __init__(self, around: Around, *, also_health: bool = False) -> None:
        self._around = around
        self._also_health = also_health

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, wrapped."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or (handler_call_details.method.startswith(_HEALTH_PREFIX) and not self._also_health):
            return handler
        return _wrapped(handler, lambda context: self._around(handler_call_details, context))


def _wrapped(handler: Any, around: Callable[[Context], AbstractAsyncContextManager[None]]) -> Any:
    inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def answer(request: Any, context: Context) -> Any:
        async with around(context):
            return await inner(_checked(request), context)

    async def stream(request: Any, context: Context) -> None:
        async with around(context):
            events = inner(_checked(request), context)
            if not isasyncgen(events):
                await events
                return
            async with aclosing(events):
                async for event in events:
                    await context.write(event)

    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    deserialize = handler.request_deserializer
    if not handler.request_streaming:
        deserialize = _forgiving(deserialize)
    behavior = stream if handler.response_streaming else answer
    return make(behavior, request_deserializer=deserialize, response_serializer=handler.response_serializer)


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


# ---- the four concerns, outermost first


def error_interceptor() -> Interceptor:
    """Turns exceptions into statuses."""

    @asynccontextmanager
    async def around(details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, details.method)

    return Interceptor(around, also_health=True)


async def _abort(context: Context, error: Exception, method: str) -> NoReturn:
    if not isinstance(error, KevError) or isinstance(error, InvariantError) or type(error) is KevError:
        bug_id = secrets.token_hex(8)
        _log.error("internal error %s in %s", bug_id, method, exc_info=error)
        error = InvariantError(f"internal error, id {bug_id}")
    message, status = encode_status(error)
    await context.abort(grpc.StatusCode[error.grpc_code], message, ((DETAILS_KEY, status),))


def key_interceptor(keys: ApiKeys, operator_services: AbstractSet[str]) -> Interceptor:
    """Tells who calls, and denies everything to those who may not."""

    @asynccontextmanager
    async def around(details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        caller = keys.identify(_presented_key(details))
        if details.method.split("/")[1] in operator_services:
            caller.require_operator()
        current_caller.set(caller)
        yield

    return Interceptor(around)


def _presented_key(details: grpc.HandlerCallDetails) -> str | None:
    for name, value in details.invocation_metadata or ():
        if name == "authorization" and isinstance(value, str) and value.lower().startswith(_BEARER):
            return value[len(_BEARER) :].strip()
    return None


class Admission:
    """Counts the calls that run, and takes no more once the drain has begun."""

    def __init__(self) -> None:
        self._num_running = 0
        self._draining = False
        self._changed = WakeUp()

    def interceptor(self) -> Interceptor:
        """Counts and refuses."""
        return Interceptor(self._around)

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

    @asynccontextmanager
    async def _around(self, _: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        if self._draining:
            raise DrainingError("this server is shutting down and takes no new calls; send it to another instance")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._changed.wake_all()


def deadline_interceptor(default_s: float) -> Interceptor:
    """Ends every call at its deadline."""

    @asynccontextmanager
    async def around(_: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        remaining_s: float | None = context.time_remaining()
        budget_s = default_s if remaining_s is None else remaining_s
        if budget_s <= 0:
            raise DeadlineExceededError("the deadline of the call had passed when it arrived; give it more time")
        try:
            async with asyncio.timeout(budget_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceededError(f"the call did not end within its {budget_s:.3g} s") from None

    return Interceptor(around)
