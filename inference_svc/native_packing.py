"""From transformers' module to a packed model that gives the same.

Invariants and semantics: the order bounds the memory: transformers' parts are run, and inputs measured, while the
weights are pages of their files that are let go after use; then each layer is packed into the store and its source
given up. At the most there are the packed weights, one layer in float32 and a few blocks of rows.

Not here: the steps (``native_check``, ``decoder``, ``calibration``, ``equalize``, ``native_model``).
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from common.heap import give_back
from inference_svc.calibration import Prompts, calibrate
from inference_svc.decoder import Decoder, read_decoder, release
from inference_svc.equalize import equalized
from inference_svc.file_pages import let_go_after_use
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import Library
from inference_svc.memory_plan import KVGeometry
from inference_svc.native_check import ModelSize, NativeCheck, reference_of
from inference_svc.native_model import NativeModel
from inference_svc.progress import Progress
from inference_svc.tensor_store import TensorStore

NATIVE_PRECISIONS = {"fp32": Precision.F32, "bf16": Precision.BF16, "int8": Precision.I8}


def pack_module(
    module: PreTrainedModel,
    geometry: KVGeometry,
    max_context: int,
    precision: str,
    library: Library,
    prompts: Prompts = (),
    store: TensorStore | None = None,
) -> NativeModel:
    """Packed weights that give transformers' logits. The module is empty afterwards.

    Args:
        module: the model, on the CPU.
        geometry: of its keys and values.
        max_context: positions of a channel.
        precision: a key of ``NATIVE_PRECISIONS``.
        library: the kernels.
        prompts: token ids to calibrate int8 with.
        store: takes the packed weights; None for this process's memory.

    Raises:
        UnsupportedModelError: the kernels do not know the model, or would run it otherwise.
    """
    dtype, vocabulary = next(module.parameters()).dtype, int(module.config.get_text_config().vocab_size)
    size = ModelSize(geometry=geometry, kv_dtype=dtype, max_context=max_context, vocab_size=vocabulary)
    with let_go_after_use(module):
        reference = reference_of(module, size)
        decoder = read_decoder(module, reference.calls, max_context)
        if precision == "int8":
            decoder = equalized(decoder, calibrate(module, prompts, max_context, with_head=False))
    check = NativeCheck(reference=reference, size=size, library=library, num_threads=torch.get_num_threads())
    check.check_reading(decoder)
    give_back()  # before the packed weights are there
    packed = _packed(decoder, precision, Precision.F32 if dtype is torch.float32 else Precision.BF16, library, store)
    release(module)
    give_back()  # before all of the packed weights are touched
    check.check_packed(packed, precision)
    return packed


def _packed(
    decoder: Decoder, precision: str, kv_precision: Precision, library: Library, store: TensorStore | None
) -> NativeModel:
    tell = partial(Progress().tell, f"layers packed in {precision}", total=len(decoder.layers))
    return NativeModel.pack(decoder, NATIVE_PRECISIONS[precision], kv_precision, library, store, tell)
