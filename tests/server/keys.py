"""API keys for tests, and files with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ALL = "secret-of-all"
SECRETS = {"all": ALL, "gen": "secret-of-gen", "mod": "secret-of-mod", "adm": "secret-of-adm"}
SCOPES = {"all": ("generate", "models", "admin"), "gen": ("generate",), "mod": ("models",), "adm": ("admin",)}


def block(name: str, secret: str, scopes: Iterable[str] = ("generate", "models", "admin"), **limits: Any) -> str:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    fields = {"name": name, "sha256": digest, "scopes": list(scopes), **limits}
    return "\n".join(["[[key]]", *(f"{field} = {json.dumps(value)}" for field, value in fields.items()), ""])


def write_keys(path: Path, *blocks: str) -> Path:
    path.write_text("\n".join(blocks) or "\n".join(block(name, SECRETS[name], SCOPES[name]) for name in SECRETS))
    return path


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)
