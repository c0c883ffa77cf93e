"""Many rows at once: threads take blocks of rows instead of outputs, and the bits stay those of few rows.

A forward of at most 15 rows a thread shares the outputs of every linear; above that each thread takes blocks of up to
24 rows through a layer by itself, and the last layer is run for the wanted rows alone (``forward.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inference_svc.kernels.layout import Work
from inference_svc.native_forward import NativeForward
from inference_svc.plan import ForwardShapes
from tests.integration.crowd import Ask, Crowd, Trace, prompt, same_bits
from tests.integration.tiny_models import ARCHITECTURES, MIXTURES, NATIVE_FORMS, Form, form_id, model_as

ASKS = [Ask(prompt(n, seed=n), max_tokens=3) for n in (1, 90, 47, 100)]
FEW = ForwardShapes(decode_rows=8, prefill_rows=7, segment_tokens=7, ragged=True)
"""Never more than 15 rows."""


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of one forward."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _traces(name: str, form: Form, shapes: ForwardShapes) -> list[Trace]:
    crowd = Crowd(model_as(name, form), shapes=shapes)
    for ask in ASKS:
        crowd.add(ask)
    return crowd.finish()


@pytest.mark.parametrize("form", NATIVE_FORMS, ids=form_id)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *MIXTURES])
def test_blocks_of_rows_give_the_bits_of_shared_outputs(name: str, form: Form, threads: int) -> None:
    """The same questions cut into forwards of 7 rows and of up to 248, with blocks that end anywhere."""
    few = _traces(name, form, FEW)
    for rows in (40, 61, 240):
        many = ForwardShapes(decode_rows=8, prefill_rows=rows, segment_tokens=20 + rows % 7, ragged=True)
        for one, other in zip(few, _traces(name, form, many), strict=True):
            assert same_bits(one, other), f"{rows} rows"


def test_the_kinds_of_work_add_up(threads: int) -> None:
    """Every forward's time is counted, for each thread, and under the kinds that it has."""
    crowd = Crowd(model_as("gemma3", NATIVE_FORMS[2]), shapes=ForwardShapes.of(8, 240, 64, ragged=True))
    for ask in ASKS:
        crowd.add(ask)
    crowd.finish()
    forward = crowd.runner._forward
    assert isinstance(forward, NativeForward)
    spent = forward.work_ms()
    assert set(spent) == set(Work) and spent[Work.EXPERTS] == 0.0
    assert all(spent[work] > 0.0 for work in Work if work not in (Work.EXPERTS, Work.WAIT))
