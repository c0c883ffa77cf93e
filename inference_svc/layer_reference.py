"""What transformers says a model computes, part by part, in float32 on the weights as they are rounded.

Invariants and semantics: the parts are transformers' own code, run one after the other on one prompt: the embedding,
each layer with its weights widened to float32, and the end (last norm, head, what follows it) for a few tokens of the
vocabulary. Each part is given what the one before it gave, so that another forward can be compared on the same input.
Windows are made small, so that a short prompt reaches beyond them; that they mean what the model means is seen apart,
on the masks that it makes itself. Only one layer at a time is held in float32.

Not here: what is compared with it (``native_check``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from common.errors import UnsupportedModelError
from inference_svc.attention import LayerCall
from inference_svc.file_pages import let_go
from inference_svc.probe import probe_prompt

SMALL_WINDOW = 7
_NUM_TOKENS = 40
_NUM_LOGITS = 256
_MOST_POSITIONS = 8_192
"""Beyond so many a mask is not looked at: it has a byte for each pair of positions, and more."""
_Arguments = dict[str, Any]
"""What a layer was called with besides its input."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """What one layer sees in a long prompt."""

    visible: torch.Tensor
    """``[P, P]`` bool; a row's positions."""
    cos: torch.Tensor
    """``[P, d]`` float32."""
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerReference:
    """What each part of a model gives for one prompt of T tokens."""

    ids: tuple[int, ...]
    hidden: tuple[torch.Tensor, ...]
    """``[T, hidden]`` float32 before the first layer, and after each."""
    views: tuple[LayerView, ...]
    """One per layer; layers that see the same share the tensors."""
    tokens: torch.Tensor
    """``[n]`` tokens of the vocabulary, in ascending order."""
    logits: torch.Tensor
    """``[T, n]`` float32: theirs, at each position."""


def small_window(call: LayerCall) -> int | None:
    """The window that a layer of the reference has."""
    return None if call.window is None else min(call.window, SMALL_WINDOW)


@torch.no_grad()
def layer_reference(module: PreTrainedModel, calls: Sequence[LayerCall], max_context: int) -> LayerReference:
    """Run a model's parts.

    Args:
        module: the model, on the CPU; stays as it was.
        calls: of each layer's attention: which of them have a window.
        max_context: positions of a channel.

    Raises:
        UnsupportedModelError: the model does not call its layers as transformers' decoders do.
    """
    weight = module.get_input_embeddings().weight
    ids = probe_prompt(weight.shape[0], "reference", min(_NUM_TOKENS, max_context))
    windows = [call.window for call in calls if call.window is not None]
    num_seen = max(len(ids), min(max_context, max(windows, default=0) + 2, _MOST_POSITIONS))
    used = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        hidden = [_embedded(module, ids)]
        layers = _layers(module)
        for layer, call, arguments in zip(layers, calls, _arguments(module, len(ids)), strict=True):
            hidden.append(_run_layer(layer, hidden[-1], arguments, small_window(call)))
        views = _views(_arguments(module, num_seen))
        tokens = _some_tokens(weight.shape[0])
        return LayerReference(ids, tuple(hidden), views, tokens, _logits(module, hidden[-1], tokens))
    finally:
        module.set_attn_implementation(used)


def _layers(module: PreTrainedModel) -> Sequence[nn.Module]:
    layers: Sequence[nn.Module] = module.base_model.layers
    return layers


def _embedded(module: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    embedding = module.get_input_embeddings()
    made: torch.Tensor = embedding(torch.tensor(ids))
    let_go([embedding.weight])
    return made.float()


class _Seen(Exception):
    """Every layer has been called."""


def _arguments(module: PreTrainedModel, num_positions: int) -> list[_Arguments]:
    """What each layer is called with for a prompt of so many positions; nothing is computed."""
    layers = _layers(module)
    found: list[_Arguments] = []

    def note(hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        found.append(arguments)
        if len(found) == len(layers):
            raise _Seen
        return hidden_states

    width = module.get_input_embeddings().weight.shape[1]
    try:
        with _instead(dict.fromkeys(layers, note)):
            module.base_model(inputs_embeds=torch.zeros(1, num_positions, width), use_cache=False)
    except _Seen:
        return found
    raise UnsupportedModelError(f"{type(module).__name__} did not run each of its layers once; set core.backend: cpu")


def _run_layer(layer: nn.Module, hidden: torch.Tensor, arguments: _Arguments, window: int | None) -> torch.Tensor:
    """``[T, hidden]`` after one layer."""
    weights = {name: weight.float() for name, weight in layer.named_parameters()}
    mask = torch.zeros(1, 1, hidden.shape[0], hidden.shape[0])
    mask.masked_fill_(~causal(hidden.shape[0], window), torch.finfo(torch.float32).min)
    made: torch.Tensor = functional_call(layer, weights, (hidden[None],), {**arguments, "attention_mask": mask})
    let_go(layer.parameters())
    return made[0]


def causal(num_positions: int, window: int | None) -> torch.Tensor:
    """``[P, P]`` bool: a row sees itself and what comes before it, ``window`` positions in all."""
    rows, columns = torch.arange(num_positions)[:, None], torch.arange(num_positions)[None]
    seen = columns <= rows
    return seen if window is None else seen & (rows - columns < window)


def _views(arguments: Sequence[_Arguments]) -> tuple[LayerView, ...]:
    """By layer; what two layers were both given is read once."""
    made: dict[tuple[int, int], LayerView] = {}
    views = []
    for each in arguments:
        mask, (cos, sin) = each["attention_mask"], each["position_embeddings"]
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            raise UnsupportedModelError("the model's masks are not what transformers' decoders make")
        key = id(mask), id(cos)
        if key not in made:
            seen = mask[0, 0] if mask.dtype is torch.bool else mask[0, 0] == 0
            made[key] = LayerView(seen, cos[0].float(), sin[0].float())
        views.append(made[key])
    return tuple(views)


def _some_tokens(vocabulary: int) -> torch.Tensor:
    """The first and last token, and some between."""
    drawn = probe_prompt(vocabulary, "vocabulary", min(_NUM_LOGITS, vocabulary))
    return torch.tensor(sorted({0, vocabulary - 1, *drawn}))


def _logits(module: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``[T, n]``: the model's end on the output of its last layer."""
    head = module.get_output_embeddings()
    rows = head.weight[tokens].float()
    bias = None if head.bias is None else head.bias[tokens].float()
    let_go([head.weight])
    apart = {
        id(weight) for part in (*_layers(module), module.get_input_embeddings(), head) for weight in part.parameters()
    }
    weights = {name: weight.float() for name, weight in module.named_parameters() if id(weight) not in apart}
    parts: dict[nn.Module, Callable[..., torch.Tensor]] = {
        layer: lambda hidden_states, **_: hidden_states for layer in _layers(module)
    }
    parts[head] = lambda states: nn.functional.linear(states, rows, bias)
    with _instead(parts):
        made = functional_call(module, weights, (), {"inputs_embeds": hidden[None], "use_cache": False})
    logits: torch.Tensor = made.logits[0]
    return logits


@contextmanager
def _instead(forwards: dict[nn.Module, Callable[..., torch.Tensor]]) -> Iterator[None]:
    """While this lasts, these functions run in the place of modules."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward
