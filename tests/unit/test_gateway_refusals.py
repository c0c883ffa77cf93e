"""What HTTP refuses, and how it says so."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from common.errors import (
    DrainingError,
    InvariantError,
    KevError,
    QueueFullError,
    all_errors,
)
from common.request import RequestRules
from common.types import FinishReason
from kev.gateway.app import create_app
from kev.gateway.settings import GatewaySettings
from kev.gateway.testing import ScriptedBackend, silent
from tests.unit.http_probe import SETTINGS, Connection, client_of, error_of, query, until


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(backend, SETTINGS)) as client:
        yield client


HUGE = "x" * 2000
BAD_BODIES = [
    ('{"queries": []}', "queries"),
    ("{}", "queries"),
    ('{"queries": null}', "queries"),
    ('{"queries": "one"}', "queries"),
    ('{"queries": 42}', "queries"),
    ('{"queries": {"text": "a"}}', "queries"),
    ('{"queries": ["a", ""]}', "queries[1]"),
    ('{"queries": ["a", "  \\n "]}', "queries[1]"),
    ('{"queries": ["a", null]}', "queries[1]"),
    ('{"queries": ["a", 42]}', "queries[1]"),
    ('{"queries": ["a", true]}', "queries[1]"),
    ('{"queries": ["a", ["b"]]}', "queries[1]"),
    ('{"queries": ["a", {}]}', "queries[1].text"),
    ('{"queries": ["a", {"text": 1}]}', "queries[1].text"),
    ('{"queries": ["a", {"text": "b", "temperture": 1}]}', "queries[1].temperture"),
    ('{"queries": ["a", {"text": "b", "temperature": NaN}]}', "queries[1].temperature"),
    ('{"queries": ["a", {"text": "b", "temperature": 1e999}]}', "queries[1].temperature"),
    ('{"queries": ["a", {"text": "b", "temperature": -1}]}', "queries[1].temperature"),
    ('{"queries": ["a", {"text": "b", "top_p": "0.5"}]}', "queries[1].top_p"),
    ('{"queries": ["a", NaN]}', "queries[1]"),
    ('{"queries": ["a"], "temperature": -Infinity}', "temperature"),
    ('{"queries": ["a"], "max_tokens": 0}', "max_tokens"),
    ('{"queries": ["a"], "max_tokens": 1.0}', "max_tokens"),
    ('{"queries": ["a"], "max_tokens": 99999999999999999999999}', "max_tokens"),
    ('{"queries": ["a"], "stop": [""]}', "stop[0]"),
    ('{"queries": ["a"], "isolation": "none"}', "isolation"),
    ('{"queries": ["a"], "strategy": 3}', "strategy"),
    ('{"queries": ["a"], "timeout_ms": 0}', "timeout_ms"),
    ('{"queries": ["a"], "request_id": "a/b"}', "request_id"),
    ('{"queries": ["a"], "request_id": "\\ud83d"}', "request_id"),
    ('{"queries": ["a", "\\ud83d"]}', "queries[1]"),
    ('{"queries": ["a", "b\\u0000"]}', "queries[1]"),
    ('{"queries": ["a"], "system_prompt": "\\udcff"}', "system_prompt"),
    ('{"queries": ["a"], "\\ud83d": 1}', "options['\\ud83d']"),
    ('{"queries": ["a"], "\\ud83d": 1, "\\ud83d": 2}', "['\\ud83d']"),
    ('{"queries": ["a"], "x y": [NaN]}', "options['x y']"),
    ('{"queries": ["a"], "self": 1}', "self"),
    ('{"queries": ["a"], "options": 1}', "options"),
    ('{"queries": ["a"], "stream": 1}', "stream"),
    ('{"queries": ["a"], "background": null}', "background"),
    ('{"queries": ["a"], "background": true, "stream": true}', "background"),
    ('{"queries": ["a"], "seed": 1, "seed": 2}', "seed"),
    ('{"queries": ["a", "' + HUGE + '"]}', "queries[1]"),
    ('{"queries": ["a","b","c","d","e"]}', "queries"),
    ("[" * 2000, "body"),
    ('{"queries": ["a"], "seed": ' + "9" * 4400 + "}", "body"),
    ("[1]", "body"),
    ("null", "body"),
    ("", "body"),
    (" \n", "body"),
    ('{"queries": ["a"]} x', "body"),
    ("{'queries': ['a']}", "body"),
    ('{"queries": ["a\n"]}', "body"),
]


BAD_STREAMS = [
    ('{"stream": true, ' + body.removeprefix("{"), field)
    for body, field in BAD_BODIES
    if body.startswith('{"') and "stream" not in body
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES + BAD_STREAMS)
async def test_bad_input_is_refused_naming_the_field(body: str, field: str) -> None:
    """Bad input runs, answers 5xx, or leaves the caller guessing which question was wrong."""
    backend = ScriptedBackend(rules=RequestRules(max_question_bytes=1000, max_queries_per_request=4))
    async with client_of(create_app(backend, GatewaySettings(max_body_bytes=5000))) as client:
        response = await client.post("/v1/query", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert field in [violation["field"] for violation in error_of(response)["violations"]]
        assert backend.submitted == []
        good = await client.post("/v1/query", json={"queries": ["next"]})
        assert good.json()["results"][0]["text"] == "next"


async def test_a_syntax_error_is_located(client: httpx.AsyncClient) -> None:
    """The caller of a broken body must search for the place."""
    message = error_of(await client.post("/v1/query", content=b'{"queries": [\n  "a",\n]}'))["message"]
    assert "line 2" in message or "line 3" in message
    broken = await client.post("/v1/query", content=b'{"queries": ["\xff"]}')
    assert "0xff at position 14" in error_of(broken)["message"]


async def test_every_violation_is_listed_up_to_a_limit(client: httpx.AsyncClient) -> None:
    """A caller fixes one field per attempt, or one bad request makes a megabyte of answer."""
    response = await client.post("/v1/query", json={"queries": ["", "ok", 3], "temperature": -1})
    fields = [violation["field"] for violation in error_of(response)["violations"]]
    assert fields == ["queries[0]", "queries[2]", "temperature"]
    response = await client.post("/v1/query", json={"queries": [""] * 250})
    assert len(error_of(response)["violations"]) == 100


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "application/json", ""])
async def test_json_is_taken_whatever_its_content_type(client: httpx.AsyncClient, content_type: str) -> None:
    """curl without a header, which sends a form type, is refused."""
    headers = {"content-type": content_type} if content_type else {}
    response = await client.post("/v1/query", content=b'\xef\xbb\xbf{"queries": ["a"]}', headers=headers)
    assert response.status_code == 200


async def test_a_form_is_told_what_to_send(client: httpx.AsyncClient) -> None:
    """A form is answered with a puzzling syntax error."""
    response = await client.post("/v1/query", data={"queries": "a"})
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_large_body_is_refused_unread(client: httpx.AsyncClient, chunked: bool) -> None:
    """One request fills the memory, or the caller is not told the limit."""
    taken = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1000
            yield b" " * 1000

    content = chunks() if chunked else b" " * 100_000
    response = await client.post("/v1/query", content=content)
    assert response.status_code == 413
    assert "4096 bytes" in error_of(response)["message"]
    assert taken <= 6000


async def test_a_body_that_never_comes_is_given_up(backend: ScriptedBackend) -> None:
    """A client that sends half a body holds its connection for ever."""
    app = create_app(backend, GatewaySettings(body_timeout_s=0.001))
    connection = Connection(app, "POST", "/v1/query", body=None)
    await connection.task
    assert connection.sent[0]["status"] == 408
    assert json.loads(connection.content)["error"]["reason"] == "BODY_TIMEOUT"


async def test_a_client_that_leaves_in_mid_body_gets_nothing(backend: ScriptedBackend) -> None:
    """A torn upload is answered, logged as a bug, or run."""
    connection = Connection(create_app(backend, SETTINGS), "POST", "/v1/query", body=None)
    connection.receive(b'{"que', more_body=True)
    connection.drop()
    await connection.task
    assert connection.sent == [] and backend.submitted == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/query/", 404),
        ("GET", "/v1/requests/", 404),
        ("GET", "/v1/query", 405),
        ("PUT", "/v1/requests/x", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/requests/unknown", 404),
        ("GET", "/v1/requests/%ED%A0%80%00", 404),
        ("GET", "/v1/requests/unknown?wait_ms=5", 404),
        ("DELETE", "/v1/requests/unknown", 404),
        ("GET", "/v1/requests/unknown/stream", 404),
    ],
)
async def test_unknown_places_are_json_errors(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    """An error body is HTML or plain text, which clients cannot parse."""
    response = await client.request(method, path)
    assert response.status_code == status
    error_of(response)


@pytest.mark.parametrize("wait_ms", ["-1", "x", "1.5", "60001", "", "９", "1" * 30])
async def test_a_bad_wait_is_refused(client: httpx.AsyncClient, wait_ms: str) -> None:
    """A poll waits for ever, or a typo is taken for no wait."""
    response = await client.get("/v1/requests/r", params={"wait_ms": wait_ms})
    assert response.status_code == 400
    assert error_of(response)["violations"][0]["field"] == "wait_ms"


async def test_a_bad_last_event_id_is_refused(client: httpx.AsyncClient) -> None:
    """A broken resume silently starts over and doubles the text."""
    response = await client.get("/v1/requests/r/stream", headers={"Last-Event-ID": "abc"})
    assert response.status_code == 400


async def test_a_taken_id_is_a_conflict(client: httpx.AsyncClient) -> None:
    """Two requests share an id and get each other's answers."""
    await client.post("/v1/query", json={"queries": ["a"], "request_id": "r"})
    again = await client.post("/v1/query", json={"queries": ["a"], "request_id": "r"})
    assert again.json()["results"][0]["text"] == "a"
    other = await client.post("/v1/query", json={"queries": ["b"], "request_id": "r"})
    assert other.status_code == 409
    assert error_of(other)["reason"] == "REQUEST_ID_CONFLICT"


async def test_overload_says_when_to_come_back(backend: ScriptedBackend, client: httpx.AsyncClient) -> None:
    """Clients retry at once and keep the overload alive."""
    backend.submit_error = QueueFullError("no channel has room; try again later", retry_after_s=1.2)
    response = await client.post("/v1/query", json={"queries": ["a"]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.headers["retry-after-ms"] == "1200"
    backend.submit_error = DrainingError("shutting down")
    response = await client.post("/v1/query", json={"queries": ["a"]})
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("kind", [cls for cls in all_errors() if cls.reason != "INTERNAL_BUG"])
async def test_every_error_keeps_its_reason_and_status(
    kind: type[KevError], backend: ScriptedBackend, client: httpx.AsyncClient
) -> None:
    """An error on purpose arrives as another one, so that a client reacts wrongly."""
    error = kind.__new__(kind)
    Exception.__init__(error, "what happened; what to do")
    vars(error).update(violations=(), retry_after_s=float("inf"))
    backend.submit_error = error
    response = await client.post("/v1/query", json={"queries": ["a"]})
    assert response.status_code == kind.http_status
    told = error_of(response)
    assert (told["reason"], told["message"]) == (kind.reason, "what happened; what to do")


@pytest.mark.parametrize("error", [RuntimeError("secret"), InvariantError("secret"), TypeError("secret")])
async def test_a_bug_tells_an_id_only(
    error: Exception, backend: ScriptedBackend, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Internals leak to callers, or a bug cannot be found in the log."""
    backend.submit_error = error
    with caplog.at_level(logging.ERROR):
        response = await client.post("/v1/query", json={"queries": ["a"]})
    assert response.status_code == 500
    told = error_of(response)
    assert told["reason"] == "INTERNAL_BUG" and "secret" not in response.text
    assert told["message"].removeprefix("internal error, id ") in caplog.text


async def test_one_failed_channel_is_a_result_not_an_error() -> None:
    """One question's failure hides its neighbours' answers."""
    backend = ScriptedBackend(silent)
    app = create_app(backend, SETTINGS)
    connection = Connection(app, "POST", "/v1/query", query("a", "b", request_id="r"))
    await until(lambda: backend.num_running == 2)
    backend.finish("r", 0, finish_reason=FinishReason.TIMEOUT_RUNNING)
    backend.finish("r", 1, ["B"])
    await connection.task
    answer = json.loads(connection.content)
    assert answer["state"] == "partial"
    assert [result["finish_reason"] for result in answer["results"]] == ["timeout_running", "stop"]
