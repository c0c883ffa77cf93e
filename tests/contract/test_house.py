"""The rules of the house: errors, imports, generated code, and what may be written into a file."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from http import HTTPStatus
from pathlib import Path

import grpc
import pytest

from common.errors import ConfigError, InvariantError, KevError, ModelError, all_errors

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ERRORS = [error for error in all_errors() if error.__module__ == "common.errors"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


# --- errors ---


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_error_maps_to_a_real_grpc_code_and_http_status(error: type[KevError]) -> None:
    """A misspelt code would turn a caller's mistake into a crash of the servicer."""
    assert error.grpc_code in grpc.StatusCode.__members__
    assert HTTPStatus(error.http_status) >= HTTPStatus.BAD_REQUEST
    assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", error.reason)


def test_each_reason_belongs_to_one_error() -> None:
    """Clients branch on the reason alone; two errors with one reason could not be told apart."""
    reasons = [error.reason for error in ERRORS if error is not InvariantError]  # the base's own, under its proper name
    assert sorted(reasons) == sorted(set(reasons))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_codes_agree_about_whose_fault_it_was(error: type[KevError]) -> None:
    """INVALID_ARGUMENT beside a 500 would make one surface blame the caller and another one blame Kev."""
    callers = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNAUTHENTICATED", "PERMISSION_DENIED"}
    assert (error.grpc_code in callers) <= (400 <= error.http_status < 500)
    if error.retryable:
        assert error.grpc_code in {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
        assert error.http_status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


def test_errors_tell_what_they_are_as_data() -> None:
    """Results carry errors as data; a lost reason would reach the caller as INTERNAL_BUG."""
    assert ModelError("no such model").info.reason == "MODEL_UNAVAILABLE"
    assert ConfigError("kev.router.stratgy").info.message == "kev.router.stratgy"


# --- imports ---

LOADED = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name.removesuffix(".*"))
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".") if name.endswith(".*") else ():
        edges = ("common.grpc_", "common.redis_", "common.service_process")
        if not found.name.endswith((".servicer", ".__main__")) and not found.name.startswith(edges):
            importlib.import_module(found.name)
print(*sorted({"torch", "transformers", "grpc", "redis"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "names", ["kev kev.v1.types_pb2", "kev.cli", "kev.gateway.*", "router_svc.*", "aggregator_svc.*", "common.*"]
)
def test_light_processes_stay_light(names: str) -> None:
    """A router or aggregator that loads torch needs a gigabyte and ten seconds more to start; so does `kev --help`."""
    done = run(sys.executable, "-c", LOADED, *names.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_import_contracts_hold() -> None:
    """Services that import each other cannot run as separate processes."""
    done = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


# --- generated code ---


def test_generated_code_is_current() -> None:
    """An edited proto without `make proto` would leave the old messages in every process."""
    done = run(sys.executable, "protos/generate.py", "--check")
    assert done.returncode == 0, done.stderr


def test_generated_code_was_made_by_the_oldest_supported_protobuf() -> None:
    """Generated code refuses to be imported on a runtime older than its compiler."""
    gencode = re.search(r"Protobuf Python Version: (\S+)", (ROOT / "kev/v1/types_pb2.py").read_text(encoding="utf-8"))
    stubs = re.search(r"GRPC_GENERATED_VERSION = '(\d+\.\d+)", (ROOT / "kev/v1/router_service_pb2_grpc.py").read_text())
    assert gencode is not None
    assert stubs is not None
    assert any(line.startswith(f"protobuf>={gencode[1]},<") for line in PYPROJECT["project"]["dependencies"])
    assert f"grpcio>={stubs[1]}" in PYPROJECT["project"]["dependencies"]


# --- files ---


def project_files() -> list[Path]:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_file_names_a_machine_or_a_package_index() -> None:
    """A path or an index of one machine breaks the install on every other."""
    machine = r"/(?:work|root|home|opt|Users)/\w"
    index = r"(?:pypi|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian)\.(?:org|com)"
    pattern = re.compile(f"{machine}|{index}")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in project_files()
        if path != Path(__file__)
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_extras_are_there_and_pinned() -> None:
    """`make` installs by these names, with exact versions; a missing pin makes tomorrow's install another one."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert extras.keys() >= {"demo", "test", "dev", "bench"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(line.split("==")[0]): line for line in lines if line and not line.startswith("#")}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned.values())
    wanted = [*PYPROJECT["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = {canonical(re.split(r"[<>=!~;\[ ]", line)[0]) for line in wanted}
    assert names - pinned.keys() == set()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
