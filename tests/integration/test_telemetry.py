"""Metrics and traces of tiers that work: the numbers add up, and one request is one trace."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aggregator_svc.metrics import Outcomes, WatchedResults
from aggregator_svc.metrics import readings as aggregator_readings
from aggregator_svc.service import AggregatorService
from aggregator_svc.settings import AggregatorSettings
from common.clock import SystemClock
from common.config import load_config
from common.errors import IsolationUnavailableError, KevError
from common.grpc_server import GrpcServer, GrpcServerSettings
from common.metrics.calls import CallMetrics
from common.metrics.catalogue import METRICS, Kind, Tier
from common.metrics.server import serve_metrics
from common.redis_backlog import BacklogGauge
from common.redis_link import RedisLink
from common.redis_registry import RedisRegistry
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_source import RedisSource
from common.redis_streams import RedisTransport
from common.request import RequestRules, parse_request
from common.service_process import Service, run_service
from common.telemetry import Telemetry
from common.tokenization import Detokenizer
from common.tracing.context import current_trace
from common.tracing.otel import OtelTracer
from common.tracing.port import SpanKind
from common.types import FinishReason, IsolationReport, NodeStats
from common.watched_work import WatchedWork
from inference_svc.metrics import Leases, WatchedRunner
from inference_svc.worker import Worker, WorkerSettings
from kev.client import AsyncClient
from kev.engine import AsyncEngine
from kev.gateway.app import Gateway
from kev.gateway.settings import GatewaySettings
from kev.parts import EngineParts
from kev.testing import ScriptedNode, ScriptedRunner, byte_tokenizer
from router_svc.metrics import Publications, WatchedBoard, WatchedRouter
from router_svc.service import RouterService
from router_svc.servicer import RouterServicer
from router_svc.settings import RouterSettings
from tests.contract.redis_servers import running_server
from tests.unit.test_metrics import parsed

CONFIG = load_config(
    {"kev": {"router": {"max_parallel_queries": 4, "channel_pool_size": 8}, "core": {"max_tokens": 32}}}, env={}
)
EMBEDDED = (Tier.GATEWAY, Tier.ROUTER, Tier.INFERENCE, Tier.AGGREGATOR)
TOKENIZER = byte_tokenizer()
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLERS_TRACE = int(CALLER.split("-")[1], 16)


def short(_: str) -> str:
    return "an answer"


class Tape:
    """Keeps the spans of one process."""

    def __init__(self, process: str, *tiers: Tier) -> None:
        self._exporter = InMemorySpanExporter()
        self.telemetry = Telemetry(process, *tiers, tracer=OtelTracer(process, self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


# --- one process


@asynccontextmanager
async def served_engine(telemetry: Telemetry, script: Callable[[str], str] = short) -> AsyncIterator[httpx.AsyncClient]:
    """What ``kev serve`` puts together, without a port."""
    node = ScriptedNode(CONFIG, ScriptedRunner(script), SystemClock())
    async with AsyncEngine(CONFIG, EngineParts(TOKENIZER, (node,)), telemetry=telemetry) as engine:
        gateway = Gateway(GatewaySettings(), telemetry)
        gateway.attach(engine)
        transport = httpx.ASGITransport(app=gateway.build_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://kev", timeout=30) as client:
            yield client


async def page(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(answer.content)


async def test_the_numbers_of_one_process_add_up() -> None:
    """A question is counted twice, or not at all, by one of the tiers it passes."""
    async with served_engine(Telemetry("gateway", *EMBEDDED)) as client:
        for number in range(5):
            body = {"queries": [f"question {i} of {number}" for i in range(6)]}
            assert (await client.post("/v1/query", json=body)).status_code == 200
        assert (await client.post("/v1/query", json={"queries": [""]})).status_code == 400
        assert (await client.get("/no/such/path")).status_code == 404
        told = await page(client)
    value = told.__getitem__
    assert value(("kev_router_submissions_total", ("accepted",))) == value(("kev_router_requests_total", ())) == 5
    assert value(("kev_router_questions_total", ())) == value(("kev_router_publications_total", ("published",))) == 30
    assert value(("kev_node_leases_total", ("first",))) == value(("kev_node_commits_total", ("committed",))) == 30
    assert value(("kev_node_outcomes_total", ("stop", "none"))) == 30
    assert value(("kev_aggregator_outcomes_total", ("stop", "none"))) == 30
    for histogram in ("kev_node_queue", "kev_node_first_token", "kev_node_question", "kev_aggregator_outcome"):
        assert value((f"{histogram}_seconds_count", ())) == 30
    assert value(("kev_node_tokens_total", ("prefill",))) == value(("kev_router_prompt_tokens_total", ()))
    assert value(("kev_node_tokens_total", ("decode",))) == 30 * len("an answer")  # the last one ends the question
    assert value(("kev_node_slots", ())) == 4 and value(("kev_node_alive", ())) == value(("kev_node_strict", ())) == 1
    for gauge in ("kev_node_slots_used", "kev_node_leases_held", "kev_node_kv_bytes_used"):
        assert value((gauge, ())) == 0
    assert value(("kev_aggregator_requests_open", ())) == 0 and value(("kev_aggregator_requests_kept", ())) == 5
    assert sum(value(("kev_router_questions_in_flight", (str(channel),))) for channel in range(8)) == 0
    assert value(("kev_http_requests_total", ("POST", "/v1/query", "200"))) == 5
    assert value(("kev_http_requests_total", ("POST", "/v1/query", "400"))) == 1
    assert value(("kev_http_requests_total", ("GET", "other", "404"))) == 1
    assert value(("kev_http_requests_open", ())) == 1, "the one that reads this"


async def test_callers_cannot_add_series() -> None:
    """Ids, tenants, paths or methods become labels, and the process grows with every new one."""
    async with served_engine(Telemetry("gateway", *EMBEDDED)) as client:

        async def ask(number: int) -> None:
            names = {"request_id": f"r-{number}", "tenant": f"t-{number}"}
            body = {"queries": [f"{uuid4()}"], **names, "seed": number}
            assert (await client.post("/v1/query", json=body)).status_code == 200
            await client.request(f"M{number}", f"/v1/{uuid4()}")
            await client.get(f"/v1/requests/{uuid4()}")

        await ask(0)
        await page(client)
        before = (await page(client)).keys()
        for number in range(1, 300):
            await ask(number)
        assert (await page(client)).keys() == before


async def test_one_request_is_one_trace_in_one_process() -> None:
    """The spans of a question cannot be found from the trace of the one who asked."""
    tape = Tape("gateway", *EMBEDDED)
    async with served_engine(tape.telemetry) as client:
        body = {"queries": ["a", "b"]}
        await client.post("/v1/query", json=body, headers={"traceparent": CALLER})
        await client.post("/v1/query", json=body, headers={"traceparent": "not one"})
    by_trace = Counter((span.context.trace_id, span.name) for span in tape.spans)
    traces = {trace_id for trace_id, _ in by_trace}
    assert len(traces) == 2 and CALLERS_TRACE in traces
    for trace_id in traces:
        spans = {name: number for (trace, name), number in by_trace.items() if trace == trace_id}
        assert spans == {"kev.http": 1, "kev.submit": 1, "kev.queue": 2, "kev.run": 2, "kev.outcome": 2}


async def test_spans_say_no_texts() -> None:
    """A question is read in a tool that many may look into."""
    tape = Tape("gateway", *EMBEDDED)
    async with served_engine(tape.telemetry) as client:
        await client.post("/v1/query", json={"queries": ["a SECRET question"], "system_prompt": "SECRET"})
        await client.post("/v1/query", json={"queries": ["SECRET", 1]})
        told = (await client.get("/metrics")).text
    assert tape.spans and "SECRET" not in told
    for span in tape.spans:
        assert "SECRET" not in span.to_json()


def test_a_span_says_the_reason_of_an_error_and_not_its_text() -> None:
    """The sentence of a refusal quotes what was sent."""
    exporter = InMemorySpanExporter()
    tracer = OtelTracer("router", exporter)
    with pytest.raises(KevError), tracer.span("kev.submit", SpanKind.SERVER, {}):
        raise IsolationUnavailableError("SECRET")
    with pytest.raises(ValueError), tracer.span("kev.submit", SpanKind.SERVER, {}):
        raise ValueError("SECRET")
    tracer.close()
    spans = exporter.get_finished_spans()
    assert [span.status.description for span in spans] == ["ISOLATION_UNAVAILABLE", "ValueError"]
    assert not any("SECRET" in span.to_json() for span in spans)


# --- a metrics port


async def test_the_metrics_port_answers_beside_the_work() -> None:
    """The port answers something else than the page, or stops the process when it is asked for nonsense."""
    telemetry = Telemetry("router", Tier.ROUTER)
    async with serve_metrics(telemetry.metrics, "127.0.0.1", 0) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert ("kev_router_lost_questions_total", ()) in await page(client)
            assert (await client.head("/metrics")).content == b""
            for method, path in (("GET", "/"), ("POST", "/metrics"), ("GET", "/metrics/..%2f")):
                assert (await client.request(method, path)).status_code == 404
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_taken_metrics_port_is_one_sentence() -> None:
    """The service ends with a traceback."""
    metrics = Telemetry("router").metrics
    async with serve_metrics(metrics, "127.0.0.1", 0) as port:
        with pytest.raises(KevError, match=f"127.0.0.1:{port} for metrics .*observability.metrics_port"):
            async with serve_metrics(metrics, "127.0.0.1", port):
                pass


@pytest.mark.parametrize("taken", ["cluster.router_port", "observability.metrics_port"])
async def test_a_service_whose_port_is_taken_starts_nothing(taken: str) -> None:
    """It takes work that it then drops, or ends with a warning of Python's beside the sentence."""
    started: list[str] = []

    async def loop() -> None:
        started.append("loop")

    async def check() -> None:
        started.append("check")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        section, name = taken.split(".")
        config = load_config({"kev": {section: {name: port}}}, env={})
        service = Service(
            name="router",
            port=port if section == "cluster" else 0,
            servicers=(),
            loops=(loop,),
            check=check,
            begin_drain=list,
            idle=lambda: True,
        )
        with pytest.raises(KevError, match=f"127.0.0.1:{port}"):
            await run_service(config, service, Telemetry("router", Tier.ROUTER, Tier.GRPC))
    assert started == []


# --- three processes over Redis


class OneNode:
    """What the router's servicer knows of the nodes."""

    def __init__(self, report: IsolationReport) -> None:
        self.report = report

    async def stats(self) -> list[NodeStats]:
        return []

    async def isolation(self) -> IsolationReport:
        return self.report


class Fleet:
    """Router, node and aggregator with telemetry of their own, as their roots put them together."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"test-{uuid4().hex}"
        self.router = Tape("router", Tier.ROUTER, Tier.GRPC)
        self.node = Tape("inference", Tier.INFERENCE)
        self.aggregator = Tape("aggregator", Tier.AGGREGATOR, Tier.GRPC)
        self._numbers = count()

    @asynccontextmanager
    async def joined(self, telemetry: Telemetry) -> AsyncIterator[tuple[RedisLink, RedisTransport]]:
        link = await RedisLink.connect(LinkSettings(url=self.url, deployment=self.name, block_s=0.5))
        settings = RedisTransportSettings(
            num_channels=8,
            node_id=f"p{next(self._numbers)}",
            lease_timeout_s=2.0,
            trace_of=telemetry.traces.trace_of,
            on_event=telemetry.traces.arrived,
        )
        transport = RedisTransport(link=link, clock=SystemClock(), settings=settings)
        try:
            yield link, transport
        finally:
            await transport.close()
            await link.close()

    @asynccontextmanager
    async def run_router(self, nodes: OneNode) -> AsyncIterator[AsyncClient]:
        """The router behind gRPC; yields a client of it."""
        telemetry = self.router.telemetry
        async with self.joined(telemetry) as (link, transport):
            router = RouterService(
                tokenizer=TOKENIZER,
                work=WatchedWork(transport, Publications(telemetry.metrics)),
                registry=RedisRegistry(link=link),
                clock=SystemClock(),
                settings=RouterSettings.from_config(CONFIG),
                board=WatchedBoard(transport, telemetry.metrics),
            )
            rules = replace(RequestRules.from_config(CONFIG, vocab_size=TOKENIZER.vocab_size), timeout_ms=20_000)
            watched = WatchedRouter(router, telemetry.metrics, telemetry.traces)
            calls = CallMetrics(telemetry.metrics)
            telemetry.metrics.add_source(calls.readings)
            servicer = RouterServicer(watched, None, nodes, rules)  # type: ignore[arg-type]  # nobody asks for results
            server = GrpcServer(GrpcServerSettings(), [servicer], calls)
            port = await server.start()
            await server.set_serving(True)
            async with _running(router.run()), AsyncClient(f"127.0.0.1:{port}", "127.0.0.1:1") as client:
                yield client
                await server.kill()

    @asynccontextmanager
    async def run_aggregator(self, tape: Tape | None = None) -> AsyncIterator[AggregatorService]:
        telemetry = (tape or self.aggregator).telemetry
        async with self.joined(telemetry) as (link, transport):
            source = RedisSource(link=link, settings=transport.settings)
            results = WatchedResults(source, telemetry.metrics)
            aggregator = AggregatorService(
                results=results, work=transport, clock=SystemClock(), settings=AggregatorSettings(), source=source
            )
            Outcomes(aggregator, telemetry.metrics)
            aggregator.add_listener(telemetry.traces.told)
            backlog = BacklogGauge(link, 8)
            telemetry.metrics.add_refresher(backlog.refresh)
            telemetry.metrics.add_source(backlog.readings)
            telemetry.metrics.add_source(lambda: aggregator_readings(aggregator, results))
            async with _running(aggregator.run()):
                yield aggregator

    @asynccontextmanager
    async def run_node(self) -> AsyncIterator[ScriptedNode]:
        telemetry = self.node.telemetry
        async with self.joined(telemetry) as (_, transport):
            node = ScriptedNode(CONFIG, ScriptedRunner(short), SystemClock(), "node-a")
            settings = WorkerSettings(
                node_id="node-a",
                max_slots=4,
                fingerprint=TOKENIZER.fingerprint,
                eos_ids=TOKENIZER.eos_ids,
                lease_timeout_s=2.0,
            )
            work = WatchedWork(transport, Leases(telemetry.metrics), telemetry.traces)
            worker = Worker(work, SystemClock(), settings, lambda: Detokenizer(TOKENIZER))
            events = worker.events_from(asyncio.get_running_loop())
            engine = node.start(events, lambda runner: WatchedRunner(runner, telemetry.metrics))
            try:
                async with _running(worker.run(engine)):
                    yield node
            finally:
                await asyncio.to_thread(node.close)

    async def told(self, tape: Tape) -> dict[tuple[str, tuple[str, ...]], float]:
        return parsed(await tape.telemetry.metrics.render())


@asynccontextmanager
async def _running(work: object) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)  # type: ignore[arg-type]
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server("valkey", tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.mark.store
async def test_one_request_is_one_trace_over_three_processes(redis_url: str) -> None:
    """The trace ends at the queue: nobody sees whether a question waited, ran, or was on its way back."""
    fleet = Fleet(redis_url)
    report = ScriptedNode(CONFIG, ScriptedRunner(short), SystemClock()).report
    async with fleet.run_aggregator() as aggregator, fleet.run_node(), fleet.run_router(OneNode(report)) as client:
        token = current_trace.set(CALLER)
        request_id = await client.submit([f"question {i}" for i in range(12)], strategy="round_robin")
        current_trace.reset(token)
        view = await aggregator.wait(request_id, 20)
        assert {result.finish_reason for result in view.results} == {FinishReason.STOP}
    (submit,) = fleet.router.spans
    assert (submit.name, submit.parent and submit.parent.span_id) == ("kev.submit", int(CALLER.split("-")[2], 16))
    assert Counter(span.name for span in fleet.node.spans) == {"kev.queue": 12, "kev.run": 12}
    assert Counter(span.name for span in fleet.aggregator.spans) == {"kev.outcome": 12}
    below = [*fleet.node.spans, *fleet.aggregator.spans]
    assert {span.context.trace_id for span in [submit, *below]} == {CALLERS_TRACE}
    assert {span.parent and span.parent.span_id for span in below} == {submit.context.span_id}
    for span in below:
        assert span.attributes is not None and span.attributes["kev.request_id"] == request_id
        assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time
    indexes = sorted(span.attributes["kev.question_index"] for span in fleet.aggregator.spans if span.attributes)
    assert indexes == list(range(12))


@pytest.mark.store
async def test_the_backlog_is_what_the_autoscaler_reads(redis_url: str) -> None:
    """The dashboard and KEDA disagree about how much waits."""
    fleet = Fleet(redis_url)
    report = ScriptedNode(CONFIG, ScriptedRunner(short), SystemClock()).report
    async with fleet.run_aggregator() as aggregator, fleet.run_router(OneNode(report)) as client:
        request_id = await client.submit([f"question {i}" for i in range(10)], strategy="round_robin")
        told = await fleet.told(fleet.aggregator)
        async with fleet.joined(fleet.node.telemetry) as (link, transport):
            lengths = [await link._client.xlen(f"{link.keys.prefix}work:{channel}") for channel in range(8)]
            assert [told["kev_queue_entries", (str(channel),)] for channel in range(8)] == lengths
            assert (sum(lengths), told["kev_queue_waiting", ()], told["kev_queue_leased", ()]) == (10, 10, 0)
            assert told["kev_store_up", ()] == 1 and told["kev_dead_letters_total", ()] == 0
            leases = await transport.lease(3, 5)
            told = await fleet.told(fleet.aggregator)
            assert (told["kev_queue_waiting", ()], told["kev_queue_leased", ()]) == (7, 3)
            await transport.dead_letter(leases[0], IsolationUnavailableError("no"))
            await transport.hand_back(leases[1:])
            told = await fleet.told(fleet.aggregator)
            assert (told["kev_queue_waiting", ()], told["kev_queue_leased", ()]) == (9, 0)
            assert told["kev_dead_letters_total", ()] == 1 and told["kev_queue_oldest_seconds", ()] >= 0
        async with fleet.run_node():
            view = await aggregator.wait(request_id, 20)
        told = await fleet.told(fleet.aggregator)
    assert told["kev_aggregator_outcomes_total", ("error", "ISOLATION_UNAVAILABLE")] == 1
    assert sum(result.finish_reason is FinishReason.STOP for result in view.results) == 9
    assert (
        told["kev_queue_waiting", ()] == told["kev_queue_leased", ()] == told["kev_aggregator_requests_open", ()] == 0
    )
    routed = await fleet.told(fleet.router)
    assert routed["kev_grpc_calls_total", ("SubmitQuery", "OK")] == 1
    assert routed["kev_grpc_calls_open", ("SubmitQuery",)] == 0


@pytest.mark.store
async def test_a_store_that_is_away_is_told(tmp_path: Path) -> None:
    """The page fails, hangs, or shows yesterday's queues as today's."""
    fleet = Fleet("")
    with running_server("valkey", tmp_path) as url:
        link = await RedisLink.connect(LinkSettings(url=url, deployment=fleet.name, patience_s=0.1))
        backlog = BacklogGauge(link, 8)
        metrics = fleet.aggregator.telemetry.metrics
        metrics.add_refresher(backlog.refresh)
        metrics.add_source(backlog.readings)
        assert (await fleet.told(fleet.aggregator))["kev_store_up", ()] == 1
    logging.getLogger("kev.redis").setLevel(logging.ERROR)
    told = await fleet.told(fleet.aggregator)
    assert told["kev_store_up", ()] == 0 and ("kev_queue_waiting", ()) not in told
    await link.close()


@pytest.mark.store
async def test_what_no_node_answers_is_counted_once(redis_url: str) -> None:
    """Each of two aggregators counts every time-out and cancellation, and twice as many are seen as there were."""
    fleet, second = Fleet(redis_url), Tape("aggregator", Tier.AGGREGATOR)
    router = fleet.run_router(OneNode(ScriptedNode(CONFIG, ScriptedRunner(short), SystemClock()).report))
    async with fleet.run_aggregator() as one, fleet.run_aggregator(second) as other, router as client:
        late = await client.submit(["a", "b", "c"], timeout_ms=300)
        withdrawn = await client.submit(["d", "e"])
        await asyncio.gather(one.load(withdrawn), other.load(withdrawn))
        await asyncio.gather(one.cancel(withdrawn), other.cancel(withdrawn))
        for request_id in (late, withdrawn):
            await asyncio.gather(one.wait(request_id, 20), other.wait(request_id, 20))
        pages = [await fleet.told(fleet.aggregator), await fleet.told(second)]
    settled: Counter[tuple[str, ...]] = Counter()
    for told in pages:
        settled.update({labels: int(n) for (name, labels), n in told.items() if name == "kev_aggregator_settled_total"})
    assert settled == {("timeout_queued", "BUDGET_SPENT"): 3, ("cancelled", "none"): 2}


@pytest.mark.store
async def test_strict_that_cannot_be_kept_is_counted(redis_url: str) -> None:
    """Callers are refused all day and no alert knows."""
    fleet = Fleet(redis_url)
    report = replace(ScriptedNode(CONFIG, ScriptedRunner(short), SystemClock()).report, levels=(), reason="no")
    async with fleet.run_router(OneNode(report)) as client:
        with pytest.raises(IsolationUnavailableError):
            await client.submit(["a"], isolation="strict")
        told = await fleet.told(fleet.router)
    assert told["kev_grpc_calls_total", ("SubmitQuery", "ISOLATION_UNAVAILABLE")] == 1
    assert not any(name == "kev_router_submissions_total" for name, _ in told)


def test_catalogue_and_roots_agree_about_tiers() -> None:
    """A process promises counters that it does not have."""
    assert {metric.tier for metric in METRICS if metric.kind is not Kind.GAUGE} == set(Tier)
    assert parse_request(["a"], {}, RequestRules.from_config(CONFIG, vocab_size=300)).questions
