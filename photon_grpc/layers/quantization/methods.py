"""The LinearMethod of every Linear, and of the embedding, of a model whose weights have a WeightFormat."""

from __future__ import annotations

from collections.abc import Callable

from photon_grpc.config.quantization import EMBEDDING, FORMATS, HEAD, WeightFormat
from photon_grpc.layers.linear import LinearMethod
from photon_grpc.layers.quantization.eight_bits import BesideEightBits, EightBits
from photon_grpc.layers.quantization.embedding import EmbeddingRows
from photon_grpc.layers.quantization.sources import FromCheckpoint, FromFloat, Source
from photon_grpc.layers.quantization.weight_only import WeightOnly
from photon_grpc.layers.unquantized import Unquantized

#: The name of a module, such as "model.layers.0.self_attn.q_proj" -> the method of its Linear.
Method = Callable[[str], LinearMethod]


def methods(form: WeightFormat | None) -> Method:
    """Return the method of every name; the same object for all names in the same format."""
    plain = Unquantized()
    if form is None:
        return lambda name: plain
    is_eight = form.activation_bits == 8
    source: Source = FromCheckpoint(form) if form.layout else FromFloat(form)
    quantized = EightBits(source) if is_eight else WeightOnly(source)
    beside = BesideEightBits() if is_eight else plain
    #: By the last part of a name.
    others: dict[str, LinearMethod] = {EMBEDDING: plain}
    if form.head:
        others[HEAD] = WeightOnly(FromFloat(FORMATS[form.head]))
    if form.embedding:
        others[EMBEDDING] = EmbeddingRows(FromFloat(FORMATS[form.embedding]))

    def method(name: str) -> LinearMethod:
        last = name.rsplit(".", 1)[-1]
        found = others.get(last) or (quantized if form.covers(name) else None)
        return found or (plain if last == HEAD else beside)

    return method
