"""The tables of all kernels, or of those named.

python -m benchmarks.kernels [--device cuda] [--kernels auto] [--save NAME] [NAME ...]
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.kernels import (
    decode_attention,
    fused_linear,
    logprobs,
    paged_attention,
    rms_norm,
    rotary,
    sample_filtered,
    swiglu,
    write_kv,
)
from benchmarks.kernels.timing import needs_gpu
from benchmarks.saved import add_save_flag, saved
from photon_grpc.kernels import select

TABLES = {
    "rms_norm": rms_norm.table,
    "rotary": rotary.table,
    "swiglu": swiglu.table,
    "write_kv": write_kv.table,
    "paged_attention": paged_attention.table,
    "decode_attention": decode_attention.table,
    "logprobs": logprobs.table,
    "sample_filtered": sample_filtered.table,
    "fused_linear": fused_linear.table,
}
#: Their tables are empty without one.
OF_A_GPU = {"decode_attention", "fused_linear"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *TABLES], help="kernels (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch", "triton"])
    add_save_flag(parser)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("no CUDA GPU is here; --device cpu measures what runs without one")
    if arguments.names and OF_A_GPU.issuperset(arguments.names):
        needs_gpu(" ".join(arguments.names), arguments.device)
    try:
        kernels = select(arguments.kernels, arguments.device)
    except ValueError as error:
        sys.exit(str(error))
    with saved(arguments.save), torch.inference_mode():
        for name in arguments.names or TABLES:
            TABLES[name](kernels, torch.device(arguments.device))


if __name__ == "__main__":
    main()
