"""Loads a model for the isolated forward, or says why it cannot be isolated.

Invariants and semantics: an architecture that cannot be isolated (``architecture``)
or does not go through transformers' attention interface is refused. Kev's own kernels run what they know (``decoder``)
and have been compared with transformers (``native_check``); left to choose, the loader takes torch where they cannot.
A model spread over several processes (``tensor_parallel``) runs on torch.

Not here: finding the model (``kev.models``), proving the forward on this machine (``probe``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from math import lcm
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from common.errors import ConfigError, InvariantError, UnsupportedModelError
from inference_svc.architecture import check_architecture, check_parallel
from inference_svc.attention import AttentionBody, Backend, cpu_attention, reference_attention, register
from inference_svc.calibration import Prompts, calibration_prompts
from inference_svc.compiled import CompiledModule
from inference_svc.decoder import FAMILIES
from inference_svc.flex import BLOCK_POSITIONS, flex_backend
from inference_svc.forward import Forward
from inference_svc.gpus import gpu_name
from inference_svc.int8_linear import quantize_linears
from inference_svc.kernels.library import Library, kernels
from inference_svc.kv_cache import KVCache
from inference_svc.memory_bill import packed_bytes
from inference_svc.memory_plan import KVGeometry
from inference_svc.model_digest import files_digest
from inference_svc.native_forward import NativeForward
from inference_svc.native_image import ImageDraft, ImageLostError, ImageName, open_image
from inference_svc.native_model import NativeModel
from inference_svc.native_packing import NATIVE_PRECISIONS, pack_module
from inference_svc.plan import ForwardShapes
from inference_svc.source_model import (
    dtype_of,
    geometry_of,
    max_context_of,
    read_config,
    read_module,
    warn_about_precision,
)
from inference_svc.tensor_parallel import Ranks, TensorParallelForward
from inference_svc.tensor_store import TensorStore
from inference_svc.torch_forward import TorchForward
from inference_svc.weight_files import read_tensor_shapes

_LOG = logging.getLogger("kev.model")

BODIES: Mapping[Backend, AttentionBody] = {
    Backend.CPU: cpu_attention,
    Backend.REFERENCE: reference_attention,
    Backend.FLEX: flex_backend,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the isolated forward: either transformers' module or packed for Kev's kernels."""

    module: PreTrainedModel | None
    native: NativeModel | None
    geometry: KVGeometry
    precision: str
    dtype: torch.dtype
    """Of keys and values."""
    device: torch.device
    backend: Backend
    vocab_size: int
    max_context: int
    """Positions of one channel: the smaller of the configured limit and the model's own."""
    fingerprint: str
    """SHA-256 over configuration, tensor layout, sampled weight pages, precision, backend and kernels."""
    compiled: CompiledModule | None = None
    """Runs instead of the module."""
    ranks: Ranks | None = None
    """The other processes that hold a part of the model; then ``module`` and ``geometry`` are those of one part."""

    @property
    def alignment_positions(self) -> int:
        """Positions at whose multiples KV extents start."""
        blocks = BLOCK_POSITIONS if self.backend is Backend.FLEX else 1
        return lcm(self.geometry.alignment_positions, blocks)

    def shapes(self, max_slots: int, prefill_rows: int, segment_tokens: int) -> ForwardShapes:
        """How many rows its forwards have: as many as there are where the kernels allow it."""
        return ForwardShapes.of(max_slots, prefill_rows, segment_tokens, ragged=self.native is not None)

    def forward_over(self, cache: KVCache, shapes: ForwardShapes) -> Forward:
        """A forward that reads and writes an arena.

        Raises:
            MemoryError: there is no room for its working memory.
        """
        if self.native is not None:
            return NativeForward(_library(), self.native, cache, shapes, torch.get_num_threads())
        forward = self.torch_forward_over(cache, shapes)
        return forward if self.ranks is None else TensorParallelForward(self.ranks, forward, cache, shapes)

    def torch_forward_over(self, cache: KVCache, shapes: ForwardShapes) -> TorchForward:
        """A forward of the module that this process holds."""
        return TorchForward(self._module(), cache, shapes, self.device, self.compiled)

    def close(self) -> None:
        """End the other processes that hold a part of the model."""
        if self.ranks is not None:
            self.ranks.close()

    def embedding_rows(self, first: int, last: int) -> torch.Tensor:
        """Embeddings ``[last - first, hidden]`` float32, on the CPU, of tokens ``[first, last)``."""
        if self.native is not None:
            return self.native.embedding_rows(first, last, _library())
        if self.ranks is not None:
            return self.ranks.embedding_rows(self.embedding, first, last)
        return self.embedding[first:last].float().cpu()

    @property
    def embedding(self) -> torch.Tensor:
        """The module's embedding; of a spread model, this process's part of it."""
        weight: torch.Tensor = self._module().get_input_embeddings().weight
        return weight

    def _module(self) -> PreTrainedModel:
        if self.module is None:
            raise InvariantError("the model has neither a module nor packed weights")
        return self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How to load."""

    precision: str
    max_context: int
    backend: Backend | None = Backend.CPU
    """None: Kev's kernels where they know the model, else torch."""
    device: str = "cpu"
    num_threads: int = 0
    """Threads of one forward; 0 keeps torch's default (all cores)."""
    image_dir: Path | None = None
    """Where packed models are kept for the next start; None: nowhere."""
    tensor_parallel: int = 1
    """Processes that hold a part of the model each."""


def load_model(path: Path, settings: LoadSettings) -> LoadedModel:
    """Load a model directory.

    Raises:
        ConfigError: a precision that is not offered.
        ModelError: the directory cannot be read.
        UnsupportedModelError: the architecture cannot be isolated.
    """
    if settings.tensor_parallel > 1:
        return _load_spread(path, settings)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    config = read_config(path)
    warn_about_precision(settings.precision, config)
    chosen = _chosen_backend(settings, config.model_type)
    max_context = max_context_of(config, settings.max_context)
    check_architecture(config, max_context, chosen.backend or Backend.CPU)
    fingerprint = fingerprint_of(path, chosen)
    kernels_in_use = _library().variant if chosen.backend is Backend.NATIVE else f"torch {torch.__version__}"
    _LOG.info("%s in %s on backend %s (%s)", config.model_type, chosen.precision, chosen.backend, kernels_in_use)
    image = _image_name(path, chosen, fingerprint)
    native = None if image is None else open_image(image)
    if native is not None and native.model.max_context >= max_context:
        native.model.max_context = max_context
        return _described(None, native, config, chosen, fingerprint)
    try:
        return _from_source(path, config, chosen, fingerprint, image)
    except ImageLostError as error:
        _LOG.warning("%s", error)
        return load_model(path, replace(settings, image_dir=None))
    except UnsupportedModelError as error:
        if settings.backend is not None or chosen.backend is not Backend.NATIVE:
            raise
        _LOG.warning("the native kernels cannot run this model, torch does: %s", error)
        return load_model(path, replace(settings, backend=Backend.CPU))


def _from_source(
    path: Path, config: PretrainedConfig, settings: LoadSettings, fingerprint: str, image: ImageName | None
) -> LoadedModel:
    """The model, packed into a new image where there is to be one.

    Raises:
        ImageLostError: the image could not be written to its end.
    """
    prompts = calibration_prompts(path) if settings.precision == "int8" else ()
    module = _read(path, config, settings)
    draft = None
    if image is not None:
        draft = ImageDraft.begin(image, packed_bytes(read_tensor_shapes(path), settings.precision))
    with nullcontext() if draft is None else closing(draft):
        model = wrap_model(module, settings, fingerprint=fingerprint, prompts=prompts, store=draft)
        if draft is not None:
            draft.publish()
    return model


def _load_spread(path: Path, settings: LoadSettings) -> LoadedModel:
    """The model, spread over this process and others on this machine."""
    settings = _spread(settings)
    check_parallel(read_config(path), settings.tensor_parallel)
    ranks = Ranks.start(path, asdict(settings), settings.tensor_parallel)
    try:
        model = replace(load_part(path, settings), ranks=ranks)
        ranks.await_loaded()
        return model
    except BaseException:
        ranks.close()
        raise


def _spread(settings: LoadSettings) -> LoadSettings:
    """Settings of each of several processes."""
    num_ranks = settings.tensor_parallel
    if settings.backend is Backend.NATIVE or settings.precision == "int8":
        raise ConfigError(
            f"core.tensor_parallel {num_ranks} runs on torch in fp32, bf16 or fp16, got core.precision "
            f"{settings.precision} and core.backend {settings.backend or 'auto'}"
        )
    if settings.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"core.tensor_parallel {num_ranks} takes the first {num_ranks} visible GPUs, got core.device "
            f"{settings.device}; set it to cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    on_cpu = settings.device == "cpu"
    threads = settings.num_threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)
    backend = settings.backend or (Backend.CPU if on_cpu else Backend.FLEX)
    return replace(settings, backend=backend, num_threads=threads if on_cpu else 0, image_dir=None)


def load_part(path: Path, settings: LoadSettings) -> LoadedModel:
    """The part of a spread model that this process holds; its rank is known to ``torch.distributed``.

    Raises:
        ModelError: the directory cannot be read.
        UnsupportedModelError: the architecture cannot be isolated.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    config = read_config(path)
    check_architecture(config, max_context_of(config, settings.max_context), settings.backend or Backend.CPU)
    return wrap_model(_read(path, config, settings), settings, fingerprint=fingerprint_of(path, settings))


def wrap_model(
    module: PreTrainedModel,
    settings: LoadSettings,
    *,
    fingerprint: str,
    prompts: Prompts = (),
    store: TensorStore | None = None,
) -> LoadedModel:
    """Check a model that is already in memory and make it ready; the native backend takes its weights.

    Args:
        module: the model.
        settings: how to run it.
        fingerprint: of the model.
        prompts: token ids to calibrate int8 with.
        store: takes the packed weights of the native backend; None for this process's memory.

    Raises:
        UnsupportedModelError: the architecture cannot be isolated, or not by this backend.
    """
    _register_backends()
    backend = settings.backend or Backend.CPU
    native = backend is Backend.NATIVE
    module.set_attn_implementation((Backend.CPU if native else backend).attention_name)
    config = module.config.get_text_config()
    max_context = max_context_of(config, settings.max_context)
    check_architecture(config, max_context, backend)
    if not getattr(module, "_supports_attention_backend", False):
        message = f"{type(module).__name__} does not use transformers' attention interface, so its channels cannot be"
        raise UnsupportedModelError(
            f"{message} separated; use a model that does, such as Llama, Qwen, Mistral or Gemma"
        )
    native_model = None
    if native:
        geometry = geometry_of(config, next(module.parameters()).dtype)
        native_model = pack_module(module, geometry, max_context, settings.precision, _library(), prompts, store)
    elif settings.precision == "int8":
        quantize_linears(module, prompts)
    return _described(None if native else module, native_model, config, settings, fingerprint)


def _described(
    module: PreTrainedModel | None,
    native: NativeModel | None,
    config: PretrainedConfig,
    settings: LoadSettings,
    fingerprint: str,
) -> LoadedModel:
    weight = None if module is None else next(module.parameters())
    dtype = dtype_of(settings.precision) if weight is None else weight.dtype
    return LoadedModel(
        module=module,
        native=native,
        geometry=geometry_of(config, dtype, settings.tensor_parallel),
        precision=settings.precision,
        dtype=dtype,
        device=torch.device("cpu") if weight is None else weight.device,
        backend=settings.backend or Backend.CPU,
        vocab_size=int(config.vocab_size),
        max_context=max_context_of(config, settings.max_context),
        fingerprint=fingerprint,
    )


def _image_name(path: Path, settings: LoadSettings, fingerprint: str) -> ImageName | None:
    if settings.backend is not Backend.NATIVE or settings.image_dir is None:
        return None
    origin = f"{path.resolve()} {settings.precision} {_library().variant}"
    return ImageName(folder=settings.image_dir, fingerprint=fingerprint, origin=origin)


def _library() -> Library:
    found = kernels()
    if isinstance(found, Library):
        return found
    raise UnsupportedModelError(f"core.backend native is not available here: {found}; set core.backend: auto")


def _chosen_backend(settings: LoadSettings, model_type: str) -> LoadSettings:
    """The settings with a backend."""
    if settings.backend is not None:
        return settings
    if settings.device.startswith("cuda"):
        return replace(settings, backend=Backend.FLEX)
    usable = isinstance(kernels(), Library) and settings.precision in NATIVE_PRECISIONS and model_type in FAMILIES
    return replace(settings, backend=Backend.NATIVE if usable else Backend.CPU)


def fingerprint_of(path: Path, settings: LoadSettings) -> str:
    """What tells models apart that give other bits; equal devices have equal fingerprints."""
    kernels_in_use = (
        f"native-{_library().variant}" if settings.backend is Backend.NATIVE else f"torch-{torch.__version__}"
    )
    device = settings.device if settings.device == "cpu" else gpu_name(settings.device)
    numbers = "int8 spread" if settings.precision == "int8" else settings.precision
    spread = f":{settings.tensor_parallel} parts" if settings.tensor_parallel > 1 else ""
    return files_digest(path, f"{numbers}:{settings.backend}:{device}:{kernels_in_use}{spread}")


def _register_backends() -> None:
    for backend, body in BODIES.items():
        register(backend, body)


def _read(path: Path, config: PretrainedConfig, settings: LoadSettings) -> PreTrainedModel:
    _register_backends()
    return read_module(path, config, settings.precision, settings.device, settings.tensor_parallel)
