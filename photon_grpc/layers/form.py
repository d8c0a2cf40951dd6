"""The form of a layer: layers of the same form run in the same kernels."""

from __future__ import annotations

from typing import NamedTuple


class LayerForm(NamedTuple):
    """The formula of a layer, without its sizes and weights. Layers of equal form differ in numbers only.

    The class of a part stands for its formula: another activation, a norm that adds one to its weight, norms after
    attention, a cap on scores, experts are other classes, and so other forms without declaring anything.
    """

    layer: type
    #: All norms of the residual stream and of what is added to it, in the order of the layer.
    norms: tuple[type, ...]
    attention: type
    #: The norms of query and of key heads, or ().
    qk_norms: tuple[type, ...]
    rope: type
    ffn: type
