"""A cluster of real processes as an operator sees it: the pages of all processes, and the trace of one request."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from common.metrics.catalogue import METRICS, Kind, Tier
from tests.e2e.test_cluster import cluster
from tests.unit.test_metrics import parsed

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TIERS = {"aggregator": Tier.AGGREGATOR, "inference": Tier.INFERENCE, "router": Tier.ROUTER}
NEEDS_A_FAULT = {
    "kev_aggregator_settled_total",
    "kev_node_hand_backs_total",
}
"""Shown from their first value on, which an untroubled cluster does not bring about."""


class Collector:
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = defaultdict(list)
        """By service."""
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {entry.key: entry.value.string_value for entry in group.resource.attributes}
                    for scope in group.scope_spans:
                        spans[names["service.name"]].extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@pytest.mark.timeout(150)
def test_a_cluster_tells_what_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root forgets to put a watcher in its place: the table, dashboard and alerts name what nobody tells."""
    first_port = 20_000 + os.getpid() % 12_000  # below those that connections are given
    (tmp_path / "kev.yaml").write_text(
        f"kev:\n  observability:\n    metrics_port: {first_port}\n    log_format: json\n", encoding="utf-8"
    )
    with collecting() as collector:
        host, port = collector.server.server_address[:2]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{host!s}:{port}")
        with cluster(
            tmp_path / "cluster", "--no-model", "--nodes", "1", "--config", str(tmp_path / "kev.yaml")
        ) as running:
            body = {"queries": ["one", "two", "three"], "request_id": "told"}
            header = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
            answer = httpx.post(f"{running.url}/v1/query", json=body, headers=header, timeout=60)
            assert answer.json()["state"] == "complete"
            pages = {
                name: parsed(httpx.get(f"http://127.0.0.1:{first_port + number}/metrics", timeout=10).content)
                for number, name in enumerate(TIERS)
            }
            gateway = parsed(httpx.get(f"{running.url}/metrics", timeout=10).content)
        logs = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "cluster/logs").glob("*.log")}
    for name, tier in TIERS.items():
        told = {series for series, _ in pages[name]}
        wanted = {m for m in METRICS if m.tier in (tier, Tier.GRPC)}
        if name == "inference":  # nobody has called the node
            wanted = {metric for metric in wanted if metric.tier is not Tier.GRPC}
        shown = {m.name for m in wanted if set(m.series) <= told}
        labelled = {m.name for m in wanted if m.labels and m.kind is Kind.COUNTER} & NEEDS_A_FAULT
        assert {m.name for m in wanted} - shown - labelled == set(), name
    assert gateway["kev_http_requests_total", ("POST", "/v1/query", "200")] == 1
    assert pages["router"]["kev_router_questions_total", ()] == 3
    assert pages["inference"]["kev_node_outcomes_total", ("stop", "none")] == 3
    assert pages["aggregator"]["kev_aggregator_outcomes_total", ("stop", "none")] == 3
    spans = {
        service: sorted(span.name for span in found if span.trace_id.hex() == TRACE_ID)
        for service, found in collector.spans.items()
    }
    assert spans == {
        "kev-gateway": ["kev.http"],
        "kev-router": ["kev.submit"],
        "kev-inference": ["kev.queue"] * 3 + ["kev.run"] * 3,
        "kev-aggregator": ["kev.outcome"] * 3,
    }
    for name, text in logs.items():
        if not name.startswith(("store", "gateway")):
            own = [line for line in text.splitlines() if not line.startswith("=== ")]  # that is kev up's
            assert own and all(re.match(r'\{"time": ', line) for line in own), text
