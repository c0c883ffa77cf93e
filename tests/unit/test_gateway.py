"""HTTP over a scripted backend: answers, event streams, liveness and readiness."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from common.errors import (
    EngineDeadError,
    ModelError,
)
from common.types import StreamEvent
from kev.gateway.app import Gateway, create_app
from kev.gateway.settings import GatewaySettings
from kev.gateway.testing import ScriptedBackend, silent
from tests.unit.http_probe import SETTINGS, Connection, client_of, error_of, events_of, query, until


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(backend, SETTINGS)) as client:
        yield client


async def test_the_articles_call_is_answered_in_question_order(client: httpx.AsyncClient) -> None:
    """The documented curl call stops working, or results move to other questions."""
    response = await client.post("/v1/query", json={"queries": ["问题A", "问题B"], "isolation": "strict"})
    assert response.status_code == 200
    answer = json.loads(response.content.decode("ascii"))
    assert answer["state"] == "complete"
    assert [result["text"] for result in answer["results"]] == ["问题A", "问题B"]
    assert [result["question_index"] for result in answer["results"]] == [0, 1]
    first = answer["results"][0]
    assert first["isolation"] == {
        "level": "strict",
        "verdict": "bitwise",
        "mask_digest": "00" * 32,
        "fingerprint": "",
    }
    audit = {"channel_id", "slot", "hash_bucket", "strategy", "tokens", "elapsed_ms", "started_at", "finished_at"}
    assert audit <= first.keys()


async def test_options_reach_the_backend_unchanged(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    """The gateway drops or renames an option."""
    question = {"text": "q", "max_tokens": 3, "stop": ["x"]}
    response = await client.post("/v1/query", json={"queries": [question], "temperature": 0.5, "request_id": "r.1"})
    assert response.json()["request_id"] == "r.1"
    sampling = backend.submitted[0].questions[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop) == (3, 0.5, ("x",))


@pytest.mark.parametrize(("body_id", "expected"), [(None, "from-header"), ("from-body", "from-body")])
async def test_a_request_id_header_counts_when_the_body_has_none(
    client: httpx.AsyncClient, body_id: str | None, expected: str
) -> None:
    """A proxy's id is ignored, or overrides the caller's own."""
    body = {"queries": ["q"], "request_id": body_id}
    response = await client.post("/v1/query", json=body, headers={"X-Request-Id": "from-header"})
    assert response.json()["request_id"] == expected


async def test_background_returns_at_once_and_is_polled(client: httpx.AsyncClient) -> None:
    """A background request waits for its answers, or cannot be found again."""
    backend = ScriptedBackend(silent)
    async with client_of(create_app(backend, SETTINGS)) as client:
        accepted = await client.post("/v1/query", json={"queries": ["a", "b"], "background": True})
        assert accepted.status_code == 202
        request_id = accepted.json()["request_id"]
        location = accepted.headers["location"]
        assert location == f"/v1/requests/{request_id}"
        backend.finish(request_id, 1, ["B"])
        pending = (await client.get(location)).json()
        assert (pending["state"], pending["num_questions"]) == ("pending", 2)
        assert [result["text"] for result in pending["results"]] == ["B"]
        assert (await client.get(location + "?wait_ms=1")).json()["state"] == "pending"
        waiting = asyncio.create_task(client.get(location + "?wait_ms=60000"))
        await asyncio.sleep(0)
        backend.finish(request_id, 0, ["A"])
        complete = (await waiting).json()
        assert [result["text"] for result in complete["results"]] == ["A", "B"]
        assert backend.cancelled == []


async def test_delete_withdraws_what_is_running() -> None:
    """A cancelled request keeps its slots."""
    backend = ScriptedBackend(silent)
    async with client_of(create_app(backend, SETTINGS)) as client:
        await client.post("/v1/query", json={"queries": ["a", "b"], "background": True, "request_id": "r"})
        assert (await client.delete("/v1/requests/r")).json() == {"request_id": "r", "cancelled": 2}
        assert backend.num_running == 0
        assert (await client.delete("/v1/requests/r")).json()["cancelled"] == 0
        assert (await client.get("/v1/requests/r")).json()["state"] == "failed"


async def test_reports_have_names_instead_of_pairs(client: httpx.AsyncClient) -> None:
    """The capability matrix or the bucket counts become unreadable lists of pairs."""
    await client.post("/v1/query", json={"queries": ["a", "b"]})
    isolation = (await client.get("/v1/isolation")).json()
    assert isolation["levels"] == {"strict": "bitwise", "loose": "unverified"}
    stats = (await client.get("/v1/stats")).json()
    assert stats["router"]["bucket_counts"] == [{"hash_bucket": 0, "questions": 2}]
    channels = (await client.get("/v1/channels")).json()
    assert channels[0]["num_total"] == 2


async def test_a_stream_tags_every_event_and_ends_with_done(client: httpx.AsyncClient) -> None:
    """Texts of two channels cannot be told apart, or a client waits for an end that never comes."""
    response = await client.post("/v1/query", json={"queries": ["hello", "world"], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = list(events_of(response.content))
    assert [int(index or -1) for _, index, _ in events] == list(range(len(events)))
    assert events[-1][0] == "done" and events[-1][2]["state"] == "complete"
    for question_index, text in enumerate(["hello", "world"]):
        own = [data for _, _, data in events if data["question_index"] == question_index]
        assert [data["type"] for data in own] == ["started", "delta", "delta", "result"]
        assert {data["channel_id"] for data in own} == {question_index}
        assert "".join(data.get("text", "") for data in own) == own[-1]["result"]["text"] == text


@pytest.mark.parametrize(
    "text",
    ["a\n\nb", "\r", "data: x", "\u2028\u2029\x85", '"\\', "   ", "🫨𠮷", "event: done\n\n", "\x1b[31m", ": "],
)
async def test_content_never_breaks_the_framing(text: str) -> None:
    """An answer's own line ends or quotes split an event, and the client gets another text."""
    backend = ScriptedBackend(lambda _: ["<", text, ">"])
    async with client_of(create_app(backend, SETTINGS)) as client:
        response = await client.post("/v1/query", json={"queries": ["q"], "stream": True})
    assert len(response.text.splitlines()) == response.text.count("\n")
    deltas = [data["text"] for kind, _, data in events_of(response.content) if kind == "delta"]
    assert deltas == ["<", text, ">"]


async def test_a_stream_resumes_after_the_last_event_seen(client: httpx.AsyncClient) -> None:
    """A reconnecting client gets events twice or misses some."""
    await client.post("/v1/query", json={"queries": ["hello"], "request_id": "r", "background": True})
    everything = list(events_of((await client.get("/v1/requests/r/stream")).content))
    for seen in range(len(everything) - 1):
        response = await client.get("/v1/requests/r/stream", headers={"Last-Event-ID": str(seen)})
        assert list(events_of(response.content)) == everything[seen + 1 :]
    after_done = await client.get("/v1/requests/r/stream", headers={"Last-Event-ID": str(len(everything) - 1)})
    assert (after_done.status_code, after_done.content) == (204, b"")


async def test_a_head_request_does_not_follow_the_stream() -> None:
    """HEAD on a running request's stream hangs until the request ends."""
    backend = ScriptedBackend(silent)
    async with client_of(create_app(backend, SETTINGS)) as client:
        await client.post("/v1/query", json={"queries": ["q"], "request_id": "r", "background": True})
        response = await client.head("/v1/requests/r/stream")
        assert response.headers["content-type"].startswith("text/event-stream")


async def test_a_silent_stream_carries_comments() -> None:
    """A proxy closes a stream whose first token takes long."""
    backend = ScriptedBackend(silent)
    app = create_app(backend, GatewaySettings(ping_interval_s=0.001))
    connection = Connection(app, "POST", "/v1/query", query("q", stream=True, request_id="r"))
    await until(lambda: connection.content.count(b": ping\n\n") >= 2)
    backend.finish("r", 0, ["x"])
    await connection.task
    assert [kind for kind, _, _ in events_of(connection.content)] == ["started", "delta", "result", "done"]


async def test_a_failure_in_mid_stream_is_an_event(backend: ScriptedBackend, client: httpx.AsyncClient) -> None:
    """A stream breaks off without a word, or ends in a traceback."""
    backend.stream_error = EngineDeadError("the model thread has ended; restart the process")
    response = await client.post("/v1/query", json={"queries": ["q"], "stream": True})
    kind, index, data = list(events_of(response.content))[-1]
    assert (kind, index) == ("error", None)
    assert data["error"] == {"reason": "ENGINE_DEAD", "message": "the model thread has ended; restart the process"}


async def test_a_bug_in_mid_stream_tells_an_id_only(
    backend: ScriptedBackend, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of an unexpected exception reaches the client, or the operator cannot find it in the log."""
    backend.stream_error = RuntimeError("secret")
    with caplog.at_level(logging.ERROR):
        response = await client.post("/v1/query", json={"queries": ["q"], "stream": True})
    error = list(events_of(response.content))[-1][2]["error"]
    assert error["reason"] == "INTERNAL_BUG" and b"secret" not in response.content
    assert error["message"].removeprefix("internal error, id ") in caplog.text
    assert "secret" in caplog.text


async def test_a_stream_that_ends_without_done_says_so(
    client: httpx.AsyncClient, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client takes a broken stream for a complete one."""

    async def cut(request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        async for event in ScriptedBackend.stream(backend, request_id, from_event_index):
            yield event
            return

    monkeypatch.setattr(backend, "stream", cut)
    response = await client.post("/v1/query", json={"queries": ["q"], "stream": True})
    assert [kind for kind, _, _ in events_of(response.content)] == ["started", "error"]


async def test_a_refused_stream_is_an_ordinary_error(client: httpx.AsyncClient) -> None:
    """A bad request with stream: true answers 200 and hides the verdict in the stream."""
    response = await client.post("/v1/query", json={"queries": ["ok", " "], "stream": True})
    assert response.status_code == 400
    assert error_of(response)["violations"][0]["field"] == "queries[1]"


async def test_health_and_readiness_differ(backend: ScriptedBackend, client: httpx.AsyncClient) -> None:
    """A busy or broken engine is restarted by liveness, or gets traffic by readiness."""
    assert (await client.get("/ready")).json() == {"ready": True}
    backend.not_ready = EngineDeadError("the model thread has ended; restart the process")
    ready = await client.get("/ready")
    assert ready.status_code == 503 and "retry-after" in ready.headers
    assert error_of(ready)["reason"] == "ENGINE_DEAD"
    assert (await client.get("/health")).status_code == 200


async def test_a_backend_that_does_not_say_is_not_ready(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness hangs with the engine instead of failing."""
    monkeypatch.setattr(backend, "ready", asyncio.Event().wait)
    async with client_of(create_app(backend, GatewaySettings(ready_timeout_s=0.001))) as client:
        response = await client.get("/ready")
    assert response.status_code == 503
    error_of(response)


async def test_while_the_model_loads_only_health_answers() -> None:
    """Traffic reaches a process that cannot answer yet."""
    gateway = Gateway(SETTINGS)
    async with client_of(gateway.build_app()) as client:
        assert (await client.get("/health")).status_code == 200
        for response in (await client.get("/ready"), await client.post("/v1/query", json={"queries": ["a"]})):
            assert response.status_code == 503
            assert error_of(response)["reason"] == ModelError.reason
        gateway.attach(ScriptedBackend())
        assert (await client.get("/ready")).status_code == 200


async def test_a_drain_refuses_new_requests_and_lets_old_ones_be_read(backend: ScriptedBackend) -> None:
    """A restart loses answers, or takes work it will not finish."""
    gateway = Gateway(SETTINGS)
    gateway.attach(backend)
    async with client_of(gateway.build_app()) as client:
        await client.post("/v1/query", json={"queries": ["a"], "request_id": "r"})
        gateway.begin_drain()
        refused = await client.post("/v1/query", json={"queries": ["b"]})
        assert (refused.status_code, error_of(refused)["reason"]) == (503, "NODE_DRAINING")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/requests/r")).json()["state"] == "complete"
