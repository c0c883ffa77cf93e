"""Kev on a GPU: flex backend against the reference, strict bit for bit, and speed beside a padded batch.

    python -m bench.device_check [--json out.json]

Random weights only: tiny models of several shapes for the bits, a Llama of about 1.2 billion parameters for the speed.
Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from inference_svc.attention import Backend
from inference_svc.model_loader import LoadedModel, LoadSettings, wrap_model
from inference_svc.plan import ForwardShapes
from tests.integration.crowd import Ask, Crowd, run_alone, run_together, same_bits
from tests.integration.tiny_models import CONFIGS, MAX_CONTEXT, WINDOW, stock_model

DEVICE = "cuda"
SHAPES = ("llama", "mistral", "gemma2", "gemma3")
LENGTHS = (1, 15, 16, 17, WINDOW, WINDOW + 1, 53, 90)
NEW_TOKENS = 64


def on_device(name: str, dtype: torch.dtype, backend: Backend) -> LoadedModel:
    """A tiny model on the GPU."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    model.load_state_dict(stock_model(name, dtype).state_dict())
    settings = LoadSettings(precision="fp32", max_context=MAX_CONTEXT, backend=backend)
    return wrap_model(model.eval().requires_grad_(False).to(DEVICE), settings, fingerprint=name)


def token_ids(num_tokens: int, seed: int, vocab: int) -> tuple[int, ...]:
    """Random prompt ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab, (num_tokens,), generator=generator).tolist())


def check_bits(name: str, dtype: torch.dtype) -> dict[str, object]:
    """Crowd against solo, bit for bit, and flex against the reference."""
    asks = [Ask(token_ids(n, 100 + n, 160), max_tokens=6) for n in LENGTHS]
    flex = on_device(name, dtype, Backend.FLEX)
    crowd = run_together(flex, asks)
    equal = sum(same_bits(run_alone(flex, ask), trace) for ask, trace in zip(asks, crowd, strict=True))
    reference = run_together(on_device(name, dtype, Backend.REFERENCE), asks)
    gap = max(
        float((one.float() - other.float()).abs().max())
        for a, b in zip(crowd, reference, strict=True)
        for one, other in zip(a.logits[:1], b.logits[:1], strict=True)
    )
    return {"model": name, "dtype": str(dtype), "bitwise_equal": f"{equal}/{len(asks)}", "max_gap_to_reference": gap}


def llama_1b() -> PreTrainedModel:
    """About 1.2 billion random parameters in bf16, Llama shape."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def padded_batch(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """``generate`` of transformers over a left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    return [tuple(row[width:].tolist()) for row in made]


def isolated(model: LoadedModel, prompts: Sequence[tuple[int, ...]], slots: int) -> list[tuple[int, ...]]:
    """Kev's engine core, level strict."""
    crowd = Crowd(model, max_slots=slots, num_positions=slots * 512, shapes=ForwardShapes.of(slots, 512, 64))
    crowd.runner.observer = None
    for ids in prompts:
        crowd.add(Ask(ids, max_tokens=NEW_TOKENS))
    return [trace.token_ids for trace in crowd.finish(max_steps=100_000)]


def measure_speed(slots: int, rounds: int = 3) -> list[dict[str, object]]:
    """Tokens/s of both systems, alternating, and how many answers change in company."""
    stock = llama_1b()
    state = stock.state_dict()
    twin = llama_1b()
    twin.load_state_dict(state)
    settings = LoadSettings(precision="bf16", max_context=512, backend=Backend.FLEX)
    model = wrap_model(twin, settings, fingerprint="llama-1b")
    prompts = [token_ids(16 + 13 * (i % 20), i, 128_000) for i in range(slots)]
    systems = {
        "kev strict, flex": lambda some: isolated(model, some, slots),
        "transformers padded batch": lambda some: padded_batch(stock, some),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for number in range(rounds + 1):
        for name, run in systems.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            answers[name] = run(prompts)
            torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - start)
        print(f"  {slots} questions, round {number}: {time.perf_counter() - start:.2f} s", flush=True)
    report: list[dict[str, object]] = []
    for name, run in systems.items():
        alone = [run([ids])[0] for ids in prompts[:8]]
        changed = sum(a != b for a, b in zip(alone, answers[name][:8], strict=True))
        rate = slots * NEW_TOKENS / statistics.median(seconds[name])
        report.append({"system": name, "questions": slots, "tokens_per_s": round(rate, 1), "changed_of_8": changed})
    return report


def main() -> int:
    """Check and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("bits", "speed"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here; nothing was checked")
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 64  # every shape of every tiny model is compiled in this one process
    report: dict[str, object] = {
        "machine": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    bits: list[dict[str, object]] = []
    speed: list[dict[str, object]] = []
    report |= {"bits": bits, "speed": speed}
    for name in SHAPES if arguments.only != "speed" else ():
        for dtype in (torch.float32, torch.bfloat16):
            bits.append(check_bits(name, dtype))
            print(bits[-1], flush=True)
    for slots in (8, 32) if arguments.only != "bits" else ():
        speed += measure_speed(slots)
        print(speed[-2:], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
