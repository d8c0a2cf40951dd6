"""python -m benchmarks.kernels [--device cuda] [--kernels auto] [NAME ...]: the tables of all kernels, or of those
named."""

from __future__ import annotations

import argparse

import torch

from benchmarks.kernels import (
    decode_attention,
    draw_kept,
    fused_linear,
    paged_attention,
    rms_norm,
    rotary,
    scores,
    swiglu,
    write_kv,
)
from photon_grpc.kernels import select

TABLES = {
    "rms_norm": rms_norm.table,
    "rotary": rotary.table,
    "swiglu": swiglu.table,
    "write_kv": write_kv.table,
    "paged_attention": paged_attention.table,
    "decode_attention": decode_attention.table,
    "scores": scores.table,
    "draw_kept": draw_kept.table,
    "fused_linear": fused_linear.table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *TABLES], help="kernels (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch", "triton"])
    arguments = parser.parse_args()
    with torch.inference_mode():
        for name in arguments.names or TABLES:
            TABLES[name](select(arguments.kernels, arguments.device), torch.device(arguments.device))


if __name__ == "__main__":
    main()
