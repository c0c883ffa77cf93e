"""Filler words and empty prefixes of Chinese and English.

Invariants and semantics: only the opening of a question is looked at, up to its first line end or colon: what follows
may be material to work on ("translate: um, hello"). A greeting, a filler or a polite prefix at the start is removed
only when what follows begins like a question or an order, and a filler inside only between two clause borders.
Questions about wording (translate, rewrite, 翻译, 语气词) keep every word, so do lists of fillers ("嗯，啊，哦").

Not here: code, quotes and the like, which the caller protects (``protected``).
"""

from __future__ import annotations

import re

from router_svc.protected import CJK

_ABOUT_WORDS = re.compile(
    r"(?i:translat|proofread|rewrit|rephras|paraphras|grammar|transcri|interjection|filler|pronounc|spell|verbatim"
    r"|sentiment)|翻译|润色|改写|语法|语气|口头禅|拼音|造句|朗读|转写|逐字|原文|错别字|情感"
)
_OPENING_END = re.compile(rf"\n|：|:(?=\s|$|[{CJK}])")

_PAUSE = r"(?:[ \t\u3000]*+(?:[，,…～]|\.{2,}+|。{2,}+)++[ \t\u3000]*+)"
"""What separates a filler from the clause after it."""
_GREETING_END = r"(?:[ \t\u3000]*+[，,!！?？.。～~…]*+[ \t\u3000]*+)"

_ZH_FILLER = r"(?:嗯++|呃++|额++|唔++|那个|就是说|怎么说呢)"
_ZH_LISTED = rf"(?:{_ZH_FILLER}|啊|哦|噢|唉|哎|这个|哪个)"
_ZH_SOFT = r"(?:一下(?!子)|下(?=[，,：怎如什为有能可谁哪多是]))"
_ZH_OPENER = r"[请麻烦我想问怎如何什为能可有帮是哪谁多几介解写列总比给说不在打劳嗯呃那]"
_ZH_GREETING = (
    r"(?:(?:你好|您好|大家好|哈喽|早上好|上午好|下午好|晚上好)[啊呀哇]?"
    r"|在[吗么]|有人吗|不好意思|打扰(?:一下|了)|劳驾)"
)
_ZH_PREFIX = (
    rf"(?:请问{_ZH_SOFT}?|请教{_ZH_SOFT}|我?想(?:请问{_ZH_SOFT}?|(?:问|请教){_ZH_SOFT})"
    r"|(?:(?:麻烦|劳烦|拜托)[你您]?(?:帮我|帮忙|给我)|请[你您]?(?:帮我|帮忙))(?:一下(?!子))?)"
    rf"{_PAUSE}?"
)

_EN_FILLER = r"(?:[Uu]m++|[Uu]h++|[Uu]hm++|[Ee]rm|[Hh]mm++)"
_EN_QUESTION = r"(?i:what|how|why|when|where|who|whom|whose|which)\b"
_EN_ORDER = (
    r"(?i:explain|tell|show|give|write|list|summari[sz]e|describe|compare|find|implement|generate|create|calculate"
    r"|compute)\b"
)
_EN_OPENER = (
    rf"(?:{_EN_QUESTION}|{_EN_ORDER}"
    r"|(?i:can|could|would|will|please|help|i|i'm|i'd|do|does|did|should|sorry|excuse)\b)"
)
_EN_WHO = r"(?: (?:there|all|everyone|everybody|folks|guys|team))?"
_EN_GREETING = rf"(?i:(?:hi|hello|hey|good (?:morning|afternoon|evening)){_EN_WHO})(?![\w'-])"
_EN_ASIDE = r"(?i:excuse me|sorry to bother you|quick question|i have a (?:quick )?question)"
_EN_KINDLY = r"(?:(?:please|kindly|just) )?"
_EN_CAN_YOU = rf"(?:please )?(?:can|could|would|will) you {_EN_KINDLY}"
_EN_WISH = (
    r"(?:i(?:'d| would) like to (?:know|ask)|i (?:just )?want(?:ed)? to (?:know|ask)"
    r"|i(?: was|'m| am) (?:just )?wondering|i wonder)"
)
_EN_PREFIX = (
    rf"(?:(?i:{_EN_CAN_YOU}(?:tell me|let me know|explain to me),? )(?={_EN_QUESTION})"
    rf"|(?i:please {_EN_KINDLY}(?:tell me|let me know),? )(?={_EN_QUESTION})"
    rf"|(?i:{_EN_WISH},? )(?={_EN_QUESTION})"
    rf"|(?i:{_EN_CAN_YOU})(?={_EN_ORDER})"
    rf"|(?i:please (?:kindly )?(?:help me (?:to )?)?)(?={_EN_ORDER}))"
)

_ANY_OPENER = rf"(?:{_ZH_OPENER}|{_EN_OPENER}|{_EN_FILLER}{_PAUSE})"
_START = re.compile(
    r"[ \t\u3000]*+(?:"
    + "|".join(
        (
            rf"{_ZH_FILLER}{_PAUSE}",
            rf"{_EN_FILLER}(?:{_PAUSE}| ++(?={_EN_OPENER}))",
            rf"{_ZH_GREETING}{_GREETING_END}(?={_ANY_OPENER})",
            rf"{_EN_GREETING}{_GREETING_END}(?={_ANY_OPENER})",
            rf"{_EN_ASIDE}{_PAUSE}(?={_ANY_OPENER})",
            _ZH_PREFIX,
            _EN_PREFIX,
        )
    )
    + ")++"
)
_INSIDE = re.compile(
    rf"(?<=[，。！？；,!?;])(?<![嗯呃额唔啊哦噢唉哎][，。！？；,!?;])(?:嗯++|呃++|额++|唔++|那个){_PAUSE}"
    r"|(?<=[A-Za-z][,;])(?<!\bum[,;])(?<!\buh[,;])(?<!\ber[,;])(?<!\berm[,;])(?<!\bhmm[,;])"
    r" (?:um++|uh++|uhm++|erm|hmm++)(?:,|…|\.{2,}+)(?= )"
)
_LISTED = re.compile(
    rf"[ \t]*+(?:{_ZH_LISTED}|[和与跟或、]|还是"
    r"|(?i:(?:and|or|vs|versus|is|means?|um+|uh+|uhm|erm?|hmm+|ah|oh|huh|hi|hello|hey)\b))"
)
"""What shows that the words before it are named, not used."""
_NAMED = re.compile(
    r"的|了|是?什么意思|这个?[词字]|一[词字]|[二两]字|怎么[说读写念拼](?=[？?。！!\s]|\Z)|[英日][文语]|表示|指的|属于"
)
_CONTENT = re.compile(r"[\w\"“‘「『《'`(（\[<]")


def filler_spans(text: str) -> list[tuple[int, int]]:
    """Where fillers and empty prefixes are, as ascending ``[start, end)`` that leave a sentence when removed."""
    if _ABOUT_WORDS.search(text):
        return []
    ends = _OPENING_END.search(text)
    opening_end = ends.start() if ends else len(text)
    spans: list[tuple[int, int]] = []
    start = _START.match(text, 0, opening_end)
    if start and _may_follow(text, start.end(), opening_end):
        spans.append(start.span())
    inside = _INSIDE.finditer(text, start.end() if start else 0, opening_end)
    return spans + [match.span() for match in inside if _may_follow(text, match.end(), opening_end)]


def _may_follow(text: str, position: int, opening_end: int) -> bool:
    """Whether what is left from ``position`` on is a clause of its own that does not talk about what was before."""
    rest = position
    while rest < opening_end and text[rest] == " ":
        rest += 1
    if rest == opening_end:
        return False
    named = _NAMED.match(text, rest, opening_end) or _LISTED.match(text, rest, opening_end)
    return named is None and _CONTENT.match(text, rest, opening_end) is not None
