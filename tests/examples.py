"""How many examples hypothesis draws, by its profile: a quarter of them in `make test`, all of them otherwise."""

from __future__ import annotations

from hypothesis import settings

#: What a profile of hypothesis has by default; tests/conftest.py has the profiles.
_ALL = 100


def examples(count: int) -> int:
    """Scale `count` as the profile in use scales hypothesis' default of 100."""
    return max(count * settings.default.max_examples // _ALL, 1)
