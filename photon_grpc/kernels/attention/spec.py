"""The facts of a layer's attention beside its pages."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionSpec(NamedTuple):
    """The facts that the kernels of a layer's attention are chosen by and computed with."""

    #: Query heads.
    num_heads: int
    #: Factor of q · k.
    scale: float
    #: In which queries, keys and values are multiplied; pages may hold fewer bits.
    dtype: torch.dtype
    #: Of latents (`latent.py`): their first numbers, which are values; 0: pages hold keys and values.
    value_width: int = 0
