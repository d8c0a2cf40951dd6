"""The tensors in which a checkpoint stores one quantized weight, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from photon_grpc.config.quantization import ALL, WeightFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.layers.parameter_owner import Part, Target

#: Of scales, as safetensors spells them.
SCALES = ("F32", "BF16", "F16")
#: The largest |q - z|.
LARGEST = {"int8": 128, "int4": 15, "fp8": 448}
#: Weights are searched for NaN so many at a time, by the type of the device: a copy of a part stays in a CPU's caches.
_PARTS = {"cpu": 1 << 20, "cuda": 1 << 26}


class Stored(NamedTuple):
    """One tensor of a weight, `suffix` behind the module's name, in `shape`.

    rows, columns: the axes along which it has the rows and the columns of W; None: all ranks read all of it. default:
    the value if a checkpoint may lack the tensor. random: as of a Target. check: of its values, with its name.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dtypes: tuple[str, ...]
    rows: int | None = 0
    columns: int | None = 1
    default: torch.Tensor | None = None
    random: Callable[[torch.Tensor], torch.Tensor] | None = None
    check: Callable[[str, StoredNumbers, WeightSizes], None] | None = None


class StoredNumbers(NamedTuple):
    """The numbers of a stored tensor, or of a rank's part: as the checkpoint has them, and as they were read."""

    stored: torch.Tensor
    read: torch.Tensor


class Codes(NamedTuple):
    """A weight W [N, K] in its canonical form, or the part of one that an output of a merged Linear is.

    values: int8 or e4m3 [N, K], or uint8 [N, K / 2] with an even column in the low half of its byte. scales: [groups of
    columns, N], or with blocks [blocks of columns, blocks of rows]. zeros: as scales; None: 0, or 8 in 4 bits.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


class WeightSizes(NamedTuple):
    """The sizes of W here and its format.

    dtype: of scales. whole: the sizes in the whole model. begin: the first column of W among those.
    """

    rows: int
    columns: int
    format: WeightFormat
    dtype: torch.dtype
    whole: tuple[int, int]
    begin: int = 0

    @property
    def has_groups(self) -> bool:
        """Whether some columns share a scale, not all."""
        return self.format.block[1] != ALL

    @property
    def group(self) -> int:
        """The columns that share a scale."""
        return self.format.block[1] or self.columns

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group)

    @property
    def per_word(self) -> int:
        """Values in a packed word."""
        return 32 // self.format.bits


def joined(parts: list[Codes]) -> Codes:
    """Return the weight of a merged Linear."""
    if len(parts) == 1:
        return parts[0]
    values, scales, zeros = zip(*parts, strict=True)
    held = None if zeros[0] is None else torch.cat(zeros, 1).contiguous()
    return Codes(torch.cat(values), torch.cat(scales, 1).contiguous(), held)


def check_sizes(name: str, shape: WeightSizes, *, is_merged: bool) -> None:
    """Raise ModelLoadError if a weight of these sizes cannot be in the format. Parts hold whole groups and words."""
    form = shape.format
    rows, columns = (_Side(name, *each) for each in (("output", shape.rows, shape.whole[0]),
                                                     ("input", shape.columns, shape.whole[1])))  # fmt: skip
    if form.block[0] > 1:
        rows.check(form.block[0], "rows of a block", when=is_merged or rows.is_part)
        columns.check(shape.group, "columns of a block", when=columns.is_part)
    else:
        columns.check(shape.group, "columns of a group")
    is_gptq, is_packed = form.layout.startswith("gptq"), form.layout == "pack-quantized"
    of_word = f"values of {form.bits} bits in a word"
    columns.check(shape.per_word, of_word, when=is_gptq or is_packed)
    has_row_words = is_gptq or form.layout == "awq" or (is_packed and form.has_zeros and rows.is_part)
    rows.check(shape.per_word, of_word, when=has_row_words)
    columns.check(2, "values in a byte", when=form.bits == 4)


class _Side(NamedTuple):
    """The features of one side of a weight: those of this rank, and those of the model."""

    name: str
    side: str
    size: int
    whole: int

    @property
    def is_part(self) -> bool:
        return self.size != self.whole

    def check(self, of: int, what: str, *, when: bool = True) -> None:
        """Raise ModelLoadError unless they are a multiple of `of`, where that is asked for."""
        if when and self.size % of:
            share, part = (f"{self.size} of ", ", the part of a rank or a shared expert,") if self.is_part else ("", "")
            problem = f"{share}{self.whole} {self.side} features{part} are not a multiple of the {of} {what}"
            raise ModelLoadError(f"{self.name}: {problem}", field=self.name)


def check_scales(name: str, values: StoredNumbers, shape: WeightSizes) -> None:
    """Raise ModelLoadError unless all scales, and the largest numbers that they stand for, are right in their dtype.

    A scale of 0 is right: its weights are 0, as those of padded rows and pruned channels are. A weight whose scales
    are all 0 is refused as damaged. Not a rank's part of one: it may be all padding.
    """
    scales, form = values.read, name_of(values.read.dtype)
    wrong = ~(scales.isfinite() & (scales >= 0))
    if bool(wrong.any()):
        raise ModelLoadError(
            f"{name}: {int(wrong.sum())} of {scales.numel()} scales are negative or not finite in {form}, the first "
            f"is {float(scales[wrong][0])}",
            field=name,
        )
    is_part = (shape.rows, shape.columns) != shape.whole
    if not is_part and not bool(scales.any()):
        raise ModelLoadError(f"{name}: all {scales.numel()} scales are 0 in {form}", field=name)
    lost = values.stored[(values.stored != 0) & (scales == 0).to(values.stored.device)]
    if len(lost):
        least = torch.finfo(scales.dtype).smallest_normal
        raise ModelLoadError(
            f"{name}: {len(lost)} of {scales.numel()} scales become 0 in {form}, whose smallest normal number is "
            f"{least:.1e}; the first is {float(lost[0]):.1e}",
            field=name,
        )
    most = float(scales.max())
    if most * LARGEST[shape.format.kind] > torch.finfo(scales.dtype).max:
        raise ModelLoadError(f"{name}: with the scale {most} weights are infinite in {form}", field=name)


def check_zeros(name: str, zeros: torch.Tensor, shape: WeightSizes) -> None:
    """Raise ModelLoadError for integer zero points of other numbers, or of any but the middle if there are none."""
    largest, middle = 2**shape.format.bits - 1, 2 ** (shape.format.bits - 1)
    most = int(zeros.max())
    if most > largest:
        raise ModelLoadError(
            f"{name}: has the zero point {most}; {shape.format.bits} bits end at {largest}", field=name
        )
    wrong = zeros != middle
    if not shape.format.has_zeros and bool(wrong.any()):
        raise ModelLoadError(
            f"{name}: has the zero point {int(zeros[wrong][0])}; quantization_config says that weights are symmetric, "
            f"which is {middle}",
            field=name,
        )


def check_floats(name: str, values: StoredNumbers, shape: WeightSizes) -> None:
    """Raise ModelLoadError if one of these e4m3 values is NaN."""
    codes = values.read.view(torch.uint8).flatten()
    # NaN are the bytes 0x7F and 0xFF.
    if any(int((part & 0x7F).amax()) == 0x7F for part in codes.split(_PARTS[codes.device.type])):
        wrong = int(values.read.float().isnan().sum())
        raise ModelLoadError(f"{name}: {wrong} of {codes.numel()} values are NaN", field=name)


def check_order(name: str, values: StoredNumbers, shape: WeightSizes) -> None:
    """Raise ModelLoadError unless each column is in the group that its number says."""
    places = values.read
    expected = (torch.arange(shape.columns, device=places.device) + shape.begin) // shape.group
    wrong = (places != expected).nonzero()
    if len(wrong):
        column = int(wrong[0])
        raise ModelLoadError(
            f"{name}: puts column {column + shape.begin} into group {int(places[column])}, in order it is in group "
            f"{int(expected[column])}; columns in another order (desc_act, actorder) are not supported",
            field=name,
        )


def check_shape(name: str, values: StoredNumbers, shape: WeightSizes) -> None:
    """Raise ModelLoadError if weight_shape is not that of the weight."""
    said = values.read.tolist()
    if tuple(said) != shape.whole:
        raise ModelLoadError(
            f"{name}: says that the weight has shape {said}, config.json asks for {list(shape.whole)}",
            field=name,
        )


def target_of(name: str, stored: Stored, tensor: torch.Tensor, part: Part | None, shape: WeightSizes) -> Target:
    """Return the place of a stored tensor of a weight of this shape."""
    full = name + stored.suffix

    def check(of_file: torch.Tensor, read: torch.Tensor) -> None:
        if stored.check is not None:
            stored.check(full, StoredNumbers(of_file, read), shape)

    return Target(
        full,
        tensor,
        part=part,
        dtypes=stored.dtypes,
        is_optional=stored.default is not None,
        random=stored.random,
        check=None if stored.check is None else check,
    )
