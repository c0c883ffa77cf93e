"""The ``kev`` command.

Invariants and semantics: every verb calls one function. A failure is one sentence on standard error and exit code 1
(2 for wrong usage, 130 for an interrupt); ``KEV_DEBUG=1`` adds the traceback. Standard output carries answers only.
``kev --help`` loads no torch: the engine is imported when a verb needs it.

Not here: what the verbs do (``kev.gateway``, ``kev.demo``, ``kev.engine``).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import io
import os
import platform
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import KevError

if TYPE_CHECKING:
    from common.telemetry import Telemetry
    from common.types import Result
    from kev.gateway.backend import Backend
    from kev.live_table import View

Source = Path | dict[str, object] | None

app = typer.Typer(
    name="kev",
    help="Answers many independent questions in one forward pass, each in its own isolated channel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Show or check the configuration.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="kev.yaml; without it, the defaults.")]


async def open_engine(source: Source, progress: Callable[[str], None], telemetry: Telemetry | None = None) -> Backend:
    """What answers under a configuration: an engine in this process, or a deployment's services.

    Loads without holding the loop. Tests put a fake in this place.
    """
    import kev
    from common.config import load_config

    config = load_config(source)
    if config.deploy.mode == "distributed":
        from kev.client import client_of

        return client_of(config)
    return await asyncio.to_thread(kev.AsyncEngine.from_config, source, progress=progress, telemetry=telemetry)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets a mark instead
            stream.reconfigure(errors="replace")
    try:
        app(arguments, prog_name="kev")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        return 130
    except KevError as error:
        return _fail(str(error), error)
    except Exception as error:
        return _fail(f"internal error ({type(error).__name__}); run again with KEV_DEBUG=1 to see where", error)
    return 0


def _fail(sentence: str, error: BaseException) -> int:
    if os.environ.get("KEV_DEBUG") == "1":
        raise error
    _say(sentence)
    return 1


def _say(sentence: str) -> None:
    from kev.live_table import printable

    print(f"kev: {printable(sentence)}", file=sys.stderr, flush=True)


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of server.host.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port, instead of server.port.")] = None,
) -> None:
    """Serve HTTP until SIGTERM; then finish what is open and exit."""
    from common.config import load_config
    from common.json_logs import configure_logs
    from common.metrics.catalogue import Tier
    from common.telemetry import Telemetry
    from kev.gateway.server import Lifecycle
    from kev.gateway.server import serve as run_server
    from kev.gateway.settings import GatewaySettings

    loaded = load_config(config)
    configure_logs(loaded.debug.log_level, loaded.observability.log_format)
    for warning in loaded.warnings():
        _say(f"warning: {warning}")
    lifecycle = Lifecycle(
        on_listening=lambda url: _say(f"listening on {url}; loading the model {loaded.core.model_path}"),
        on_ready=lambda: _say("ready; stop with Ctrl-C or SIGTERM"),
        on_draining=lambda: _say("finishing what is open; a second signal ends it at once"),
    )
    embedded = () if loaded.deploy.mode == "distributed" else (Tier.ROUTER, Tier.INFERENCE, Tier.AGGREGATOR)
    telemetry = Telemetry("gateway", Tier.GATEWAY, *embedded)
    asyncio.run(
        run_server(
            lambda: open_engine(config, _say, telemetry),
            loaded.server.host if host is None else host,
            loaded.server.port if port is None else port,
            GatewaySettings(max_body_bytes=loaded.server.max_body_bytes),
            lifecycle,
            telemetry,
        )
    )
    telemetry.close()


@app.command()
def ask(
    questions: Annotated[list[str], typer.Argument(help="The questions; each gets its own channel.")],
    config: ConfigOption = None,
    isolation: Annotated[str | None, typer.Option(help="strict, loose or shared.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How channels are picked; else router.strategy.")] = None,
    category: Annotated[str | None, typer.Option(help="Of all the questions (strategy prebucket).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of each answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the request; each channel's is this + its index.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Answer questions side by side."""
    routing = {"isolation": isolation, "strategy": strategy, "category": category}
    given = {**routing, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}
    asyncio.run(_ask(config, tuple(questions), options, as_json=as_json))


async def _ask(source: Source, questions: tuple[str, ...], options: Mapping[str, object], *, as_json: bool) -> None:
    from kev.gateway.encoding import encode_view

    async with _engine(source) as engine:
        request_id = await engine.submit(list(questions), **options)
        if as_json:
            await engine.wait(request_id)
        else:
            with _view(questions) as view:
                async for event in engine.stream(request_id):
                    view.apply(event)
        answered = await engine.poll(request_id)
        if as_json:
            print((await encode_view(answered)).decode("ascii"))
    _require_answers(answered.results)


def _require_answers(results: Sequence[Result]) -> None:
    from common.types import FinishReason

    missing = [result for result in results if result.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)]
    if missing:
        first = missing[0]
        why = f": {first.error.message}" if first.error else ""
        _say(
            f"{len(missing)} of {len(results)} questions were not answered; "
            f"question {first.question_index} ended with {first.finish_reason}{why}"
        )
        raise typer.Exit(1)


def _view(questions: tuple[str, ...]) -> View:
    from rich.console import Console

    from common.clock import SystemClock
    from kev.live_table import ChannelTable, PlainLines

    console = Console()
    return ChannelTable(questions, console, SystemClock()) if console.is_terminal else PlainLines(questions, console)


@contextlib.asynccontextmanager
async def _engine(source: Source) -> AsyncIterator[Backend]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        _say("loading the model")
    with console.status("loading the model"):  # shows nothing unless on a terminal
        engine = await open_engine(source, lambda line: console.print(line, markup=False, highlight=False))
    try:
        yield engine
    finally:
        await engine.close()


@app.command()
def up(
    config: ConfigOption = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Inference nodes.")] = 2,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="HTTP port; 0 picks a free one.")] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Keep configuration, data and logs here.")] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Nodes answer from a script, without a model.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill a random node every ten seconds or so.")] = False,
) -> None:
    """Run a whole cluster on this machine: store, router, inference nodes, aggregator and HTTP."""
    from rich.console import Console

    from kev.up.run import UpOptions, run_up

    options = UpOptions(config=config, num_nodes=nodes, port=port, folder=folder, no_model=no_model, chaos=chaos)
    raise typer.Exit(run_up(options, Console(stderr=True)))


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 64,
) -> None:
    """Answer four questions on the demo model and print every channel with its audit fields."""
    asyncio.run(_demo(max_tokens))


async def _demo(max_tokens: int) -> None:
    from kev.demo import run_demo

    async with _engine({"kev": {"core": {"model_path": "demo"}}}) as engine:
        answered = await run_demo(engine, sys.stdout, max_tokens)
    if not answered:
        _say("not every question was answered; the reasons are printed above")
        raise typer.Exit(1)


@app.command()
def plan(
    config: ConfigOption = None,
    memory: Annotated[str, typer.Option(help="Memory to fill, such as 24GiB; without it, this machine's.")] = "",
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a channel; else core.max_context.")] = None,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Of these, common to all channels.")] = 0,
    channels: Annotated[int | None, typer.Option(min=1, help="Else router.max_parallel_queries.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="A model by its sizes: layers.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="A model by its sizes: width.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="A model by its sizes: attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="A model by its sizes: KV heads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the memory bill: weights, KV per channel and level, and how many channels fit."""
    import json

    from rich.console import Console

    from common.config import load_config
    from kev.models import resolve_model
    from kev.plan import PlanOptions, as_data, make_plan, print_plan

    loaded = load_config(config)
    options = PlanOptions(
        memory=memory,
        tokens=tokens,
        prefix_tokens=prefix_tokens,
        channels=channels,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
    )
    by_sizes = layers is not None or hidden is not None
    model = None if by_sizes else resolve_model(loaded.core.model_path, loaded.core.cache_dir or None, _say).path
    made = make_plan(loaded, options, model)
    if as_json:
        print(json.dumps(as_data(made), indent=2))
    else:
        print_plan(made, Console())


@app.command()
def stats(
    target: Annotated[str, typer.Argument(help="http://HOST:PORT, or HOST:PORT of a router; else as configured.")] = "",
    config: ConfigOption = None,
    watch: Annotated[float | None, typer.Option(min=0.1, help="Look again every so many seconds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per look.")] = False,
) -> None:
    """Show channels, queues, breakers and hot buckets of a running Kev."""
    from rich.console import Console

    from common.config import load_config
    from kev.stats import follow, open_source
    from kev.stats_view import Screen

    with Screen(Console(), is_live=watch is not None, as_json=as_json) as screen:
        asyncio.run(follow(open_source(target, load_config(config)), screen.show, watch))


@app.command()
def route(
    question: Annotated[str, typer.Argument(help="The question, as a caller writes it.")],
    category: Annotated[str, typer.Option(help="Category of the question (strategy prebucket).")] = "",
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain where every strategy would send a question; loads no weights."""
    import json

    from common.config import load_config
    from kev.models import resolve_model
    from kev.route import as_data, find_routes, lines

    loaded = load_config(config)
    model = resolve_model(loaded.core.model_path, loaded.core.cache_dir or None, _say).path
    found = find_routes(loaded, model, question, category, _say)
    print(json.dumps(as_data(found), indent=2, ensure_ascii=False) if as_json else "\n".join(lines(found)))


@app.command()
def verify(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove on this machine that a question gets the same bits alone and in company; exit code 1 if not."""
    import json

    from common.config import load_config
    from kev.verify import as_data, lines
    from kev.verify import verify as run_verify

    found = run_verify(load_config(config), _say)
    print(json.dumps(as_data(found), indent=2) if as_json else "\n".join(lines(found)))
    if not found.passed:
        raise typer.Exit(1)


@config_app.command("show")
def config_show(config: ConfigOption = None) -> None:
    """Print the whole configuration as YAML, defaults and KEV__... variables included."""
    from common.config import load_config

    print(load_config(config).to_yaml(), end="")


@config_app.command("check")
def config_check(config: ConfigOption = None) -> None:
    """Check the configuration and print what is probably not meant."""
    from common.config import load_config

    warnings = load_config(config).warnings()
    for warning in warnings:
        print(f"warning: {warning}")
    origin = "the default configuration" if config is None else str(config)
    print(f"{origin} is valid" + (f", with {len(warnings)} warning(s)" if warnings else ""))


@app.command()
def version() -> None:
    """Print the versions of Kev and of what it runs on."""
    print(f"kev {_installed('kev')}")
    print(f"python {platform.python_version()}, torch {_installed('torch')}, transformers {_installed('transformers')}")


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
