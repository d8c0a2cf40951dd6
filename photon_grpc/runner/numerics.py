"""The numerics of an engine (docs/numerics.md): our own number, and the properties of libraries and device."""

from __future__ import annotations

import ctypes
import platform
import re

import torch

from photon_grpc.config.quantization import WeightFormat
from photon_grpc.core.numerics import Numerics
from photon_grpc.kernels import TORCH, Kernels
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.kernels.lang.jit import triton

#: Raise it with every change of ours after which the bits of any result may differ. A test fails if sources that decide
#: them have changed and it has not; its message says what to do.
NUMERICS = 7

#: cublasGetProperty takes 0, 1, 2 for the parts of the version.
_PARTS_OF_VERSION = 3

#: KV blocks from which every kernel of prompts on CUDA reads, with the same bits; the plain one reads all others.
_ALIKE = (8, 16, 32, 64, 128, 256, 512, 1024)


def numerics(
    mode: str,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    weight_format: WeightFormat | None = None,
    block_size: int = 64,
    *,
    is_long: bool = False,
    kv_form: str = "",
    cuts: str = "",
) -> Numerics:
    """Return the numerics of an engine, with their version.

    `mode` is the value of --numerics; `is_long` says whether keys are rotated by the long factors of LongRoPE;
    `kv_form` is the form of pages if that is not `dtype`; `cuts` says which ranks have parts of the sums of a product,
    which are added in their order.
    """
    has_triton = kernels is not TORCH
    form = name_of(dtype)
    on_cuda = device.type == "cuda"
    return Numerics(
        number=NUMERICS,
        mode=mode,
        kernels="triton" if has_triton else "torch",
        libraries=(
            f"torch {torch.__version__}",
            *([f"triton {triton.__version__}"] if has_triton else []),
            *([_cublas()] if on_cuda else _cpu_libraries()),
        ),
        device=(_gpu(device) if on_cuda else _cpu()) + (f", {cuts}" if cuts else ""),
        dtype=form,
        weights=form if weight_format is None else weight_format.name,
        activations=form if weight_format is None or weight_format.activation_bits == 16 else weight_format.activations,
        kv_cache=(kv_form or form)
        + (f" in blocks of {block_size}" if on_cuda and block_size not in _ALIKE else "")
        + (", rotated by long factors" if is_long else ""),
    ).signed()


def _gpu(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"compute capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"


def _cpu() -> str:
    """Describe the CPU. The number of threads is part of it, since torch shares out sums among them."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {instructions}, {torch.get_num_threads()} threads"


def _cublas() -> str:
    """Return the name and version of the library that torch has loaded, which need not be the one of its build."""
    major = str(torch.version.cuda).partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:
        return f"cuda {torch.version.cuda}"
    numbers = []
    for part in range(_PARTS_OF_VERSION):
        number = ctypes.c_int(-1)
        library.cublasGetProperty(part, ctypes.byref(number))
        numbers.append(str(number.value))
    return f"cublas {'.'.join(numbers)}"


def _cpu_libraries() -> list[str]:
    """Return the names and versions of the libraries that multiply on a CPU, from torch's description of its build."""
    described = torch.__config__.show()
    versions = (
        ("mkl", r"Math Kernel Library Version (\S+?)-"),
        ("onednn", r"MKL-DNN v(\S+)"),
        ("blas", r"BLAS_INFO=(\w+)"),
    )
    found = ((name, re.search(pattern, described)) for name, pattern in versions)
    return [f"{name} {match[1]}" for name, match in found if match]
