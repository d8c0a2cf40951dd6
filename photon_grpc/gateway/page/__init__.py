"""The page at `/`: its files as they are sent, and the headers that go with each of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
}

#: Nothing from elsewhere, no inline script or style, no frame around it.
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "; ".join(f"{name} {source}" for name, source in _POLICY.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
)


def _read() -> dict[str, tuple[bytes, str]]:
    found = {each.name: each for each in files(__name__).iterdir() if each.name.rpartition(".")[2] in _TYPES}
    read = {name: (each.read_bytes(), _TYPES[name.rpartition(".")[2]]) for name, each in sorted(found.items())}
    return {"/": read.pop("index.html"), **{f"/page/{name}": file for name, file in read.items()}}


#: Path of the URL -> (content, content type).
FILES: Mapping[str, tuple[bytes, str]] = MappingProxyType(_read())
