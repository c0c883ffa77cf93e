"""``kev stats``: where it asks, what it shows, and that it goes on while a server is away."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from common.config import Config, load_config
from common.errors import InvalidRequestError, KevError, ServiceUnavailableError
from common.types import (
    BreakerState,
    BucketHeat,
    ChannelSnapshot,
    Diversion,
    EngineStats,
    HeatUnit,
    HotSpot,
    HotSpotKind,
    NodeStats,
    RouterStats,
    Strategy,
)
from kev import cli, stats
from kev.stats import GrpcSource, HttpSource, Picture, follow, open_source
from kev.stats_view import Screen

SPOT = HotSpot(
    kind=HotSpotKind.BUCKET,
    channel_id=1,
    num_questions=60,
    share=0.6,
    remedy="take \x1b[31mround_robin",
    strategy=Strategy.SEMANTIC_HASH,
    hash_bucket=50,
)


def picture(num_channels: int = 3) -> Picture:
    channels = [
        ChannelSnapshot(channel_id=i, num_queued=0, num_total=0, num_diverted=0, breaker_open=False)
        for i in range(num_channels - 1)
    ]
    channels.append(
        ChannelSnapshot(
            channel_id=num_channels - 1,
            num_queued=8,
            num_total=60,
            num_diverted=7,
            breaker_open=True,
            breaker=BreakerState.HALF_OPEN,
            breaker_why=Diversion.QUEUE_LENGTH,
            oldest_ms=12_345,
            num_recent=60,
            num_recent_tokens=900,
        )
    )
    router = RouterStats(
        num_requests=90,
        num_questions=100,
        num_rejected=4,
        num_overflow=5,
        num_removed_chars=0,
        bucket_counts=((50, 60),),
        window_ms=60_000,
        num_recent=100,
        num_recent_tokens=1_200,
        bucket_heat=(BucketHeat(strategy=Strategy.SEMANTIC_HASH, hash_bucket=50, num_questions=60, num_tokens=900),),
        hot_spots=(SPOT,),
        releases_per_s=4.25,
    )
    node = NodeStats(
        node_id="n",
        num_running=3,
        num_waiting=0,
        max_slots=8,
        num_steps=0,
        num_prompt_tokens=0,
        num_completion_tokens=0,
        kv_bytes_used=1,
        kv_bytes_total=4,
        num_prefixes=0,
        alive=True,
    )
    return Picture(channels=channels, stats=EngineStats(router=router, node=node))


class Pictures:
    """Answers in turn with what it was given."""

    def __init__(self, *answers: Picture | KevError) -> None:
        self.answers = list(answers)
        self.closed = False

    async def read(self) -> Picture:
        answer = self.answers.pop(0)
        if isinstance(answer, KevError):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


def drawn(seen: Picture | KevError, *, as_json: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with Screen(console, is_live=False, as_json=as_json) as screen:
        screen.show(seen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_names_what_is_hot_and_what_to_do() -> None:
    """An operator would have to read JSON to see which channel is stuck and why."""
    shown = drawn(picture())
    assert "100 questions in 90 requests, 4 refused | 5 wait for a channel | pace" in shown.replace("\n", " ")
    assert "4.2/s" in shown and "slots 3/8" in shown and "KV 25%" in shown
    assert "half-open: queue length" in shown and "12.3s" in shown
    assert "100 questions in the last 60 s, 1200 tokens" in shown and "60%" in shown and "75%" in shown
    assert "hot spot: hash bucket 50 of semantic_hash (channel 1) has 60%" in " ".join(shown.split())
    assert shown.count("┘") == 2, "a table was cut off"
    assert "\x1b" not in shown, "a server's words must not move the cursor"


def test_the_picture_says_what_fails_and_what_is_long() -> None:
    """An operator would look for a crowd where a few are long, or at a channel whose node has no memory."""
    seen = picture()
    broken = replace(
        seen.channels[2], breaker=BreakerState.OPEN, breaker_why=Diversion.FAILURES, main_failure="OUT_OF_MEMORY"
    )
    long = replace(SPOT, share=0.08, token_share=0.7, hot_by=HeatUnit.TOKENS)
    router = replace(seen.stats.router, hot_spots=(long,))
    shown = drawn(replace(seen, channels=[broken], stats=replace(seen.stats, router=router)))
    assert "open: failures" in shown and "(OUT_OF_MEMORY)" in shown
    assert shown.count("┘") == 2, "a table was cut off"
    assert "has 70% of the latest tokens in 8% of the questions;" in " ".join(shown.split())


def test_of_many_channels_the_fullest_are_shown() -> None:
    """The one channel that matters would have scrolled away."""
    shown = drawn(picture(200))
    assert "199" in shown and "and 168 more, none of them fuller" in shown
    assert len(shown.splitlines()) < 60


def test_json_is_one_line_per_look() -> None:
    """A pipe into a JSON reader would break."""
    told = drawn(picture(), as_json=True)
    assert told.count("\n") == 1
    decoded = json.loads(told)
    assert decoded["channels"][2]["breaker"] == "half_open"
    assert decoded["stats"]["router"]["hot_spots"][0]["hash_bucket"] == 50
    assert json.loads(drawn(ServiceUnavailableError("away"), as_json=True))["error"]["message"] == "away"


async def test_watching_outlives_a_server_that_is_away() -> None:
    """A restart of Kev would end the watch of everybody who wants to see it come back."""
    source = Pictures(picture(), ServiceUnavailableError("away"), picture(4))
    seen: list[Picture | KevError] = []
    task = asyncio.create_task(follow(source, seen.append, 0.001))
    async with asyncio.timeout(10):
        while len(seen) < 3:
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, IndexError)):
        await task
    assert [type(one) for one in seen] == [Picture, ServiceUnavailableError, Picture]
    assert source.closed


async def test_one_look_ends_and_a_first_failure_is_told() -> None:
    """A script would hang, or take an empty picture for an idle Kev."""
    source = Pictures(picture())
    await follow(source, lambda seen: None, None)
    assert source.closed
    away = Pictures(ServiceUnavailableError("away"))
    with pytest.raises(ServiceUnavailableError):
        await follow(away, lambda seen: None, 1.0)
    assert away.closed


def config(**cluster: object) -> Config:
    return load_config({"kev": {"deploy": {"mode": "distributed", "workers": 1}, "cluster": cluster}}, env={})


def test_where_it_asks() -> None:
    """It would look at another Kev than the one that was meant."""
    embedded = load_config({"kev": {"server": {"host": "0.0.0.0", "port": 9000}}}, env={})
    found = open_source("", embedded)
    assert isinstance(found, HttpSource) and found._url == "http://127.0.0.1:9000"
    named = open_source("http://kev.example:80/", config())
    assert isinstance(named, HttpSource) and named._url == "http://kev.example:80"
    for target, address in (("", "router.example:1"), ("10.0.0.1:50051", "10.0.0.1:50051")):
        source = open_source(target, config(router_address="router.example:1"))
        assert isinstance(source, GrpcSource)
        assert source._client._router_settings.target == address  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", ["kev", "ftp://kev", ":50051", "kev/path:1"])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    """A typing error would end in a message of some library."""
    with pytest.raises(InvalidRequestError, match="HOST:PORT"):
        open_source(target, config())


def test_the_command_fails_in_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A traceback would be all an operator gets when nothing runs."""
    file = tmp_path / "kev.yaml"
    file.write_text("kev: {server: {port: 1}}\n")
    assert cli.main(["stats", "--config", str(file)]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "nobody answers at http://127.0.0.1:1" in told.err and "start kev serve" in told.err


def test_the_command_prints_what_it_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The verb would not reach its function."""
    monkeypatch.setattr(stats, "open_source", lambda target, config: Pictures(picture()))
    assert cli.main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["router"]["num_questions"] == 100
