"""The formats of a model's weights: 16 or 32 bits unless a checkpoint or `--quantization` says otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from photon_grpc.errors import ConfigError

#: Columns of W whose float8 activations share a scale where the scales of W are blocks.
BLOCK = 128
#: Rows or columns of a block of scales: all of them.
ALL = 0

Kind = Literal["int8", "int4", "fp8"]
Head = Literal["", "int8"]
#: How a checkpoint stores quantized weights; "" is a float checkpoint, which is quantized while it is read.
Layout = Literal["", "gptq", "gptq_v2", "awq", "pack-quantized", "int-quantized", "float-quantized", "fp8"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of the weights of linear layers, and of the activations that they are multiplied with.

    block: rows and columns of W [out, in] that share a scale, ALL for all of them: (1, ALL) is a scale a row, (1, 128)
    groups of 128 columns, (ALL, ALL) one scale, (128, 128) blocks. activation_bits: 16, or 8: then activations are
    quantized per token, with blocks per token and 128 columns. has_zeros: each scale has a zero point. ignored: names
    of modules that stay 16 bits, parts of such names, or "re:" and a pattern that matches their beginning. head: the
    kind of the head's weights where they have 8 bits on request, with a scale a row and 16-bit activations; "": as
    `ignored` says. embedding: the same of the embedding, which else has 16 bits. targets: the only modules that do not
    stay 16 bits, in the forms of `ignored`; (): all.
    """

    kind: Kind
    block: tuple[int, int]
    activation_bits: int = 16
    has_zeros: bool = False
    layout: Layout = ""
    ignored: tuple[str, ...] = ()
    head: Head = ""
    embedding: Head = ""
    targets: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def name(self) -> str:
        """The name as `--quantization` spells it where it has the format, with the layout of a checkpoint."""
        rows, columns = self.block
        if self.kind == "fp8":
            name = "fp8-block" if rows > 1 and columns else "fp8"
        elif self.activation_bits == 8:
            name = "w8a8"
        else:
            name = f"{self.kind}-g{columns}" if columns else self.kind
        name = f"{name} ({self.layout})" if self.layout else name
        name = f"{name}, head {self.head}" if self.head else name
        return f"{name}, embedding {self.embedding}" if self.embedding else name

    @property
    def activations(self) -> str:
        """The form of activations of 8 bits, such as "float8_e4m3fn per token"."""
        values = "float8_e4m3fn" if self.kind == "fp8" else "int8"
        columns = f" and {BLOCK} columns" if self.block[0] > 1 else ""
        return f"{values} per token{columns}"

    def covers(self, name: str) -> bool:
        """Return whether this module, such as "model.layers.0.self_attn.q_proj", has quantized weights."""
        is_target = not self.targets or any(_matches(pattern, name) for pattern in self.targets)
        return is_target and not any(_matches(pattern, name) for pattern in self.ignored)


class WeightBytes(NamedTuple):
    """Bytes of quantized weights, those that they save, and the tokens of KV cache that have room in them."""

    held: int
    saved: int
    kv_tokens_gained: int


def _matches(pattern: str, name: str) -> bool:
    """Return whether the pattern is the module's name, some whole parts of it, or a regular expression for it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


def groups(columns: int) -> tuple[int, int]:
    """Return the block of groups of so many columns."""
    return 1, columns


PER_ROW = 1, ALL
PER_TENSOR = ALL, ALL
#: The head stays 16 bits, unless `WeightFormat.head` says otherwise.
HEAD = "lm_head"
EMBEDDING = "embed_tokens"
_HEAD = (HEAD,)
#: The values of --quantization but "auto".
FORMATS: dict[str, WeightFormat] = {
    "int8": WeightFormat("int8", PER_ROW, ignored=_HEAD),
    "int8-g32": WeightFormat("int8", groups(32), ignored=_HEAD),
    "int8-g64": WeightFormat("int8", groups(64), ignored=_HEAD),
    "int8-g128": WeightFormat("int8", groups(128), ignored=_HEAD),
    "w8a8": WeightFormat("int8", PER_ROW, 8, ignored=_HEAD),
    "fp8": WeightFormat("fp8", PER_ROW, 8, ignored=_HEAD),
    "fp8-block": WeightFormat("fp8", (BLOCK, BLOCK), 8, ignored=_HEAD),
    "int4-g128": WeightFormat("int4", groups(128), ignored=_HEAD),
}


#: The values of --quantization-head and of --quantization-embedding.
HEADS: dict[str, Head] = {"none": "", "int8": "int8"}


def chosen_format(
    checkpoint: WeightFormat | None, flag: str, head: str = "none", embedding: str = "none", *, is_tied: bool = False
) -> WeightFormat | None:
    """Return the format for a checkpoint and values of --quantization, --quantization-head and --…-embedding.

    None: the weights stay as they are. Raise ConfigError if the flags contradict the checkpoint or one another.
    is_tied: whether the head has the embedding's weights.
    """
    if flag != "auto" and checkpoint is not None:
        message = f"--quantization {flag}: the checkpoint is quantized already ({checkpoint.name}); leave the flag out"
        raise ConfigError(message, field="quantization")
    form = checkpoint if flag == "auto" else FORMATS[flag]
    for field, value in (("quantization_head", head), ("quantization_embedding", embedding)):
        if form is None and value != "none":
            message = f"--{field.replace('_', '-')} {value}: the other weights are not quantized; choose a format with "
            raise ConfigError(message + "--quantization", field=field)
    if form is None:
        return None
    if head != "none" and form.layout and form.covers(HEAD):
        message = f"--quantization-head {head}: the checkpoint's head is quantized already ({form.name})"
        raise ConfigError(message, field="quantization_head")
    if embedding != "none" and is_tied and head != embedding:
        message = f"--quantization-embedding {embedding}: the head has the same weights; add --quantization-head "
        raise ConfigError(message + embedding, field="quantization_embedding")
    return replace(form, head=HEADS[head], embedding=HEADS[embedding])
