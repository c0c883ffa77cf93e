"""What a start may skip because an earlier one has shown it, and what it must never believe."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from common.clock import ManualClock, SystemClock
from common.errors import IsolationUnavailableError
from inference_svc import node as node_module
from inference_svc.model_loader import LoadedModel
from inference_svc.node import Node, NodeSettings
from inference_svc.probe import Bench, ProbeReport, probe_isolation
from inference_svc.probe_cache import ProbeCache
from tests.integration.test_node import leaky_model
from tests.integration.tiny_models import NATIVE_FORMS, model_as

FACTS = {"cpu": "a", "threads": "2"}


def _node(model: LoadedModel, folder: Path | None, *, fresh: bool = False, slots: int = 3, now: float = 0.0) -> Node:
    settings = NodeSettings(
        node_id="n", max_slots=slots, prefill_rows=32, segment_tokens=16, probe_dir=folder, fresh_probe=fresh
    )
    clock = ManualClock()
    clock.advance(now)
    return Node(model, settings, clock)


@pytest.fixture
def whole_probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts whole probes."""
    calls: list[int] = []

    def counted(bench: Bench) -> ProbeReport:
        calls.append(1)
        return probe_isolation(bench)

    monkeypatch.setattr(node_module, "probe_isolation", counted)
    return calls


def test_a_second_start_runs_the_short_probe(tmp_path: Path, whole_probes: list[int]) -> None:
    """Same promise, with the time at which it was shown; other shapes are shown anew, and so is a fresh probe."""
    model = model_as("llama", NATIVE_FORMS[1])
    first = _node(model, tmp_path, now=50.0)
    assert first.report.probe_cached_at is None
    second = _node(model, tmp_path, now=90.0)
    assert second.report.probe_cached_at == first.scheduler._clock.time()
    assert second.report.levels == first.report.levels and len(whole_probes) == 1
    assert _node(model, tmp_path, slots=4).report.probe_cached_at is None
    assert _node(model, tmp_path, fresh=True, now=200.0).report.probe_cached_at is None
    assert len(whole_probes) == 3
    again = _node(model, tmp_path).report.probe_cached_at
    assert again is not None and again > second.report.probe_cached_at, "a fresh probe is kept anew"
    _node(model, None)
    assert len(whole_probes) == 4, "without a folder nothing is believed"


def test_a_failed_probe_is_not_kept(tmp_path: Path) -> None:
    """Rows that see each other are refused at every start."""
    for _ in range(2):
        with pytest.raises(IsolationUnavailableError):
            _node(leaky_model(10.0), tmp_path)
        assert not list(tmp_path.iterdir())


def test_a_short_probe_that_fails_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was shown once does not hold any more: no promise at this start, whatever a whole probe then says."""
    model = model_as("llama", NATIVE_FORMS[1])
    _node(model, tmp_path)
    monkeypatch.setattr(node_module, "recheck_isolation", lambda _bench: False)
    with pytest.raises(IsolationUnavailableError, match="content of other rows"):
        _node(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        json.dumps({"version": 1, "facts": FACTS, "passed": 1, "passed_at": 5}).encode(),
        json.dumps({"version": 1, "facts": FACTS, "passed": True, "passed_at": "now"}).encode(),
        json.dumps({"version": 1, "facts": FACTS | {"cpu": "b"}, "passed": True, "passed_at": 5}).encode(),
        json.dumps({"version": 2, "facts": FACTS, "passed": True, "passed_at": 5}).encode(),
    ],
)
def test_a_file_that_is_not_its_own_is_ignored(damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log, no error, no belief."""
    kept = ProbeCache(tmp_path, FACTS)
    kept.keep(7.0)
    (file,) = tmp_path.iterdir()
    assert kept.passed_at() == 7.0
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING, logger="kev.probe"):
        assert kept.passed_at() is None
    assert len(caplog.records) == 1


def test_outcomes_of_other_facts_are_not_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every fact is part of the key; where nothing can be written, nothing is kept."""
    ProbeCache(tmp_path, FACTS).keep(7.0)
    for name in FACTS:
        assert ProbeCache(tmp_path, FACTS | {name: "x"}).passed_at() is None
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="kev.probe"):
        ProbeCache(tmp_path / "file" / "below", FACTS).keep(7.0)
    assert len(caplog.records) == 1


def test_outcomes_are_kept_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last used ones stay; what was used long ago goes when something is kept."""
    monkeypatch.setattr("inference_svc.probe_cache._MOST_FILES", 3)
    now = SystemClock().time()
    caches = [ProbeCache(tmp_path, FACTS | {"number": str(number)}) for number in range(5)]
    for number, cache in enumerate(caches[:4]):
        cache.keep(7.0)
        os.utime(cache._path, (0, now - 1_000 + number))
    assert caches[0].passed_at() is None, "the fourth made it go"
    assert caches[1].passed_at() == 7.0, "which counts as use"
    os.utime(caches[3]._path, (0, now - 31 * 86_400))
    caches[4].keep(7.0)
    assert [cache.passed_at() is not None for cache in caches] == [False, True, True, False, True]
