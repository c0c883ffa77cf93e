"""A reader of the documentation: types every command, runs every program, looks at every answer shown.

Python blocks of a document share their names, as in a notebook. A YAML block becomes ``kev.yaml`` in the working
directory. A ``json`` or ``text`` block after a command or program with output shows that output; any other ``json``
block is a request body. Whatever the reader does not know how to check is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

import kev
from bench.traffic.__main__ import main as simulate_traffic
from common.config import load_config
from common.request import RequestRules, parse_request
from kev import cli
from tests.e2e import deploy_commands
from tests.e2e.documents import ROOT, Block
from tests.e2e.server import ServerProcess
from tests.e2e.shapes import json_difference, text_difference

ServeCommand = Callable[[Sequence[str]], ServerProcess]
"""From the arguments of ``kev`` to a running server."""

_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


class Reader:
    """Reads one document in its own working directory (the current one)."""

    def __init__(self, serve: ServeCommand) -> None:
        self._serve = serve
        self._server: ServerProcess | None = None
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._output = ""
        self._http_status = 0

    def read(self, blocks: Sequence[Block]) -> None:
        """Do what the blocks say, in order.

        Raises:
            AssertionError: a block does not do what it says, or nobody knows how to check it.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_engines)
            for index, block in enumerate(blocks):
                before = blocks[index - 1].language if index else ""
                after = blocks[index + 1] if index + 1 < len(blocks) else None
                try:
                    self._check(block, before, after)
                except Exception as error:
                    raise AssertionError(f"{block}: {error!r}") from error

    def _check(self, block: Block, before: str, after: Block | None) -> None:
        match block.language:
            case "python":
                self._run_python(block)
            case "bash":
                self._run_commands(block.text, refused=after is not None and _shows_error(after))
            case "yaml" if "\nkind: Kustomization\n" in block.text:
                deploy_commands.check_kustomization(block.text)
            case "yaml":
                Path("kev.yaml").write_text(block.text, encoding="utf-8")
                load_config("kev.yaml", env={})
            case "json" if before in ("bash", "python") and self._output:
                difference = json_difference(json.loads(block.text), json.loads(self._output))
                assert difference is None, difference
            case "json":
                _check_body(json.loads(block.text))
            case "text" if before in ("bash", "python"):
                difference = text_difference(block.text, self._output)
                assert difference is None, f"{difference}:\n{self._output}"
            case other:
                raise AssertionError(f"nobody checks blocks of language {other!r} after {before!r}")

    def _run_python(self, block: Block) -> None:
        text = block.text if self._server is None else self._server.local(block.text)
        padded = "\n" * block.line + text  # so that a traceback names the document's line
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(padded, block.document, "exec"), self._names)
        self._output = out.getvalue()

    def _close_engines(self) -> None:
        for value in self._names.values():
            if isinstance(value, kev.Engine):
                value.close()

    # ---- commands

    def _run_commands(self, text: str, *, refused: bool) -> None:
        outputs: list[str] = []
        self._http_status = 0
        for words in commands(text):
            with pytest.MonkeyPatch.context() as patch:
                while _ASSIGNMENT.match(words[0]):
                    name, _, value = words.pop(0).partition("=")
                    patch.setenv(name, value)
                outputs.append(self._run(words))
        assert (self._http_status >= 400) is refused, f"HTTP {self._http_status}: {outputs}"
        self._output = "".join(outputs)

    def _run(self, words: list[str]) -> str:
        match words:
            case ["kev", "serve", *_]:
                self._server = self._serve(words[1:])
                return ""
            case ["kev", "up", *_] | ["docker" | "kubectl", *_]:
                deploy_commands.check(words)
                return ""
            case ["kev", *arguments]:
                return _kev([self._local(word) for word in arguments])
            case ["curl", *arguments]:
                assert self._server is not None, "curl without kev serve before it"
                return self._curl(arguments, self._server)
            case ["make", target]:
                return _make(target)
            case ["source", path]:
                venv = re.search(r"^VENV := (\S+)$", _MAKEFILE, re.MULTILINE)
                assert venv is not None and path == f"{venv[1]}/bin/activate"
                return ""
            case ["python", script, *arguments] if script.startswith("examples/"):
                return run_example(ROOT / script, [self._local(word) for word in arguments])
            case ["python", "-m", "bench.traffic", *arguments]:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    assert simulate_traffic(arguments) == 0
                return out.getvalue()
            case ["head" | "tail", "-n", _, _]:
                return subprocess.run(words, capture_output=True, text=True, check=True).stdout
        raise AssertionError(f"nobody runs the command {words}")

    def _local(self, word: str) -> str:
        return word if self._server is None else self._server.local(word)

    def _curl(self, arguments: Sequence[str], server: ServerProcess) -> str:
        request = parse_curl(arguments)
        url = server.local(request.url)
        assert url != request.url, f"{request.url} is not the address of the server in this document"
        headers = dict(header.split(": ", 1) for header in request.headers)
        if request.data is not None:
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")  # curl does so
        method = request.method or ("GET" if request.data is None else "POST")
        content = None if request.data is None else request.data.encode()
        with httpx.Client(timeout=30) as client:
            response = client.request(method, url, content=content, headers=headers)
        self._http_status = response.status_code
        return response.text


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words; a command may go on over several lines.

    Raises:
        AssertionError: a quote is never closed.
    """
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote goes on in the next line
            pending += "\n"
            continue
        pending = ""
        if words:
            assert not {"|", ">", "&&", ";", "&"} & set(words), f"only plain commands are checked: {words}"
            yield words
    assert not pending.strip(), f"the command does not end: {pending!r}"


def parse_curl(arguments: Sequence[str]) -> argparse.Namespace:
    """The few options of curl that the documents use; any other one is an error."""
    parser = argparse.ArgumentParser("curl", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("url")
    parsed, unknown = parser.parse_known_args(arguments)
    assert not unknown, f"unknown options of curl: {unknown}"
    return parsed


def run_example(script: Path, arguments: Sequence[str] = ()) -> str:
    """Run a program of ``examples/`` as ``python script arguments`` would; returns its standard output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def _kev(arguments: Sequence[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main(list(arguments))
    assert code == 0, f"kev {shlex.join(arguments)} ended with {code}: {errors.getvalue()}"
    return out.getvalue()


def _make(target: str) -> str:
    """Look at what a target would do; a target that is one ``kev`` command is carried out."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{re.escape(target)}:.*## ", _MAKEFILE, re.MULTILINE), f"make help does not show {target}"
    last = shlex.split(done.stdout.strip().splitlines()[-1])
    return _kev(last[1:]) if last[0].endswith("/kev") and last[1:] != ["serve"] else ""


def _shows_error(block: Block) -> bool:
    return block.language == "json" and '"error": {' in block.text


def _check_body(body: Mapping[str, object]) -> None:
    options = {key: value for key, value in body.items() if key not in ("queries", "stream", "background")}
    rules = RequestRules.from_config(load_config(None, env={}), vocab_size=1000)
    parse_request(body["queries"], options, rules)
