"""Loads a model for the isolated forward, or says why it cannot be isolated.

Invariants and semantics: weights come from safetensors only. An architecture is accepted when every layer is plain
causal attention (full or sliding) that goes through transformers' attention interface, and when nothing in it lets
one row's numbers depend on another row: recurrent layers, encoder-decoders, mixtures of experts on stock float kernels
and rotary scalings that look at the longest row are refused with the reason and the way out. Fail closed: what is not
known to be safe is refused. Kev's own kernels run what they know (``decoder``) and have been compared with
transformers (``native_check``); left to choose, the loader takes torch where they cannot.

Not here: finding the model (``kev.models``), proving the forward on this machine (``probe``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import lcm
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError, InvariantError, ModelError, UnsupportedModelError
from inference_svc.attention import AttentionBody, Backend, cpu_attention, reference_attention, register
from inference_svc.decoder import FAMILIES, read_decoder
from inference_svc.flex import BLOCK_POSITIONS, flex_backend
from inference_svc.forward import Forward
from inference_svc.gpus import gpu_name
from inference_svc.int8_linear import quantize_linears
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import Library, kernels
from inference_svc.kv_cache import KVCache
from inference_svc.memory_plan import KVGeometry
from inference_svc.native_check import ModelSize, check_against, reference_of
from inference_svc.native_forward import NativeForward
from inference_svc.native_image import open_image, save_image
from inference_svc.native_model import NativeModel
from inference_svc.plan import ForwardShapes
from inference_svc.torch_forward import TorchForward

_LOG = logging.getLogger("kev.model")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}
"""Type of keys and values, and of the weights as they are loaded."""
_NATIVE_PRECISIONS = {"fp32": Precision.F32, "bf16": Precision.BF16, "int8": Precision.I8}
_BODIES: Mapping[Backend, AttentionBody] = {
    Backend.CPU: cpu_attention,
    Backend.REFERENCE: reference_attention,
    Backend.FLEX: flex_backend,
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_RECURRENT_SIGNS = ("ssm_state_size", "mamba_d_state", "linear_num_key_heads", "conv_kernel", "time_mix_extra_dim")
_EXPERT_SIGNS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PAGES = 64
_PAGE_BYTES = 4096


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
        return TorchForward(self._module(), cache, shapes, self.device)

    def embedding_rows(self, first: int, last: int) -> torch.Tensor:
        """Embeddings ``[last - first, hidden]`` float32, on the CPU, of tokens ``[first, last)``."""
        if self.native is not None:
            return self.native.embedding_rows(first, last, _library())
        weight: torch.Tensor = self._module().get_input_embeddings().weight
        return weight[first:last].float().cpu()

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


def load_model(path: Path, settings: LoadSettings) -> LoadedModel:
    """Load a model directory.

    Raises:
        ConfigError: a precision that is not offered.
        ModelError: the directory cannot be read.
        UnsupportedModelError: the architecture cannot be isolated.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    config = _read_config(path)
    _warn_about_precision(settings.precision, config)
    chosen = _chosen_backend(settings, config.model_type)
    max_context = _max_context(config, settings.max_context)
    check_architecture(config, max_context, chosen.backend or Backend.CPU)
    fingerprint = fingerprint_of(path, chosen)
    kernels_in_use = _library().variant if chosen.backend is Backend.NATIVE else f"torch {torch.__version__}"
    _LOG.info("%s in %s on backend %s (%s)", config.model_type, chosen.precision, chosen.backend, kernels_in_use)
    image = _image_path(chosen, fingerprint)
    native = None if image is None else open_image(image, fingerprint)
    if native is not None and native.model.max_context >= max_context:
        native.model.max_context = max_context
        return _described(None, native, config, chosen, fingerprint)
    module = _read_module(path, config, chosen)
    try:
        model = wrap_model(module, chosen, fingerprint=fingerprint)
        if image is not None and model.native is not None:
            save_image(model.native, image, fingerprint)
        return model
    except UnsupportedModelError as error:
        if settings.backend is not None or chosen.backend is not Backend.NATIVE:
            raise
        _LOG.warning("the native kernels cannot run this model, torch does: %s", error)
        return load_model(path, replace(settings, backend=Backend.CPU))


def wrap_model(module: PreTrainedModel, settings: LoadSettings, *, fingerprint: str) -> LoadedModel:
    """Check a model that is already in memory and make it ready; the native backend takes its weights.

    Raises:
        UnsupportedModelError: the architecture cannot be isolated, or not by this backend.
    """
    _register_backends()
    backend = settings.backend or Backend.CPU
    native = backend is Backend.NATIVE
    module.set_attn_implementation((Backend.CPU if native else backend).attention_name)
    config = module.config.get_text_config()
    max_context = _max_context(config, settings.max_context)
    check_architecture(config, max_context, backend)
    if not getattr(module, "_supports_attention_backend", False):
        message = f"{type(module).__name__} does not use transformers' attention interface, so its channels cannot be"
        raise UnsupportedModelError(
            f"{message} separated; use a model that does, such as Llama, Qwen, Mistral or Gemma"
        )
    native_model = _packed(module, config, settings) if native else None
    if not native and settings.precision == "int8":
        quantize_linears(module)
    return _described(None if native else module, native_model, config, settings, fingerprint)


def _described(
    module: PreTrainedModel | None,
    native: NativeModel | None,
    config: PretrainedConfig,
    settings: LoadSettings,
    fingerprint: str,
) -> LoadedModel:
    weight = None if module is None else next(module.parameters())
    dtype = _dtype(settings.precision) if weight is None else weight.dtype
    return LoadedModel(
        module=module,
        native=native,
        geometry=_geometry(config, dtype),
        precision=settings.precision,
        dtype=dtype,
        device=torch.device("cpu") if weight is None else weight.device,
        backend=settings.backend or Backend.CPU,
        vocab_size=int(config.vocab_size),
        max_context=_max_context(config, settings.max_context),
        fingerprint=fingerprint,
    )


def _packed(module: PreTrainedModel, config: PretrainedConfig, settings: LoadSettings) -> NativeModel:
    """Packed weights that give transformers' logits. The module is empty afterwards."""
    library = _library()
    dtype = next(module.parameters()).dtype
    size = ModelSize(
        geometry=_geometry(config, dtype),
        kv_dtype=dtype,
        max_context=_max_context(config, settings.max_context),
        vocab_size=int(config.vocab_size),
    )
    reference = reference_of(module, size)
    decoder = read_decoder(module, reference.calls, size.max_context)
    kv_precision = Precision.F32 if dtype is torch.float32 else Precision.BF16
    packed = NativeModel.pack(decoder, _NATIVE_PRECISIONS[settings.precision], kv_precision, library)

    def forward_over(cache: KVCache, shapes: ForwardShapes) -> Forward:
        return NativeForward(library, packed, cache, shapes, torch.get_num_threads())

    check_against(reference, forward_over, size, settings.precision)
    return packed


def _image_path(settings: LoadSettings, fingerprint: str) -> Path | None:
    if settings.backend is not Backend.NATIVE or settings.image_dir is None:
        return None
    return settings.image_dir / f"{fingerprint[:32]}.kevmodel"


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
    usable = isinstance(kernels(), Library) and settings.precision in _NATIVE_PRECISIONS and model_type in FAMILIES
    return replace(settings, backend=Backend.NATIVE if usable else Backend.CPU)


def _read_module(path: Path, config: PretrainedConfig, settings: LoadSettings) -> PreTrainedModel:
    _register_backends()
    transformers_logging.disable_progress_bar()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=_dtype(settings.precision), use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the model in {path} cannot be loaded: {_first_line(error)}") from error
    return module.eval().requires_grad_(False).to(settings.device)


def check_architecture(config: PretrainedConfig, max_context: int, backend: Backend = Backend.CPU) -> None:
    """Refuse what cannot be isolated.

    Raises:
        UnsupportedModelError: with the reason and the way out.
    """
    kind = config.model_type
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; Kev runs decoder-only language models")
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{kind} attends in both directions; Kev runs causal language models")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if layer_types - _LAYER_TYPES or any(getattr(text, sign, None) for sign in _RECURRENT_SIGNS):
        found = ", ".join(sorted(layer_types - _LAYER_TYPES)) or "recurrent state"
        message = f"{kind} has layers that carry state outside the KV cache ({found}), which cannot be split by channel"
        raise UnsupportedModelError(f"{message}; use a model with full or sliding attention only")
    if backend is not Backend.NATIVE and any((getattr(text, sign, None) or 0) > 1 for sign in _EXPERT_SIGNS):
        message = f"{kind} routes tokens to experts: the shapes of its float kernels depend on the neighbours' tokens"
        raise UnsupportedModelError(
            f"{message}, so strict isolation cannot be kept; use a dense model, or core.backend: native where it knows "
            "the model"
        )
    _check_rotary(kind, text, max_context)


def fingerprint_of(path: Path, settings: LoadSettings) -> str:
    """SHA-256 that tells models apart without reading all of a large file.

    It covers config.json, every safetensors header and 64 evenly spaced pages of each file; equal devices have equal
    fingerprints.
    """
    digest = sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as handle:
            header_bytes = int.from_bytes(handle.read(8), "little")
            digest.update(handle.read(min(header_bytes, size)))
            for page in range(_PAGES):
                handle.seek(max(0, size - _PAGE_BYTES) * page // (_PAGES - 1))
                digest.update(handle.read(_PAGE_BYTES))
    kind = f"native-{_library().variant}" if settings.backend is Backend.NATIVE else f"torch-{torch.__version__}"
    device = settings.device if settings.device == "cpu" else gpu_name(settings.device)
    digest.update(f"{settings.precision}:{settings.backend}:{device}:{kind}".encode())
    return digest.hexdigest()


def _register_backends() -> None:
    for backend, body in _BODIES.items():
        register(backend, body)


def _dtype(precision: str) -> torch.dtype:
    if precision not in _DTYPES:
        raise ConfigError(f"core.precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
    return _DTYPES[precision]


def _read_config(path: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model in {path} cannot be read: {_first_line(error)}") from error
    return config.get_text_config()


def _warn_about_precision(precision: str, config: PretrainedConfig) -> None:
    if precision == "fp16" and config.dtype is torch.bfloat16:
        _LOG.warning(
            "core.precision is fp16 but %s was trained in bf16: values beyond 65,504 overflow and such answers end in "
            "an error; set core.precision: bf16",
            config.model_type,
        )


def _max_context(config: PretrainedConfig, configured: int) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if own is not None and own < configured:
        _LOG.info("core.max_context %d is above the model's %d positions; using %d", configured, own, own)
        return int(own)
    return configured


def _check_rotary(kind: str, config: PretrainedConfig, max_context: int) -> None:
    """Scalings that switch with the longest row of a forward would let a long neighbour change a short question."""
    parameters: Mapping[str, object] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = limit or config.max_position_embeddings
        if isinstance(limit, int) and max_context > limit:
            message = (
                f"{kind} scales its rotary positions by the longest row ({rope['rope_type']}) beyond {limit} tokens"
            )
            raise UnsupportedModelError(f"{message}, so neighbours would change answers; set core.max_context: {limit}")


def _geometry(config: PretrainedConfig, dtype: torch.dtype) -> KVGeometry:
    heads = int(config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVGeometry(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        key_head_size=int(head_size),
        value_head_size=int(head_size),
        element_bytes=dtype.itemsize,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
