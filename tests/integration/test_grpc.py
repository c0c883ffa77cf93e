"""Kev over gRPC: the answers and verdicts of the engine, also when connections and servers come and go."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import grpc.aio
import httpx
import pytest

from common.codec import decode_query, decode_status, encode_query, encode_status
from common.errors import (
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    IsolationUnavailableError,
    KevError,
    QueueFullError,
    RequestConflictError,
    RequestNotFoundError,
    all_errors,
)
from common.request import RequestRules, parse_request
from common.types import IsolationLevel, Question, Result, StreamEventType, Verdict
from kev.client import AsyncClient, Client
from kev.gateway.app import create_app
from tests.integration import test_surfaces as table
from tests.integration.grpc_cluster import Cluster, Reflected, open_cluster
from tests.integration.surfaces import async_verdict, http_verdict

SEED_QUERIES = [
    "Kev的隔离通道是如何实现的？",
    "帮我总结一下Transformer的注意力机制",
    "写出一个Python快速排序示例",
    "解释一下什么是KV Cache",
]
SMALL = {"kev": {"core": {"max_context": 1000, "max_tokens": 200}, "router": {"max_parallel_queries": 4}}}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster(SMALL) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client() as client:
        yield client


def audit(results: list[Result]) -> list[dict[str, Any]]:
    """All fields but those that differ from run to run."""
    varying = ("request_id", "elapsed_ms", "queued_ms", "first_token_ms", "started_at", "finished_at")
    found = [asdict(result) for result in results]
    for fields in found:
        assert all(fields.pop(name) is not None for name in varying)
    return found


# ---- the same answers


async def test_the_seeds_example_gives_the_engines_tokens_and_audit_fields(cluster: Cluster) -> None:
    """An answer or an audit field changes on its way through three services."""
    options: dict[str, Any] = {"isolation": "strict", "max_parallel": 4, "seed": 7, "logprobs": None}
    embedded = await cluster.engine.ask(SEED_QUERIES, **options)

    def remotely() -> list[Result]:
        with Client(cluster.address("router"), cluster.address("aggregator")) as client:
            request_id = client.submit(SEED_QUERIES, **options)
            return client.wait(request_id, timeout=15.0)

    remote = await asyncio.to_thread(remotely)
    assert audit(remote) == audit(embedded)
    assert [result.text for result in remote] == SEED_QUERIES
    assert all(result.token_ids and result.isolation.verdict is Verdict.BITWISE for result in remote)


async def test_every_method_tells_what_the_engine_tells(cluster: Cluster, client: AsyncClient) -> None:
    """A method of the client says something else than the engine's."""
    request_id = await client.submit(["one", {"text": "two"}, Question("three")], mode="seq_append")
    await client.wait(request_id)
    assert await client.poll(request_id) == await cluster.engine.poll(request_id)
    assert [e async for e in client.stream(request_id)] == [e async for e in cluster.engine.stream(request_id)]
    tail = [event async for event in client.stream(request_id, 5)]
    assert tail[0].event_index == 5 and tail[-1].type is StreamEventType.DONE
    assert [event async for event in client.stream(request_id, 10**12)] == []
    assert await client.cancel(request_id) == 0
    assert await client.channels() == await cluster.engine.channels()
    assert await client.isolation() == await cluster.engine.isolation()
    assert await client.stats() == await cluster.engine.stats()
    await client.ready()


async def test_odd_text_is_answered_as_it_is(client: AsyncClient) -> None:
    """Text that looks like a control token, a frame or a literal changes on the wire."""
    assert [result.text for result in await client.ask(table.FINE)] == table.FINE


SPELLINGS: list[tuple[list[Any], dict[str, Any]]] = [
    (["a", {"text": "b", "stop": [], "stop_token_ids": [], "category": ""}], {"stop": "x", "category": "c", "seed": 1}),
    ([Question("a", temperature=0, top_k=0, seed=0, priority=0)], {"temperature": 1, "priority": -3}),
    (["a"], {"stop": ["x", "y"], "stop_token_ids": (1, 2), "ignore_eos": False, "min_tokens": 0, "seed": 2**63 - 1}),
    (["a"], {"isolation": "shared", "strategy": "round_robin", "mode": "priority", "max_parallel": 1, "seed": 3}),
    ([{"text": "a", "truncate": "none", "timeout_ms": 1}], {"truncate": "left", "timeout_ms": 86_400_000, "seed": 3}),
    (["a"], {"system_prompt": "s", "tenant": "t", "request_id": "r", "logprobs": 0, "top_p": 0.1, "seed": 5}),
]


@pytest.mark.parametrize("index", range(len(SPELLINGS)))
def test_a_request_means_the_same_after_the_wire(index: int) -> None:
    """A zero, an empty list or a default is lost on the wire and the request is run with something else."""
    queries, options = SPELLINGS[index]
    rules = RequestRules(prompt_stop=("\nQuestion:",))
    sent = {"request_id": "id", **options}
    decoded_queries, decoded = decode_query(encode_query(queries, sent))
    assert parse_request(decoded_queries, decoded, rules) == parse_request(queries, sent, rules)


# ---- the same verdicts


@pytest.mark.parametrize("cases", [table.QUERIES, table.CHOICES, table.TEXTS, table.LIMITS, table._numbers()])
async def test_bad_input_gets_the_engines_verdict(cluster: Cluster, client: AsyncClient, cases: list[Any]) -> None:
    """The wire lets bad input through, blames another field, or answers INTERNAL."""
    for queries, options, _, _ in cases:
        verdict = await async_verdict(cluster.engine, queries, options)
        assert await async_verdict(client, queries, options) == verdict, options  # type: ignore[arg-type]
    assert (await client.stats()).router.num_questions == 0
    assert (await client.ask(["next"]))[0].text == "next"


async def test_python_objects_are_refused_by_the_client_in_the_same_words(
    cluster: Cluster, client: AsyncClient
) -> None:
    """An object that protobuf cannot carry ends in a TypeError, or its methods are run."""
    for queries, options, _, _ in table.FOREIGN:
        verdict = await async_verdict(cluster.engine, queries, options)
        assert await async_verdict(client, queries, options) == verdict  # type: ignore[arg-type]


async def test_every_wrong_field_is_listed(cluster: Cluster, client: AsyncClient) -> None:
    """Hundreds of mistakes make a status that no client accepts."""
    queries = [{"text": "问" * 40, "temperature": -1, "top_p": 隔} for 隔 in range(2, 200)]
    with pytest.raises(InvalidRequestError) as here:
        await cluster.engine.submit(queries)
    with pytest.raises(InvalidRequestError) as there:
        await client.submit(queries)
    assert str(there.value) == str(here.value) and "and 391 more" in str(there.value)
    assert there.value.violations == here.value.violations


@pytest.mark.parametrize("index", range(len(table.UNKNOWN_IDS)))
async def test_an_unknown_request_is_not_found(client: AsyncClient, index: int) -> None:
    """A mistyped id hangs, or ends in an error of protobuf."""
    request_id: Any = table.UNKNOWN_IDS[index]
    for ask in (client.poll, client.wait, client.cancel, lambda id_: anext(client.stream(id_))):
        with pytest.raises(RequestNotFoundError, match="never accepted"):
            await ask(request_id)


async def test_waits_and_streams_check_their_numbers(cluster: Cluster, client: AsyncClient) -> None:
    """A wait of NaN seconds hangs, or is refused in other words than by the engine."""
    request_id = await client.submit(["a"])
    for timeout in (-1, float("nan"), "5", True):
        told = []
        for door in (cluster.engine, client):
            with pytest.raises(InvalidRequestError) as refused:
                await door.wait(request_id, timeout)  # type: ignore[arg-type]
            told.append(str(refused.value))
        assert told[0] == told[1]
    for index in (-1, 1.5, None, "3"):
        with pytest.raises(InvalidRequestError, match="from_event_index"):
            await anext(client.stream(request_id, index))  # type: ignore[arg-type]


async def test_conflicts_full_queues_and_levels_are_told_as_they_are(cluster: Cluster, client: AsyncClient) -> None:
    """A client cannot tell what kind of refusal it was, or when to come again."""
    await client.ask(["first"], request_id="taken")
    with pytest.raises(RequestConflictError, match="'taken'"):
        await client.submit(["second"], request_id="taken")
    assert await client.submit(["first"], request_id="taken") == "taken"
    report = cluster.node.report
    assert report is not None
    unverified = tuple((level, Verdict.UNVERIFIED) for level in IsolationLevel)
    cluster.node.report = type(report)(**{**asdict(report), "levels": unverified, "reason": "no probe"})
    with pytest.raises(IsolationUnavailableError, match="no probe"):
        await client.submit(["a"], isolation="strict")


async def test_a_full_queue_says_when_to_come_again() -> None:
    """A refusal under load is retried by the client, or loses its retry-after."""
    config = {"kev": {"router": {"overflow_policy": "reject", "channel_pool_size": 1, "channel_queue_size": 1}}}
    async with open_cluster(config) as cluster, cluster.client() as client:
        cluster.runner.gate.clear()
        await client.submit(["a"])
        with pytest.raises(QueueFullError) as here:
            await cluster.engine.submit(["b"])
        with pytest.raises(QueueFullError) as there:
            await client.submit(["b"])
        assert str(there.value).partition("in about")[0] == str(here.value).partition("in about")[0]
        assert f"in about {there.value.retry_after_s:.2g} s" in str(there.value)
        assert there.value.retry_after_s > here.value.retry_after_s, "it was refused later"
        cluster.runner.gate.set()


@pytest.mark.parametrize(
    "kind", [kind for kind in all_errors() if kind is not KevError], ids=lambda kind: kind.__name__
)
def test_every_error_survives_its_status(kind: type[KevError]) -> None:
    """An error of the table becomes another one at the client."""
    if issubclass(kind, InvalidRequestError):
        error: KevError = kind.of("queries[0]", "失败 é")
    else:
        error = kind("失败 é", 2.5) if kind is QueueFullError else kind("失败 é")  # type: ignore[call-arg]
    told = decode_status(encode_status(error)[1])
    assert type(told) is kind and str(told) == str(error)
    assert getattr(told, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    assert getattr(told, "violations", None) == getattr(error, "violations", None)


@pytest.mark.parametrize("text", ["x", "隔", "\n", "%"])
def test_a_status_stays_below_what_every_peer_takes(text: str) -> None:
    """A request with many mistakes is answered with metadata that foreign clients refuse."""
    violations = [FieldViolation(f"queries[{i}].temperature", f"must not be {text * 70}") for i in range(400)]
    for error in (InvalidRequestError(violations), RequestNotFoundError(text * 5_000)):
        message, status = encode_status(error)
        assert len(quote(message)) + len(base64.b64encode(status)) + 200 < 8192
        told = decode_status(status)
        assert type(told) is type(error) and str(told) == message and str(error).startswith(message[:-1])
        if isinstance(told, InvalidRequestError):
            assert len(told.violations) >= 5 and list(told.violations) == violations[: len(told.violations)]


async def test_damaged_bytes_are_the_senders_mistake(cluster: Cluster) -> None:
    """Bytes that are no message, half a character or a missing query answer INTERNAL or UNKNOWN."""
    method = "/kev.v1.RouterService/SubmitQuery"
    async with grpc.aio.insecure_channel(cluster.address("router")) as channel:
        send: Any = channel.unary_unary(method)
        for data in (b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe", b"", b"\x0a\x06\x12\x04\x0a\x02\xed\xa0"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await send(data, timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value


async def test_a_secret_in_an_exception_stays_inside(
    cluster: Cluster, client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of an unexpected exception, with whatever is in it, reaches a caller."""
    cluster.engine._started().router.channels = lambda: {}["password=hunter2"]  # type: ignore[method-assign,assignment]
    with pytest.raises(KevError, match=r"^internal error, id [0-9a-f]{16}$") as failed:
        await client.channels()
    assert failed.value.grpc_code == "INTERNAL"
    bug_id = str(failed.value).split()[-1]
    assert any(bug_id in record.getMessage() and "hunter2" in str(record.exc_info) for record in caplog.records)


# ---- who uses the client


async def test_the_gateway_runs_over_the_client(cluster: Cluster, client: AsyncClient) -> None:
    """HTTP says something else when the engine is far away."""
    for transport in (httpx.ASGITransport(create_app(client)), httpx.ASGITransport(create_app(cluster.engine))):
        async with httpx.AsyncClient(transport=transport, base_url="http://kev") as http:
            answer = await http.post("/v1/query", json={"queries": ["a", "b"]})
            assert [result["text"] for result in answer.json()["results"]] == ["a", "b"]
            streamed = await http.post("/v1/query", json={"queries": ["a"], "stream": True})
            assert streamed.text.count("event: ") >= 3 and '"done"' in streamed.text
            refused = http_verdict(await http.post("/v1/query", json={"queries": ["a", 5]}))
            assert refused == await async_verdict(cluster.engine, ["a", 5], {})
            for path in ("/ready", "/v1/stats", "/v1/channels", "/v1/isolation"):
                assert (await http.get(path)).status_code == 200
            assert (await http.get("/v1/requests/unknown")).status_code == 404


async def test_a_blocking_client_is_used_from_threads(cluster: Cluster) -> None:
    """Two threads get each other's answers, or a closed client hangs."""

    def use() -> None:
        with Client(cluster.address("router"), cluster.address("aggregator")) as client:
            assert [e.type.value for e in client.stream(client.submit(["a"]))][-1] == "done"
            assert client.stats().node.alive and client.isolation().levels and client.channels()
            assert client.cancel(client.submit(["b"])) in (0, 1)
            assert client.poll(client.submit(["c"])).num_questions == 1
        with pytest.raises(EngineDeadError, match="client is closed"):
            client.ask(["a"])
        client.close()

    await asyncio.gather(*(asyncio.to_thread(use) for _ in range(3)))


async def test_closing_ends_what_waits(cluster: Cluster) -> None:
    """A call hangs, or looks cancelled, when its client is closed."""
    cluster.runner.gate.clear()
    client = cluster.client()
    request_id = await client.submit(["a"])
    stream = client.stream(request_id)
    waiting = [asyncio.ensure_future(client.wait(request_id)), asyncio.ensure_future(anext(stream))]
    await asyncio.sleep(0.1)
    await client.close()
    for call in waiting:
        with pytest.raises(EngineDeadError, match="closed"):
            await call
    with pytest.raises(EngineDeadError, match="closed"):
        await client.poll(request_id)
    cluster.runner.gate.set()


async def test_a_client_belongs_to_its_loop(cluster: Cluster, client: AsyncClient) -> None:
    """A client from another event loop hangs."""
    await client.ready()
    with pytest.raises(EngineDeadError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.poll("x")))


async def test_a_call_by_reflection_is_answered(cluster: Cluster) -> None:
    """A generic tool finds no methods, or cannot call them."""
    async with grpc.aio.insecure_channel(cluster.address("router")) as channel:
        tool = Reflected(channel)
        assert {"grpc.health.v1.Health", "kev.v1.RouterService"} < set(await tool.services())
        methods = {method.name: method for method in await tool.methods("kev.v1.RouterService")}
        answers = await tool.call(methods["AskQuery"], {"query": {"questions": [{"text": "hello", "max_tokens": 3}]}})
        assert answers[-2].event.result.text == "hel"
        (health,) = [method for method in await tool.methods("grpc.health.v1.Health") if method.name == "Check"]
        for service in ("", "kev.v1.RouterService"):
            assert (await tool.call(health, {"service": service}))[0].status == 1
