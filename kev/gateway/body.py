"""Reading a request body: bounded, strict JSON, and what the gateway itself takes out of it.

Invariants and semantics: a body is an object in UTF-8; duplicate keys and anything after the object are refused. NaN,
Infinity and numbers beyond a double are handed on, for ``submit`` to refuse as it does everywhere. A wrong
Content-Type is forgiven when the body is JSON all the same (curl sends a form type by default). What remains goes to
``submit`` unchanged.

Not here: whether the questions and options make sense (``submit`` decides that).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request

from common.errors import FieldViolation, InvalidRequestError
from common.wording import named
from kev.gateway.settings import GatewaySettings

BODY = "body"
"""Field name for what is wrong with the body as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A ``POST /v1/query``, taken apart."""

    queries: object
    options: dict[str, object]
    stream: bool
    background: bool


class _DuplicateKeyError(ValueError):
    """An object names a key twice."""


async def read_call(request: Request, settings: GatewaySettings) -> Call:
    """The call in a request.

    Raises:
        InvalidRequestError: the body is not a JSON object, or ``stream`` or ``background`` is wrong.
        HTTPException: 408, 413 or 415.
        ClientDisconnect: the client left before the body was complete.
    """
    content = await _read_bytes(request, settings)
    options = parse_object(content, request.headers.get("content-type", ""))
    queries = options.pop("queries", None)
    stream, background = _flags(options)
    request_id = request.headers.get("x-request-id")
    if request_id is not None and options.get("request_id") is None:
        options["request_id"] = request_id
    return Call(queries=queries, options=options, stream=stream, background=background)


async def _read_bytes(request: Request, settings: GatewaySettings) -> bytes:
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    content = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s; send it faster or in smaller requests"
        raise HTTPException(408, message) from None
    return bytes(content)


def _too_large(limit_bytes: int) -> HTTPException:
    message = f"the body is larger than {limit_bytes} bytes (server.max_body_bytes); split the request or raise it"
    return HTTPException(413, message)


def parse_object(content: bytes, content_type: str = "") -> dict[str, object]:
    """The JSON object in ``content``.

    Raises:
        InvalidRequestError: empty, not UTF-8, not JSON or not an object.
        HTTPException: 415; it is not JSON, and ``content_type`` says that it was not meant to be.
    """
    if not content.strip():
        raise InvalidRequestError.of(BODY, 'empty; send a JSON object such as {"queries": ["..."]}')
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        _refuse(f"not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}", content_type)
    except json.JSONDecodeError as error:
        _refuse(f"not valid JSON at line {error.lineno} column {error.colno}: {error.msg}", content_type)
    except _DuplicateKeyError as error:
        raise InvalidRequestError.of(named(str(error)).removeprefix("."), "is given twice; give it once") from None
    except RecursionError:
        raise InvalidRequestError.of(BODY, "nested too deeply") from None
    except ValueError:  # Python refuses integers of more than 4,300 digits
        raise InvalidRequestError.of(BODY, "has an integer with too many digits") from None
    if not isinstance(value, dict):
        raise InvalidRequestError.of(BODY, 'must be a JSON object such as {"queries": ["..."]}')
    return value


def _refuse(message: str, content_type: str) -> NoReturn:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, f"the body is {message}, and Content-Type is not application/json; send JSON")
    raise InvalidRequestError.of(BODY, message)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return found


def _flags(options: dict[str, object]) -> tuple[bool, bool]:
    violations: list[FieldViolation] = []
    flags: list[bool] = []
    for name in ("stream", "background"):
        value = options.pop(name, False)
        if not isinstance(value, bool):
            violations.append(FieldViolation(name, "must be true or false"))
        flags.append(value is True)
    if all(flags):
        message = "cannot be combined with stream; send background alone and read GET /v1/requests/{id}/stream"
        violations.append(FieldViolation("background", message))
    if violations:
        raise InvalidRequestError(violations)
    return flags[0], flags[1]
