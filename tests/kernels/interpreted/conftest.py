"""These tests run Triton kernels in its interpreter, which must be chosen before they are imported.

`tests/kernels/test_interpreter.py` starts them in a process where it is; anywhere else they are not collected. By hand:
    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted

The interpreter computes `tl.dot` of bf16 wrongly and truncates casts to it, so float32 and float16 are tested here and
bf16 on a GPU. Every program costs milliseconds: grids stay below fifty.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
