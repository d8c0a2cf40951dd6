"""EAGLE-3 heads: one layer that drafts from states within another model (Li et al. 2025, arXiv:2503.01840).

With h the residual stream of the model before three of its layers, at position p, and x the ids:

    f[p] = fc · [h_low[p], h_middle[p], h_high[p]]
    a[p] = f[p] + attention([norm(embedding(x[p + 1])), norm(f)])[p]
    s[p] = a[p] + mlp(norm(a[p]))
    logits of x[p + 2] = lm_head · norm(s[p])

over the ids i + d2t[i]. The next draft has s[p] for f[p + 1]. The embedding is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from photon_grpc.config.eagle3 import Eagle3Config, states_before
from photon_grpc.config.quantization import FORMATS
from photon_grpc.core.batch import MAX_DRAFTING_ROWS
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import TORCH, keep_rows
from photon_grpc.kernels.lang.gluon import can_fuse
from photon_grpc.kernels.linear import embed, tiles
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.head import LOGITS, LMHead
from photon_grpc.layers.kernel_linear import KernelLinear
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.group import Mesh
from photon_grpc.layers.parameter_owner import ParameterOwner, Target
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.layers.rotary import rotary_embedding
from photon_grpc.models.decoder import Decoder, DecoderLayer
from photon_grpc.models.decoder_builder import DecoderBuilder


class ReducedHead(LMHead):
    """A head over some of a vocabulary's ids; logits of the others are -infinity.

    Args:
        size: the number of these ids; the checkpoint's `d2t` says which.
        vocab_size: of the whole vocabulary.
    """

    def __init__(
        self,
        size: int,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        sample: Callable[[torch.Tensor, SamplingMetadata], torch.Tensor],
        method: LinearMethod,
    ) -> None:
        self._vocab_size = vocab_size
        self._ids = self._d2t = torch.empty(size, dtype=torch.int64, device="meta")
        # For its sizes.
        rows = Embedding("", size, hidden_size, dtype=dtype)
        super().__init__("lm_head", rows, tied=False, method=method, sample=sample)

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        self._d2t = torch.zeros(self._d2t.shape, dtype=torch.int64, device=device)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        is_whole = len(self._d2t) == self._vocab_size
        yield Target("d2t", self._d2t, dtypes=("I64", "I32"), is_optional=is_whole, check=self._check_d2t)

    def after_load(self) -> None:
        super().after_load()
        self._logits = {rows: self.gemm(rows, LOGITS) for rows in tiles.BUCKETS}
        self._ids = self._d2t + torch.arange(len(self._d2t), device=self._d2t.device)

    def _check_d2t(self, stored: torch.Tensor, d2t: torch.Tensor) -> None:
        """Raise ModelLoadError for ids that are equal or beyond the vocabulary."""
        # On the host: loading the device's sort takes longer.
        ids = {number + offset for number, offset in enumerate(d2t.tolist())}
        least, most = min(ids), max(ids)
        if least < 0 or most >= self._vocab_size or len(ids) < len(d2t):
            problem = f"names ids from {least} to {most}; they must differ and be below {self._vocab_size}"
            raise ModelLoadError(f"d2t {problem}", field="d2t")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        own = super().logits(x)
        whole = own.new_full((own.shape[0], self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._ids, own)

    def sample(self, x: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        return self._sample(self.logits(x), metadata)


class Midlayer(DecoderLayer):
    """The layer of a head: its attention reads an embedding and a state side by side.

    Args:
        layer: its attention, its feed-forward block and their norms, of which the first is of the embedding.
        state_norm: of the state.
        is_normed_before: whether the residual stream begins behind `state_norm`.
    """

    def __init__(self, layer: DecoderLayer, state_norm: RMSNorm, *, is_normed_before: bool) -> None:
        super().__init__(layer.input_norm, layer.attention, layer.post_attention_norm, layer.mlp)
        self.state_norm = state_norm
        self._is_normed_before = is_normed_before

    def draft(
        self, embedded: torch.Tensor, states: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [T, hidden] twice to two whose sum is the next state."""
        normed = self.state_norm(states)
        residual = normed if self._is_normed_before else states
        x = self.attention(torch.cat((self.input_norm(embedded), normed), dim=-1), ctx)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x, ctx), residual

    def leaves(self) -> Iterator[ParameterOwner]:
        yield self.state_norm
        yield from super().leaves()


class HeadParts(NamedTuple):
    """Owners of the weights of a head; `fc` makes a state of the three."""

    fc: Linear
    layer: Midlayer
    norm: RMSNorm
    head: ReducedHead


class Eagle3Head(Decoder):
    """A head for a loaded model, without memory for its own weights: `load` or `dummy` fills them.

    Args:
        states_before: the layers of the model before which its states are taken.
        parts: its own.
        target: the model.
        max_tokens: the most tokens of a step of the model.
    """

    def __init__(self, states_before: Sequence[int], parts: HeadParts, target: Decoder, max_tokens: int) -> None:
        self.fc, self._layer, norm, head = parts
        self._places = {number: at for at, number in enumerate(states_before)}
        super().__init__(
            target.embedding, [self._layer], norm, head, target.kernels,
            dtype=target.dtype, device=target.device, max_model_len=target.max_model_len,
        )  # fmt: skip
        self.hidden_size: int = norm.weight.shape[0]
        #: [max_tokens, 3 · hidden]: h of the tokens of the model's newest step, row after row. No product makes states
        #: of them in the model's steps, most of which may draft nothing.
        self.streams = torch.zeros(
            max_tokens, len(self._places) * self.hidden_size, dtype=target.dtype, device=target.device
        )

    def leaves(self) -> Iterator[ParameterOwner]:
        yield self.fc
        yield from self._layer.leaves()
        yield self.norm
        yield self.head

    def fuse(self) -> None:
        """Multiply the loaded weights by the kernels of their method."""
        attention, mlp = self._layer.attention, self._layer.mlp
        for owner, name in ((self, "fc"), (attention, "qkv"), (attention, "output"), (mlp, "gate_up"), (mlp, "down")):
            setattr(owner, name, KernelLinear(getattr(owner, name), self.device))

    def before(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext) -> None:
        """Keep the residual stream before one of the three layers; not of more rows than can draft in the next step."""
        at = self._places.get(layer)
        if at is None or x.shape[0] == ctx.num_rows > MAX_DRAFTING_ROWS:
            return
        place = self.streams[: x.shape[0], at * self.hidden_size : (at + 1) * self.hidden_size]
        keep_rows.launch(x, residual, place)

    def states(self, streams: torch.Tensor) -> torch.Tensor:
        """Map streams [T, 3 · hidden] to states [T, hidden]: f of them."""
        return self.fc(streams, None)

    def draft(
        self, token_ids: torch.Tensor, states: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (hidden, next states) [T, hidden] from ids [T], and the states before each of them.

        Writes the keys and values of the T positions. `logits` and `sample` take the hidden states.
        """
        # A fused embedding writes into the model's buffers.
        embedded = embed.rows(self.embedding.weight, token_ids)
        hidden, following = self.norm.add(*self._layer.draft(embedded, states, ctx))
        ctx.memo.clear()
        return hidden, following


@dataclass(frozen=True, slots=True)
class _HeadBuilder(DecoderBuilder):
    """Builder of a head's parts, from the config of its layer."""

    prefix: ClassVar[str] = "midlayer."

    def attention_features(self) -> int:
        return 2 * self.config.hidden_size

    def midlayer(self, *, is_normed_before: bool) -> Midlayer:
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        inputs, states, post = (self.norm(self.prefix + name) for name in names)
        attention = self.attention(0, self.prefix + "self_attn.", None)
        mlp = self.gated_mlp(self.prefix + "mlp.", post)
        layer = DecoderLayer(inputs, attention, post, mlp)
        return Midlayer(layer, states, is_normed_before=is_normed_before)


def has_kernels(target: Decoder) -> bool:
    """Return whether there are kernels for packed weights of a head of this model."""
    return target.dtype.itemsize == 2 and target.kernels is not TORCH and can_fuse(target.device)


def build_head(config: Eagle3Config, target: Decoder, max_tokens: int) -> Eagle3Head:
    """Return the head for a loaded model, its weights not yet allocated. Raise ModelLoadError if it does not fit.

    The model's steps fill its `streams` from now on.
    """
    layer, hidden_size = config.layer, target.embedding.weight.shape[1]
    found = states_before(config, hidden_size, target.vocab_size, len(target.layers))
    if target.embedding.factor is not None:
        raise ModelLoadError("a model that scales its embedding takes no EAGLE-3 head")
    tables = {"device": target.device, "kernels": target.kernels}
    rope = layer.ropes[0]
    rotaries = {rope: rotary_embedding(rope, layer.head_dim, target.max_model_len, **tables)}
    # Where weights are read from memory for every pass, as half as many bytes: a draft is a guess anyway.
    method = methods(FORMATS["int8"] if has_kernels(target) else None)
    builder = _HeadBuilder(
        layer, target.dtype, target.device, target.kernels, method, rotaries, target.max_model_len, Mesh()
    )
    fc = Linear("", len(found) * hidden_size, {"fc": hidden_size}, bias=False, dtype=target.dtype, method=method("fc"))
    sizes = config.draft_vocab_size, target.vocab_size, hidden_size
    reduced = ReducedHead(*sizes, target.dtype, target.kernels.sample, method("fc"))
    midlayer = builder.midlayer(is_normed_before=config.norm_before_residual)
    head = Eagle3Head(found, HeadParts(fc, midlayer, builder.norm("norm"), reduced), target, max_tokens)
    target.observer = head
    return head
