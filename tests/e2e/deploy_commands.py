"""Structural checks of documented ``docker``, ``kubectl`` and ``kev up`` commands, for which nothing is started.

A command is right when every file, service, profile, overlay and object that it names exists. What is not known here is
an error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from kev import cli
from kev.up import run
from tests.contract.kustomize import render
from tests.e2e.documents import ROOT

_COMPOSE_VERBS = {"up": {"--build", "--detach"}, "down": {"--volumes"}, "ps": set(), "logs": {"--follow"}}
_SECRETS = {"kev-tls", "kev-api-keys", "kev-service-key", "kev-redis"}
_OVERLAYS = ROOT / "deploy/k8s/overlays"


def check(words: Sequence[str]) -> None:
    """Look at one command.

    Raises:
        AssertionError: it names something that is not there, or nobody knows how to check it.
    """
    match list(words):
        case ["kev", *arguments]:
            _check_up(arguments)
        case ["docker", "build", *arguments]:
            _check_build(arguments)
        case ["docker", "compose", *arguments]:
            _check_compose(arguments)
        case ["kubectl", *arguments]:
            _check_kubectl(arguments)
        case other:
            raise AssertionError(f"nobody checks {other}")


def _check_up(arguments: Sequence[str]) -> None:
    """Options that ``kev up`` takes."""
    started: list[run.UpOptions] = []

    def run_up(options: run.UpOptions, console: Console) -> int:
        started.append(options)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_up", run_up)
        assert cli.main(list(arguments)) == 0
    assert len(started) == 1


def _check_build(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("docker build", allow_abbrev=False, exit_on_error=False)
    for option in ("-f", "--target", "-t"):
        parser.add_argument(option, required=True)
    parser.add_argument("context")
    given = parser.parse_args(arguments)
    text = (ROOT / given.f).read_text(encoding="utf-8")
    assert re.search(rf"^FROM \S+ AS {re.escape(given.target)}$", text, re.M), f"no target {given.target}"
    images = {image["newName"] for file in _OVERLAYS.glob("*/kustomization.yaml") for image in _images(file)}
    assert given.t.partition(":")[0] in images and given.context == "."


def _images(path: Path) -> list[dict[str, str]]:
    return list(yaml.safe_load(path.read_text(encoding="utf-8")).get("images", ()))


def _check_compose(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("docker compose", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-f", dest="files", action="append", default=[])
    parser.add_argument("--profile", dest="profiles", action="append", default=[])
    parser.add_argument("verb", choices=list(_COMPOSE_VERBS))
    given, rest = parser.parse_known_args(arguments)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert all((ROOT / file).is_file() for file in given.files)
    assert set(given.profiles) <= {name for service in services.values() for name in service.get("profiles", ())}
    words = iter(rest)
    for word in words:
        if word == "--scale":
            word = next(words).partition("=")[0]
        assert word in services or word in _COMPOSE_VERBS[given.verb], f"docker compose {given.verb} {word}"


def _check_kubectl(arguments: Sequence[str]) -> None:
    """``kubectl`` with overlays and objects that exist."""
    match list(arguments):
        case ["apply", "-k", folder]:
            assert render(ROOT / folder)
        case ["-n", "kev", "get", "pods"]:
            pass
        case ["-n", "kev", "rollout", "status", target]:
            kind, _, name = target.partition("/")
            objects = {(item["kind"].lower(), item["metadata"]["name"]) for item in render(_OVERLAYS / "cpu")}
            assert (kind, name) in objects, target
        case ["-n", "kev", "create", "secret", "generic", name, *sources]:
            assert name in _SECRETS and sources
            assert all(re.match(r"--from-(?:file|literal)=\S", source) for source in sources)
        case other:
            raise AssertionError(f"nobody checks kubectl {other}")


def check_kustomization(text: str) -> None:
    """A kustomization as it would stand in a folder beside the overlays."""
    described = yaml.safe_load(text)
    assert described.keys() <= {"apiVersion", "kind", "resources", "components"}
    for name in (*described["resources"], *described.get("components", ())):
        assert (_OVERLAYS / "mine" / name / "kustomization.yaml").resolve().is_file(), name
