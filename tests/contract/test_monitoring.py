"""Dashboards, alerts and scrape settings ask for metrics that there are, at ports where somebody answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

from common.config import load_config
from common.metrics.catalogue import LIBRARY_SERIES, METRICS, Kind, Tier
from common.metrics.page import PAGE_PATH, with_table
from common.tracing.port import wants_tracing
from kev.up.commands import HEALTH_SERVICES, Role
from kev.up.plan import Ports, Surroundings, plan_cluster
from tests.contract.kustomize import Document, containers, load_documents, render

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yml"
DASHBOARD = DEPLOY / "grafana/dashboards/kev.json"
SERIES = {series: metric for metric in METRICS for series in metric.series}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus itself adds."""
STORE_AND_HELPERS = {"prometheus", "grafana", "jaeger"}
RATES = {"rate", "increase", "irate"}


def documents(path: Path) -> list[Document]:
    return load_documents(path.read_text(encoding="utf-8"))


def rules() -> list[Document]:
    (document,) = documents(ALERTS)
    (group,) = document["groups"]
    found: list[Document] = group["rules"]
    return found


def panels() -> list[Document]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def scale_queries() -> Iterator[tuple[str, str]]:
    """Queries of autoscalers that ask Prometheus, and names of metrics that one of them is given by an adapter."""
    for path in (DEPLOY / "k8s").rglob("*.yaml"):
        for document in documents(path):
            for trigger in document.get("spec", {}).get("triggers", ()):
                if trigger["type"] == "prometheus":
                    yield str(path.relative_to(DEPLOY)), trigger["metadata"]["query"]
            for metric in document.get("spec", {}).get("metrics", ()):
                for kind in ("pods", "object", "external"):
                    if kind in metric:
                        yield str(path.relative_to(DEPLOY)), metric[kind]["metric"]["name"]


QUERIES = [
    *((f"alert {rule['alert']}", rule["expr"]) for rule in rules()),
    *((f"panel {panel['title']}", target["expr"]) for panel in panels() for target in panel["targets"]),
    *scale_queries(),
]


def nodes_of(query: str) -> list[Any]:
    """Every part of a query, after reading it as Prometheus does."""
    found: list[Any] = []
    promql.walk(promql.parse(query.replace("$__rate_interval", "5m")), pre_visit=found.append)
    return found


def check_query(query: str) -> None:
    """Looks at names, labels and kinds.

    Raises:
        AssertionError: it asks for something that is not told.
        ValueError: it is not PromQL.
    """
    nodes = nodes_of(query)
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    assert selectors, "it asks for nothing"
    known: set[str] = set(SCRAPED)
    for selector in selectors:
        name = selector.name
        assert name in SERIES or name in LIBRARY_SERIES or name == "up", f"nobody tells {name}"
        labels = set(SERIES[name].labels) | SCRAPED if name in SERIES else set(SCRAPED)
        labels |= {"le"} if name.endswith("_bucket") else set()
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= labels, f"{name} has no label {asked - labels}"
        known |= labels
    for node in nodes:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known, f"nothing has the labels {set(node.modifier.labels) - known}"
        if isinstance(node, promql.Call) and node.func.name in RATES:
            (argument,) = node.args
            check_grows(argument.vector_selector.name, node.func.name)
        elif isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
            inner = [part.name for part in nodes if isinstance(part, promql.VectorSelector)]
            assert all(name.endswith("_bucket") for name in inner), f"no buckets in {inner}"


def check_grows(name: str, function: str) -> None:
    kind = SERIES[name].kind if name in SERIES else Kind.COUNTER
    assert kind is not Kind.GAUGE and (name in SERIES or name.endswith("_total")), f"{function} of the gauge {name}"


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_query_asks_for_what_is_told(where: str, query: str) -> None:
    """A metric is renamed, and its panel stays empty or its alert never fires."""
    check_query(query)


@pytest.mark.parametrize(
    "query",
    [
        "sum(kev_no_such_metric)",
        'sum(rate(kev_node_commits_total{reason="stale"}[5m]))',
        "sum by (channel) (rate(kev_node_tokens_total[5m]))",
        "rate(kev_node_slots_used[5m])",
        "increase(process_open_fds[5m])",
        "histogram_quantile(0.9, sum by (le) (rate(kev_node_queue_seconds_sum[5m])))",
        "kev_node_queue_seconds",
        "kev_node_slots_total",
        "sum(rate(kev_node_tokens_total[5m])",
        "1 + 1",
    ],
)
def test_a_wrong_query_is_noticed(query: str) -> None:
    """The check above would let it pass."""
    with pytest.raises((AssertionError, ValueError)):
        check_query(query)


def test_every_tier_is_looked_at() -> None:
    """A tier fails and the dashboard has nothing to show of it."""
    named = {node.name for _, query in QUERIES for node in nodes_of(query) if isinstance(node, promql.VectorSelector)}
    assert {SERIES[name].tier for name in named if name in SERIES} == set(Tier)


# --- alerts


def test_alerts_say_what_to_do() -> None:
    """Somebody is woken up and does not know why, or what for."""
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert re.fullmatch(r"Kev[A-Za-z]+", rule["alert"]) and rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}
        for used in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert used in SCRAPED


def test_alerts_name_what_exists() -> None:
    """The advice names a setting or a metric of another version."""
    fields = {field.path.removeprefix("kev.") for field in type(load_config(None, env={})).describe()}
    sections = {path.partition(".")[0] for path in fields}
    for rule in rules():
        action = rule["annotations"]["action"]
        assert set(re.findall(r"kev_\w+", action)) <= SERIES.keys() | {m.name for m in METRICS}
        named = {name for name in re.findall(r"\b([a-z]+\.[a-z_]+)\b", action) if name.partition(".")[0] in sections}
        assert named <= fields


def test_kubernetes_has_the_same_alerts() -> None:
    """One of two copies is corrected."""
    (rule,) = documents(DEPLOY / "k8s/components/monitoring/rules.yaml")
    (alerts,) = documents(ALERTS)
    assert rule["spec"] == alerts


# --- the dashboard


def test_the_dashboard_can_be_read() -> None:
    """Panels lie upon each other, show one another's legend, or have no unit."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            aggregated = [node for node in nodes_of(target["expr"]) if isinstance(node, promql.AggregateExpr)]
            kept = set(aggregated[0].modifier.labels) if aggregated and aggregated[0].modifier else set()
            assert shown <= (kept if aggregated else SCRAPED), panel["title"]


def test_grafana_is_told_where_things_are() -> None:
    """Grafana starts empty, or with panels that know no source."""
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/kev.yml")
    (providers,) = documents(DEPLOY / "grafana/provisioning/dashboards/kev.yml")
    services = compose_services()
    for source in sources["datasources"]:
        assert re.match(r"http://(\w+):", source["url"])[1] in services  # type: ignore[index]
    variable = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"][0]
    assert variable["current"]["text"] in {source["name"] for source in sources["datasources"]}
    folder = providers["providers"][0]["options"]["path"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts == {
        "./deploy/grafana/provisioning": "/etc/grafana/provisioning",
        "./deploy/grafana/dashboards": folder,
    }
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/kev.json"


# --- compose


def compose_services() -> Document:
    (compose,) = documents(ROOT / "docker-compose.yml")
    services: Document = compose["services"]
    return services


def helpers() -> Document:
    return {name: s for name, s in compose_services().items() if s.get("profiles") == ["observability"]}


def compose_metrics_port(folder: Path) -> int:
    (folder / "kev.yaml").write_text((DEPLOY / "compose/kev.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    return load_config(folder / "kev.yaml", env={}).observability.metrics_port


def test_prometheus_finds_every_process(tmp_path: Path) -> None:
    """A service is added or a port changed, and nobody is told that it is down."""
    (prometheus,) = documents(DEPLOY / "prometheus/prometheus.yml")
    (job,) = prometheus["scrape_configs"]
    found = {(name, entry["port"]) for entry in job["dns_sd_configs"] for name in entry["names"]}
    port = compose_metrics_port(tmp_path)
    assert found == {(role.value, port) for role in HEALTH_SERVICES} | {(Role.GATEWAY.value, 8765)}
    assert f"/etc/prometheus/{ALERTS.name}" in prometheus["rule_files"]
    service = helpers()["prometheus"]
    assert f"--config.file=/etc/prometheus/{'prometheus.yml'}" in service["command"]
    assert "./deploy/prometheus:/etc/prometheus:ro" in service["volumes"]
    assert "back" in service["networks"], "the nodes are on no other network"


def test_helpers_are_optional_and_locked_down() -> None:
    """Looking at a cluster opens it to the network, or every start of it brings three more containers."""
    assert helpers().keys() == STORE_AND_HELPERS
    for service in helpers().values():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and int(service["user"].split(":")[0]) > 0
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "an image without a version is another one tomorrow"


# --- Kubernetes


@pytest.fixture(scope="module", params=("cpu", "gpu", "tls"))
def monitored(request: pytest.FixtureRequest) -> list[Document]:
    folder = DEPLOY / "k8s/overlays" / str(request.param)
    return render(folder, (DEPLOY / "k8s/components/monitoring",))


def deployments(manifests: list[Document]) -> Iterator[tuple[Role, Document]]:
    for document in manifests:
        if document["kind"] == "Deployment":
            yield Role(document["metadata"]["name"].removeprefix("kev-")), document


def named(manifests: list[Document], kind: str, name: str) -> Document:
    (found,) = (d for d in manifests if (d["kind"], d["metadata"]["name"]) == (kind, name))
    return found


def test_every_pod_tells_its_metrics(monitored: list[Document]) -> None:
    """The monitor asks a port that no container has, or a container opens a port that nobody asks."""
    monitor = named(monitored, "PodMonitor", "kev")["spec"]
    asked = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    roles = set()
    for role, deployment in deployments(monitored):
        (container,) = containers(deployment)
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        template = deployment["spec"]["template"]["metadata"]
        assert monitor["selector"]["matchLabels"].items() <= template["labels"].items()
        (name,) = asked & ports.keys()
        assert template["annotations"] == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": ports[name],
            "prometheus.io/path": "/metrics",
        }
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        if role is not Role.GATEWAY:
            assert env["KEV__OBSERVABILITY__METRICS_PORT"] == ports["metrics"]
        roles.add(role)
    assert roles == {*HEALTH_SERVICES, Role.GATEWAY}


def test_the_network_lets_prometheus_in_and_nobody_else(monitored: list[Document]) -> None:
    """A default-deny namespace answers nothing to Prometheus, or everybody reads the metrics."""
    opened = {}
    for name in ("metrics", "gateway-metrics"):
        spec = named(monitored, "NetworkPolicy", name)["spec"]
        (rule,) = spec["ingress"]
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kev-metrics": "true"}}}]
        assert spec["policyTypes"] == ["Ingress"]
        selector = spec["podSelector"]
        pods = selector.get("matchExpressions", [{"values": list(selector.get("matchLabels", {}).values())}])
        (port,) = (entry["port"] for entry in rule["ports"])
        opened |= {pod: port for expression in pods for pod in expression["values"]}
    assert opened == {"kev-router": 9464, "kev-aggregator": 9464, "kev-inference": 9464, "kev-gateway": 8765}


# --- processes


def test_nothing_is_loaded_for_traces_that_nobody_collects() -> None:
    """Every process pays for OpenTelemetry, or does not start without it."""
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import router_svc.__main__, inference_svc.__main__, aggregator_svc.__main__, kev.gateway.server\n"
        "from common.telemetry import Telemetry\n"
        "Telemetry('router').close()\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr


def test_processes_of_one_machine_have_metrics_ports_of_their_own() -> None:
    """``kev up`` with a metrics port: the second process cannot bind it and ends."""
    surroundings = Surroundings(folder=Path("/tmp/c"), store_binary="valkey-server", python="py", num_cpus=4)
    ports = Ports(store=7000, aggregator=7001, router=7002, gateway=7003, inference=(7010, 7011))

    def own_ports(metrics_port: int) -> dict[str, str | None]:
        config = load_config({"kev": {"observability": {"metrics_port": metrics_port}}}, env={})
        plan = plan_cluster(config, ports, surroundings, no_model=True)
        return {spec.name: spec.env.get("KEV__OBSERVABILITY__METRICS_PORT") for spec in plan.processes}

    given = own_ports(9464)
    assert {name for name, port in given.items() if port is None} == {"store", "gateway"}
    assert sorted(port for port in given.values() if port) == ["9464", "9465", "9466", "9467"]
    assert set(own_ports(0).values()) == {None}


# --- documents


def test_the_table_of_metrics_is_current() -> None:
    """An operator looks for a metric that was renamed. Run ``python -m common.metrics.page``."""
    page = (ROOT / PAGE_PATH).read_text(encoding="utf-8")
    assert page == with_table(page)


def test_documented_variables_switch_tracing_on() -> None:
    """A reader follows the page and no span is ever sent."""
    page = (ROOT / PAGE_PATH).read_text(encoding="utf-8")
    names = set(re.findall(r"`(OTEL_[A-Z_]+)", page))
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in names
    assert wants_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://jaeger:4318"})
