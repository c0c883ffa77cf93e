"""The classes of strategy ``prebucket`` in ``kev.yaml``: what one of them holds, and what holds between them.

Invariants and semantics: as for the sections of the file: unknown keys and wrong types are refused, every sentence
names the class at fault.

Not here: the section they stand in (``common.config_sections``), routing by them (``router_svc.strategies.prebucket``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

from common.config_text import Allowed
from common.text_pattern import MAX_PATTERN_CHARS, TextPattern
from common.types import DEFAULT_CLASS
from common.wording import shown

MAX_CLASSES = 64

_Lax = Strict(strict=False)
_Label = Annotated[str, Field(min_length=1, max_length=64)]
_Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)]


class PrebucketClass(BaseModel):
    """One entry of ``kev.router.prebucket_classes``."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: _Label
    """Also the first of its categories."""
    num_channels: int = Field(ge=1, le=4096)
    """Channels that only this class uses."""
    categories: Annotated[
        tuple[_Label, ...], _Lax, Field(max_length=64), Allowed("a list of at most 64 texts of 1 to 64 characters")
    ] = ()
    """Further categories of a question that mean this class."""
    patterns: Annotated[
        tuple[_Pattern, ...], _Lax, Field(max_length=64), Allowed("a list of at most 64 texts of 1 to 128 characters")
    ] = ()
    """What the text of a question without category must have: plain text, * for anything, ^ for the start."""


def class_flaws(classes: Sequence[PrebucketClass], num_channels: int) -> Iterator[str]:
    """What is wrong between the classes of a pool of ``num_channels``, one sentence each."""
    owners: dict[str, str] = {DEFAULT_CLASS: ""}
    for each in classes:
        for category in (each.name, *each.categories):
            if not category.isprintable() or category != category.strip():
                yield f"class {shown(each.name)}: the category {shown(category)} must be printable text of one line"
            elif category == DEFAULT_CLASS:
                yield f"class {shown(each.name)}: {DEFAULT_CLASS} is the class of all other questions; choose another"
            elif category in owners:
                yield f"class {shown(each.name)}: the category {shown(category)} is of class {owners[category]!r} too"
            owners[category] = each.name
        for pattern in each.patterns:
            try:
                TextPattern(pattern)
            except ValueError as error:
                yield f"class {shown(each.name)}: {error}"
    num_taken = sum(each.num_channels for each in classes)
    if classes and num_taken >= num_channels:
        yield (
            f"the classes take {num_taken} channels of channel_pool_size ({num_channels}); "
            f"leave at least 1 to class {DEFAULT_CLASS}, for all other questions"
        )
