"""The names of dtypes, as config.json and the formats of pages write them: "bfloat16"."""

from __future__ import annotations

import torch


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
