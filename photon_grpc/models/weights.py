"""Weights of a decoder: from safetensors files, checked in full before anything is allocated, or at random.

Leaf by leaf: allocate on the device, copy every tensor, or the part of it that a Target names, from the mapped file
into its place, bring it into its final form. So the peak is the model with one leaf twice, or four times if 16 bits
are packed by way of float32 (`layers/prepacked.py`).
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from photon_grpc.config.checkpoint import Checkpoint, TensorEntry, read_checkpoint
from photon_grpc.config.experts import refuse_other_layers
from photon_grpc.config.kv_calibration import is_kv_scale
from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels.linear.weight import QuantizedWeight
from photon_grpc.layers.experts import Experts, Router
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.parameter_owner import ParameterOwner, Target
from photon_grpc.models.decoder import Decoder

#: Called with (bytes done, bytes in all).
OnProgress = Callable[[int, int], None]

MAX_NAMES_SHOWN = 5

#: Random weights repeat one row of normal numbers, a prime number of them, so that rows of any length repeat late.
DUMMY_STD = 0.02
DUMMY_PERIOD = 1_048_583


def fill(decoder: Decoder, config: ModelConfig, load_format: str, seed: int, progress: OnProgress) -> None:
    """Load the weights, or with the format "dummy" fill them at random; raise as `load`."""
    if load_format == "dummy":
        dummy(decoder, seed)
    else:
        load(decoder, config, progress=progress)


def load(decoder: Decoder, config: ModelConfig, *, progress: OnProgress | None = None) -> None:
    """Load the safetensors files of `config.path` into `decoder`, converting to its dtype.

    Raise ModelLoadError naming what is missing, surplus, of a wrong shape or dtype, or malformed.
    """
    checkpoint = checked(decoder, config)
    with ExitStack() as stack:
        files = {name: _open(stack, config, name) for name in checkpoint.files}
        _check_tied_head(decoder, checkpoint, files)
        done, total = 0, _needed_bytes(decoder, checkpoint)
        for leaf in decoder.leaves():
            _allocate(leaf, decoder.device)
            for target in _present(leaf, checkpoint):
                stored = target.taken(_tensor(files, checkpoint.tensors[target.name], target.name))
                target.tensor.copy_(stored)
                if target.check is not None:
                    target.check(stored, target.tensor)
                done += _num_bytes(target, checkpoint)
                if progress is not None:
                    progress(done, total)
            leaf.after_load()


def checked(decoder: Decoder, config: ModelConfig) -> Checkpoint:
    """Return the headers of the files of `config.path`, with their names for experts; raise as `check`."""
    checkpoint = read_checkpoint(config.path)
    for leaf in decoder.leaves():
        if isinstance(leaf, Router | Experts):
            leaf.read_as(checkpoint.tensors)
    check(decoder, checkpoint, config)
    return checkpoint


def dummy(decoder: Decoder, seed: int = 0) -> None:
    """Fill at random: normal with deviation 0.02, around 1 for norms; a function of seed and name on any device."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(DUMMY_PERIOD).normal_(0.0, DUMMY_STD, generator=generator)
    noise = torch.cat((noise, noise)).to(decoder.device)
    noise, standard = noise.to(decoder.dtype), noise / DUMMY_STD
    for leaf in decoder.leaves():
        _allocate(leaf, decoder.device)
        for target in leaf.targets():
            if not target.is_optional:
                _fill_at_random(target, noise if target.random is None else target.random(standard))
            if target.center:
                target.tensor.add_(target.center)
        leaf.after_load()


def check(decoder: Decoder, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelLoadError unless the checkpoint has just the decoder's tensors, in shape and dtype, and empty ones."""
    if not checkpoint.files:
        raise ModelLoadError(f"there is no .safetensors file in {config.path}")
    targets = {target.name: target for leaf in decoder.leaves() for target in leaf.targets()}
    if config.experts is not None:
        refuse_other_layers(config.experts, config.architecture, checkpoint.tensors)
    missing = {name for name, target in targets.items() if not target.is_optional} - checkpoint.tensors.keys()
    codes = (".qweight", ".weight_packed", ".weight_scale") if missing and config.quantization is None else ()
    _refuse_names("need a quantization_config", (name for name in checkpoint.tensors if name.endswith(codes)))
    _refuse_names("are missing", missing)
    others = (name for name in checkpoint.tensors.keys() - targets.keys() if checkpoint.tensors[name].num_bytes)
    surplus = (name for name in others if not _is_tolerated(name, decoder, config))
    _refuse_names(f"do not belong to {config.architecture}", surplus)
    for name in filter(checkpoint.tensors.__contains__, targets):
        _check_entry(targets[name], checkpoint.tensors[name])


def check_values(decoder: Decoder, config: ModelConfig, until_s: float = math.inf) -> int:
    """Raise as `checked`, for wrong scales, zero points, orders of columns and e4m3 values, and another tied head.

    Return the bytes of values that were not read because `until_s`, as time.monotonic() counts, was over: large tensors
    are read last, which are weights. Float weights that are to be quantized are checked while they are loaded. The
    decoder need not be allocated.
    """
    checkpoint = checked(decoder, config)
    with ExitStack() as stack:
        files = {name: _open(stack, config, name) for name in checkpoint.files}
        _check_tied_head(decoder, checkpoint, files)
        targets = [target for leaf in decoder.leaves() for target in _present(leaf, checkpoint) if target.check]
        targets.sort(key=lambda target: _num_bytes(target, checkpoint))
        for number, target in enumerate(targets):
            if time.monotonic() > until_s:
                return sum(_num_bytes(left, checkpoint) for left in targets[number:])
            stored = target.taken(_tensor(files, checkpoint.tensors[target.name], target.name))
            if target.check is not None:
                target.check(stored, stored.to(target.tensor.dtype))
    return 0


def _check_entry(target: Target, entry: TensorEntry) -> None:
    name, shape, dtypes = target.name, list(target.shape), target.dtypes
    if not target.takes(entry.shape):
        raise ModelLoadError(
            f"{entry.file}: {name} has shape {list(entry.shape)}, config.json asks for {shape}", field=name
        )
    if entry.dtype not in dtypes:
        only = f"only {', '.join(dtypes)} are supported" if len(dtypes) > 1 else f"it must be {dtypes[0]}"
        raise ModelLoadError(f"{entry.file}: {name} has dtype {entry.dtype}; {only}", field=name)


def _present(leaf: ParameterOwner, checkpoint: Checkpoint) -> Iterator[Target]:
    """Return the leaf's targets that the checkpoint has."""
    return (target for target in leaf.targets() if target.name in checkpoint.tensors)


def _refuse_names(problem: str, names: Iterable[str]) -> None:
    if found := sorted(names):
        shown = ", ".join(name[:100] for name in found[:MAX_NAMES_SHOWN])
        more = f" and {len(found) - MAX_NAMES_SHOWN} more" if len(found) > MAX_NAMES_SHOWN else ""
        raise ModelLoadError(f"tensors of the safetensors files {problem}: {shown}{more}", field=found[0])


def _is_tolerated(name: str, decoder: Decoder, config: ModelConfig) -> bool:
    """Return whether this tensor is of another part or of the KV cache, or follows from others."""
    if name.startswith(config.other_parts):
        return True
    if any(name[: end + 1] in decoder.elsewhere for end, letter in enumerate(name) if letter == "."):
        return True
    return (
        name.endswith(".rotary_emb.inv_freq")
        or is_kv_scale(name)
        or (decoder.head.is_tied and name == decoder.head.name)
    )


def _check_tied_head(decoder: Decoder, checkpoint: Checkpoint, files: dict[str, Any]) -> None:
    """Raise ModelLoadError if a tied head is stored separately and differs from the embedding."""
    head, embedding = decoder.head.name, decoder.embedding.name
    if not decoder.head.is_tied or head not in checkpoint.tensors:
        return
    stored = _tensor(files, checkpoint.tensors[head], head)
    if not torch.equal(stored, _tensor(files, checkpoint.tensors[embedding], embedding)):
        raise ModelLoadError(
            f"{head} differs from {embedding} although config.json says tie_word_embeddings",
            field="tie_word_embeddings",
        )


def linears_of(decoder: Decoder) -> Iterator[Linear]:
    """Return every Linear, including those of experts."""
    for leaf in decoder.leaves():
        if isinstance(leaf, Linear):
            yield leaf
        elif isinstance(leaf, Experts):
            yield from leaf.linears()


def linear_bytes(decoder: Decoder) -> tuple[int, int]:
    """Return the bytes of the loaded weights of all Linears, and those that they would have in the decoder's dtype.

    A quantized embedding counts among them.
    """
    linears = list(linears_of(decoder))
    # A tied head has no parameters of its own; quantized, it takes memory all the same.
    held = [leaf for leaf in linears if leaf.num_parameters or isinstance(leaf.weight, tuple)]
    num_bytes, num_parameters = sum(leaf.method.num_bytes(leaf) for leaf in held), 0
    table = decoder.embedding.weight
    if isinstance(table, QuantizedWeight):
        num_parameters = table.shape.numel()
        # Of a tied head it is the same.
        num_bytes += 0 if decoder.head.is_tied and decoder.head in held else table.num_bytes
    return num_bytes, decoder.dtype.itemsize * (num_parameters + sum(leaf.num_parameters for leaf in linears))


def _needed_bytes(decoder: Decoder, checkpoint: Checkpoint) -> int:
    return sum(_num_bytes(target, checkpoint) for leaf in decoder.leaves() for target in _present(leaf, checkpoint))


def _num_bytes(target: Target, checkpoint: Checkpoint) -> int:
    """Return the bytes read for the target."""
    return checkpoint.tensors[target.name].num_bytes * target.tensor.numel() // max(1, math.prod(target.shape))


def _open(stack: ExitStack, config: ModelConfig, name: str) -> Any:
    try:
        return stack.enter_context(safe_open(config.path / name, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{name}: cannot be opened ({error})") from None


def _tensor(files: dict[str, Any], entry: TensorEntry, name: str) -> torch.Tensor:
    """Return a view of the tensor in the mapped file."""
    try:
        tensor: torch.Tensor = files[entry.file].get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{entry.file}: {name} cannot be read ({error})", field=name) from None
    return tensor


def _allocate(leaf: ParameterOwner, device: torch.device) -> None:
    try:
        leaf.allocate(device)
    except RuntimeError as error:  # torch's out-of-memory error on any device
        needed = sum(target.tensor.numel() * target.tensor.element_size() for target in leaf.targets())
        raise ModelLoadError(
            f"the weights do not fit into the memory of {device}: {needed} bytes more ({error})", needed=needed
        ) from None


def _fill_at_random(target: Target, noise: torch.Tensor) -> None:
    """Fill at random; a rank's part has the same values as in the whole tensor."""
    whole = target.tensor if target.part is None else target.tensor.new_empty(target.shape)
    _fill(whole.view(-1), noise, offset=zlib.crc32(target.name.encode()) % DUMMY_PERIOD)
    if target.part is not None:
        target.tensor.copy_(target.taken(whole))


def _fill(flat: torch.Tensor, noise: torch.Tensor, offset: int) -> None:
    """Repeat noise [2 · DUMMY_PERIOD], one period twice, from `offset` on."""
    period = noise[offset : offset + DUMMY_PERIOD]
    whole = flat.numel() // DUMMY_PERIOD * DUMMY_PERIOD
    flat[:whole].view(-1, DUMMY_PERIOD).copy_(period)
    flat[whole:].copy_(period[: flat.numel() - whole])
