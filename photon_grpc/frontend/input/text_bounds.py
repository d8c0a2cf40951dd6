"""The most text that one id can stand for. Text that cannot fit into the context is refused before it is encoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: The largest factor by which a normalizer can shorten UTF-8.
_SHRINKS = {"NFC": 3, "NFD": 3, "NFKC": 12, "NFKD": 12, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1, "Replace": 1}
_KEEPS_TEXT = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"}


def bytes_per_token(spec: dict[str, Any]) -> int | None:
    """Return the most UTF-8 bytes that one id of a tokenizer.json stands for, None if the tokenizer may drop text.

    White space that added tokens strip beside them does not count.
    """
    shrinks = [_shrink(step) for step in _steps(spec.get("normalizer"), "normalizers")]
    keeps = all(_keeps(step) for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"))
    if None in shrinks or not keeps or not _spells_everything(spec):
        return None
    vocab = spec["model"]["vocab"]
    texts = vocab if isinstance(vocab, dict) else [text for text, _ in vocab]
    longest = max((len(text.encode()) for text in texts), default=1)
    longest = max(longest, max((len(token["content"].encode()) for token in spec["added_tokens"]), default=1))
    for shrink in shrinks:
        longest *= shrink or 1
    return longest


def _steps(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if part is not None and part["type"] == "Sequence":
        for step in part[key]:
            yield from _steps(step, key)
    elif part is not None:
        yield part


def _shrink(step: dict[str, Any]) -> int | None:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return None if not pattern or len(step["content"].encode()) < len(pattern.encode()) else 1
    return _SHRINKS.get(step["type"])


def _keeps(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPS_TEXT and "Removed" not in (step.get("behavior"), step.get("behaviour"))


def _spells_everything(spec: dict[str, Any]) -> bool:
    """Return whether no text is dropped and none of any length becomes one unknown token."""
    model = spec["model"]
    if model.get("byte_fallback"):
        return True
    steps = [*_steps(spec.get("pre_tokenizer"), "pretokenizers"), *_steps(spec.get("normalizer"), "normalizers")]
    return model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in steps)
