"""Prompts, control tokens and detokenization, on small tokenizers of the three common kinds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from common.clock import ManualClock
from common.errors import ConfigError, InvalidRequestError, ModelError
from common.tokenization import Detokenizer, Tokenizer, TooManyTokens
from common.types import Prompt, Truncate

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>", "<table>"]
CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "用一句话说明什么是注意力机制。注意力机制让模型关注重要的部分。",
    "user system assistant Question: Answer: def f(x):\n    return x\n\n",
    "a <eos> b <eos> c <|im_end|> d <|im_end|> <table> <table> <unk> <pad> <bos>",
] * 4
TEMPLATE = "Question: {question}\nAnswer:"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}{% endfor %}"
)


def _added() -> list[AddedToken]:
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL[:-1]]
    blanks = [AddedToken(text, normalized=False) for text in ("\n\n", "\n\n\n", "\t\t", "\u2581\u2581", "        ")]
    return [*special, AddedToken("<table>", normalized=False), *blanks]


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_tokens(_added())
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), _bos_first(made)])
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """Like a converted sentencepiece BPE; its merges reach control tokens, as "<eos>" is frequent in the corpus."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    parts = json.loads(trained.to_str())["model"]
    vocab = {text: i for i, text in enumerate([*CONTROL[:4], *(f"<0x{byte:02X}>" for byte in range(256))])}
    for text in sorted(parts["vocab"], key=parts["vocab"].get):
        vocab.setdefault(text, len(vocab))
    merges = [tuple(pair) for pair in parts["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer, made.pre_tokenizer = trained.normalizer, trained.pre_tokenizer
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_tokens(_added())
    made.post_processor = _bos_first(made)
    return made


def unigram() -> tokenizers.Tokenizer:
    """No byte fallback, and control tokens are ordinary pieces of the model."""
    letters = [*sorted(set("".join(CORPUS)) - {" ", "\n"}), "\n", "\u2581"]
    words = ["\u2581the", "\u2581capital", "tion", "France", "注意力"]
    pieces = [(text, -1.0) for text in CONTROL] + [(w, -4.0) for w in words] + [(c, -8.0) for c in letters]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=CONTROL.index("<unk>"), byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    made.add_tokens(_added())
    made.post_processor = _bos_first(made)
    return made


def _bos_first(made: tokenizers.Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
    )


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
}


def save(directory: Path, made: tokenizers.Tokenizer, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    named = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return directory


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(kind), KINDS[kind]())


@pytest.fixture(scope="module")
def stock(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def plain(directory: Path) -> Tokenizer:
    return Tokenizer.from_dir(directory, prompt_template=TEMPLATE, knowledge_prefix="Be exact. <bos>")


@pytest.fixture(scope="module")
def chat(kind: str, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = save(tmp_path_factory.mktemp(f"{kind}_chat"), KINDS[kind](), chat_template=CHATML)
    return Tokenizer.from_dir(made, prompt_template=TEMPLATE)


def render(tokenizer: Tokenizer, question: str, system_prompt: str = "", limit: int = 10**6) -> Prompt:
    return tokenizer.render(question, system_prompt, max_prompt_tokens=limit, truncate=Truncate.NONE)


SPELLINGS = [*CONTROL, "<<eos>eos>", "<e<eos>os>", "<|im_<|im_end|>end|>", "＜eos＞", "<eos", ">", "<", "|>"]
ORDINARY = [
    "What is ",
    "注意力",
    "\n\n",
    "        ",
    "\t\t",
    "  ",
    "\u2581\u2581",
    "é",
    "🫨",
    "☃",
    "KevMark7f3aQuestion",
]
hostile_text = st.lists(st.sampled_from([*SPELLINGS, *ORDINARY]) | st.text(max_size=3), max_size=8).map("".join)
hostile_text = hostile_text.filter(lambda text: text.isprintable() or not any(0xD800 <= ord(c) < 0xE000 for c in text))


def forged(tokenizer: Tokenizer, ids: tuple[int, ...] | list[int], stock: tokenizers.Tokenizer) -> list[int]:
    """Control ids but "unknown", which every text with an unknown character has."""
    unk = stock.token_to_id("<unk>")
    return [token_id for token_id in ids if token_id in tokenizer.control_ids and token_id != unk]


@settings(max_examples=40, deadline=None)
@given(text=hostile_text)
def test_text_never_becomes_a_control_token(
    plain: Tokenizer, chat: Tokenizer, stock: tokenizers.Tokenizer, text: str
) -> None:
    """A caller could close a turn, forge a system turn or end the answer by writing a token's name."""
    assert forged(plain, plain.encode_plain(text), stock) == []
    for tokenizer in (plain, chat):
        clean = forged(tokenizer, render(tokenizer, "x", "y").ids, stock)
        assert forged(tokenizer, render(tokenizer, text, "y").ids, stock) == clean
        assert forged(tokenizer, render(tokenizer, "x", text or "y").ids, stock) == clean
        assert render(tokenizer, text).ids.count(stock.token_to_id("<bos>")) == 1


@settings(max_examples=25, deadline=None)
@given(text=st.lists(st.sampled_from(ORDINARY) | st.text(alphabet="aé用🫨 \n.!", max_size=4), max_size=8).map("".join))
def test_ordinary_text_has_the_stock_ids(
    plain: Tokenizer, chat: Tokenizer, stock: tokenizers.Tokenizer, text: str
) -> None:
    """Hardening against control tokens would cost quality if it changed how ordinary text is read."""
    assert plain.encode_plain(text) == stock.encode(text, add_special_tokens=False).ids
    whole = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert list(render(chat, text).ids) == stock.encode(whole).ids


def test_unknown_characters_are_allowed_and_spelled_names_are_not(tmp_path: Path) -> None:
    """A model without byte fallback would refuse every emoji, or let "<unk>" through as a token."""
    tokenizer = Tokenizer.from_dir(save(tmp_path, unigram()), prompt_template=TEMPLATE)
    unk = CONTROL.index("<unk>")
    assert tokenizer.encode_plain("☃").count(unk) == 1
    assert unk not in tokenizer.encode_plain("<unk>")


def test_a_character_that_is_a_control_token_is_refused_in_words(tmp_path: Path) -> None:
    """A one-character end token cannot be spelled out, so it must not slip through or crash."""
    made = unigram()
    made.add_special_tokens(["力"])
    tokenizer = Tokenizer.from_dir(save(tmp_path, made), prompt_template=TEMPLATE)
    with pytest.raises(InvalidRequestError, match="'力' is the control token"):
        render(tokenizer, "力")


def test_boundaries_end_the_prefixes(plain: Tokenizer, stock: tokenizers.Tokenizer) -> None:
    """Shared prefixes would be cut at a place that depends on the question, and no store would hit."""
    first, second = render(plain, "What?", "Be kind."), render(plain, "\n\nOr not <eos>", "Be kind.")
    assert first.boundaries == second.boundaries and len(first.boundaries) == 2
    knowledge, system = first.boundaries
    assert first.ids[:system] == second.ids[:system]
    assert render(plain, "What?").boundaries == (knowledge,)
    assert render(plain, "What?", "Other.").ids[:knowledge] == first.ids[:knowledge]
    assert first.ids[0] == plain.bos_id == stock.token_to_id("<bos>")
    assert list(first.ids[system:]) == plain.encode_plain("Question: What?\nAnswer:")
    assert list(first.ids[knowledge:system]) == plain.encode_plain("Be kind.\n\n")


def test_chat_boundary_lies_before_the_question(chat: Tokenizer) -> None:
    """The system prompt would be shared together with a part of the question, or not at all."""
    prompt = render(chat, "What?", "Be kind.")
    (end,) = prompt.boundaries
    assert render(chat, "Or not", "Be kind.").ids[:end] == prompt.ids[:end]
    assert prompt.ids[0] == chat.bos_id
    assert list(prompt.ids[end:])[: len(chat.encode_plain("What?"))] == chat.encode_plain("What?")
    assert render(chat, "What?").boundaries == ()


def test_knowledge_joins_the_system_message_of_a_chat(kind: str, tmp_path: Path) -> None:
    """Knowledge outside the turns is text a chat model never saw; its prefix must not depend on the system prompt."""
    made = save(tmp_path, KINDS[kind](), chat_template=CHATML)
    tokenizer = Tokenizer.from_dir(made, prompt_template=TEMPLATE, knowledge_prefix="Paris")
    bare, full = render(tokenizer, "What?"), render(tokenizer, "What?", "Be kind.")
    assert bare.boundaries == full.boundaries[:1]
    assert bare.ids[: bare.boundaries[0]] == full.ids[: full.boundaries[0]]
    stock = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    assert full.ids.count(stock.token_to_id("<|im_start|>")) == 3


def test_template_without_system_role_and_with_its_own_bos(kind: str, tmp_path: Path) -> None:
    """Two BOS shift every answer; a template that refuses system messages must not refuse the request."""
    made = save(tmp_path, KINDS[kind](), chat_template=[{"name": "default", "template": NO_SYSTEM}])
    tokenizer = Tokenizer.from_dir(made, prompt_template=TEMPLATE)
    prompt = render(tokenizer, " <bos>What?", "be kind.")
    assert tokenizer.uses_chat_template
    assert prompt.ids.count(tokenizer.bos_id or -1) == 1 and prompt.ids[0] == tokenizer.bos_id
    text = tokenizer.decode(prompt.ids)
    assert 0 < text.index("be kind.") < text.index("What?")


def test_chat_template_file_counts_before_the_inline_one_and_knows_the_date(tmp_path: Path) -> None:
    """A model repaired by a template file would go on with its old template; dates must come from the clock."""
    made = save(tmp_path, byte_level(), chat_template=CHATML)
    source = "{% generation %}{{ strftime_now('%Y') }} {{ messages | tojson }}{% endgeneration %}"
    (made / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_dir(made, prompt_template=TEMPLATE, clock=ManualClock(86_400.0 * 366))
    prompt = render(tokenizer, '{{ 1 + 1 }} " < {% raw %}')
    assert tokenizer.decode(prompt.ids) == '1971 [{"role": "user", "content": "{{ 1 + 1 }} " < {% raw %}"}]'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content",
        "no text",
        "{{ messages[0].content * 2 }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content | upper }}",
    ],
)
def test_broken_chat_templates_are_refused_at_load(tmp_path: Path, source: str) -> None:
    """A template that loses or repeats the question would answer something else, at the first request."""
    with pytest.raises(ModelError, match="chat template"):
        Tokenizer.from_dir(save(tmp_path, byte_level(), chat_template=source), prompt_template=TEMPLATE)


@pytest.mark.parametrize(
    "template", ["", "no field", "{}", "{question} {question}", "{question!r}", "{question:>9}", "{q}", "{"]
)
def test_broken_prompt_templates_are_refused(tmp_path: Path, template: str) -> None:
    """A template without the question answers nothing; one with other fields fails at the first request."""
    with pytest.raises(ConfigError, match=r"core\.prompt_template"):
        Tokenizer.from_dir(save(tmp_path, byte_level()), prompt_template=template)


def test_doubled_braces_in_the_template_and_braces_in_the_question(tmp_path: Path) -> None:
    """Formatting the caller's text would fail on its braces, or fill them in."""
    tokenizer = Tokenizer.from_dir(save(tmp_path, byte_level()), prompt_template="{{x}} {question}!")
    assert tokenizer.decode(render(tokenizer, "{question} {0} }{").ids) == "{x} {question} {0} }{!"


def test_prompt_templates_may_name_control_tokens(tmp_path: Path) -> None:
    """An operator's turn markers would reach the model as plain characters."""
    template = "<|im_start|>user\n{question}<|im_end|>"
    tokenizer = Tokenizer.from_dir(save(tmp_path, byte_level()), prompt_template=template)
    harmless, hostile = render(tokenizer, "hi").ids, render(tokenizer, "<|im_end|>").ids
    assert (harmless[1], harmless[-1]) == (hostile[1], hostile[-1])
    assert hostile.count(hostile[-1]) == 1 and harmless[-1] in tokenizer.control_ids


@settings(max_examples=30, deadline=None)
@given(text=hostile_text, side=st.sampled_from([Truncate.LEFT, Truncate.RIGHT]), limit=st.integers(1, 120))
def test_truncation_cuts_only_the_question(
    plain: Tokenizer, chat: Tokenizer, text: str, side: Truncate, limit: int
) -> None:
    """Cutting the template or the prefix changes what the model is asked, and nobody is told."""
    for tokenizer in (plain, chat):
        whole = render(tokenizer, text, "Be kind.")
        try:
            prompt = tokenizer.render(text, "Be kind.", max_prompt_tokens=limit, truncate=side)
        except TooManyTokens as error:
            assert error.max_tokens == limit < error.num_tokens <= len(whole.ids)
            continue
        assert len(prompt.ids) == len(whole.ids) - prompt.num_truncated <= limit
        assert (prompt.num_truncated > 0) == (len(whole.ids) > limit)
        assert prompt.boundaries == whole.boundaries
        start = _common(prompt.ids, whole.ids)
        assert start >= prompt.boundaries[-1] and prompt.ids[-2:] == whole.ids[-2:]
        end = len(prompt.ids) - start
        assert prompt.ids[start:] == whole.ids[len(whole.ids) - end :]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_the_limit_counts_every_token(plain: Tokenizer, off_by: int) -> None:
    """Off-by-one between two components cuts the first token or refuses what fits."""
    num_tokens = len(render(plain, "What is it?", "Be kind.").ids)
    if off_by >= 0:
        assert len(render(plain, "What is it?", "Be kind.", num_tokens + off_by).ids) == num_tokens
        return
    with pytest.raises(TooManyTokens) as caught:
        render(plain, "What is it?", "Be kind.", num_tokens - 1)
    assert (caught.value.num_tokens, caught.value.max_tokens) == (num_tokens, num_tokens - 1)


def test_truncation_keeps_the_named_end_and_whole_characters(tmp_path: Path) -> None:
    """The end that was to be kept would be lost, or half a character sent to the model."""
    tokenizer = Tokenizer.from_dir(save(tmp_path, byte_fallback()), prompt_template="{question}")
    whole = render(tokenizer, "one 🫨🫨🫨 two").ids
    for limit in range(4, len(whole)):
        for side, kept in ((Truncate.LEFT, "two"), (Truncate.RIGHT, "o")):
            prompt = tokenizer.render("one 🫨🫨🫨 two", "", max_prompt_tokens=limit, truncate=side)
            text = tokenizer.decode(prompt.ids)
            assert "\ufffd" not in text and (text.endswith(kept) if side is Truncate.LEFT else text.startswith(kept))
            assert "one 🫨🫨🫨 two".endswith(text) or "one 🫨🫨🫨 two".startswith(text)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (None, None, {"<eos>"}),
        (["<pad>", "<|im_end|>"], "<bos>", {"<eos>", "<pad>", "<|im_end|>"}),
        (None, "<|im_end|>", {"<eos>", "<|im_end|>"}),
        ("<|im_end|>", ["<pad>"], {"<eos>", "<|im_end|>"}),
    ],
)
def test_end_tokens_of_every_source(
    tmp_path: Path, generation: str | list[str] | None, model: str | list[str] | None, expected: set[str]
) -> None:
    """Answers would run on to their limit when the end token is only in a list of the generation settings."""
    made = byte_level()

    def ids(names: str | list[str]) -> int | list[int]:
        found = [made.token_to_id(name) for name in ([names] if isinstance(names, str) else names)]
        return found[0] if isinstance(names, str) else found

    save(tmp_path, made)
    for name, value in (("generation_config.json", generation), ("config.json", model)):
        (tmp_path / name).write_text(json.dumps({} if value is None else {"eos_token_id": ids(value)}))
    if isinstance(generation, list):  # "None of them" as some configurations write it.
        listed = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*listed, -1]}))
    tokenizer = Tokenizer.from_dir(tmp_path, prompt_template=TEMPLATE)
    assert tokenizer.eos_ids == {made.token_to_id(name) for name in expected}


def test_bos_follows_the_setting_then_the_post_processor(tmp_path: Path) -> None:
    """A prompt gets a BOS its model never saw, or lacks the one it needs."""
    made = byte_level()
    switched_off = save(tmp_path / "off", made, add_bos_token=False)
    assert Tokenizer.from_dir(switched_off, prompt_template=TEMPLATE).bos_id is None
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    assert Tokenizer.from_dir(save(tmp_path / "none", made), prompt_template=TEMPLATE).bos_id is None
    switched_on = save(tmp_path / "on", made, add_bos_token=True)
    assert Tokenizer.from_dir(switched_on, prompt_template=TEMPLATE).bos_id == made.token_to_id("<bos>")


def test_fingerprint_follows_everything_that_decides_ids(tmp_path: Path) -> None:
    """A node with another tokenizer would answer prompts that mean something else to it."""
    made = save(tmp_path / "a", byte_level())
    one = Tokenizer.from_dir(made, prompt_template=TEMPLATE).fingerprint
    assert one == Tokenizer.from_dir(made, prompt_template=TEMPLATE).fingerprint and len(one) == 64
    others = [
        Tokenizer.from_dir(made, prompt_template="{question}"),
        Tokenizer.from_dir(made, prompt_template=TEMPLATE, knowledge_prefix="x"),
        Tokenizer.from_dir(save(tmp_path / "b", byte_fallback()), prompt_template=TEMPLATE),
        Tokenizer.from_dir(save(tmp_path / "c", byte_level(), chat_template=CHATML), prompt_template=TEMPLATE),
    ]
    assert len({one, *(other.fingerprint for other in others)}) == 5


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """A broken download would end in a traceback of a library."""
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path, prompt_template=TEMPLATE)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path, prompt_template=TEMPLATE)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json"):
        Tokenizer.from_dir(tmp_path, prompt_template=TEMPLATE)


def test_a_saved_truncation_setting_is_ignored(tmp_path: Path) -> None:
    """Prompts would be cut in silence to the length a trainer once used."""
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    tokenizer = Tokenizer.from_dir(save(tmp_path, made), prompt_template="{question}")
    assert tokenizer.decode(render(tokenizer, "one two three four five").ids) == "one two three four five"


def test_vocab_size_covers_every_id(plain: Tokenizer, stock: tokenizers.Tokenizer) -> None:
    """A stop token id or a table row at the end of the vocabulary would be out of range."""
    assert plain.vocab_size == 1 + max(stock.get_vocab(with_added_tokens=True).values())


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_whole_text(plain: Tokenizer, stock: tokenizers.Tokenizer, data: st.DataObject) -> None:
    """The text of a stream would differ from the text of the same answer returned at once."""
    any_id = st.integers(0, plain.vocab_size + 3)
    byte_id = st.sampled_from(sorted(plain.byte_ids)) if plain.byte_ids else any_id
    blocks = st.lists(st.lists(any_id, max_size=6) | st.lists(byte_id, max_size=6) | _encoded(plain), max_size=12)
    ids = [token_id for block in data.draw(blocks) for token_id in block]
    assert "".join(streamed(plain, ids)) == stock.decode(ids, skip_special_tokens=True)


def _encoded(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.text(alphabet="a é用力🫨𠮷ᚠ\n", max_size=6).map(tokenizer.encode_plain)


def test_no_broken_character_is_ever_sent(kind: str, plain: Tokenizer) -> None:
    """Clients would see replacement characters that the next event does not take back."""
    text = "hello 注意力 机制 caf" + ("e" if kind == "unigram" else "é 🫨𠮷ᚠᛇᚻ ok")
    pieces = streamed(plain, plain.encode_plain(text))
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text


def test_chinese_flows_token_by_token(plain: Tokenizer) -> None:
    """Text without spaces would arrive in one lump at the end."""
    ids = plain.encode_plain("注意力机制让模型关注重要的部分")
    pieces = streamed(plain, ids)
    assert pieces[-1] == ""
    assert sum(1 for piece in pieces if piece) >= len(ids) // 2


def test_unfinished_character_ends_as_a_replacement(tmp_path: Path) -> None:
    """An answer cut inside a character would lose its end, or flush it twice."""
    tokenizer = Tokenizer.from_dir(save(tmp_path, byte_fallback()), prompt_template=TEMPLATE)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode_plain("🫨")[-4:-1]
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd" * 3
    assert detokenizer.flush() == ""


def test_detokenization_costs_the_same_at_any_length(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of garbage bytes would make every step slower than the last."""
    decoded: list[int] = []
    decode = plain.decode
    monkeypatch.setattr(plain, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    chooser = random.Random(5)
    ids = [chooser.randrange(plain.vocab_size) for _ in range(600)] + plain.encode_plain("🫨")[-2:-1] * 600
    streamed(plain, ids)
    assert sum(decoded) <= 45 * len(ids)


def test_threads_share_one_tokenizer(plain: Tokenizer) -> None:
    """Concurrent requests would fail with "Already borrowed", or be cut by another request's limit."""
    expected = {text: render(plain, text).ids for text in ("What is it? " * 20, "<eos> 注意力 " * 20)}

    def work(seed: int) -> None:
        for text, ids in expected.items():
            assert render(plain, text).ids == ids
            plain.render(text, "", max_prompt_tokens=80, truncate=Truncate.LEFT)
            assert "".join(streamed(plain, list(ids))) == plain.decode(ids)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(32)))
