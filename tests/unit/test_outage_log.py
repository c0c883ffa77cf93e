"""A store that is away must be seen in the log, and must not fill it."""

from __future__ import annotations

import logging

import pytest

from common.outage_log import OutageLog

LOG = logging.getLogger("test.outage")


class Hours:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hours() -> Hours:
    return Hours()


@pytest.fixture
def outage(hours: Hours) -> OutageLog:
    return OutageLog(LOG, interval_s=10.0, now_s=hours)


def test_a_long_outage_takes_few_lines(outage: OutageLog, hours: Hours, caplog: pytest.LogCaptureFixture) -> None:
    """Two lines a second from every process bury what else went wrong."""
    for tenth in range(301):
        hours.now_s = tenth / 10
        outage.failed("the store is full")
    assert caplog.messages == [
        "the store is full",
        *["the store is full (99 more times since the last such line)"] * 3,
    ]
    outage.failed("the store is full")
    outage.worked()
    outage.worked()
    assert caplog.messages[4:] == ["works again after 302 failures: the store is full"]


def test_another_failure_is_told_at_once(outage: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    """The cause that counts may come second."""
    for message in ("away", "away", "refused", "away"):
        outage.failed(message)
    assert caplog.messages == ["away", "refused (1 more times since the last such line)", "away"]


def test_single_failures_are_told_each(outage: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    """Hiccups that pass are seen, and make one line each."""
    outage.worked()
    for _ in range(3):
        outage.failed("away")
        outage.worked()
    assert caplog.messages == ["away"] * 3
