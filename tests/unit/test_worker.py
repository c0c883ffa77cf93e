"""What the worker makes of events that have piled up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.types import ChannelDelta, ChannelEvent, ChannelResult, ChannelStarted, FinishReason
from inference_svc.worker import joined_deltas

_WHERE = {"request_id": "r", "question_index": 0, "channel_id": 0}
_STARTED = ChannelStarted(**_WHERE, slot=0, attempt=1, node_id="n")
_RESULT = ChannelResult(**_WHERE, finish_reason=FinishReason.STOP)


def _delta(text: str, number: int) -> ChannelDelta:
    return ChannelDelta(**_WHERE, attempt=1, seq=number, text=text, num_tokens=number + 1)


@given(texts=st.lists(st.text(max_size=4), max_size=8), started=st.booleans(), ended=st.booleans())
def test_joining_keeps_the_text_the_count_and_the_order(texts: list[str], started: bool, ended: bool) -> None:
    """A reader would miss text, see it twice, or see the outcome before the end of the text."""
    deltas = [_delta(text, number) for number, text in enumerate(texts)]
    events: list[ChannelEvent] = [*([_STARTED] if started else []), *deltas, *([_RESULT] if ended else [])]
    joined = joined_deltas(events)
    kept = [event for event in joined if isinstance(event, ChannelDelta)]
    assert "".join(delta.text for delta in kept) == "".join(texts)
    assert [delta.num_tokens for delta in kept] == ([len(texts)] if texts else [])
    assert [event for event in joined if not isinstance(event, ChannelDelta)] == [
        event for event in events if not isinstance(event, ChannelDelta)
    ]
    assert not any(isinstance(a, ChannelDelta) and isinstance(b, ChannelDelta) for a, b in pairwise(joined))
