"""The memory bill: the article's example, levels, what fits, and words for bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common.config import load_config
from common.errors import ConfigError, ModelError
from common.types import IsolationLevel, KVCacheMode
from inference_svc.memory_bill import (
    LevelBill,
    Load,
    MemoryBill,
    ModelShape,
    article_kv_bytes,
    memory_bill,
    packed_bytes,
    packed_matrix_bytes,
)
from inference_svc.weight_files import read_shape, read_tensor_shapes
from kev.plan import PlanOptions, as_data, machine_bytes, make_plan, parse_bytes, print_plan

GIB = 2**30
SEVEN_B = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, head_size=128, mlp_width=11_008, vocabulary=32_000
)


def _level(bill: MemoryBill, level: IsolationLevel, kept: KVCacheMode) -> LevelBill:
    return next(row for row in bill.levels if (row.level, row.kv_cache) == (level, kept))


def test_the_articles_example_is_reproduced() -> None:
    """7B, fp16, context 4096, 8 channels: the product of the article's formula, and the same from the bill."""
    load = Load(precision="fp16", max_context=4096, num_channels=8, channel_tokens=4096)
    bill = memory_bill(SEVEN_B, load)
    assert article_kv_bytes(32, 4096, 4096, 2, 8) == 17_179_869_184 == 16 * GIB
    assert _level(bill, IsolationLevel.STRICT, KVCacheMode.UNIFIED).bytes_for(8) == 16 * GIB
    assert 13e9 < bill.weight_bytes < 14e9, "weights of a 7B model in 16 bits, as the article says"


def test_grouped_heads_cost_their_share() -> None:
    """KV is counted in KV heads: 8 of 32 heads cost a quarter."""
    grouped = ModelShape(
        num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_size=128, mlp_width=11_008, vocabulary=32_000
    )
    load = Load(precision="bf16", max_context=4096, num_channels=8, channel_tokens=4096)
    assert memory_bill(grouped, load).position_bytes * 4 == memory_bill(SEVEN_B, load).position_bytes


@given(
    context=st.integers(16, 5_000),
    share=st.floats(0.1, 1.0),
    prefix_share=st.floats(0.0, 0.9),
    channels=st.integers(1, 64),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "int8"]),
)
def test_what_is_shared_and_split_never_costs_more(
    context: int, share: float, prefix_share: float, channels: int, precision: str
) -> None:
    """unified >= split; what fits by the bill fits, and one more does not."""
    tokens = max(1, int(context * share))
    prefix = min(int(tokens * prefix_share), tokens - 1)
    load = Load(
        precision=precision,
        max_context=context,
        num_channels=channels,
        channel_tokens=tokens,
        prefix_tokens=prefix,
    )
    bill = memory_bill(SEVEN_B, load)
    unified = _level(bill, IsolationLevel.STRICT, KVCacheMode.UNIFIED)
    split = _level(bill, IsolationLevel.STRICT, KVCacheMode.SPLIT)
    assert unified.bytes_for(channels) >= split.bytes_for(channels)
    for row in bill.levels:
        room = 3 * row.channel_bytes + row.common_bytes + 7
        fit = row.channels_within(room)
        assert row.bytes_for(fit) <= room < row.bytes_for(fit + 1)


def test_packed_sizes_round_up() -> None:
    """Outputs in panels of 16, inputs in whole words, eight bytes per int8 output; vectors are float32."""
    assert packed_matrix_bytes(17, 5, "fp32") == 32 * 5 * 4
    assert packed_matrix_bytes(17, 5, "bf16") == 32 * 6 * 2
    assert packed_matrix_bytes(17, 5, "int8") == 32 * 8 + 32 * 8
    assert packed_bytes({"a": (7,), "b": (), "c": (3, 16, 4)}, "bf16") == 4 * 7 + 4 + 3 * 16 * 4 * 2
    assert packed_bytes({"mlp.gate.weight": (16, 4)}, "int8") == 16 * 4 * 4, "routers keep full precision"


def test_contradictions_are_refused_in_words() -> None:
    """A channel longer than the context; a prefix that leaves nothing."""
    with pytest.raises(ConfigError, match="longer than the context of 100"):
        memory_bill(SEVEN_B, Load(precision="bf16", max_context=100, num_channels=1, channel_tokens=101))
    with pytest.raises(ConfigError, match="leaves nothing"):
        memory_bill(
            SEVEN_B, Load(precision="bf16", max_context=100, num_channels=1, channel_tokens=50, prefix_tokens=50)
        )


@pytest.mark.parametrize(
    ("text", "expected"), [("24GiB", 24 * GIB), ("24g", 24 * 10**9), ("1.5 MiB", 1_572_864), ("1000", 1000)]
)
def test_quantities(text: str, expected: int) -> None:
    """Binary and decimal units."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "12 apples", "-4G", "4GG"])
def test_what_is_no_quantity(text: str) -> None:
    """It is refused and shown how to write it."""
    with pytest.raises(ConfigError, match="24GiB"):
        parse_bytes(text)


def test_a_plan_by_sizes_prints_and_gives_json() -> None:
    """Table and JSON carry the same numbers."""
    config = load_config({"kev": {"core": {"precision": "fp16"}}}, env={})
    plan = make_plan(config, PlanOptions(memory="40GiB", layers=32, hidden=4096), None)
    written = io.StringIO()
    print_plan(plan, Console(file=written, width=140))
    data = as_data(plan)
    assert "2 x 32 x 4096 x 4096 x 2 x 8 = 17,179,869,184 bytes = 16 GiB" in written.getvalue()
    assert json.loads(json.dumps(data)) == data
    assert data["bytes_per_position"] == 524_288
    assert machine_bytes() > 0


def test_several_cores_share_the_weights_of_their_device() -> None:
    """An operator would plan a copy of the weights for each core, or forget the KV of all but one."""
    deploy = {"mode": "multi_gpu", "devices": ["cuda:0", "cuda:1"], "workers": 3}
    config = load_config({"kev": {"deploy": deploy}}, env={})
    plan = make_plan(config, PlanOptions(memory="40GiB", layers=32, hidden=4096), None)
    first, second = plan.devices
    assert [(one.device, one.num_cores) for one in plan.devices] == [("cuda:0", 2), ("cuda:1", 1)]
    assert first.fixed_bytes == plan.bill.weight_bytes + 2 * plan.bill.working_bytes
    for level in plan.bill.levels:
        assert second.bytes_for(level, 8) == plan.bill.fixed_bytes + level.bytes_for(8)
        fit = first.channels_within(level)
        assert first.bytes_for(level, fit) <= 40 * GIB < first.bytes_for(level, fit + 1)
    written = io.StringIO()
    print_plan(plan, Console(file=written, width=140))
    data = as_data(plan)
    assert "fit per core" in written.getvalue() and json.loads(json.dumps(data)) == data
    assert [one["cores"] for one in data["devices"]] == [2, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(layers=2),
        PlanOptions(hidden=128),
        PlanOptions(layers=2, hidden=100, heads=3),
        PlanOptions(layers=2, hidden=96, heads=6, kv_heads=4),
    ],
)
def test_sizes_that_do_not_fit_together(options: PlanOptions) -> None:
    """Named in words."""
    with pytest.raises(ConfigError, match="--"):
        make_plan(load_config(None, env={}), options, None)


def test_reading_a_directory_that_is_none(tmp_path: Path) -> None:
    """Missing, broken and incomplete files are model errors that name the file."""
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}', encoding="utf-8")
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read_shape(tmp_path)
    with pytest.raises(ModelError, match="no safetensors"):
        read_tensor_shapes(tmp_path)
    for content in (b"", b"\xff" * 16, (5).to_bytes(8, "little") + b"{bad}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_tensor_shapes(tmp_path)
