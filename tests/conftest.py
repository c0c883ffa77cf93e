"""What all tests share: which of them are quick.

Not here: fixtures of one kind of test (the ``conftest`` beside it).
"""

from __future__ import annotations

from pathlib import Path

import pytest

QUICK = tuple(Path(__file__).parent / name for name in ("unit", "contract"))
SLOW_MARKS = ("store", "chaos")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``make check`` runs, before ``-m`` selects; ``make test`` runs those and, apart, all others."""
    for item in items:
        is_slow = any(item.get_closest_marker(name) for name in SLOW_MARKS)
        if not is_slow and any(item.path.is_relative_to(folder) for folder in QUICK):
            item.add_marker(pytest.mark.quick)
