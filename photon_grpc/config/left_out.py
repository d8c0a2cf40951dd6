"""The modules that a quantized checkpoint leaves out or names, in its tool's words: patterns for `WeightFormat`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from photon_grpc.config.json_file import refusal, shown
from photon_grpc.errors import ModelLoadError

FILE, KEY = "config.json", "quantization_config"


def left_out(dynamic: Any) -> tuple[str, ...]:
    """Return the modules that GPTQModel's rules leave out; refuse rules that give modules formats of their own."""
    if dynamic is None:
        return ()
    if not isinstance(dynamic, dict):
        raise refused("dynamic", f"must be an object, is {shown(dynamic)}")
    for rule in dynamic:
        if not rule.startswith("-:"):
            problem = "'-:' and a pattern, which leaves modules out: all others have one format"
            raise refused("dynamic", f"has the rule {shown(rule)}; supported: {problem}")
    return tuple(checked_pattern("dynamic", "re:" + rule[2:]) for rule in dynamic)


def outside(groups_of_names: Any, *, has_head: bool) -> tuple[str, ...]:
    """Return a pattern of all modules but those in `modules_in_block_to_quantize`, [["self_attn.q_proj", ...], ...]."""
    if not groups_of_names:
        return ()
    key = "modules_in_block_to_quantize"
    try:
        names = [name for group in msgspec.convert(groups_of_names, list[list[str]]) for name in group if name]
    except (msgspec.ValidationError, TypeError):
        raise refused(key, f"must be lists of names of modules, is {shown(str(groups_of_names))}") from None
    if not names:
        raise refused(key, "names no module")
    found = "|".join(map(re.escape, [*["lm_head"] * has_head, *names]))
    return (rf"re:(?!(?:.*\.)?(?:{found})$)",)


def targeted(targets: tuple[str, ...], at: str) -> tuple[str, ...]:
    """Return patterns for `WeightFormat.targets`; () for all linear layers, which are named by their class."""
    if targets == ("Linear",):
        return ()
    for target in targets:
        if not target.startswith("re:") and "." not in target:
            problem = f"holds {shown(target)}; supported: [\"Linear\"], or names of modules and patterns ('re:')"
            raise refused(at, problem)
    if not targets:
        raise refused(at, "is empty")
    return tuple(checked_pattern(at, each if each.startswith("re:") else f"re:{re.escape(each)}$") for each in targets)


def checked_pattern(key: str, pattern: str) -> str:
    """Return it. Refuse a name that would be that of everything, and a pattern that is no regular expression."""
    if not pattern.removeprefix("re:"):
        raise refused(key, "holds an empty name")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except (re.error, OverflowError, RecursionError) as error:
            raise refused(key, f"holds {shown(pattern)}, which is no regular expression ({error})") from None
    return pattern


def refused(key: str, problem: str) -> ModelLoadError:
    """Return the error about a key of quantization_config."""
    return refusal(FILE, f"{KEY}.{key}", problem)
