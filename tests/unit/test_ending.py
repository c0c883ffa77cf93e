"""How a question ended, in the words that lie beside its outcome."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ending import Ending
from common.errors import all_errors
from common.types import ChannelResult, ErrorInfo, FinishReason


@pytest.mark.parametrize("finish_reason", list(FinishReason))
def test_what_is_written_is_read(finish_reason: FinishReason) -> None:
    """A failure is taken for an answer, or for another failure."""
    for reason in ("", *(kind.reason for kind in all_errors())):
        error = ErrorInfo(reason=reason, message="what; the way out") if reason else None
        result = ChannelResult(request_id="r", question_index=0, channel_id=0, finish_reason=finish_reason, error=error)
        assert Ending.read(Ending.of(result).mark) == Ending(finish_reason, reason)


@given(st.text())
def test_what_is_not_known_here_says_nothing(mark: str) -> None:
    """A newer version's word, or damage, ends the router."""
    ending = Ending.read(mark)
    assert ending == Ending() or ending.mark == mark


@pytest.mark.parametrize("mark", ["", "vanished", "error  X", "error x", "ERROR", "stop\n", "error " + "X" * 65])
def test_other_words_are_not_known(mark: str) -> None:
    """Whatever lies in the store is shown to an operator."""
    assert Ending.read(mark) == Ending()
