"""The words of a question that tell its topic, for hashing.

Invariants and semantics: a pure function. What only tells how one asks (``how do I``, ``请问怎么``) goes, case and
width of letters are evened out, and the plural of English words too. A text that is made of such words only is its own
topic. Of a long text the opening and the end are looked at, so the work is bounded.

Not here: what the model gets to read (``normalize``), which stays as the caller wrote it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from router_svc.protected import CJK

_MAX_CHARS = 1024
"""Looked at, from either end."""

_WORD = re.compile(rf"[{CJK}]+|[^\W{CJK}]+(?:['’][^\W{CJK}]+)*")
_NOT_PLURAL = ("ss", "us", "is", "as", "os")
_MIN_PLURAL_CHARS = 4

_EN_FRAME = frozenset(
    """
    a an the this that these those some any all each every both few other such own same i you he she it we
    they me him us them my your his her its our their mine myself i'm i'd i'll i've you're it's that's there's
    what's let's am is are was were be been being do does did done doing don't doesn't didn't have has had
    having haven't hasn't hadn't can could can't cannot couldn't will would won't wouldn't shall should
    shouldn't may might must isn't aren't wasn't weren't no not nor and or but if then than so as of at by for
    from in into on onto to with without about between over under up down out off again more most very too
    just only also still even yet already here there when where why how what which who whom whose please tell
    give show explain describe help need want wants like get gets got getting make makes made making let know
    say says said going go goes use using used way ways method methods step steps process tip tips advice best
    good better possible right thing things idea reason reasons example examples simple what're recommend
    suggest suggestion suggestions someone something anything one first much many often now before after
    during while happen happens happened difference differences compare cause causes caused effective properly
    write writing wrote written compose create add implement turn take put keep keeps look see find choose
    safely quickly fast work works working place places care
    """.split()
)
_ZH_FRAME = frozenset(
    """
    请问 请教 一下 怎么办 怎么样 怎么回事 怎么 怎样 如何 为什么 什么 是什么 哪里 哪个 哪些 哪种 哪位 多少 多久
    几 哪 吗 呢 吧 啊 呀 了 的 地 得 着 过 我 你 您 他 她 它 我们 你们 他们 自己 我家 想 想要 需要 要 应该 可以
    能不能 能否 可不可以 能 会 必须 帮我 帮忙 帮 给我 给 请 麻烦 告诉 解释 介绍 说明 说说 说 讲讲 讲 教我 推荐
    总结 概括 列出 建议 是 有 有没有 没有 在 和 与 跟 或 或者 还是 把 被 从 到 对 用 就 都 也 还 又 再 很 太 最
    更 这 那 这个 那个 这些 那些 一个 一种 一段 一些 一 个 些 种 里 里面 上 下 中 后 前 时 时候 之 以 及 等 为
    因为 所以 但是 如果 原因 方法 办法 步骤 流程 原理 作用 做法 注意事项 事项 地方 东西 问题 情况 回事 区别 不同
    进行 关于 由于 如下 具体 详细 简单 有效 快速 最好 好 不 没 去 来 做 写 弄 让 使 总是 突然 正在 已经 操作
    处理 要注意 查 查询 看 找 谁 叫 张 条 次 才 该 多 比 使用 实现 添加 办理 办 申请 需
    """.split()
)
_ZH_FRAMES = re.compile("|".join(sorted(_ZH_FRAME, key=lambda word: (-len(word), word))))
"""The longest first, so that no word ends where a longer one goes on."""


def topic_words(text: str) -> str:
    """The words that tell the topic, each after a blank; the text itself when there is none."""
    if len(text) > 2 * _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]} {text[-_MAX_CHARS:]}"
    folded = (text if text.isascii() else unicodedata.normalize("NFKC", text)).lower()
    words = [word for found in _WORD.findall(folded) for word in _telling(found)]
    return f" {' '.join(words)}" if words else text


def _telling(found: str) -> Iterator[str]:
    """What is left of a run of letters; Chinese is written without blanks between words."""
    if found[0] >= "\u3040":
        yield from filter(None, _ZH_FRAMES.split(found))
    elif found not in _EN_FRAME:
        is_plural = found[-1] == "s" and len(found) >= _MIN_PLURAL_CHARS and not found.endswith(_NOT_PLURAL)
        yield found[:-1] if is_plural else found
