"""The matrix library without split-K, so that the number of rows never decides how a product's K is cut.

cuBLAS cuts K where it has a workspace for the parts. PyTorch reads the size of that workspace once, before the first
product of the process: a program that has multiplied on the GPU before keeps what it had.
"""

from __future__ import annotations

import os
import warnings

import torch

_VARIABLE, _NO_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":0:0"
#: A product that the library splits wherever it may: few rows, few columns, a long K.
_ROWS, _MANY_ROWS, _N, _K = 8, 2048, 128, 16_384


def forbid_split_k() -> None:
    """Disable the library's workspace for the rest of the process; no effect after its first product on a GPU."""
    os.environ[_VARIABLE] = _NO_WORKSPACE
    # cuBLASLt asks for more than cuBLAS has, and PyTorch says so once, at the first sum with a product.
    warnings.filterwarnings("ignore", message="Requested unified CUBLASLT workspace")


@torch.no_grad()
def splits_k(device: torch.device) -> bool:
    """Return whether the library splits K differently for few rows than for many."""
    if device.type != "cuda":
        return False
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(_MANY_ROWS, _K, device=device, generator=generator).bfloat16()
    w = torch.randn(_N, _K, device=device, generator=generator).bfloat16()
    few, many = (torch.mm(rows, w.t(), out_dtype=torch.float32) for rows in (x[:_ROWS], x))
    return not torch.equal(few, many[:_ROWS])
