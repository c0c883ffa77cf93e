"""The deployment files agree with the code, with each other and with the schemas of what reads them."""

from __future__ import annotations

import argparse
import copy
import functools
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import kubernetes_validate
import pytest

from common import health_check
from common.config import Config, load_config
from common.config_sections import DeployMode
from common.redis_keys import WORK, RedisKeys
from kev.up.commands import HEALTH_SERVICES, STORE_OPTIONS, Role, commands
from tests.contract.kustomize import Document, containers, load_documents, render
from tests.e2e import deploy_commands

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
K8S = DEPLOY / "k8s"
OVERLAYS = ("cpu", "gpu", "tls")
COMPONENTS = ("tls", "keda", "external-redis", "monitoring")
SCHEMA_VERSIONS = ("1.29", "1.34")
CONFIG_PATH = "/etc/kev/kev.yaml"
ARGV = {role: list(argv) for role, argv in commands(CONFIG_PATH).items()}
PORTS = {Role.ROUTER: 50051, Role.AGGREGATOR: 50052, Role.INFERENCE: 50053, Role.GATEWAY: 8765, Role.STORE: 6379}
CUSTOM_RESOURCES = {"ScaledObject", "PodMonitor", "PrometheusRule"}
DNS = {("UDP", 53), ("TCP", 53)}


def test_no_file_gives_a_key_twice() -> None:
    """The last of two wins in silence, and the first is what a reader believes."""
    files = [ROOT / "docker-compose.yml", *DEPLOY.rglob("*.yaml")]
    assert len(files) > 15
    for path in files:
        load_documents(path.read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="given twice: a"):
        load_documents("a: 1\nb: 2\na: 3\n")


def test_ports_are_the_configuration_s() -> None:
    """A default changes and the deployment files keep the old one."""
    config = load_config(None, env={})
    cluster = config.cluster
    assert PORTS[Role.ROUTER] == cluster.router_port and PORTS[Role.AGGREGATOR] == cluster.aggregator_port
    assert PORTS[Role.INFERENCE] == cluster.inference_port and PORTS[Role.GATEWAY] == config.server.port


def check_config(text: str, folder: Path, hosts: Mapping[Role, str]) -> Config:
    """A kev.yaml for a cluster whose services have these names."""
    (folder / "kev.yaml").write_text(text, encoding="utf-8")
    config = load_config(folder / "kev.yaml", env={})
    assert config.deploy.mode is DeployMode.DISTRIBUTED
    assert config.server.host == config.cluster.bind_host == "0.0.0.0"
    assert config.cluster.redis_url == f"redis://{hosts[Role.STORE]}:6379/0"
    for role, address in (
        (Role.ROUTER, config.cluster.router_address),
        (Role.AGGREGATOR, config.cluster.aggregator_address),
    ):
        assert address == f"{hosts[role]}:{PORTS[role]}"
    return config


def check_overrides(names: set[str]) -> None:
    """A misspelt variable stops every process."""
    overrides = {name: {field.env: field for field in Config.describe()}.get(name) for name in names}
    assert [name for name, field in overrides.items() if name.startswith("KEV__") and field is None] == []


def check_probe_command(command: list[str], role: Role) -> None:
    """A health check that the program understands and that asks this process."""
    assert command[:3] == ["python", "-m", "common.health_check"]
    given = health_check.argument_parser().parse_args(command[3:])
    if role is Role.GATEWAY:
        assert given.target == "http://127.0.0.1:8765/ready"
        return
    assert given.target == f"127.0.0.1:{PORTS[role]}"
    assert given.service in (HEALTH_SERVICES[role], "")


# --- Kubernetes


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Document]:
    return render(K8S / "overlays" / str(request.param))


@pytest.fixture(scope="module")
def everything() -> list[Document]:
    """The tls overlay with the components that no overlay has."""
    return render(K8S / "overlays/tls", (K8S / "components/keda", K8S / "components/external-redis"))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def named(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = (document for document in of_kind(documents, kind) if document["metadata"]["name"] == name)
    return found


def role_of(document: Document) -> Role:
    return Role(document["metadata"]["name"].removeprefix("kev-"))


def workloads(documents: list[Document]) -> Iterator[tuple[Role, Document, Document]]:
    """Each workload as role, pod template and container."""
    for document in of_kind(documents, "Deployment", "StatefulSet"):
        (container,) = containers(document)
        yield role_of(document), document["spec"]["template"], container


@pytest.fixture(scope="module")
def schemas() -> Iterator[None]:
    """The schemas, which the library would read anew for every document: megabytes each time."""
    library = kubernetes_validate.utils
    with pytest.MonkeyPatch.context() as patch:
        for name in ("schema_contents", "all_versions"):
            patch.setattr(library, name, functools.cache(getattr(library, name)))
        yield


def check_schema(documents: list[Document], version: str) -> None:
    for document in documents:
        if document["kind"] not in CUSTOM_RESOURCES:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", SCHEMA_VERSIONS)
def test_manifests_fit_the_schema(schemas: None, manifests: list[Document], version: str) -> None:
    """A field is misspelt or at the wrong place; the cluster refuses it, or ignores it."""
    check_schema(manifests, version)


@pytest.mark.parametrize("version", SCHEMA_VERSIONS)
def test_optional_components_fit_the_schema(schemas: None, everything: list[Document], version: str) -> None:
    """No overlay has them, so the test above does not see a misspelt field in one of them."""
    check_schema(everything, version)


def test_a_field_that_no_schema_has_is_noticed(schemas: None, everything: list[Document]) -> None:
    """The checks above would let it pass."""
    deployment = copy.deepcopy(named(everything, "Deployment", "kev-router"))
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        check_schema([deployment], SCHEMA_VERSIONS[-1])


def test_names_are_unique(manifests: list[Document]) -> None:
    """One of two objects replaces the other."""
    names = [(document["kind"], document["metadata"]["name"]) for document in manifests]
    assert len(set(names)) == len(names)
    assert {document["metadata"].get("namespace", "kev") for document in manifests} == {"kev"}


def test_every_service_is_there(manifests: list[Document]) -> None:
    """A tier is missing from an overlay."""
    assert {role for role, _, _ in workloads(manifests)} == set(Role)


def test_commands_are_those_of_the_processes(manifests: list[Document]) -> None:
    """A container starts something that no test has ever started."""
    for role, _, container in workloads(manifests):
        command = container["command"]
        if role is Role.STORE:
            check_store(command)
        else:
            assert command == ARGV[role] and "args" not in container


def check_store(command: list[str]) -> None:
    """Durable as ``kev up`` is."""
    options = list(STORE_OPTIONS)
    assert command[0] == "valkey-server"
    assert any(command[start : start + len(options)] == options for start in range(len(command)))
    assert "--maxmemory" in command, "noeviction needs a limit below the container's"


def test_selectors_match(manifests: list[Document], everything: list[Document]) -> None:
    """A Service, budget or autoscaler points at nothing."""
    for documents in (manifests, everything):
        pods = [template["metadata"]["labels"] for _, template, _ in workloads(documents)]
        for document in of_kind(documents, "Deployment", "StatefulSet", "Service", "PodDisruptionBudget"):
            selector = document["spec"]["selector"]
            labels = selector.get("matchLabels", selector)
            hit = [pod for pod in pods if labels.items() <= pod.items()]
            assert hit == [{**hit[0], "app.kubernetes.io/name": document["metadata"]["name"]}], document["metadata"]
        for document in of_kind(documents, "HorizontalPodAutoscaler", "ScaledObject"):
            named(documents, "Deployment", document["spec"]["scaleTargetRef"]["name"])
        for _, template, _ in workloads(documents):
            for spread in template["spec"].get("topologySpreadConstraints", ()):
                assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_ports_exist(manifests: list[Document]) -> None:
    """A probe or a Service asks a port that nobody listens on."""
    for role, _, container in workloads(manifests):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert list(ports.values()) == [PORTS[role]]
        (exposed,) = named(manifests, "Service", f"kev-{role}")["spec"]["ports"]
        assert exposed["port"] == PORTS[role] and exposed["targetPort"] in ports
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            for handler in ("grpc", "httpGet", "tcpSocket"):
                if handler in probe:
                    port = probe[handler]["port"]
                    assert ports.get(port, port) == PORTS[role]


def asked(probe: Document, role: Role) -> str:
    """The gRPC service or HTTP path that a probe asks for."""
    if "grpc" in probe:
        return str(probe["grpc"].get("service", ""))
    if "httpGet" in probe:
        return str(probe["httpGet"]["path"])
    check_probe_command(probe["exec"]["command"], role)
    return str(health_check.argument_parser().parse_args(probe["exec"]["command"][3:]).service)


def test_only_readiness_depends_on_others(manifests: list[Document]) -> None:
    """Redis is away for a minute, and every pod is restarted for it."""
    for role, _, container in workloads(manifests):
        if role is Role.STORE:
            continue
        alive, ready = ("/health", "/ready") if role is Role.GATEWAY else ("", HEALTH_SERVICES[role])
        assert asked(container["livenessProbe"], role) == asked(container["startupProbe"], role) == alive
        assert asked(container["readinessProbe"], role) == ready


def test_a_drain_is_waited_for(manifests: list[Document], tmp_path: Path) -> None:
    """The kubelet kills a pod that is still finishing its questions."""
    config = kubernetes_config(manifests, tmp_path)
    for role, template, container in workloads(manifests):
        if role is not Role.STORE:
            pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
            grace_s = template["spec"]["terminationGracePeriodSeconds"]
            assert grace_s >= pause_s + config.cluster.drain_grace_s + 10


def kubernetes_config(documents: list[Document], folder: Path) -> Config:
    text = named(documents, "ConfigMap", "kev-config")["data"]["kev.yaml"]
    return check_config(text, folder, {role: f"kev-{role}" for role in Role})


def test_configuration_loads(manifests: list[Document], tmp_path: Path) -> None:
    """Services look for each other under names that do not exist."""
    kubernetes_config(manifests, tmp_path)
    for _, _, container in workloads(manifests):
        check_overrides({entry["name"] for entry in container.get("env", ())})


def test_what_is_mounted_exists(manifests: list[Document], everything: list[Document]) -> None:
    """A pod waits for a volume for ever, or a file is looked for where nothing is mounted."""
    secrets = {
        "kev-tls": {"tls.crt", "tls.key", "ca.crt"},
        "kev-api-keys": {"api-keys.yaml"},
        "kev-service-key": {"key"},
    }
    for documents in (manifests, everything):
        maps = {document["metadata"]["name"]: set(document["data"]) for document in of_kind(documents, "ConfigMap")}
        for role, template, container in workloads(documents):
            volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", ())}
            files = set()
            for mount in container["volumeMounts"]:
                volume = volumes.get(mount["name"], {"emptyDir": {}} if role is Role.STORE else {})
                inside = maps[volume["configMap"]["name"]] if "configMap" in volume else set()
                inside = secrets[volume["secret"]["secretName"]] if "secret" in volume else inside
                files |= {f"{mount['mountPath']}/{name}" for name in inside}
                assert volume.keys() & {"emptyDir", "configMap", "secret"}
            named_files = {entry.get("value", "") for entry in container.get("env", ())} | set(container["command"])
            assert {name for name in named_files if name.startswith("/etc/")} <= files


def test_pods_are_restricted(manifests: list[Document]) -> None:
    """A namespace with the restricted standard refuses the pod, or a break-in finds root and a writable system."""
    assert manifests[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for _, template, container in workloads(manifests):
        pod, inside = template["spec"]["securityContext"], container["securityContext"]
        assert (
            pod["runAsNonRoot"] is True and pod["runAsUser"] > 0 and pod["seccompProfile"]["type"] == "RuntimeDefault"
        )
        assert inside["allowPrivilegeEscalation"] is False and inside["capabilities"] == {"drop": ["ALL"]}
        assert inside["readOnlyRootFilesystem"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_grpc_services_are_headless(manifests: list[Document]) -> None:
    """A client's one connection goes to one pod for ever, and new pods get nothing."""
    for role in (Role.ROUTER, Role.AGGREGATOR, Role.INFERENCE):
        assert named(manifests, "Service", f"kev-{role}")["spec"]["clusterIP"] == "None"
    assert "clusterIP" not in named(manifests, "Service", "kev-gateway")["spec"]


def test_a_service_survives_the_loss_of_a_pod(manifests: list[Document]) -> None:
    """A node that is drained takes a whole tier with it, or can never be drained."""
    for role in (Role.ROUTER, Role.AGGREGATOR, Role.INFERENCE, Role.GATEWAY):
        deployment = named(manifests, "Deployment", f"kev-{role}")["spec"]
        budget = named(manifests, "PodDisruptionBudget", f"kev-{role}")["spec"]
        assert budget.get("maxUnavailable") == 1 or budget["minAvailable"] < deployment["replicas"]
        assert deployment["replicas"] >= 2
        assert deployment.get("strategy", {}).get("type", "RollingUpdate") == "RollingUpdate"
        assert {spread["topologyKey"] for spread in deployment["template"]["spec"]["topologySpreadConstraints"]} == {
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        }


def pods_of(selector: Document) -> set[str]:
    """The names that a pod selector picks; ``*`` is every pod."""
    if "matchExpressions" in selector:
        return {name for expression in selector["matchExpressions"] for name in expression["values"]}
    labels = selector.get("matchLabels", {})
    return {labels.get("app.kubernetes.io/name", "*" if not labels else "client")}


def edges(documents: list[Document], direction: str) -> set[tuple[str, str, int]]:
    """Who may talk to whom on which port, by the rules of one direction (``ingress`` or ``egress``)."""
    found: set[tuple[str, str, int]] = set()
    for document in of_kind(documents, "NetworkPolicy"):
        spec = document["spec"]
        for rule in spec.get(direction, ()):
            for peer in rule["from" if direction == "ingress" else "to"]:
                others = pods_of(peer["podSelector"]) if "podSelector" in peer else {"outside"}
                for port in rule["ports"]:
                    pairs = ((mine, other) for mine in pods_of(spec["podSelector"]) for other in others)
                    if (port["protocol"], port["port"]) not in DNS:
                        found |= {
                            (other, mine, port["port"]) if direction == "ingress" else (mine, other, port["port"])
                            for mine, other in pairs
                        }
    return found


def test_the_network_has_the_needed_edges_only(manifests: list[Document]) -> None:
    """A tier cannot reach the next, or a break-in into the gateway reaches the store."""
    to_store = {(f"kev-{role}", "kev-store", 6379) for role in (Role.ROUTER, Role.AGGREGATOR, Role.INFERENCE)}
    services = (Role.ROUTER, Role.AGGREGATOR, Role.INFERENCE)
    from_gateway = {("kev-gateway", f"kev-{role}", PORTS[role]) for role in services}
    inside = {("kev-router", "kev-aggregator", PORTS[Role.AGGREGATOR])}
    from_clients = {("client", f"kev-{role}", PORTS[role]) for role in services}
    from_outside = {("outside", "kev-gateway", PORTS[Role.GATEWAY])}
    assert edges(manifests, "egress") == to_store | from_gateway | inside
    assert edges(manifests, "ingress") == to_store | from_gateway | inside | from_clients | from_outside
    deny = named(manifests, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_backlog_is_that_of_every_channel(everything: list[Document], tmp_path: Path) -> None:
    """Questions on a channel without a trigger never bring a new node."""
    text = named(everything, "ConfigMap", "kev-config")["data"]["kev.yaml"]
    (tmp_path / "kev.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "kev.yaml", env={})
    spec = named(everything, "ScaledObject", "kev-inference")["spec"]
    keys = RedisKeys(config.cluster.name)
    streams = [trigger["metadata"]["stream"] for trigger in spec["triggers"]]
    assert streams == [keys.name(WORK, channel) for channel in range(config.router.channel_pool_size)]
    modifiers = spec["advanced"]["scalingModifiers"]
    assert modifiers["formula"].split(" + ") == [trigger["name"] for trigger in spec["triggers"]]
    assert modifiers["target"] == str(config.router.max_parallel_queries)
    scaled = {document["spec"]["scaleTargetRef"]["name"] for document in of_kind(everything, "HorizontalPodAutoscaler")}
    assert scaled == {"kev-router", "kev-gateway"}, "two autoscalers would pull at one Deployment"


def test_a_store_of_one_s_own_replaces_ours(everything: list[Document]) -> None:
    """Services start with the address of a store that is not there."""
    assert not [document for document in everything if document["metadata"]["name"] in ("kev-store", "to-store")]
    for role, _, container in workloads(everything):
        references = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry]
        expected = {"name": "kev-redis", "key": "url", "optional": False}
        assert references == ([] if role is Role.GATEWAY else [expected])


def test_gpu_nodes_get_a_gpu() -> None:
    """The model runs on the CPU of an expensive machine."""
    gpu = named(render(K8S / "overlays/gpu"), "Deployment", "kev-inference")["spec"]["template"]["spec"]
    (container,) = gpu["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "KEV__CORE__DEVICE", "value": "cuda"} in container["env"]
    assert container["image"].startswith("kev-cuda:")


# --- compose


@pytest.fixture(scope="module")
def compose() -> Document:
    """Kev's own services and the store; test_monitoring.py looks at the others."""
    (document,) = load_documents((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    services = document["services"]
    own = {name: service for name, service in services.items() if service.get("profiles") != ["observability"]}
    return {**document, "services": own}


@pytest.fixture(scope="module")
def secure() -> Document:
    (document,) = load_documents((DEPLOY / "compose/secure.yaml").read_text(encoding="utf-8"))
    return document


def compose_role(name: str) -> Role:
    return Role(name.removesuffix("-gpu"))


def test_compose_starts_the_processes(compose: Document) -> None:
    """A container starts something that no test has ever started."""
    assert {compose_role(name) for name in compose["services"]} == set(Role)
    for name, service in compose["services"].items():
        if name == "store":
            check_store(service["command"])
        else:
            assert service["command"] == ARGV[compose_role(name)]


def test_compose_configuration_loads(compose: Document, secure: Document, tmp_path: Path) -> None:
    """Services look for each other under names that do not exist."""
    path = re.sub(r"\$\{\w+:-(.*)\}", r"\1", compose["configs"]["kev"]["file"])
    config = check_config((ROOT / path).read_text(encoding="utf-8"), tmp_path, {role: role.value for role in Role})
    for services in (compose["services"], secure["services"]):
        for service in services.values():
            check_overrides(set(service.get("environment", ())))
    for name, service in compose["services"].items():
        if name != "store":
            assert service["configs"] == [{"source": "kev", "target": CONFIG_PATH}]
            assert seconds(service["stop_grace_period"]) >= config.cluster.drain_grace_s + 10


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_compose_waits_for_health(compose: Document, secure: Document) -> None:
    """A service starts before the store takes commands, or is healthy without being asked."""
    waits = {name: set(service.get("depends_on", ())) for name, service in compose["services"].items()}
    services = {"aggregator", "inference", "inference-gpu", "router"}
    assert waits == {"store": set(), "gateway": {"router", "aggregator"}, **{name: {"store"} for name in services}}
    for name, service in compose["services"].items():
        assert all(entry == {"condition": "service_healthy"} for entry in service.get("depends_on", {}).values())
        test = service["healthcheck"]["test"]
        if name == "store":
            assert test == ["CMD", "valkey-cli", "-e", "ping"], "without -e, an error is a success"
            continue
        check_probe_command(test[1:], compose_role(name))
        if "healthcheck" in secure["services"][name]:
            command = secure["services"][name]["healthcheck"]["test"][1:]
            check_probe_command(command, compose_role(name))
            given = health_check.argument_parser().parse_args(command[3:])
            assert given.service and given.server_name == compose_role(name).value


def test_compose_is_locked_down(compose: Document) -> None:
    """A cluster for trying things out is open to the network, or one runaway process takes the machine."""
    assert compose["networks"]["back"] == {"internal": True}
    for name, service in compose["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and int(service["user"].split(":")[0]) > 0
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        is_inside = name == "store" or name.startswith("inference")
        assert ("front" in service["networks"]) is not is_inside
        assert ("ports" in service) is not is_inside, "a published port forbids --scale"


def test_compose_secrets_come_from_files(secure: Document) -> None:
    """A key stands in the environment, where every process and `docker inspect` shows it."""
    for name, service in secure["services"].items():
        given = set(service["secrets"])
        assert given <= secure["secrets"].keys()
        used = {value.removeprefix("/run/secrets/") for value in service["environment"].values()}
        assert used == given, name
    assert all(entry.keys() == {"file"} for entry in secure["secrets"].values())


# --- images


class Stage:
    """One stage of the Dockerfile with what it inherits."""

    def __init__(self, base: Stage | None) -> None:
        self.instructions: list[tuple[str, str]] = list(base.instructions) if base else []

    def last(self, instruction: str) -> str:
        return [rest for name, rest in self.instructions if name == instruction][-1]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    """By name; a stage may only build on, or copy from, one above it."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, lines)):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            assert base in found or base in ("${PYTHON}", "${MODEL}"), base
            current = found[alias] = Stage(found.get(base))
        elif current is not None:
            current.instructions.append((name, rest))
            if copied := re.match(r"--from=(\S+)", rest):
                assert copied[1] in found, line
    return found


def words_of(text: str) -> list[str]:
    (document,) = load_documents(text)  # JSON is YAML
    assert isinstance(document, list), "only the exec form passes signals on"
    return document


@pytest.mark.parametrize(
    ("target", "role"), [("services", Role.GATEWAY), ("cpu", Role.INFERENCE), ("cuda", Role.INFERENCE)]
)
def test_images_run_a_process_as_nobody(stages: dict[str, Stage], target: str, role: Role) -> None:
    """An image runs as root, is always healthy, or swallows SIGTERM in a shell."""
    stage = stages[target]
    assert stage.last("USER") == "10001:10001"
    assert words_of(stage.last("CMD")) == ARGV[role]
    check = stage.last("HEALTHCHECK")
    check_probe_command(words_of(check[check.index("CMD ") + 4 :]), role)
    assert str(PORTS[role]) in stage.last("EXPOSE")


def test_images_are_small(stages: dict[str, Stage]) -> None:
    """A compiler, pip's cache or torch is carried into images that have no use for it."""
    for target in ("services", "cpu"):
        runs = [rest for name, rest in stages[target].instructions if name == "RUN"]
        assert not any("apt-get" in rest or "pip" in rest for rest in runs)
    assert ("COPY", "--from=packages-services /venv /venv") in stages["services"].instructions
    services = " ".join(rest for name, rest in stages["packages-services"].instructions if name == "RUN")
    assert "torch'" in services and not re.search(r"install [^&]*\btorch\b", services)
    assert any("PIP_NO_CACHE_DIR=1" in rest for name, rest in stages["dependencies"].instructions if name == "ENV")


def test_the_light_image_lacks_torch_only(stages: dict[str, Stage]) -> None:
    """A package of the same first letters is left out, or one that needs torch is kept."""
    run = next(rest for name, rest in stages["dependencies"].instructions if name == "RUN" and "light.txt" in rest)
    program = shlex.split(run.split(" > ")[0])
    done = subprocess.run(["python3", *program[1:]], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    left_out = set(declared) - set(done.stdout.split("\n"))
    assert {re.split(r"[<>=]", line)[0] for line in left_out} == {"torch", "transformers", "safetensors"}


def test_images_have_every_package() -> None:
    """A new package works everywhere but in a container."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.rstrip("*") for name in pyproject["tool"]["setuptools"]["packages"]["find"]["include"]}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and packages <= let_in
    assert {"pyproject.toml", "setup.py", "constraints.txt", pyproject["project"]["readme"], "LICENSE"} <= let_in


# --- documented commands: what the reader of the documentation would let pass


@pytest.mark.parametrize(
    "command",
    [
        "kev up --node 3",
        "docker run kev",
        "docker build -f deploy/Dockerfile --target gpu -t kev-cuda:1 .",
        "docker build -f deploy/Dockerfile --target cuda -t kev-gpu:1 .",
        "docker compose up --scale node=3",
        "docker compose --profile cuda up",
        "docker compose -f compose.yml up",
        "docker compose restart router",
        "kubectl apply -k deploy/k8s/overlays/metal",
        "kubectl -n kev rollout status deployment/router",
        "kubectl -n kev create secret generic kev-keys --from-file=key",
        "kubectl delete namespace kev",
    ],
)
def test_wrong_documented_commands_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A page shows a command that does not work."""
    with pytest.raises((AssertionError, argparse.ArgumentError, SystemExit, OSError)):
        deploy_commands.check(shlex.split(command))


def test_a_documented_kustomization_names_what_is_there() -> None:
    """A reader's overlay is refused."""
    with pytest.raises(AssertionError, match="components/prometheus"):
        deploy_commands.check_kustomization("resources: [../cpu]\ncomponents: [../../components/prometheus]\n")
