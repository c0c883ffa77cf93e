"""Markdown documents as the code blocks that a reader would copy out of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>.*)$")
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)(?P<path>[^)#\s]*)(?:#[^)\s]*)?\)")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    document: str
    line: int
    """Of the opening fence, from 1."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line} ({self.language})"


def read_blocks(path: Path) -> list[Block]:
    """Every fenced block of a document, in order.

    Raises:
        ValueError: a fence is never closed.
    """
    blocks: list[Block] = []
    opened: re.Match[str] | None = None
    start, body = 0, list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, start, body = fence, number, []
        elif fence is not None and fence["fence"] == opened["fence"] and not fence["language"]:
            name = str(path.relative_to(ROOT))
            text = "".join(f"{kept.removeprefix(opened['indent'])}\n" for kept in body)
            blocks.append(Block(name, start, opened["language"].strip(), text))
            opened = None
        else:
            body.append(line)
    if opened is not None:
        raise ValueError(f"{path}:{start}: the fence is never closed")
    return blocks


def broken_links(path: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    text = path.read_text(encoding="utf-8")
    paths = [match["path"] for match in _LINK.finditer(text) if match["path"]]
    return [link for link in paths if not (path.parent / link).exists()]
