"""``kev plan``: the memory bill of a configuration as a table.

Invariants and semantics: reads sizes, loads nothing. The numbers are those of ``inference_svc.memory_bill``.

Not here: the arithmetic, several devices (``kev.device_bill``), the engine.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.config import Config
from common.errors import ConfigError
from inference_svc.memory_bill import Load, MemoryBill, ModelShape, article_kv_bytes, memory_bill, packed_bytes
from inference_svc.weight_files import read_shape, read_tensor_shapes
from kev import device_bill
from kev.device_bill import DeviceBill, device_bills, sized

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is asked on the command line."""

    memory: str = ""
    """For how many channels; empty: this machine's."""
    tokens: int | None = None
    prefix_tokens: int = 0
    channels: int | None = None
    layers: int | None = None
    """With ``hidden``: a model by its sizes instead of a directory."""
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A bill and what it was asked for."""

    shape: ModelShape
    load: Load
    bill: MemoryBill
    memory_bytes: int
    devices: tuple[DeviceBill, ...] = ()
    """With several engine cores in one process."""


def make_plan(config: Config, options: PlanOptions, model: Path | None) -> Plan:
    """Work out the bill.

    Args:
        config: the deployment.
        options: what is asked.
        model: directory of the model; None when it is given by its sizes.

    Raises:
        ConfigError: the options contradict each other, or the devices are not there.
        ModelError: the directory cannot be read.
    """
    core = config.core
    shape = _shape_by_sizes(options) if model is None else read_shape(model)
    load = Load(
        precision=core.precision.value,
        max_context=core.max_context,
        num_channels=options.channels or config.router.max_parallel_queries,
        channel_tokens=options.tokens or core.max_context,
        prefix_tokens=options.prefix_tokens,
        prefill_rows=core.prefill_rows,
        segment_tokens=core.segment_tokens,
    )
    weights = None if model is None else packed_bytes(read_tensor_shapes(model), load.precision)
    memory = parse_bytes(options.memory) if options.memory else machine_bytes()
    bill = memory_bill(shape, load, weights)
    return Plan(shape, load, bill, memory, device_bills(config, bill, memory, is_given=bool(options.memory)))


def parse_bytes(text: str) -> int:
    """Bytes of a quantity such as 24GiB, 24G or 1000000.

    Raises:
        ConfigError: it is not one.
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory: {text!r} is not a quantity of bytes; write it like 24GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def machine_bytes() -> int:
    """Memory of this machine, or what its container may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def as_data(plan: Plan) -> dict[str, object]:
    """The bill as JSON data."""
    rows = [
        {
            "level": row.level.value,
            "kv_cache": row.kv_cache.value,
            "bytes_per_channel": row.channel_bytes,
            "bytes_common": row.common_bytes,
            "bytes_kv": row.bytes_for(plan.load.num_channels),
            "channels_that_fit": row.channels_within(plan.memory_bytes - plan.bill.fixed_bytes),
        }
        for row in plan.bill.levels
    ]
    return {
        "model": asdict(plan.shape),
        "load": asdict(plan.load),
        "bytes_weights": plan.bill.weight_bytes,
        "bytes_working": plan.bill.working_bytes,
        "bytes_per_position": plan.bill.position_bytes,
        "bytes_memory": plan.memory_bytes,
        "levels": rows,
        "devices": device_bill.as_data(plan.devices, plan.load.num_channels),
    }


def print_plan(plan: Plan, console: Console) -> None:
    """The bill as a table, with the rule of thumb beside it."""
    shape, load, bill = plan.shape, plan.load, plan.bill
    console.print(
        f"{shape.num_layers} layers, hidden {shape.hidden}, {shape.num_heads} heads, {shape.num_kv_heads} KV heads of "
        f"{shape.head_size}, {load.precision}; {load.num_channels} channels, context {load.max_context}, "
        f"{load.channel_tokens} tokens in use, {load.prefix_tokens} of them common",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"weights {sized(bill.weight_bytes)}, working memory {sized(bill.working_bytes)}, "
        f"KV {bill.position_bytes:,} bytes per token",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("level", "kv_cache", "per channel", "common", "all KV", "in all", "fit")
    for row in bill.levels:
        kv = row.bytes_for(load.num_channels)
        fit = row.channels_within(plan.memory_bytes - bill.fixed_bytes)
        sizes = (row.channel_bytes, row.common_bytes, kv, bill.fixed_bytes + kv)
        table.add_row(row.level.value, row.kv_cache.value, *map(sized, sizes), f"{fit:,}")
    console.print(table)
    console.print(
        f"all KV and in all: of {load.num_channels} channels; fit: channels within {sized(plan.memory_bytes)}",
        highlight=False,
        soft_wrap=True,
    )
    device_bill.print_devices(plan.devices, load.num_channels, console)
    element_bytes = shape.geometry(load.precision).element_bytes
    factors = (shape.num_layers, shape.hidden, load.max_context, element_bytes, load.num_channels)
    rule = article_kv_bytes(*factors)
    product = " x ".join(map(str, (2, *factors)))
    console.print(
        f"if every head were a KV head: {product} = {rule:,} bytes = {sized(rule)}", highlight=False, soft_wrap=True
    )


def _shape_by_sizes(options: PlanOptions) -> ModelShape:
    if options.layers is None or options.hidden is None:
        raise ConfigError("a model by its sizes needs both --layers and --hidden")
    heads = options.heads or max(1, options.hidden // 128)
    kv_heads = options.kv_heads or heads
    if options.hidden % heads or heads % kv_heads:
        raise ConfigError(
            f"--heads {heads} must divide --hidden {options.hidden}, and --kv-heads {kv_heads} must divide --heads"
        )
    return ModelShape(
        num_layers=options.layers,
        hidden=options.hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=options.hidden // heads,
        mlp_width=options.hidden * 11 // 4,
        vocabulary=32_000,
    )
