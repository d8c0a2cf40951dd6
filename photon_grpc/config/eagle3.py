"""The directory of an EAGLE-3 head: config.json of one Llama layer, with a few keys more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from photon_grpc.config.families import Family
from photon_grpc.config.json_file import as_struct, parse_object, read_bytes, refusal, shown
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.model_json import ArchitectureJson
from photon_grpc.config.rope import CONFIG_FILE
from photon_grpc.errors import ModelLoadError

#: The embedding is that of the model that it drafts for, and `t2d` follows from `d2t`.
_FAMILY = Family("llama", other_parts=("embed_tokens.", "t2d"))
#: The names of public checkpoints.
ARCHITECTURES = {"LlamaForCausalLMEagle3": _FAMILY, "Eagle3LlamaForCausalLM": _FAMILY}
NUM_STATES = 3

_Layer = Annotated[int, Meta(ge=0, le=1024)]


class _LayersJson(Struct, kw_only=True):
    layers: list[_Layer] | None = field(name="eagle_aux_hidden_state_layer_ids", default=None)
    use_aux_hidden_state: bool = True


class _HeadJson(Struct, kw_only=True):
    draft_vocab_size: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    target_hidden_size: Annotated[int, Meta(ge=1, le=2**17)] | None = None
    norm_before_residual: bool = False
    eagle_config: _LayersJson | None = None


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The facts about a head.

    Args:
        layer: the sizes of its only layer, and its files.
        draft_vocab_size: ids that it can draft.
        layers: those of the served model before which its states are taken; None: the usual ones.
        norm_before_residual: whether the residual stream of its layer begins behind the norm of the state.
    """

    layer: ModelConfig
    draft_vocab_size: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool


def is_eagle3(directory: Path) -> bool:
    """Return whether this is the directory of a head. Raise ModelLoadError if its config.json cannot be read."""
    named = as_struct(parse_object(read_bytes(directory / CONFIG_FILE), CONFIG_FILE), ArchitectureJson, CONFIG_FILE)
    return (named.architectures or [""])[0] in ARCHITECTURES


def read_eagle3_dir(directory: Path) -> Eagle3Config:
    """Read and check the directory of a head. Raise ModelLoadError naming the key."""
    layer = read_model_dir(directory, families=ARCHITECTURES)
    json = as_struct(parse_object(read_bytes(directory / CONFIG_FILE), CONFIG_FILE), _HeadJson, CONFIG_FILE)
    states = json.eagle_config or _LayersJson()
    layers, size = states.layers, json.draft_vocab_size or layer.vocab_size
    if layer.num_layers != 1:
        raise refusal(CONFIG_FILE, "num_hidden_layers", f"must be 1 in an EAGLE-3 head, is {layer.num_layers}")
    if size > layer.vocab_size:
        raise refusal(CONFIG_FILE, "draft_vocab_size", f"is {size}, more than vocab_size {layer.vocab_size}")
    if json.target_hidden_size not in (None, layer.hidden_size):
        problem = f"is {json.target_hidden_size}; only hidden_size, {layer.hidden_size}, is supported"
        raise refusal(CONFIG_FILE, "target_hidden_size", problem)
    if not states.use_aux_hidden_state:
        raise refusal(CONFIG_FILE, "eagle_config.use_aux_hidden_state", "is false, which is not supported")
    if layers is not None and not NUM_STATES == len(layers) == len(set(layers)):
        problem = f"must name {NUM_STATES} layers, is {shown(str(layers))}"
        raise refusal(CONFIG_FILE, "eagle_config.eagle_aux_hidden_state_layer_ids", problem)
    return Eagle3Config(layer, size, None if layers is None else tuple(layers), json.norm_before_residual)


def states_before(config: Eagle3Config, hidden_size: int, vocab_size: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a model with these sizes before which the head's states are taken.

    Raise ModelLoadError if the model has no such layers, or other sizes than the head.
    """
    for name, own, wanted in (
        ("hidden_size", config.layer.hidden_size, hidden_size),
        ("vocab_size", config.layer.vocab_size, vocab_size),
    ):
        if own != wanted:
            raise ModelLoadError(f"the head's {name} is {own}, the model's {wanted}", field=name)
    layers = config.layers or (2, num_layers // 2, num_layers - 3)
    if len(set(layers)) != NUM_STATES or not all(0 <= layer < num_layers for layer in layers):
        named = ", ".join(map(str, layers))
        raise ModelLoadError(f"the head takes states before layers {named}; the model has {num_layers} layers")
    return layers
