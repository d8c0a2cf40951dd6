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
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import numpy as np
    import torch
    from triton.language import core
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

    #: numpy's types by the names of Triton's; the interpreter makes a table of all of them with every call.
    _numpy_types: dict[str, Any] = {}
    numpy_type = interpreter._get_np_dtype

    def numpy_type_once(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in _numpy_types:
            _numpy_types[scalar.name] = numpy_type(scalar)
        return _numpy_types[scalar.name]

    interpreter._get_np_dtype = numpy_type_once

    class _LateType(core.tuple_type):  # type: ignore[misc]
        """The type of a tuple, made when it is read; those of shapes, of which each tensor has two, are not."""

        def __init__(self, values: Sequence[Any], fields: Sequence[str] | None = None) -> None:
            self._late = values, fields

        def _made(self) -> core.tuple_type:
            made = type_of_tuple(*self._late)
            self.__class__ = core.tuple_type
            self.__dict__ = vars(made)
            return self

        def __getattr__(self, name: str) -> Any:
            if name in ("types", "fields", "name"):
                return getattr(self._made(), name)
            raise AttributeError(name)

        def __eq__(self, other: object) -> bool:
            return bool(self._made() == (other._made() if isinstance(other, _LateType) else other))

        __hash__ = None  # type: ignore[assignment]

    type_of_tuple = core._type_for_tuple_values
    core._type_for_tuple_values = lambda values, fields=None: _LateType([*values], fields)

    #: What a block type has, by the name of its elements and its shape. Kernels have few, each tensor makes its own.
    _block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    new_block_type = core.block_type.__init__

    def block_type_once(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in _block_types:
            new_block_type(self, element_ty, shape)
            _block_types[key] = vars(self)
        self.__dict__ = dict(_block_types[key])

    core.block_type.__init__ = block_type_once

    def fma_once_rounded(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Return x · y + z; of float32 as a GPU has it, rounded once but for ties of float64."""
        wide = [part.data.astype(np.float64) if part.data.dtype == np.float32 else part.data for part in (x, y, z)]
        with np.errstate(invalid="ignore", over="ignore"):
            return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma_once_rounded
    convert_float = interpreter._convert_float

    def convert(data: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        """Round float32 to e4m3 as a GPU does; the interpreter's own cast does not."""
        if from_type.scalar.name == "fp32" and to_type.scalar.name == "fp8e4nv":
            return torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert_float(data, from_type, to_type, rounding)

    interpreter._convert_float = convert
