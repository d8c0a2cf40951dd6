"""The sliding window of each layer, from the keys of config.json."""

from __future__ import annotations

from photon_grpc.config.families import Family
from photon_grpc.config.json_file import refusal, shown
from photon_grpc.config.model_json import ConfigJson
from photon_grpc.config.rope import CONFIG_FILE

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


def read_windows(config: ConfigJson, family: Family, rotates: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0 for none: by `layer_types`, else by Family.slides.

    `rotates` says which layers have rotary embedding. Raise ModelLoadError naming the key.
    """
    window = _window(config, family)
    by_family = tuple(window if slides else 0 for slides in _sliding_layers(config, family, rotates))
    if config.layer_types is None:
        return by_family
    windows = tuple(window if kind == SLIDING else 0 for kind in _checked(config.layer_types, config.num_layers))
    if SLIDING in config.layer_types and not window:
        problem = "names sliding_attention, but there is no window: set use_sliding_window true and sliding_window"
        raise refusal(CONFIG_FILE, "layer_types", problem)
    if family.slides == "every_layer" and windows != by_family:
        problem = f"says that some layers have a window; {family.model_type} has one in all layers or in none"
        raise refusal(CONFIG_FILE, "layer_types", problem)
    return windows


def _window(config: ConfigJson, family: Family) -> int:
    """Return the window of the layers that have one; 0 if none has."""
    has_switch = family.slides in ("from_layer", "without_rotary")
    if family.slides == "never" and config.use_sliding_window:
        raise refusal(CONFIG_FILE, "use_sliding_window", f"is true; {family.model_type} has no sliding windows")
    # A pattern needs a window: its layers have another rotary embedding.
    has_none = config.sliding_window is None and (family.slides != "pattern" or config.layer_types is not None)
    if family.slides == "never" or has_none or (has_switch and not config.use_sliding_window):
        return 0
    if not config.sliding_window:
        condition = " if use_sliding_window is true" if has_switch else ""
        raise refusal(CONFIG_FILE, "sliding_window", f"must be at least 1{condition}, is {config.sliding_window}")
    return config.sliding_window


def _sliding_layers(config: ConfigJson, family: Family, rotates: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which layers have the window, if there is one."""
    if family.slides == "from_layer":
        return tuple(layer >= config.max_window_layers for layer in range(config.num_layers))
    if family.slides == "without_rotary":
        return tuple(not is_rotated for is_rotated in rotates)
    if family.slides == "pattern":
        return tuple((layer + 1) % config.sliding_window_pattern != 0 for layer in range(config.num_layers))
    return (family.slides == "every_layer",) * config.num_layers


def _checked(kinds: list[str], num_layers: int) -> list[str]:
    unknown = next((kind for kind in kinds if kind not in LAYER_TYPES), None)
    if unknown is not None:
        problem = f"must be a list of {' and '.join(LAYER_TYPES)}, holds {shown(unknown)}"
        raise refusal(CONFIG_FILE, "layer_types", problem)
    if len(kinds) != num_layers:
        problem = f"must name each of the {num_layers} layers once, names {len(kinds)}"
        raise refusal(CONFIG_FILE, "layer_types", problem)
    return kinds
