"""The request store: bounded, and nothing that runs is dropped."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator_svc.collector import Collector
from aggregator_svc.settings import AggregatorSettings
from aggregator_svc.store import RequestStore, StoredRequest
from common.config import load_config
from common.errors import InvariantError, QueueFullError, RequestConflictError
from common.types import ChannelResult
from tests.unit.aggregator_builders import moment, outcome, question, request


def stored(request_id: str = "r", now_s: float = 100.0, timeout_ms: int = 10_000) -> StoredRequest:
    record = request([question(0, timeout_ms=timeout_ms)], request_id=request_id)
    return StoredRequest(Collector(record, moment(now_s)))


def finish(store: RequestStore, request_: StoredRequest, now_s: float = 100.0) -> None:
    request_.collector.place(outcome(request_id=request_.request_id), moment(now_s))
    store.finish(request_, now_s)


def expire_all(store: RequestStore, now_s: float) -> list[tuple[StoredRequest, tuple[ChannelResult, ...]]]:
    """Settle every question that is due, where nothing competes."""
    due = store.due(moment(now_s), again_after_s=5)
    for request_, placeholders in due:
        for placeholder in placeholders:
            assert request_.collector.place(placeholder, moment(now_s))
    return due


def make(max_requests: int = 10, result_ttl_s: float = 600.0) -> RequestStore:
    return RequestStore(max_requests=max_requests, result_ttl_s=result_ttl_s)


def test_a_request_is_found_running_and_finished() -> None:
    """A caller would lose sight of its request."""
    store = make()
    mine = stored()
    store.add(mine, 100)
    assert store.find("r") is mine
    assert store.running() == [mine]
    finish(store, mine)
    assert store.find("r") is mine
    assert (store.running(), len(store)) == ([], 1)
    assert store.find("other") is None


def test_the_same_id_means_the_same_content() -> None:
    """A caller would be given the answers to somebody else's questions."""
    store = make()
    assert not store.holds("r", "digest")
    store.add(stored(), 100)
    assert store.holds("r", "digest")
    with pytest.raises(RequestConflictError, match="'r'"):
        store.holds("r", "other")


def test_results_expire_from_the_last_outcome_on() -> None:
    """Results would be lost early, or kept for ever."""
    store = make(result_ttl_s=60)
    mine = stored(now_s=100)
    store.add(mine, 100)
    store.drop_expired(10_000)
    assert store.find("r") is mine
    finish(store, mine, 130)
    store.drop_expired(189.9)
    assert store.find("r") is mine
    store.drop_expired(190)
    assert (store.find("r"), len(store)) == (None, 0)
    store.add(stored(now_s=200), 200)
    assert store.find("r") is not mine


def test_the_oldest_finished_makes_room() -> None:
    """A running request would be dropped, or new ones refused because of old results."""
    store = make(max_requests=3)
    first, second, third = stored("a"), stored("b"), stored("c")
    for request_ in (first, second, third):
        store.add(request_, 100)
    finish(store, second)
    finish(store, first)
    store.add(stored("d"), 100)
    assert [store.find(name) is not None for name in "abcd"] == [True, False, True, True]


def test_a_store_full_of_running_requests_refuses() -> None:
    """Memory would grow without bound, or a refusal would not say when to come back."""
    store = make(max_requests=1)
    store.add(stored("a", timeout_ms=4_000), 100)
    with pytest.raises(QueueFullError) as refused:
        store.add(stored("b"), 101)
    assert refused.value.retry_after_s == 3
    assert store.find("b") is None


def test_wrong_bookkeeping_is_noticed() -> None:
    """Two requests would share an id, or one be finished twice."""
    store = make()
    mine = stored()
    store.add(mine, 100)
    with pytest.raises(InvariantError):
        store.add(stored(), 100)
    finish(store, mine)
    with pytest.raises(InvariantError):
        store.finish(mine, 100)


def test_removed_requests_are_gone() -> None:
    """A withdrawn request would keep its id."""
    store = make()
    mine = stored()
    store.add(mine, 100)
    store.remove("r")
    assert store.find("r") is mine, "a running request must stay"
    finish(store, mine)
    store.remove("r")
    store.remove("r")
    assert store.find("r") is None


def test_questions_expire_at_their_own_time() -> None:
    """A timeout would be missed, or fire for the wrong request."""
    store = make()
    record = request([question(0, timeout_ms=1_000), question(1, timeout_ms=3_000)], request_id="a")
    mine = StoredRequest(Collector(record, moment(100)))
    store.add(mine, 100)
    store.add(stored("b", timeout_ms=2_000), 100)
    assert store.next_due_s() == 101
    seen = []
    for now_s in (100.9, 101, 102, 103):
        due = expire_all(store, now_s)
        seen.append([(s.request_id, p.question_index) for s, placeholders in due for p in placeholders])
    assert seen == [[], [("a", 0)], [("b", 0)], [("a", 1)]]
    assert expire_all(store, 200) == []


def test_the_next_expiry_of_results_is_known() -> None:
    """Finished requests would stay in memory until the next call."""
    store = make(result_ttl_s=5)
    mine = stored()
    store.add(mine, 100)
    finish(store, mine)
    expire_all(store, 110)
    assert store.next_due_s() == 105


def test_dropped_requests_leave_memory() -> None:
    """Far deadlines would keep the text of evicted requests alive."""
    store = make(max_requests=1)
    references = []
    for index in range(300):
        request_ = stored(str(index), timeout_ms=86_400_000)
        references.append(weakref.ref(request_.collector))
        store.add(request_, 100)
        finish(store, request_)
    del request_
    gc.collect()
    assert sum(reference() is not None for reference in references) == 1
    assert len(store._deadlines) < 100


@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["add", "add", "finish", "pass"]), st.integers(0, 5), st.integers(1, 40)),
        max_size=40,
    )
)
def test_deadlines_are_kept_whatever_happens(operations: list[tuple[str, int, int]]) -> None:
    """Some history would leave a question open past its deadline, or drop a running request."""
    store = make(max_requests=4, result_ttl_s=0.02)
    now_s = 100.0
    for operation, number, span_ms in operations:
        name = str(number)
        known = store.find(name)
        if operation == "add" and known is None:
            running = store.running()
            try:
                store.add(stored(name, now_s, timeout_ms=span_ms), now_s)
            except QueueFullError:
                assert len(running) == 4
            assert {r.request_id for r in running} <= {r.request_id for r in store.running()}
        elif operation == "finish" and known is not None and not known.collector.done:
            finish(store, known, now_s)
        elif operation == "pass":
            now_s += span_ms / 1000
            for request_, _ in expire_all(store, now_s):
                if request_.collector.done:
                    store.finish(request_, now_s)
            store.drop_expired(now_s)
            next_due_s = store.next_due_s()
            assert next_due_s is None or next_due_s > now_s
        assert len(store) <= 4
        for request_ in store.running():
            deadline_s = request_.collector.next_deadline_s
            next_due_s = store.next_due_s()
            assert deadline_s is not None and next_due_s is not None and next_due_s <= deadline_s


def test_settings_come_from_the_configuration() -> None:
    """A configured bound would have no effect."""
    config = load_config({"kev": {"aggregator": {"result_ttl_s": 7, "max_requests": 3}}})
    assert AggregatorSettings.from_config(config) == AggregatorSettings(result_ttl_s=7, max_requests=3)
    assert AggregatorSettings.from_config(load_config(None)) == AggregatorSettings()
