"""Calls to one gRPC service: the connection, deadlines, errors as Kev's own, and what may be tried again.

Invariants and semantics: every call has a deadline. A failed call raises the ``KevError`` that the server raised, or,
where no server spoke, one that says so. Every method of Kev may be tried again, because ``submit`` always carries a
request id. A peer belongs to the event loop that made it.

Not here: which methods there are (``common.grpc_router``, ``common.grpc_aggregator``), when a call is tried again
(``common.grpc_patience``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.codec.status import DETAILS_KEY, decode_status
from common.errors import (
    ConfigError,
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    InvariantError,
    KevError,
    MessageTooLargeError,
    PermissionDeniedError,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from common.grpc_options import DEFAULT_MAX_MESSAGE_BYTES, channel_credentials, client_options
from common.grpc_patience import Patience, RetryBudget
from common.tls_files import TlsFiles
from common.tracing.context import HEADER as TRACE_HEADER
from common.tracing.context import traceparent

READ_DEADLINE_S = 10.0
"""Deadline of calls that only look something up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How to reach a service."""

    target: str
    """``host:port``; of a name with several addresses, all are used in turn."""
    api_key: str = ""
    tls: TlsFiles | None = None
    """None: plaintext."""
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    """Largest message in either direction; the server's own limit."""
    patience_s: float = 10.0
    """How long a call is tried again while nobody answers."""


class Peer:
    """A connection to one service."""

    def __init__(self, settings: PeerSettings) -> None:
        """Prepare the connection; it is made by the first call. Needs a running event loop.

        Raises:
            ConfigError: a certificate file cannot be read.
        """
        self._settings = settings
        self._budget = RetryBudget()
        self._closed = False
        self._metadata = (("authorization", f"Bearer {settings.api_key}"),) if settings.api_key else ()
        target = _by_name(settings.target)
        options = client_options(settings.max_message_bytes, settings.tls.server_name if settings.tls else "")
        if settings.tls is None:
            self.channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self.channel = grpc.aio.secure_channel(target, channel_credentials(settings.tls), options=options)

    def patience(self) -> Patience:
        """For one call."""
        self._budget.earn()
        return Patience(self._settings.patience_s, self._budget, self._is_connected)

    async def call(
        self,
        method: Any,
        request: Any,
        deadline_s: float = READ_DEADLINE_S,
        *,
        first_metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """The answer of a method with one answer.

        Args:
            method: of a stub made with ``channel``.
            request: its request.
            deadline_s: seconds for the call, tries included.
            first_metadata: goes with the first try only.

        Raises:
            KevError: what the server raised, or why it could not be asked.
        """
        end_s = time.monotonic() + deadline_s
        patience = self.patience()
        while True:
            try:
                return await self._once(method, request, max(0.001, end_s - time.monotonic()), first_metadata)
            except KevError as error:
                first_metadata = ()
                await patience.pause_after(error, end_s)

    async def stream(self, method: Any, request: Any, deadline_s: float) -> AsyncIterator[Any]:
        """The answers of a method with many; nothing is tried again.

        Raises:
            KevError: as ``call``; after any number of answers.
        """
        self._check_request(request)
        call = None
        try:
            call = method(request, timeout=deadline_s, metadata=self._metadata_now())
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        except grpc.aio.UsageError:
            raise self._closed_error() from None
        except asyncio.CancelledError:
            self._check_cancelled_by_us()
            raise
        finally:
            if call is not None:
                call.cancel()

    async def check_serving(self, service: str) -> None:
        """Return if the service says that it would answer calls now.

        Raises:
            DrainingError: it says that it would not.
            KevError: it could not be asked.
        """
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        answer = await self._once(stub.Check, health_pb2.HealthCheckRequest(service=service), READ_DEADLINE_S)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise DrainingError(f"{service} at {self._settings.target} does not serve now: it starts or shuts down")

    async def close(self) -> None:
        """End the connection; calls that run fail with ``EngineDeadError``."""
        self._closed = True
        await self.channel.close(None)

    def _is_connected(self) -> bool:
        """Whether there is a connection to any address; if not, one is being made."""
        if self._closed:
            raise self._closed_error()
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    async def _once(
        self, method: Any, request: Any, deadline_s: float, metadata: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        self._check_request(request)
        try:
            return await method(request, timeout=deadline_s, metadata=(*self._metadata_now(), *metadata))
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        except grpc.aio.UsageError:
            raise self._closed_error() from None
        except asyncio.CancelledError:
            self._check_cancelled_by_us()
            raise

    def _metadata_now(self) -> tuple[tuple[str, str], ...]:
        """What goes with a call: the key, and the trace that it belongs to."""
        trace = traceparent()
        return (*self._metadata, (TRACE_HEADER, trace)) if trace else self._metadata

    def _check_request(self, request: Any) -> None:
        limit_bytes = self._settings.max_message_bytes
        if request.ByteSize() > limit_bytes:
            raise MessageTooLargeError(
                f"the request has {request.ByteSize()} bytes, more than the {limit_bytes} of one message "
                "(cluster.max_message_bytes); send fewer questions at a time"
            )

    def _check_cancelled_by_us(self) -> None:
        """Closing the channel cancels its calls, which is no cancellation of the caller's task."""
        task = asyncio.current_task()
        if self._closed and not (task and task.cancelling()):
            raise self._closed_error() from None

    def _closed_error(self) -> KevError:
        return EngineDeadError("the client is closed; open a new one")

    def _error_of(self, error: grpc.aio.AioRpcError) -> KevError:
        metadata: Any = error.trailing_metadata() or ()
        for key, value in metadata:
            if key == DETAILS_KEY and isinstance(value, bytes) and (told := decode_status(value)) is not None:
                return told
        code, details, target = error.code(), error.details() or "", self._settings.target
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ServiceUnavailableError(f"{target} cannot be reached, or the connection broke; is it running there?")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"{target} did not answer within the deadline of the call")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            limit_bytes = self._settings.max_message_bytes
            message = f"a message is above the limit of {limit_bytes} bytes (cluster.max_message_bytes) here or there"
            return MessageTooLargeError(f"{message}: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"{target} does not offer this method: it is another service, or another version of Kev")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError(f"{target} refuses the API key")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return PermissionDeniedError(f"{target} does not let this API key do that")
        return InvariantError(f"{target} failed with {code.name}: {details}")


def _by_name(target: str) -> str:
    """A target that is looked up by DNS, so that every address behind the name gets its share."""
    return target if target.startswith(("dns:", "unix:", "ipv4:", "ipv6:", "xds:")) else f"dns:///{target}"
