"""The work of a model's experts since the start, as the device has counted it."""

from __future__ import annotations

import msgspec


class ExpertTally(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Counts over steps and layers.

    layers: layers with experts that were computed, once a step. reached: the experts that they reached. busiest: pairs
    of token and expert of the busiest expert of each. pairs: all of them.
    """

    layers: int = 0
    reached: int = 0
    busiest: int = 0
    pairs: int = 0
