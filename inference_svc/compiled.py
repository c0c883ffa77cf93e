"""A transformers module as compiled code: a graph for each shape of a forward, Kev's attention one closed step in it.

Invariants and semantics: both graphs are made at load; later nothing is compiled any more. An input that would need
another graph fails its forward: other code might give other bits. Attention finds the forward at hand in a variable of
its thread. On a GPU the pieces between attention calls are recorded as CUDA graphs; attention, whose block mask is new
in every forward, is not. Compiled code is kept in Kev's cache directory.

Not here: whether compiled code keeps bits (``probe`` looks), the forward around it (``torch_forward``).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from common.errors import InvariantError
from inference_svc.attention import AttentionBody, ForwardContext, LayerCall, attend, no_mask

_LOG = logging.getLogger("kev.model")

ATTENTION_NAME = "kev_compiled"
"""Name under which transformers knows the closed step."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NONE = 0
"""Stands for no window and no cap: the schema of an operator knows numbers only."""


class _Step(threading.local):
    """The forward that runs on this thread."""

    context: ForwardContext | None = None
    body: AttentionBody | None = None


_STEP = _Step()
_TAGS = tuple(tag for tag in (getattr(torch._C.Tag, "cudagraph_unsafe", None),) if tag is not None)


@torch.library.custom_op("kev::attend", mutates_args=(), tags=_TAGS)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of one layer in the forward of this thread; it writes the arena, which no graph knows of."""
    context, body = _STEP.context, _STEP.body
    if context is None or body is None:
        raise InvariantError("compiled code was called without a step plan")
    return attend(body, query, key, value, LayerCall(layer, scaling, window or None, softcap or None), context)


@_attend.register_fake
def _shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def _hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer while it is traced; what is refused was refused uncompiled."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    made = _attend(query, key, value, module.layer_idx, scale, sliding_window or _NONE, float(softcap or _NONE))
    return made, None


class CompiledModule:
    """The graphs of one module."""

    def __init__(
        self,
        module: PreTrainedModel,
        body: AttentionBody,
        device: torch.device,
        prepare: Callable[[ForwardContext], None] | None = None,
    ) -> None:
        """Compile nothing yet; each shape is compiled when it is met first.

        Args:
            module: loaded with the attention ``ATTENTION_NAME`` by the first call.
            body: the backend's attention.
            device: where the module is.
            prepare: called with every forward before it runs.
        """
        AttentionInterface.register(ATTENTION_NAME, _hook)
        AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
        self._body = body
        self._prepare = prepare
        self._on_gpu = device.type == "cuda"
        self._is_sealed = False
        self.num_graphs = 0
        self._run: Callable[..., object] = torch.compile(module, backend=self._compile, dynamic=False, fullgraph=True)

    def __call__(self, context: ForwardContext, **inputs: object) -> object:
        """One forward; the output is that of the module."""
        context.compiled = True
        if self._prepare is not None:
            self._prepare(context)
        _STEP.context, _STEP.body = context, self._body
        try:
            return self._run(**inputs)
        finally:
            _STEP.context = _STEP.body = None

    def seal(self) -> None:
        """From now on nothing is compiled."""
        self._is_sealed = True

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        if self._is_sealed:
            raise InvariantError("a forward has a shape that was not compiled at the start")
        from torch._inductor.compile_fx import compile_fx

        self.num_graphs += 1
        patches = {"triton.cudagraphs": True, "graph_partition": True} if self._on_gpu else {}
        return cast("Callable[..., object]", compile_fx(graph, inputs, config_patches=patches))


def keep_compiled_in(folder: Path) -> None:
    """Where compiled code is kept for the next start, unless the environment says so already."""
    os.environ.setdefault(CACHE_VARIABLE, str(folder))
