"""What normalization removes, and what it must never touch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import NormalizeLevel
from router_svc.normalize import normalize

LEVELS = [NormalizeLevel.LIGHT, NormalizeLevel.FULL]

# (before, after light, after full)
CASES = [
    # repeated marks
    ("怎么退款！！！！", "怎么退款！", "怎么退款！"),
    ("好的。。。。那怎么退款？？", "好的。那怎么退款？", "好的。那怎么退款？"),
    ("真的？！？！", "真的？！", "真的？！"),
    ("真的？!?!", "真的？!", "真的？!"),
    ("苹果，，，梨、、、桃；；", "苹果，梨、桃；", "苹果，梨、桃；"),
    ("Is it free???", "Is it free?", "Is it free?"),
    ("怎么退款!!!! 急", "怎么退款! 急", "怎么退款! 急"),
    ("wait..... what", "wait... what", "wait... what"),
    ("等一下………………再说", "等一下……再说", "等一下……再说"),
    # blanks
    ("  how   are\u00a0\u00a0you  ", "how are\u00a0you", "how are\u00a0you"),
    ("\u3000\u3000怎么  退款\u3000", "怎么 退款", "怎么 退款"),
    ("\n\nfirst  \n\n\n\nsecond\n", "first\n\nsecond", "first\n\nsecond"),
    ("a\r\n\r\n\r\n\r\nb", "a\r\n\r\nb", "a\r\n\r\nb"),
    # fillers and empty prefixes, Chinese
    ("嗯，怎么退款？", "嗯，怎么退款？", "怎么退款？"),
    ("嗯嗯，那个…请问一下，KV Cache是什么意思？", "嗯嗯，那个…请问一下，KV Cache是什么意思？", "KV Cache是什么意思？"),
    ("请问一下怎么修改地址", "请问一下怎么修改地址", "怎么修改地址"),
    ("请问下怎么修改地址", "请问下怎么修改地址", "怎么修改地址"),
    ("请问下载地址在哪", "请问下载地址在哪", "下载地址在哪"),
    ("麻烦帮我写一个快速排序", "麻烦帮我写一个快速排序", "写一个快速排序"),
    ("您好！麻烦您帮我一下，看看这个订单", "您好！麻烦您帮我一下，看看这个订单", "看看这个订单"),
    ("在吗？怎么申请退款", "在吗？怎么申请退款", "怎么申请退款"),
    ("我想问一下怎么退款", "我想问一下怎么退款", "怎么退款"),
    ("订单到哪了？嗯，退款多久到账？", "订单到哪了？嗯，退款多久到账？", "订单到哪了？退款多久到账？"),
    # fillers and empty prefixes, English
    ("um, please could you tell me how attention works?",) * 2 + ("how attention works?",),
    ("uh what is a KV cache",) * 2 + ("what is a KV cache",),
    ("Hi there, what is a KV cache?",) * 2 + ("what is a KV cache?",),
    ("Good morning! I was wondering why it rains",) * 2 + ("why it rains",),
    ("Could you please explain attention?",) * 2 + ("explain attention?",),
    ("Could you tell me a joke",) * 2 + ("tell me a joke",),
    ("how do I, um, sort a list",) * 2 + ("how do I, sort a list",),
]

UNTOUCHED = [
    # ellipses, operators, blanks to fill in
    "等等……",
    "wait... what",
    "what does !! do in Kotlin: x!! or foo!! bar",
    "what does !!! mean",
    "what is 7!!! and n!!!",
    "the capital of France is ......",
    "a -- b == c :: d",
    "法国的首都是____",
    # code
    "```python\nx   = 1  # 好！！！！\n\n\n\nprint('um,  hi')\n```",
    "```\nnever closed   !!!!",
    "~~~\na   b\n~~~",
    "run `ls   -l!!!!` now",
    "what does `` a ` b   c `` do",
    "why:\n    x   = 1!!!!\n\ty = 2",
    "for i in range(3):   print(i)",
    "x = 1  # 变量！！！！",
    "foo();  // 注释！！！！",
    "SELECT a,   b FROM t",
    "fix f( a,  b,   c )",
    "x = 1\nthe   middle\ny = 2",
    "| a   | b |\n|--|--|",
    "name     age\nBob      12",
    "$ pip   install kev",
    "C:\\new   dir\\x",
    # quotes
    "他说“嗯，，，好！！！！  对”",
    "他说「嗯。。。。」和『哦。。。。』",
    "电影《你好！！！！》",
    'say "um,  hello!!!!"',
    "say 'um,  the boys' toys!!!!'",
    "“outer “inner!!!!” still   quoted!!!!”",
    "‘It’s   quoted!!!!’",
    "“never closed   ！！！！",
    "> um,  a quoted line!!!!",
    # addresses, numbers, versions, emoji
    "https://a.io/x..y?q=1!!!!",
    "mail me..x@b.co",
    "1  000 000",
    "版本 v1.2.3 和 3.14",
    "😀😀😀😀 ‼️",
]

KEPT_WORDS = [
    # names
    "Hello, World program in C",
    "Hello! Project members",
    "Hey Jude lyrics",
    "你好，李焕英讲了什么",
    "请问和平饭店在哪",
    "麻烦制造者是谁",
    # fillers that are the subject
    "嗯是什么意思",
    "嗯，啊，哦哪个更常用",
    "语气词有嗯，啊，哦",
    "那个函数怎么用",
    "那个、这个、哪个的区别",
    "这个，那个，哪个更好",
    "请问的英文怎么说",
    "请问怎么说？",
    "um, uh and er are fillers",
    "Um is a German word",
    "which one is ruder, um, or uh",
    "Hi and hello, which is older",
    # material to work on
    "翻译成英文：嗯，我不知道",
    "Translate: um, hello there",
    "Summarize the text\nUm, please tell me why",
    "Fix the grammar. Um, please tell me why you is here",
    "写一句话：好的，嗯，我知道了",
    "Reply to this\nI think, um, so it is",
    "润色这句话，嗯，我觉得可以",
    # nothing would be left
    "嗯，“。。。”",
    "嗯",
    "嗯，",
    "请问一下",
    "麻烦帮我",
    "um",
    "hi there,",
]


@pytest.mark.parametrize(("before", "light", "full"), CASES)
def test_removes_noise(before: str, light: str, full: str) -> None:
    """Tokens would be spent on noise."""
    assert normalize(before, NormalizeLevel.LIGHT).text == light
    assert normalize(before, NormalizeLevel.FULL).text == full


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("text", UNTOUCHED)
def test_never_touches(text: str, level: NormalizeLevel) -> None:
    """The model would be asked about other code, another quote, another number."""
    assert normalize(text, level).text == text


CORPUS: dict[str, list[list[str]]] = yaml.safe_load(
    (Path(__file__).parents[1] / "data/normalization.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("kind", CORPUS)
def test_the_corpus(kind: str) -> None:
    """A rule that is right for one kind of question would spoil another; see tests/data/normalization.yaml."""
    for before, *after in CORPUS[kind]:
        light = after[0] if after else before
        full = after[1] if len(after) > 1 else light
        assert normalize(before, NormalizeLevel.LIGHT).text == light
        assert normalize(before, NormalizeLevel.FULL).text == full
        for level in LEVELS:
            once = normalize(before, level)
            assert normalize(once.text, level).removed == ()
            assert len(once.text) + once.num_removed_chars == len(before)


@pytest.mark.parametrize("text", KEPT_WORDS)
def test_keeps_words_that_carry_the_question(text: str) -> None:
    """The question would lose its subject or its material."""
    assert normalize(text, NormalizeLevel.FULL).text == text


def test_off_changes_nothing() -> None:
    """An operator who switched it off would still get another text."""
    text = "  嗯，，，怎么退款！！！！  "
    assert normalize(text, NormalizeLevel.OFF).text == text


def test_records_pieces_in_order() -> None:
    """The audit could not show what was removed."""
    found = normalize("嗯，那个…怎么  退款！！！！", NormalizeLevel.FULL)
    assert (found.text, found.removed, found.num_removed_chars) == ("怎么 退款！", ("嗯，那个…", " ", "！！！"), 9)


FREE_TEXT = [
    "嗯，",
    "那个…",
    "请问一下",
    "麻烦帮我",
    "怎么退款",
    "um, ",
    "uh... ",
    "please ",
    "could you tell me ",
    "hi there, ",
]
FREE_MARKS = [
    "！！！！",
    "。。。。",
    "，，",
    "...",
    "……",
    ".....",
    "???",
    "  ",
    "\t",
    "\n",
    "\n\n\n\n",
    "：",
    ": ",
    " - ",
    "\u3000",
]
FREE_OPENERS = ['"', "“", "”", "'", "`", "「", "=", "(", ")", ";", "\r\n", "我", "1", "A", "how ", "what ", "word "]
FREE = st.sampled_from(FREE_TEXT) | st.sampled_from(FREE_MARKS) | st.sampled_from(FREE_OPENERS)
CODE = ["\n```\nx   = 1!!!!\n```\n", " `a   b!!!!` ", " foo(a,  b)!!!! ", "\n\tx   y!!!!\n", " x  =  1 "]
QUOTES = [
    "“嗯，好！！！！  对”",
    "「嗯。。。。  」",
    ' "um,  ok!!!!" ',
    " 'um,  well!!!!' ",
    "《你好！！！！》",
    "\n> um,   so!!!!\n",
]
DATA = [" https://a.io/x..y?q=1!!!! ", " me..x@b.co ", " 1  000 ", " v1.2.3 ", "3.14", "😀😀😀"]
GUARDED = st.sampled_from(CODE) | st.sampled_from(QUOTES) | st.sampled_from(DATA)
FILLING = st.sampled_from(
    ["嗯，", "请问一下", "怎么退款", "！！！！", "。。。。", "...", "  ", "\n\n\n\n", "um, ", "how ", "好"]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(FREE, max_size=14).map("".join) | st.text(max_size=40), st.sampled_from(LEVELS))
def test_is_idempotent_and_only_deletes(text: str, level: NormalizeLevel) -> None:
    """A retried request would get another prompt, or the audit would not account for the difference."""
    once = normalize(text, level)
    assert normalize(once.text, level).text == once.text
    assert len(once.text) + once.num_removed_chars == len(text)
    rest = iter(text)
    assert all(character in rest for character in once.text)
    assert once.text or not text
    assert once.text.strip() or not text.strip(), "a question is never emptied"
    if any(character.isalnum() for character in text):
        assert any(character.isalnum() for character in once.text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(GUARDED, FILLING), min_size=1, max_size=5), st.sampled_from(LEVELS))
def test_guarded_pieces_survive_in_any_company(pieces: list[tuple[str, str]], level: NormalizeLevel) -> None:
    """Code, quotes, addresses, numbers or emoji would change next to noise."""
    found = normalize("问" + "".join(guarded + filling for guarded, filling in pieces), level).text
    position = 0
    for guarded, _ in pieces:
        core = guarded.strip(" \n")
        position = found.index(core, position) + len(core)


@pytest.mark.parametrize(
    "unit",
    [
        "嗯，",
        "um, ",
        "` `` ",
        '"',
        "'a ",
        "“",
        "x  y  ",
        ".",
        "=",
        "= ",
        "(",
        "a (b ",
        "\n",
        "\n ",
        "~~~\n",
        "|",
        " ",
        "; ",
        "\\",
    ],
)
def test_time_is_linear_in_the_length(unit: str) -> None:
    """One crafted question would hold up the router (quadratic scans take minutes at this size)."""
    start = time.process_time()
    normalize(unit * (30_000 // len(unit)) + "x", NormalizeLevel.FULL)
    assert time.process_time() - start < 3.0
