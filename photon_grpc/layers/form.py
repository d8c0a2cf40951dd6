"""The form of a layer: what must be equal for two layers to be computed by the same kernels."""

from __future__ import annotations

from typing import NamedTuple


class LayerForm(NamedTuple):
    """The formula of a layer, without its sizes and weights. Layers of equal form differ in numbers only.

    The classes of its parts stand for what they compute: another activation, a norm that adds one to its weight, norms behind attention,
    a cap of its logits or experts are other classes, and so another form without anything being declared.
    """

    layer: type
    #: Before attention and before the feed-forward.
    norms: tuple[type, type]
    attention: type
    #: Of query and of key heads, or ().
    qk_norms: tuple[type, ...]
    rope: type
    ffn: type
    #: Tokens that a query looks back; 0 is all of them.
    window: int
