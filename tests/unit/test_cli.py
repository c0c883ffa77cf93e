"""The ``kev`` command over a scripted engine: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from common.clock import ManualClock
from common.errors import ModelError
from common.types import Strategy, StreamEvent, StreamEventType
from kev import cli, demo
from kev.gateway.backend import Backend
from kev.gateway.testing import ScriptedBackend, silent
from kev.live_table import ChannelTable, PlainLines, printable


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    backend = ScriptedBackend()

    async def opened(source: cli.Source, progress: Callable[[str], None], _: object = None) -> Backend:
        progress("a licence line")
        return backend

    monkeypatch.setattr(cli, "open_engine", opened)
    return backend


def fail_to_open(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def opened(source: cli.Source, progress: Callable[[str], None], _: object = None) -> Backend:
        raise error

    monkeypatch.setattr(cli, "open_engine", opened)


def test_ask_prints_each_answer_and_closes_the_engine(
    backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers are missing, mixed up, or the process hangs on an open engine."""
    assert cli.main(["ask", "问题A", "[b]", "--max-tokens", "5", "--temperature", "0.5", "--seed", "7"]) == 0
    output = capsys.readouterr()
    assert "[0] 问题A\nchannel=0 | time=2ms | tokens=2 | stop\n问题A\n" in output.out
    assert "[1] [b]\nchannel=1 | time=2ms | tokens=2 | stop\n[b]\n" in output.out
    assert "loading the model" in output.err and "a licence line" in output.err
    sampling = [question.sampling for question in backend.submitted[0].questions]
    assert [(s.max_tokens, s.temperature, s.seed) for s in sampling] == [(5, 0.5, 7), (5, 0.5, 8)]
    assert backend.closed


def test_ask_takes_the_routing_of_the_request(backend: ScriptedBackend) -> None:
    """The command line could not try a strategy that a program may ask for."""
    assert cli.main(["ask", "a", "--strategy", "round_robin", "--category", "refund"]) == 0
    (spec,) = backend.submitted
    assert (spec.strategy, spec.questions[0].category) == (Strategy.ROUND_ROBIN, "refund")


def test_ask_json_prints_one_object_only(backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe into a JSON reader breaks on progress lines."""
    assert cli.main(["ask", "a\u2028b", "--json"]) == 0
    output = capsys.readouterr().out
    assert json.loads(output.encode("ascii"))["results"][0]["text"] == "a\u2028b"
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask", " "], "queries[0]: must not be blank"),
        (["ask", "a", "\udcff"], "queries[1]: must be whole"),
        (["ask", "a", "--isolation", "none"], "isolation: must be one of strict, loose or shared"),
        (["ask", "a", "--strategy", "none"], "strategy: must be one of semantic_hash, round_robin"),
        (["ask", "a", "--temperature", "nan"], "temperature: must be a finite number"),
        (["ask", "a", "--max-tokens", "0"], "max_tokens: must be an integer from 1"),
        (["config", "check", "--config", "/nowhere/kev.yaml"], "/nowhere/kev.yaml"),
        (["serve", "--config", "/nowhere/kev.yaml"], "/nowhere/kev.yaml"),
    ],
)
def test_a_failure_is_one_sentence(
    backend: ScriptedBackend, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """A user's mistake ends in a traceback, without the way out, or with exit code 0."""
    assert cli.main(arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kev: ") and words in last


@pytest.mark.parametrize("arguments", [["ask"], ["nonsense"], ["serve", "--port", "70000"], ["ask", "a", "--bogus"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts cannot tell wrong usage from a failure."""
    assert cli.main(arguments) == 2
    assert "Usage: kev" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModelError("there is no model at /x; set core.model_path"), "kev: there is no model at /x"),
        (RuntimeError("detail\nmore"), "kev: internal error (RuntimeError); run again with KEV_DEBUG=1"),
        (KeyboardInterrupt(), ""),
    ],
)
def test_a_model_that_fails_to_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    """A missing model or a bug ends in a traceback; an interrupt looks like a failure."""
    fail_to_open(monkeypatch, error)
    assert cli.main(["ask", "a"]) == (1 if words else 130)
    errors = capsys.readouterr().err
    assert words in errors and "Traceback" not in errors


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug cannot be located."""
    fail_to_open(monkeypatch, RuntimeError("detail"))
    monkeypatch.setenv("KEV_DEBUG", "1")
    with pytest.raises(RuntimeError, match="detail"):
        cli.main(["ask", "a"])


def test_an_unanswered_question_is_a_failure(
    backend: ScriptedBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script takes a timeout for an answer."""

    class Cancelling(ScriptedBackend):
        async def submit(self, queries: object, /, **options: object) -> str:
            request_id = await super().submit(queries, **options)
            await self.cancel(request_id)
            return request_id

    async def opened(source: cli.Source, progress: Callable[[str], None], _: object = None) -> Backend:
        return Cancelling(lambda text: [text] if text == "a" else silent(text))

    monkeypatch.setattr(cli, "open_engine", opened)
    assert cli.main(["ask", "a", "b"]) == 1
    assert "kev: 1 of 2 questions were not answered; question 1 ended with cancelled" in capsys.readouterr().err


def test_demo_prints_every_audit_field(backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo shows answers without the proof that channels are isolated."""
    assert cli.main(["demo"]) == 0
    output = capsys.readouterr().out
    for question in demo.QUESTIONS:
        assert question in output
    for name in ("channel", "slot", "hash_bucket", "strategy", "attempt", "node"):
        assert f"{name}=" in output
    for name in ("prompt_tokens", "tokens", "queued_ms", "first_token_ms", "elapsed_ms", "finish_reason"):
        assert f"{name}=" in output
    assert output.count("isolation=strict verdict=bitwise mask_digest=" + "00" * 32) == 4
    assert "4 channels, 8 tokens in 2 ms" in output


def test_config_check_and_show(tmp_path: Path) -> None:
    """The configuration in force cannot be seen, or a questionable one is not pointed out."""
    path = tmp_path / "kev.yaml"
    path.write_text("kev:\n  router:\n    max_parallel_queries: 8\n    channel_pool_size: 4\n")
    checked = CliRunner().invoke(cli.app, ["config", "check", "--config", str(path)])
    assert checked.exit_code == 0
    assert "warning: router.channel_pool_size 4" in checked.output and "is valid, with 1 warning" in checked.output
    shown = CliRunner().invoke(cli.app, ["config", "show", "--config", str(path)])
    assert "channel_pool_size: 4" in shown.output
    path.write_text(shown.output)
    assert CliRunner().invoke(cli.app, ["config", "show", "--config", str(path)]).output == shown.output


def test_version_names_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A bug report cannot say which versions were used."""
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("kev ")


def test_help_loads_neither_torch_nor_the_server() -> None:
    """``kev --help`` takes seconds."""
    code = (
        "import sys; from kev import cli; assert cli.main(['--help']) == 0; "
        "assert not {'torch', 'transformers', 'uvicorn', 'starlette', 'pydantic', 'grpc'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in ("serve", "ask", "demo", "config", "version"):
        assert verb in done.stdout


async def events_of(backend: ScriptedBackend, *questions: str) -> list[StreamEvent]:
    request_id = await backend.submit(list(questions))
    return [event async for event in backend.stream(request_id)]


async def test_the_live_table_has_a_row_per_channel() -> None:
    """A row shows another channel's text, or markup of a question is obeyed."""
    clock = ManualClock()
    console = Console(width=160, force_terminal=False, record=True)
    table = ChannelTable(("[red]q0[/red]", "q1"), console, clock)
    events = await events_of(ScriptedBackend(), "zero", "one")
    for event in events[:2]:
        table.apply(event)
    clock.advance(1.5)
    console.print(table.render())
    running = console.export_text()
    assert "[red]q0[/red]" in running and "running" in running and "queued" in running and "1500" in running
    for event in events[2:]:
        table.apply(event)
    console.print(table.render(whole=True))
    rows = [line for line in console.export_text().splitlines() if "stop" in line]
    assert ["zero" in rows[0], "one" in rows[1], len(rows)] == [True, True, 2]


async def test_a_new_attempt_replaces_the_text() -> None:
    """After a redelivery the row shows the text twice."""
    table = ChannelTable(("q",), Console(width=100), ManualClock())
    for kind, text in ((StreamEventType.DELTA, "ab"), (StreamEventType.ATTEMPT_CHANGED, "xy")):
        table.apply(StreamEvent(type=kind, request_id="r", event_index=0, question_index=0, channel_id=0, text=text))
    console = Console(width=100, record=True)
    console.print(table.render())
    assert "xy" in (shown := console.export_text()) and "ab" not in shown


async def test_plain_lines_obey_no_terminal_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer recolours, clears or retitles the reader's terminal."""
    view = PlainLines(("q",), Console())
    for event in await events_of(ScriptedBackend(), "\x1b[31mred\x9b\x07"):
        view.apply(event)
    output = capsys.readouterr().out
    assert "red" in output and not {"\x1b", "\x9b", "\x07"} & set(output)
    assert printable("a\r\nb\tc\ud83d") == "a\nb\tc\ufffd"
