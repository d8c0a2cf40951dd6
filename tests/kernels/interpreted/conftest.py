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
from collections.abc import Callable
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

    #: The modules that are patched while a kernel runs.
    _patched: set[str] = set()
    patch_lang = interpreter._patch_lang

    class _Patches:
        """What ends with a kernel; nothing for a device function that finds its modules patched."""

        def __init__(self, restore: Callable[[], None] = lambda: None) -> None:
            self.restore = restore

    @functools.cache
    def modules_of(function: Any) -> frozenset[str]:
        found = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in found if module in (interpreter.tl, interpreter.tl.core))

    def patch_once(function: Any) -> _Patches:
        modules = modules_of(function)
        if modules and modules <= _patched:
            return _Patches()
        scope = patch_lang(function)
        _patched.update(modules)

        def restore() -> None:
            scope.restore()
            _patched.clear()

        return _Patches(restore)

    # The kernel has patched what its device functions, of which it calls hundreds, would patch again.
    interpreter._patch_lang = patch_once
