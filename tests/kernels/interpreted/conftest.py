"""These tests run Triton kernels in its interpreter, which must be chosen before they are imported.

`tests/kernels/test_interpreter.py` starts them in a process where it is; anywhere else they are not collected. By hand:
    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted

The interpreter computes `tl.dot` of bf16 wrongly and truncates casts to it, so float32 and float16 are tested here and
bf16 on a GPU. Every program costs milliseconds: grids stay below fifty.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(package, name)) for name in names_of_builtins(package)]

    # With every call of a device function the interpreter looks through all of triton.language for what to patch, which
    # is half of its time; which names these are does not change.
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": builtins_of})
