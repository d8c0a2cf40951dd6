"""Which cases of the compile tests `make test` has: with an empty cache of Triton all of them take minutes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import pytest

from tests.each_value import Values, each_value


def _values(item: pytest.Function) -> Values:
    found = item.callspec.params if hasattr(item, "callspec") else {}
    return frozenset((name, value if isinstance(value, Hashable) else repr(value)) for name, value in found.items())


# Before the marks are read.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of a compile test `full` if others have their values, too."""
    cases = defaultdict[tuple[Path, str], list[pytest.Function]](list)
    for item in items:
        is_compiled = item.path.parent == Path(__file__).parent and item.path.name.startswith("test_compile")
        if is_compiled and isinstance(item, pytest.Function) and item.get_closest_marker("full") is None:
            cases[item.path, item.originalname].append(item)
    for several in cases.values():
        kept = each_value([_values(item) for item in several]) or {0}
        for number, item in enumerate(several):
            if number not in kept:
                item.add_marker(pytest.mark.full)
