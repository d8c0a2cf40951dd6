"""Keeps text from being read as special tokens in the vocabulary for grammars.

The grammar library encodes text that a grammar forces, and allows only those ids. If that text spells a special token,
it would only allow the id of that token, which is not text.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from msgspec import Raw, json


def rename_special_tokens(tokenizer: bytes) -> tuple[str, list[int]]:
    """Return a tokenizer.json whose special tokens have names that no caller can guess, and their ids.

    Raise msgspec.MsgspecError or KeyError if it is not a tokenizer.json.
    """
    parts = json.decode(tokenizer, type=dict[str, Raw])
    added_tokens = json.decode(parts.get("added_tokens", b"[]"))
    secret, names = secrets.token_hex(16), {}
    special = [token for token in added_tokens if token.get("special")]
    for token in special:
        names[token["content"]] = token["content"] = f"<{secret}:{token['id']}>"
    model = _rename(json.decode(parts["model"], type=dict[str, Raw]), names)
    text = json.encode({**parts, "added_tokens": added_tokens, "model": model}).decode()
    return text, [token["id"] for token in special]


def _rename(model: dict[str, Raw], names: dict[str, str]) -> dict[str, Any]:
    """Return the model of a tokenizer.json with other names in its vocabulary and without merges to them."""
    renamed: dict[str, Any] = dict(model)
    vocab = json.decode(model["vocab"])
    if isinstance(vocab, dict):
        renamed["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
    else:
        renamed["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    if "merges" in model and not names.keys().isdisjoint(vocab):
        renamed["merges"] = [merge for merge in json.decode(model["merges"]) if not _has(merge, names)]
    if "unk_token" in model:
        unknown = json.decode(model["unk_token"])
        renamed["unk_token"] = names.get(unknown, unknown)
    return renamed


def _has(merge: str | list[str], names: Collection[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
