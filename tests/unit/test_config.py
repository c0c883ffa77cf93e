"""Configuration: what loads, what is refused and in which words, and that its documents are current."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from common.config import Config, load_config
from common.config_docs import EXAMPLE_PATH, PAGE_PATH, render_default_yaml, render_page
from common.config_sections import CoreConfig, DeployMode, Precision, RouterConfig
from common.config_source import dump_yaml
from common.errors import ConfigError
from common.types import AggregateMode, IsolationLevel, KVCacheMode, NormalizeLevel, OverflowPolicy, Strategy

ROOT = Path(__file__).parents[2]


def load(sections: object = None, **env: str) -> Config:
    return load_config({"kev": sections}, env)


def refusal(sections: object = None, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(sections, **env)
    return str(caught.value)


def file_refusal(directory: Path, content: str | bytes) -> str:
    path = directory / "kev.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    return str(caught.value).removeprefix(str(path))


def test_the_published_file_loads_verbatim() -> None:
    """A reader of the article could not start Kev with the file printed there."""
    config = load_config(ROOT / "deploy/examples/seed.yaml", {})
    assert (config.deploy.mode, config.deploy.workers) == (DeployMode.SINGLE, 1)
    assert config.router.strategy is Strategy.SEMANTIC_HASH
    assert (config.router.max_parallel_queries, config.router.channel_pool_size) == (8, 16)
    assert config.router.overflow_policy is OverflowPolicy.WAIT
    assert config.isolation.level is IsolationLevel.STRICT
    assert config.isolation.shared_prefix is True
    assert config.isolation.kv_cache is KVCacheMode.SPLIT
    assert config.core.model_path == "./models/kev-7b"
    assert (config.core.precision, config.core.max_context) == (Precision.FP16, 4096)
    assert (config.aggregator.mode, config.aggregator.timeout_ms) == (AggregateMode.SLOT_MAP, 10_000)
    assert [warning.split(":")[0] for warning in config.warnings()] == ["core.precision fp16"]


@pytest.mark.parametrize("name", ["single", "multi_gpu", "distributed"])
def test_every_form_parses_but_distributed_is_not_embedded(name: str) -> None:
    """A distributed deployment's file could not be checked, or an embedded engine would start with it."""
    config = load({"deploy": {"mode": name, "workers": 1 if name == "single" else 4}})
    if name != "distributed":
        config.require_embedded()
        return
    with pytest.raises(ConfigError, match=rf"kev\.deploy\.mode: {name} .* set it to single"):
        config.require_embedded()


def test_example_file_is_current_and_equals_the_defaults() -> None:
    """The example would show other defaults than the code has; run ``python -m common.config_docs``."""
    assert (ROOT / EXAMPLE_PATH).read_text(encoding="utf-8") == render_default_yaml()
    assert load_config(ROOT / EXAMPLE_PATH, {}) == Config()


def test_documentation_page_is_current() -> None:
    """docs/configuration.md would describe an older Kev; run ``python -m common.config_docs``."""
    assert (ROOT / PAGE_PATH).read_text(encoding="utf-8") == render_page()


def test_every_field_has_one_line_of_documentation_and_a_valid_default() -> None:
    """A field without documentation would appear as an empty row."""
    rows = Config.describe()
    assert len({row.path for row in rows}) == len(rows) == sum(len(section) for section in _dumped(Config()).values())
    for row in rows:
        assert 20 < len(row.description) <= 120, row.path
        assert row.description.endswith("."), row.path
        assert row.allowed, row.path


def _dumped(config: Config) -> dict[str, dict[str, object]]:
    return config.model_dump()


def test_default_has_no_warnings() -> None:
    """Every start would print warnings about settings nobody made."""
    assert Config().warnings() == ()
    assert load_config(None, {}) == load(None) == load({"router": None}) == Config()


def test_environment_wins_over_the_file_and_is_read_by_type() -> None:
    """A container could not override single keys, or would get text where a number is meant."""
    config = load(
        {"router": {"strategy": "length_aware"}},
        KEV__ROUTER__STRATEGY="round_robin",
        KEV__ROUTER__LENGTH_TIERS="[16, 32]",
        KEV__ROUTER__NORMALIZE="off",
        KEV__ROUTER__LOAD_BOUND="2",
        KEV__ROUTER__HASH_KEY="0123",
        KEV__ISOLATION__SHARED_PREFIX="false",
        KEV__CORE__CACHE_DIR="",
        UNRELATED="x",
        KEV_SERVICE_HOST="10.0.0.1",
    )
    assert config.router.strategy is Strategy.ROUND_ROBIN
    assert config.router.length_tiers == (16, 32)
    assert config.router.normalize is NormalizeLevel.OFF
    assert config.router.load_bound == 2.0
    assert config.router.hash_key == "0123"
    assert config.isolation.shared_prefix is False


def test_process_environment_is_used_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overrides would be ignored by default, or leak into callers that pass their own."""
    monkeypatch.setenv("KEV__SERVER__PORT", "9000")
    assert load_config().server.port == 9000
    assert load_config({"kev": {}}).server.port == 9000
    assert load_config(None, {}).server.port == 8765


def test_the_callers_mapping_is_not_changed() -> None:
    """An override would stay in a dictionary that the caller uses again."""
    source = {"kev": {"router": {"channel_pool_size": 12}}}
    assert load_config(source, {"KEV__ROUTER__CHANNEL_POOL_SIZE": "9"}).router.channel_pool_size == 9
    assert source == {"kev": {"router": {"channel_pool_size": 12}}}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"router": {"stratgy": "x"}}, "kev.router.stratgy: unknown key, did you mean kev.router.strategy?"),
        ({"router": {"timeout_ms": 1}}, "kev.router.timeout_ms: unknown key, did you mean kev.aggregator.timeout_ms?"),
        ({"rooter": {}}, "kev.rooter: unknown key, did you mean kev.router?"),
        (
            {"router": {"virtual_nodes": 4096, "channel_pool_size": 4096}},
            "virtual_nodes: times channel_pool_size (4096)",
        ),
        ({"deploy": {"qqq": 1}}, "kev.deploy.qqq: unknown key, known here are mode, workers, devices"),
        ({"deploy": {"a b\n": 1}}, "kev.deploy['a b\\n']: unknown key, known here are mode, workers, devices"),
        ({"deploy": {3: 1}}, "kev.deploy: keys must be text, got 3"),
        ({"router": []}, "kev.router: must be a mapping of keys to values, got a list of length 0"),
        (
            {"router": {"strategy": "semantic"}},
            "kev.router.strategy: must be one of semantic_hash, round_robin, length_aware, consistent_hash or "
            "prebucket, got 'semantic'",
        ),
        ({"router": {"strategy": None}}, "got null"),
        ({"router": {"channel_pool_size": 0}}, "channel_pool_size: must be an integer from 1 to 4096, got 0"),
        ({"router": {"channel_pool_size": True}}, "must be an integer from 1 to 4096, got true"),
        ({"router": {"channel_pool_size": 8.0}}, "must be an integer from 1 to 4096, got 8.0"),
        ({"router": {"channel_pool_size": "8"}}, "must be an integer from 1 to 4096, got '8'"),
        ({"core": {"kv_cache_bytes": 10**5000}}, "got an integer of more than 24 digits"),
        ({"router": {"load_bound": float("nan")}}, "must be a finite number above 1 and up to 100, got NaN"),
        ({"router": {"load_bound": float("inf")}}, "got infinity"),
        ({"router": {"load_bound": 1}}, "load_bound: must be a finite number above 1 and up to 100, got 1"),
        ({"isolation": {"shared_prefix": "yes"}}, "shared_prefix: must be true or false, got 'yes'"),
        ({"router": {"length_tiers": [512, 64]}}, "length_tiers: must be ascending, such as [64, 512], got [512, 64]"),
        ({"router": {"length_tiers": [64, 64]}}, "must be ascending"),
        ({"router": {"length_tiers": []}}, "must be a list of 1 to 16 ascending integers above 0"),
        ({"router": {"length_tiers": [64, "x"]}}, "got 'x' at place 1"),
        ({"deploy": {"workers": 4}}, "workers > 1 comes with deploy.mode: distributed or multi_gpu"),
        ({"deploy": {"devices": ["cpu"]}}, "deploy.devices: are of deploy.mode: multi_gpu, got mode single"),
        ({"deploy": {"mode": "multi_gpu", "devices": ["cuda"]}}, "each cpu or cuda:N, got 'cuda' at place 0"),
        ({"deploy": {"mode": "multi_gpu", "devices": ["cpu", "cpu"]}}, "must name each device once"),
        ({"core": {"device": "tpu"}}, "kev.core.device: must be one of cpu, cuda or cuda:N, got 'tpu'"),
        ({"core": {"model_path": "\ud800"}}, "model_path: must be text, not empty, got '\\ud800'"),
        ({"core": {"prompt_template": "hi"}}, "prompt_template: must contain {question}, got 'hi'"),
        ({"core": {"max_context": 64}}, "max_tokens: must be less than max_context (64)"),
        ({"core": {"prefill_rows": 32}}, "segment_tokens: must be at most prefill_rows (32)"),
        (["router"], "kev: must be a mapping of sections, got a list of length 1"),
    ],
)
def test_refusals_name_the_key_and_what_is_right(sections: object, sentence: str) -> None:
    """An operator would have to guess what is wrong with the file."""
    assert sentence in refusal(sections)


REFUND = {"name": "refund", "num_channels": 4}


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        (
            [{**REFUND, "weight": 1}],
            "prebucket_classes[0].weight: unknown key, known here are name, num_ch",
        ),
        ([REFUND, {**REFUND, "pattern": 1}], "prebucket_classes[1].pattern: unknown key, did you mean patterns?"),
        ([{"name": "a"}], "prebucket_classes[0].num_channels: is missing, must be an integer from 1 to 4096"),
        ([{**REFUND, "num_channels": 0}], "[0].num_channels: must be an integer from 1 to 4096, got 0"),
        ([{**REFUND, "name": ""}], "[0].name: must be text of 1 to 64 characters, got ''"),
        (
            [{**REFUND, "patterns": "退款"}],
            "[0].patterns: must be a list of at most 64 texts of 1 to 128 characters, got",
        ),
        ([{**REFUND, "patterns": ["a", ""]}], "of 1 to 128 characters, got '' at place 1"),
        (
            ["refund"],
            "mappings with name, num_channels, categories, patterns, got 'refund'",
        ),
        ({"refund": 4}, "must be a list of at most 64 mappings"),
        ([{**REFUND, "patterns": [r"^\d+"]}], "class 'refund': '^\\\\d+' looks like a regular expression ('\\\\')"),
        ([{**REFUND, "patterns": ["^*"]}], "'^*' matches every question; write some text beside * and ^"),
        (
            [{**REFUND, "num_channels": 16}],
            "take 16 channels of channel_pool_size (16); leave at least 1 to class",
        ),
        ([REFUND, {"name": "x", "num_channels": 1, "categories": ["refund"]}], "'refund' is of class 'refund' too"),
        ([{"name": "default", "num_channels": 1}], "default is the class of all other questions; choose another"),
        ([{"name": "a\nb", "num_channels": 1}], "the category 'a\\nb' must be printable text of one line"),
    ],
)
def test_a_wrong_class_is_named(classes: object, sentence: str) -> None:
    """An operator would start Kev with classes that never match, or with channels that nobody uses."""
    message = refusal({"router": {"prebucket_classes": classes}})
    assert message.startswith("kev.router.prebucket_classes")
    assert sentence in message


def test_strategy_prebucket_needs_classes() -> None:
    """Every question would silently be of one class."""
    told = refusal({"router": {"strategy": "prebucket"}})
    assert told == "kev.router.prebucket_classes: must name at least one class, because strategy is prebucket"
    config = load({"router": {"strategy": "prebucket", "prebucket_classes": [REFUND]}})
    assert load_config({"kev": config.model_dump(mode="json")}, {}) == config
    from_env = load(KEV__ROUTER__PREBUCKET_CLASSES="[{name: refund, num_channels: 4}]")
    assert from_env.router.prebucket_classes == config.router.prebucket_classes


def test_all_mistakes_are_named_at_once_up_to_a_limit() -> None:
    """An operator would fix one mistake per start."""
    message = refusal({"router": {"strategy": 1, "semantic_planes": 0}, "server": {"prot": 1}})
    assert [word in message for word in ("router.strategy", "semantic_planes", "server.prot")] == [True] * 3
    assert refusal({"server": {f"qqq{i}": 1 for i in range(1000)}}).endswith("; and 990 more")


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"KEV__ROUTER__STRATGY": "x"}, "unknown environment variable, did you mean KEV__ROUTER__STRATEGY?"),
        ({"KEV__router__strategy": "x"}, "did you mean KEV__ROUTER__STRATEGY?"),
        ({"KEV__Q": "x"}, "names begin with KEV__AGGREGATOR__..., "),
        ({"KEV__ROUTER__CHANNEL_POOL_SIZE": "many"}, "KEV__ROUTER__CHANNEL_POOL_SIZE: must be an integer from 1"),
        ({"KEV__ROUTER__LENGTH_TIERS": "[1"}, "KEV__ROUTER__LENGTH_TIERS, line 1, column 3: is not valid YAML"),
        ({"KEV__DEPLOY__WORKERS": "4"}, "KEV__DEPLOY__WORKERS: must be 1, got 4"),
    ],
)
def test_a_wrong_variable_is_named(env: dict[str, str], sentence: str) -> None:
    """A mistyped variable would be ignored, or its mistake blamed on the file."""
    assert sentence in refusal({}, **env)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "kev:\n  router:\n    strategy: a\n    strategy: b\n",
            ", line 4, column 5: is not valid YAML: the key 'strategy'",
        ),
        ("kev: [\n", ", line 2, column 1: is not valid YAML"),
        ("kev:\n\trouter: 3\n", ", line 2, column 1: is not valid YAML"),
        ("kev:\n  a: \x01\n", ", line 2: has the character U+0001"),
        ("kev: !!python/object:os.system {}\n", ", line 1, column 6: is not valid YAML"),
        ("kev: {? [a] : 1}\n", ", line 1, column 9: is not valid YAML"),
        ("[" * 600, ": is nested too deeply"),
        ("kev: {router: {semantic_planes: " + "9" * 5000 + "}}", ": is not valid YAML"),
        (b"kev: \xff\n", ": must be UTF-8 text, byte 5 is not"),
        ("", ": must be a mapping with the top key kev, got null"),
        ("- kev\n", ": must be a mapping with the top key kev, got a list of length 1"),
        ("router: {}\n", ": must have the one top key kev with every section under it, got 'router'"),
        ("kev: {}\nrouter: {}\n", "got 'kev', 'router'"),
        (
            "kev: {core: {max_context: 010}}\n",
            ": kev.core.max_context: must be an integer from 16 to 16777216, got '010'",
        ),
        ("kev: {isolation: {shared_prefix: no}}\n", ": kev.isolation.shared_prefix: must be true or false, got 'no'"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    """A broken file would end in a traceback, or be read as something else."""
    assert sentence in file_refusal(tmp_path, content)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A wrong path would end in a traceback."""
    cases = {
        str(tmp_path / "none.yaml"): "there is no such file",
        str(tmp_path): "cannot be read: Is a directory",
        "\0": "cannot be read",
        "\ud800": "cannot be read",
    }
    for path, sentence in cases.items():
        with pytest.raises(ConfigError, match=sentence) as caught:
            load_config(path, {})
        str(caught.value).encode()


def test_a_byte_order_mark_and_yaml_1_1_words_do_no_harm(tmp_path: Path) -> None:
    """Windows editors' files would be refused; ``normalize: off`` would arrive as false."""
    path = tmp_path / "kev.yaml"
    path.write_text("\ufeffkev:\n  router:\n    normalize: off\n    hash_key: 12:30\n  core:\n", encoding="utf-8")
    router = load_config(str(path), {}).router
    assert (router.normalize, router.hash_key) == (NormalizeLevel.OFF, "12:30")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"deploy": {"mode": "multi_gpu"}, "core": {"device": "cuda"}}, "cuda has no effect in deploy.mode multi_gpu"),
        ({"router": {"channel_pool_size": 4}}, "is smaller than router.max_parallel_queries 8"),
        ({"router": {"channel_pool_size": 17}}, "is more than twice router.max_parallel_queries 8"),
        ({"router": {"breaker_queue_length": 9}}, "is full before the breaker diverts"),
        ({"router": {"max_queries_per_request": 129, "overflow_policy": "reject"}}, "more than the 128 questions"),
        ({"router": {"max_queries_per_request": 385, "overflow_policy": "queue"}}, "more than the 384 questions"),
        ({"router": {"max_waiting_queries": 100}}, "more than the 228 questions"),
        ({"router": {"max_wait_ms": 10_001}}, "is longer than aggregator.timeout_ms 10000"),
        (
            {"router": {"strategy": "length_aware", "max_parallel_queries": 1, "channel_pool_size": 2}},
            "makes 3 tiers for 2 channels",
        ),
        ({"router": {"max_question_tokens": 64}}, "every question that sets no max_tokens of its own is refused"),
        ({"router": {"max_question_tokens": 4097}}, "is above core.max_context 4096"),
        ({"router": {"max_question_tokens": 200, "max_request_tokens": 199}}, "less than a single question may have"),
        ({"router": {"max_request_tokens": 99, "max_tenant_tokens": 98}}, "less than router.max_request_tokens 99"),
        ({"router": {"max_tenant_questions": 255}}, "less than router.max_queries_per_request 256"),
        ({"isolation": {"level": "shared"}}, "for answers to end users use strict"),
        ({"isolation": {"level": "shared", "shared_prefix": False}}, "shares nothing"),
        ({"isolation": {"level": "loose"}}, "and that is empty"),
        ({"isolation": {"kv_cache": "shared_readonly"}}, "isolation.level strict has none"),
        ({"isolation": {"kv_cache": "unified"}}, "reserves core.max_context 4096 tokens for each of 8 slots"),
        ({"aggregator": {"timeout_ms": 999}}, "is short"),
        ({"aggregator": {"timeout_ms": 120_001}}, "is long"),
        ({"core": {"precision": "fp16"}}, "can overflow in fp16"),
        ({"server": {"max_body_bytes": 1000}}, "HTTP refuses questions"),
        ({"server": {"host": "0.0.0.0"}}, "may be reached from other machines"),
    ],
)
def test_doubtful_combinations_are_warned_of(sections: object, words: str) -> None:
    """The operator would meet the pitfall in production instead of at start."""
    assert any(words in warning for warning in load(sections).warnings())


@pytest.mark.parametrize(
    "sections",
    [
        {"router": {"channel_pool_size": 8}},
        {"router": {"max_queries_per_request": 128, "overflow_policy": "reject"}},
        {"router": {"max_queries_per_request": 60_000}},
        {"router": {"max_wait_ms": 10_000, "max_waiting_queries": 128}},
        {"router": {"max_question_tokens": 65, "max_request_tokens": 65, "max_tenant_tokens": 65}},
        {"router": {"max_tenant_questions": 256}},
        {"aggregator": {"timeout_ms": 1000}},
        {"aggregator": {"timeout_ms": 120_000}},
        {"isolation": {"kv_cache": "unified"}, "core": {"max_context": 2048}},
    ],
)
def test_sensible_combinations_are_not_warned_of(sections: object) -> None:
    """Warnings at the very border would teach operators to ignore them."""
    assert load(sections).warnings() == ()


def test_a_config_never_changes() -> None:
    """One room could change what another already read."""
    with pytest.raises(ValidationError, match="frozen"):
        Config().router.strategy = Strategy.ROUND_ROBIN


_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40) | st.sampled_from(
    [
        "off",
        "yes",
        "1e3",
        "012",
        "1_0",
        "null",
        "~",
        "a: b",
        "# c",
        "'",
        '"',
        "x\ny",
        " ",
        "12:30",
        "2020-01-01",
        "\x85",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    text=_TEXTS,
    stops=st.lists(_TEXTS.filter(bool), max_size=3),
    tiers=st.sets(st.integers(1, 10_000), min_size=1, max_size=5),
    bound=st.floats(1.0, 100.0, exclude_min=True),
    level=st.sampled_from(IsolationLevel),
)
def test_to_yaml_reads_back_as_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    stops: list[str],
    tiers: set[int],
    bound: float,
    level: IsolationLevel,
) -> None:
    """``kev config show > kev.yaml`` would not be the configuration that was shown."""
    config = Config(
        router=RouterConfig(length_tiers=tuple(sorted(tiers)), load_bound=bound),
        core=CoreConfig(prompt_stop=tuple(stops), prompt_template=f"{text}{{question}}"),
    ).model_copy(update={"isolation": Config().isolation.model_copy(update={"level": level, "knowledge_prefix": text})})
    path = tmp_path_factory.getbasetemp() / "shown.yaml"
    path.write_bytes(config.to_yaml().encode())
    assert load_config(path, {}) == config


def test_dumped_words_are_safe_for_yaml_1_1_readers() -> None:
    """Another tool would read ``normalize: off`` of the example as false."""
    assert dump_yaml({"normalize": "off"}) == "normalize: 'off'\n"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        section: _JSON
        | st.dictionaries(
            st.sampled_from([row.key for row in Config.describe() if row.section == section]), _JSON, max_size=5
        )
        for section in ("deploy", "router", "isolation", "core")
    },
)


@settings(max_examples=100, deadline=None)
@given(_FIELDS | _JSON)
def test_any_content_is_a_config_or_a_config_error(sections: object) -> None:
    """Some content would end in a traceback instead of a sentence."""
    try:
        config = load(sections)
    except ConfigError as error:
        str(error).encode()
        assert len(str(error)) < 20_000
    else:
        assert isinstance(config, Config)
