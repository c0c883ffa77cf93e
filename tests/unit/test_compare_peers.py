"""The protocol of ``bench.compare`` with a peer: its lines, and its process, here a few lines of Python."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare.peer_process import PeerProcess
from bench.compare.wire import (
    Answer,
    Answered,
    Ask,
    Failed,
    Loaded,
    LoadOrder,
    Message,
    RunOrder,
    WireError,
    decode,
    encode,
)

# --- wire ---

TEXT = st.text(max_size=20)
IDS = st.lists(st.integers(0, 300_000), max_size=5).map(tuple)
SECONDS = st.floats(0, 1e6)
ASKS = st.builds(Ask, ids=IDS, text=TEXT, max_tokens=st.integers(1, 99))
ANSWERS = st.builds(
    Answer, output=TEXT, num_tokens=st.integers(0, 99), first_token_s=st.none() | SECONDS, finished_s=SECONDS
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(RunOrder, asks=st.lists(ASKS, max_size=3).map(tuple), system_prompt=TEXT, reuse_prefix=st.booleans()),
    st.builds(Answered, answers=st.lists(ANSWERS, max_size=3).map(tuple), total_s=SECONDS),
    st.builds(Loaded, versions=st.dictionaries(TEXT, TEXT, max_size=3), load_s=SECONDS),
    st.builds(Failed, message=TEXT, offered=st.booleans()),
)


@given(MESSAGES)
def test_a_message_comes_back_as_it_was_in_one_line(message: Message) -> None:
    """A line end inside a text would cut the message in two."""
    line = encode(message)
    assert len(line.splitlines()) == 1
    assert decode(line) == message


@pytest.mark.parametrize("line", ["", "null", "[]", "{}", '{"kind": "run"}', '{"kind": "loaded", "x": 1}', "noise"])
def test_a_line_that_is_no_message_is_refused(line: str) -> None:
    """Whatever a library prints must not pass for an answer."""
    with pytest.raises(WireError, match="not a message"):
        decode(line)


# --- processes ---

PEER = """
import os, sys, time
from bench.compare.wire import Answer
from bench.compare.worker import NotOfferedError, serve

class Echo:
    versions = {"echo": "1"}
    def prepare(self):
        print("noise on standard output")
    def run(self, order, clock):
        word = order.asks[0].text
        if word == "end":
            os._exit(3)
        if word == "hang":
            time.sleep(60)
        if word == "break":
            raise ValueError("broken")
        return [Answer(output=a.text, num_tokens=a.max_tokens, first_token_s=None, finished_s=clock.now())
                for a in order.asks]

def load(order):
    if order.precision != "bf16":
        raise NotOfferedError("only bf16")
    return Echo()

serve(load)
"""
LOAD = LoadOrder(model_dir="m", gguf="", precision="bf16", num_threads=1, max_slots=8, max_context=64)
LIMIT_S = 30.0


@pytest.fixture
def peer(tmp_path: Path) -> PeerProcess:
    """A running peer."""
    root = str(Path(__file__).resolve().parents[2])
    return PeerProcess([sys.executable, "-c", PEER], {**os.environ, "PYTHONPATH": root}, tmp_path / "log")


def asking(text: str) -> RunOrder:
    """One question."""
    return RunOrder(asks=(Ask(ids=(1,), text=text, max_tokens=2),))


def state(pid: int) -> str:
    """As /proc tells it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_peer_answers_in_its_turn_and_is_stopped_between_turns(peer: PeerProcess) -> None:
    """A peer that polls in the background would take time from the one that is measured."""
    with peer:
        loaded = peer.turn(LOAD, LIMIT_S).reply
        assert isinstance(loaded, Loaded) and loaded.versions == {"echo": "1"}
        turn = peer.turn(asking("hello"), LIMIT_S)
        assert isinstance(turn.reply, Answered) and turn.reply.answers[0].output == "hello"
        assert turn.peak_rss_bytes > 1 << 20
        pid = peer.pid
        deadline = time.monotonic() + LIMIT_S
        while state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert state(pid) == "T"
    assert not Path(f"/proc/{pid}").exists()


def test_a_failed_order_does_not_end_the_peer(peer: PeerProcess) -> None:
    """One question too long must not cost the other works."""
    with peer:
        refused = peer.turn(replace(LOAD, precision="int8"), LIMIT_S).reply
        assert refused == Failed(message="only bf16", offered=False)
        early = peer.turn(asking("hello"), LIMIT_S).reply
        assert isinstance(early, Failed) and "out of turn" in early.message
        peer.turn(LOAD, LIMIT_S)
        assert peer.turn(asking("break"), LIMIT_S).reply == Failed(message="ValueError: broken")
        assert isinstance(peer.turn(asking("hello"), LIMIT_S).reply, Answered)


@pytest.mark.parametrize(("word", "limit_s", "told"), [("end", LIMIT_S, "ended"), ("hang", 0.2, "no reply")])
def test_a_peer_that_is_gone_fails_from_then_on(peer: PeerProcess, word: str, limit_s: float, told: str) -> None:
    """Waiting for it, or reading its late reply as the answer to the next order, would both be wrong."""
    with peer:
        peer.turn(LOAD, LIMIT_S)
        first = peer.turn(asking(word), limit_s).reply
        assert isinstance(first, Failed) and told in first.message and "log" in first.message
        assert peer.turn(asking("hello"), LIMIT_S).reply == first
