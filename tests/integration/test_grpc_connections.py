"""gRPC calls that end early, grow too large or lose their server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest

from common import grpc_aggregator
from common.codec import encode_query
from common.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    KevError,
    MessageTooLargeError,
    ServiceUnavailableError,
)
from common.grpc_server import GrpcServerSettings
from common.types import FinishReason, StreamEventType
from kev.client import AsyncClient
from kev.v1 import aggregator_service_pb2, router_service_pb2, router_service_pb2_grpc
from tests.integration.grpc_cluster import Cluster, open_cluster
from tests.integration.scripted_runners import GuidedRunner, until, until_idle


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client() as client:
        yield client


@pytest.fixture
def slow() -> GuidedRunner:
    return GuidedRunner(lambda prompt: prompt * 60, step_s=0.004)


# ---- deadlines, sizes, damaged bytes


async def test_a_wait_that_ends_first_leaves_the_request_running(cluster: Cluster, client: AsyncClient) -> None:
    """A short wait takes the request with it, or tells another sentence than the engine."""
    cluster.runner.gate.clear()
    request_id = await client.submit(["a", "b"])
    told = []
    for door in (cluster.engine, client):
        with pytest.raises(DeadlineExceededError) as ended:
            await door.wait(request_id, 0.1)
        told.append(str(ended.value))
    assert told[0] == told[1] and "0 of 2 questions" in told[0]
    cluster.runner.gate.set()
    assert [result.text for result in await client.wait(request_id)] == ["a", "b"]


async def test_calls_end_at_their_deadline() -> None:
    """A call without a deadline is cut at once or lives for ever; one whose deadline has passed is run all the same."""
    settings = GrpcServerSettings(default_deadline_s=0.2)
    async with open_cluster(settings=settings) as cluster, cluster.client() as client:
        cluster.runner.gate.clear()
        request_id = await client.submit(["a"])
        request = aggregator_service_pb2.WaitResultRequest(request_id=request_id)
        async with grpc.aio.insecure_channel(cluster.address("aggregator")) as channel:
            call: Any = channel.unary_unary(
                "/kev.v1.AggregatorService/WaitResult",
                request_serializer=aggregator_service_pb2.WaitResultRequest.SerializeToString,
                response_deserializer=aggregator_service_pb2.WaitResultResponse.FromString,
            )
            for timeout_s, shortest_s in ((None, 0.15), (0.05, 0.0), (1e-9, 0.0)):
                began_s = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call(request, timeout=timeout_s)
                assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert shortest_s <= time.monotonic() - began_s < 2
        assert (await client.poll(request_id)).state.value == "pending"
        cluster.runner.gate.set()


async def test_long_waits_and_streams_are_made_of_short_calls(
    slow: GuidedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait or stream ends with the deadline or the connection age of one call."""
    monkeypatch.setattr(grpc_aggregator, "LONGEST_CALL_S", 0.2)
    monkeypatch.setattr(grpc_aggregator, "_LONGEST_WAIT_S", 0.15)
    settings = GrpcServerSettings(max_connection_age_s=0.3)
    async with open_cluster(runner=slow, settings=settings) as cluster, cluster.client() as client:
        request_id = await client.submit(["abc"], max_tokens=150, timeout_ms=60_000)
        waiting = asyncio.ensure_future(client.wait(request_id))
        with pytest.raises(DeadlineExceededError, match=r"after waiting 0\.4 s; the request goes on"):
            await client.wait(request_id, 0.4)
        events = [event async for event in client.stream(request_id)]
        assert events == [event async for event in cluster.engine.stream(request_id)]
        assert (await waiting)[0].text == ("abc" * 60)[:150]


async def test_a_message_above_the_limit_is_refused_by_name() -> None:
    """A large request ends in an unexplained error, or a small limit loses answers that are already there."""
    settings = GrpcServerSettings(max_message_bytes=8_000)
    async with open_cluster(settings=settings, script=lambda prompt: prompt * 20) as cluster:
        async with cluster.client(max_message_bytes=8_000) as client, cluster.client() as careless:
            for sender in (client, careless):
                with pytest.raises(MessageTooLargeError, match="max_message_bytes") as refused:
                    await sender.submit(["x" * 30_000], truncate="left")
            assert refused.value.grpc_code == "RESOURCE_EXHAUSTED"
            with pytest.raises(InvalidRequestError, match="must not be blank"):
                await client.submit(["x" * 30_000, ""])
            queries = [f"question {i:02}" for i in range(40)]
            results = await client.ask(queries, max_tokens=100)
            assert [result.text for result in results] == [(query * 20)[:100] for query in queries]
            assert sum(2 * result.tokens for result in results) == 8_000, "the answers would fit into one message"
            assert len((await client.poll(results[0].request_id)).results) == 40
            request_id = await client.submit(["隔" * 130], max_tokens=3_000)
            for call in (client.wait(request_id), client.poll(request_id)):
                with pytest.raises(MessageTooLargeError, match="max_message_bytes"):
                    await call


# ---- leaving


def ask_query(channel: grpc.aio.Channel, request_id: str = "") -> Any:
    """A raw AskQuery that asks two questions."""
    stub: Any = router_service_pb2_grpc.RouterServiceStub(channel)
    query = encode_query(["one", "two"], {"request_id": request_id or None, "timeout_ms": 30_000})
    return stub.AskQuery(router_service_pb2.AskQueryRequest(query=query), timeout=30)


async def test_a_client_that_leaves_askquery_withdraws_its_request(cluster: Cluster) -> None:
    """Questions of a client that is gone keep their slots; or they end though another caller still waits."""
    cluster.runner.gate.clear()
    async with grpc.aio.insecure_channel(cluster.address("router")) as channel:
        first, second = ask_query(channel, "mine"), ask_query(channel, "mine")
        askers = cluster.servicers["router"]._askers
        await until(lambda: askers["mine"] == 2 and cluster.runner.forwards)
        first.cancel()
        await until(lambda: askers["mine"] == 1)
        assert (await cluster.engine.poll("mine")).results == ()
        second.cancel()
        async with asyncio.timeout(5):
            results = await cluster.engine.wait("mine")
        assert {result.finish_reason for result in results} == {FinishReason.CANCELLED}
        await cluster.engine.submit(["one", "two"], request_id="theirs", timeout_ms=30_000, tenant="")
        third = ask_query(channel, "theirs")
        cluster.runner.gate.set()
        await third.read()
        third.cancel()
        assert [result.text for result in await cluster.engine.wait("theirs")] == ["one", "two"]
        answers = [answer.event async for answer in ask_query(channel)]
        assert answers[-1].state and [event.event_index for event in answers] == list(range(len(answers)))
    await until_idle(cluster.engine)


async def test_a_retry_after_its_own_withdrawal_is_told_so(cluster: Cluster) -> None:
    """A retry under the id of a call whose connection broke gets cancelled questions in place of answers."""
    cluster.runner.gate.clear()
    async with grpc.aio.insecure_channel(cluster.address("router")) as channel:
        first = ask_query(channel, "mine")
        await until(lambda: cluster.runner.forwards)
        first.cancel()
        await until(lambda: not cluster.servicers["router"]._askers)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError, match="2 of its 2 questions were not answered") as told:
                await ask_query(channel, "mine").read()
            assert told.value.code() is grpc.StatusCode.ABORTED
        cluster.runner.gate.set()
        answers = [answer.event async for answer in ask_query(channel, "another")]
        assert [event.result.text for event in answers if event.HasField("result")] == ["one", "two"]
        again = [answer.event async for answer in ask_query(channel, "another")]
        assert again == answers, "what was answered is answered again"
    servicer = cluster.servicers["router"]
    await until(lambda: not (servicer._askers or servicer._started or servicer._withdrawals))
    await until_idle(cluster.engine)


async def test_a_cancelled_ask_withdraws_its_questions(cluster: Cluster, client: AsyncClient) -> None:
    """A caller that gives up leaves its questions running."""
    cluster.runner.gate.clear()
    asking = asyncio.ensure_future(client.ask(["a"], request_id="gone", timeout_ms=30_000))
    await until(lambda: cluster.runner.forwards)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(5):
        results = await client.wait("gone")
    assert results[0].finish_reason is FinishReason.CANCELLED
    cluster.runner.gate.set()


async def test_a_cancelled_submission_leaves_nothing_behind(cluster: Cluster, client: AsyncClient) -> None:
    """A submission that is cancelled while its answer travels runs for nobody."""
    await client.ready()
    cluster.runner.gate.clear()
    for attempt in range(30):
        submitting = asyncio.ensure_future(client.submit(["a"], timeout_ms=60_000))
        for _ in range(attempt):
            await asyncio.sleep(0)
        submitting.cancel()
        with suppress(asyncio.CancelledError):
            await client.cancel(await submitting)
    store = cluster.engine._started().aggregator._store
    await until(lambda: not list(store.running()))
    cluster.runner.gate.set()
    await until_idle(cluster.engine)


# ---- servers that come and go


async def test_a_stream_goes_on_after_a_restart_without_gaps_or_repeats(slow: GuidedRunner) -> None:
    """A restarted aggregator costs a stream some of its events, or gives some twice."""
    async with open_cluster(runner=slow) as cluster, cluster.client() as client:
        request_id = await client.submit(["abc", "xyz"], max_tokens=150)
        waiting = asyncio.ensure_future(client.wait(request_id))
        events = []
        restarts = 0
        async for event in client.stream(request_id):
            events.append(event)
            if event.event_index in (20, 120, 200):
                restarts += 1
                await cluster.servers["aggregator"].kill()
                await cluster.start("aggregator")
        assert restarts == 3
        assert events == [event async for event in cluster.engine.stream(request_id)]
        assert await waiting == await cluster.engine.wait(request_id)


async def test_a_submission_whose_answer_was_lost_joins_itself(cluster: Cluster, client: AsyncClient) -> None:
    """A retry runs the same questions twice."""
    router = cluster.engine._started().router
    accept = router.accept
    lost: list[str] = []

    async def losing(spec: Any, **told: Any) -> bool:
        is_new = await accept(spec, **told)
        if not lost:
            lost.append(spec.request_id)
            await asyncio.Event().wait()  # the answer never leaves
        return is_new

    router.accept = losing  # type: ignore[method-assign]
    submitting = asyncio.ensure_future(client.submit(["once"]))
    await until(lambda: lost)
    await cluster.servers["router"].kill()
    await cluster.start("router")
    assert await submitting == lost[0]
    assert (await client.wait(lost[0]))[0].text == "once"
    assert (await client.stats()).router.num_questions == 1


async def test_nobody_at_the_address_is_told_in_time(cluster: Cluster) -> None:
    """A wrong address hangs, or ends in an error of gRPC."""
    await cluster.servers["router"].kill()
    async with cluster.client(patience_s=0.3) as client:
        began_s = time.monotonic()
        for call in (client.submit(["a"]), client.ready(), client.submit([b"a"])):
            with pytest.raises(ServiceUnavailableError, match="cannot be reached"):
                await call
        assert time.monotonic() - began_s < 5
    async with AsyncClient(cluster.address("aggregator"), patience_s=0.3) as astray:
        with pytest.raises(KevError, match="another service"):
            await astray.submit(["a"])


async def test_a_drain_takes_nothing_new_and_finishes_what_runs(slow: GuidedRunner) -> None:
    """A shutdown drops a stream that was nearly done, or a draining server still says that it serves."""
    async with open_cluster(runner=slow) as cluster, cluster.client(patience_s=0.2) as client:
        request_id = await client.submit(["ab"], max_tokens=100)
        stream = client.stream(request_id)
        events = [await anext(stream)]
        server = cluster.servers["aggregator"]
        draining = asyncio.ensure_future(server.drain(10))
        await asyncio.sleep(0.02)
        with pytest.raises(DrainingError, match="does not serve"):
            await client.ready()
        with pytest.raises(DrainingError, match="shutting down"):
            await client.poll(request_id)
        events += [event async for event in stream]
        assert events[-1].type is StreamEventType.DONE
        async with asyncio.timeout(3):
            await draining


async def test_calls_are_spread_over_every_address() -> None:
    """One long-lived connection sends everything to one router."""
    async with open_cluster() as one, open_cluster() as other:
        both = f"ipv4:{one.address('router')},{other.address('router')}"
        async with AsyncClient(both, one.address("aggregator")) as client:
            await client.channels()
            for _ in range(20):
                with pytest.raises(InvalidRequestError):
                    await client.submit([])
                await client.submit(["x"])
        shares = [(await cluster.engine.stats()).router.num_questions for cluster in (one, other)]
        assert sum(shares) == 20 and min(shares) >= 5
