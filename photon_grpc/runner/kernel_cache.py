"""The directory of compiled kernels, and what is missing in it where a start fails."""

from __future__ import annotations

import json
import os
from glob import iglob

VARIABLE = "TRITON_CACHE_DIR"
#: Of the files of a kernel, the one that names the others with their paths.
_GROUP = "__grp__*.json"


def directory() -> str:
    """Return the directory in which Triton keeps kernels; it begins with `~` if there is no home."""
    chosen = os.environ.get(VARIABLE)
    return chosen or os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")


def damage() -> str:
    """Return what is damaged in the directory, and what to do; "" if nothing is seen.

    Triton takes a kernel whose metadata are there for compiled, and fails without its binary. All kernels are looked
    at, which takes too long for a start that succeeds.
    """
    names = sorted(
        os.path.basename(path) for group in iglob(os.path.join(directory(), "*", _GROUP)) for path in _missing(group)
    )
    if not names:
        return ""
    return (
        f"the cache of kernels in {directory()} is damaged: {len(names)} files such as {names[0]} are missing or "
        f"empty; delete this directory, so that kernels are compiled again, or set {VARIABLE} to another one"
    )


def _missing(group: str) -> list[str]:
    """Return the files of a kernel that are missing or empty; none if it is compiled anew in any case."""
    try:
        with open(group, encoding="utf-8") as file:
            paths = list(json.load(file)["child_paths"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [group]
    # Without its metadata a kernel is compiled again.
    if not all(os.path.exists(path) for path in paths if path.endswith(".json")):
        return []
    return [path for path in paths if not os.path.exists(path) or not os.path.getsize(path)]
