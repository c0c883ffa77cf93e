"""Documentation that is true: every block of README and docs is executed or validated, and every table is the code's.

The commands run verbatim; only the model is a tiny one (by environment variable) and the port is a free one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import kev
from common.config import load_config
from common.errors import InvariantError, all_errors
from common.types import AggregateMode, FinishReason, IsolationLevel, KVCacheMode, Question, Result, Strategy
from tests.e2e.documents import ROOT, Block, broken_links, read_blocks
from tests.e2e.reader import Reader, commands, parse_curl, run_example
from tests.e2e.server import ServerProcess
from tests.e2e.shapes import json_difference, text_difference
from tests.e2e.tiny_model import save_tiny_model

READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
PAGES = tuple(sorted((ROOT / "docs").glob("*.md")))
EXAMPLES = ROOT / "examples"
SERVE = ("serve", "--config", "kev.yaml", "--port", "8765")


pytestmark = pytest.mark.timeout(240)


def name_of(path: Path) -> str:
    return path.name


@pytest.fixture(scope="module", autouse=True)
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever a document or example configures, the model is the tiny one, on one thread."""
    folder = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEV__CORE__MODEL_PATH", str(folder))
        patch.setenv("KEV__CORE__NUM_THREADS", "1")
        patch.setenv("KEV__CORE__KEEP_PACKED", "false")
        yield


def first_config(path: Path) -> str:
    return next(block.text for block in read_blocks(path) if block.language == "yaml")


class Servers:
    """One ``kev serve`` per command line and configuration, shared by the documents that start the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[tuple[str, ...], ServerProcess] = {}

    def start(self, arguments: Sequence[str], config: str) -> ServerProcess:
        """Start without waiting, so that loading takes place beside other work."""
        key = (*arguments, config)
        if key not in self._running:
            folder = self._folder / f"server-{len(self._running)}"
            folder.mkdir()
            (folder / "kev.yaml").write_text(config, encoding="utf-8")
            self._running[key] = ServerProcess(arguments, folder, "kev")
        return self._running[key]

    def serve(self, arguments: Sequence[str]) -> ServerProcess:
        """What a reader types; returns when it answers."""
        server = self.start(arguments, Path("kev.yaml").read_text(encoding="utf-8"))
        server.wait_ready()
        return server

    def stop(self) -> None:
        """SIGTERM to all; each must leave in order."""
        for server in self._running.values():
            server.begin_stop()
        ends = [(server.stop(), server.log) for server in self._running.values()]
        assert all(code == 0 for code, _ in ends), ends


@pytest.fixture(scope="module", autouse=True)
def servers(tiny_model: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    for path in (READMES[0], ROOT / "docs/http.md"):
        servers.start(SERVE, first_config(path))
    yield servers
    servers.stop()


@pytest.fixture
def reader(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(servers.serve)


@pytest.mark.parametrize("path", (READMES[0], *PAGES), ids=name_of)
def test_every_block_does_what_it_says(path: Path, reader: Reader) -> None:
    """A newcomer copies a block, and it fails, hangs or shows something else."""
    blocks = read_blocks(path)
    generated = ("configuration.md", "scale.md")  # checked against their source elsewhere
    assert blocks or path.name in generated, "a page without a single block says little"
    reader.read(blocks)


def test_the_readmes_have_the_same_blocks() -> None:
    """One language's commands are executed above, the other's rot."""
    english, chinese = ([(block.language, block.text) for block in read_blocks(path)] for path in READMES)
    assert english == chinese


@pytest.mark.parametrize("path", (*READMES, *PAGES), ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """A page points at a file that was moved, renamed or never written."""
    assert broken_links(path) == []


# --- examples


def test_the_minimal_example_prints_every_channel() -> None:
    """The first program a newcomer runs fails."""
    assert (
        len(re.findall(r"^channel=\d+ \| time=\d+ms \| tokens=\d+$", run_example(EXAMPLES / "minimal.py"), re.M)) == 4
    )


def test_the_streaming_example_ends_every_question() -> None:
    """Pieces of a channel do not add up to its text (the example asserts that), or a question never ends."""
    output = run_example(EXAMPLES / "streaming.py")
    assert sorted(re.findall(r"^\[(\d)\] ended: (?:stop|length)$", output, re.M)) == ["0", "1", "2"]
    assert output.endswith("request complete\n")


def test_the_batch_example_answers_hundreds_of_questions() -> None:
    """A long list times out, is refused, or leaves channels idle."""
    output = run_example(EXAMPLES / "batch_eval.py")
    assert re.search(r"^300 of 300 answered, \d+ right\n16 channels, \d+ forwards, \d+ tokens\n\Z", output, re.M)


def test_the_http_example_works_against_a_server(servers: Servers) -> None:
    """Plain, streaming, background or refused: one of the four forms is not as the example reads it."""
    server = servers.start(SERVE, first_config(ROOT / "docs/http.md"))
    server.wait_ready()
    output = run_example(EXAMPLES / "http_client.py", [f"http://127.0.0.1:{server.port}"])
    assert re.findall(r"^--- (\w+)$", output, re.M) == ["plain", "streaming", "background", "refused"]
    assert "is complete" in output and "400 queries[1]: must not be blank" in output


def test_every_example_is_executed() -> None:
    """A new example is added and never run."""
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {"minimal.py", "streaming.py", "http_client.py", "batch_eval.py"}
    assert load_config(EXAMPLES / "kev.yaml", env={}).warnings() == ()


# --- tables


def table(path: Path, first_header: str) -> list[list[str]]:
    """The cells of the rows of the table whose first column has this header."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    assert any(line.startswith(f"| {first_header} |") for line in lines), f"{path.name} has no table {first_header}"
    next(lines)
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("path", READMES, ids=("en", "zh"))
def test_the_error_table_is_the_code(path: Path) -> None:
    """A client is written against a status or a reason that Kev does not send."""
    shown = {names_in(row[0])[0]: int(row[1]) for row in table(path, "reason")}
    real = {error.reason: error.http_status for error in all_errors() if error.__module__ == InvariantError.__module__}
    assert shown == real


@pytest.mark.parametrize(("path", "header"), ((READMES[0], "field"), (READMES[1], "字段")), ids=("en", "zh"))
def test_the_tables_of_fields_are_the_code(path: Path, header: str) -> None:
    """A field is documented that does not exist, or one exists that nobody can know of."""
    text = path.read_text(encoding="utf-8")
    first = text.index(f"| {header} |")
    second = text.index(f"| {header} |", first + 1)
    parameters, audit = (
        [name for cell in re.findall(r"^\| ((?:`\w+`[、, ]*)+) \|", part, re.M) for name in names_in(cell)]
        for part in (text[first:second], text[second:])
    )
    assert parameters == [field.name for field in fields(Question)][1:]
    assert set(audit) == {field.name for field in fields(Result)}


@pytest.mark.parametrize("path", READMES, ids=("en", "zh"))
def test_every_word_a_user_may_choose_is_explained(path: Path) -> None:
    """A level, mode, strategy or finish reason is added and the page does not know it."""
    text = path.read_text(encoding="utf-8")
    words = [*IsolationLevel, *KVCacheMode, *FinishReason]
    assert [word for word in words if f"`{word}`" not in text] == []
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [word for word in (*Strategy, *AggregateMode) if f"`{word}`" not in pages] == []


def test_public_errors_are_exported() -> None:
    """README says that every error is a subclass of kev.KevError; a caller must be able to name it."""
    raised = {error.__name__ for error in all_errors() if error.__module__ == InvariantError.__module__}
    only_data = {"InvariantError", "OutOfMemoryError", "NonFiniteLogitsError", "IsolationViolationError"}
    assert raised - set(kev.__all__) == only_data, "they come in results, nobody catches them"


# --- the reader itself: what it would let pass, nothing would catch


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("toml", "a = 1\n"),
        ("", "kev ask\n"),
        ("bash", "rm -rf /\n"),
        ("bash", "kev config chek\n"),
        ("bash", "kev config show | head\n"),
        ("bash", "make no-such-target\n"),
        ("bash", "curl http://localhost:8765/health\n"),
        ("bash", "kev ask 'never closed\n"),
        ("python", "raise ValueError\n"),
        ("yaml", "kev:\n  router:\n    stratgy: round_robin\n"),
        ("json", '{"queries": ["a"], "temprature": 1}\n'),
        ("text", "output of nothing\n"),
    ],
)
def test_the_reader_refuses_what_it_cannot_check(reader: Reader, language: str, text: str) -> None:
    """A broken block counts as read."""
    with pytest.raises(AssertionError, match=r"page\.md:7"):
        reader.read([Block("page.md", 7, language, text)])


@pytest.mark.parametrize("option", ["-s", "--fail", "-o"])
def test_an_unknown_curl_option_is_refused(option: str) -> None:
    """A documented option is dropped, so the real command would do something else."""
    with pytest.raises(AssertionError, match="unknown options"):
        parse_curl([option, "http://localhost:8765/health"])


def test_commands_go_on_over_lines() -> None:
    """Half a command is run, or two as one."""
    text = "kev ask a \\\n  --seed 1  # comment\n\ncurl -d '{\n}' x\n"
    assert list(commands(text)) == [["kev", "ask", "a", "--seed", "1"], ["curl", "-d", "{\n}", "x"]]


@pytest.mark.parametrize(
    ("shown", "real", "equal"),
    [
        ({"a": 1, "b": [{"c": "x"}]}, {"a": 2.5, "b": [{"c": "y"}, {"c": "z"}]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"error": {"reason": "A"}}, {"error": {"reason": "B"}}, False),
        ({"a": None}, {"a": 3}, True),
    ],
)
def test_json_is_compared_by_structure(shown: object, real: object, equal: bool) -> None:
    """A field is renamed and the document still passes."""
    assert (json_difference(shown, real) is None) is equal


@pytest.mark.parametrize(
    ("shown", "equal"),
    [
        ("channel=7 text=y\nend\n", True),
        ("end\nchannel=7 text=y\n", False),
        ("channel=7 txt=y\n", False),
        ('data: {"type":"done","n":3}\n', True),
        ('data: {"type":"result","n":3}\n', False),
        ('data: {"type":"done","m":3}\n', False),
    ],
)
def test_text_is_compared_by_shape(shown: str, equal: bool) -> None:
    """Output is renamed or reordered and the document still passes."""
    real = 'channel=1 text=x\nmore\nend\ndata: {"type":"done","n":1}\n'
    assert (text_difference(shown, real) is None) is equal


def test_a_fence_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    """Everything after it would be skipped."""
    page = tmp_path / "page.md"
    page.write_text("```bash\nkev version\n", encoding="utf-8")
    with pytest.raises(ValueError, match="never closed"):
        read_blocks(page)
