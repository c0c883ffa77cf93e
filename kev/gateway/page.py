"""The page at ``/``: channels, queues, breakers and hot buckets in a browser, looked at every two seconds.

Invariants and semantics: one file without anything from elsewhere; it reads ``/v1/channels`` and ``/v1/stats`` of the
server that it came from, and may reach nothing else. It is there while the model loads, and says that it does.

Not here: the numbers.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}


def page() -> Response:
    """The page."""
    return Response(_content(), headers=_HEADERS, media_type="text/html")


@cache
def _content() -> bytes:
    return files("kev.gateway").joinpath("page.html").read_bytes()
