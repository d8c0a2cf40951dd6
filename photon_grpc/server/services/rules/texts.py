"""Strings and bytes that keep their rules, as Lark terminals of their JSON."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from photon_grpc.server.services.rules.patterns import whole_text
from photon_grpc.server.services.rules.values import Unsatisfiable
from photon_grpc.server.typed.json_grammar import ESCAPED, UNESCAPED

#: The longest text that a rule alone can ask for.
MAX_CHARS = 2**16
_CHAR = f"({UNESCAPED}|{ESCAPED})"
_ASCII = r"[ !#-\[\]-~]"
_HEX = "[0-9a-f]"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = f"(0|[1-9a-f]{_HEX}{{0,3}})"
_IPV6 = f"{_GROUP}(:{_GROUP}){{7}}"
_NETWORK4 = rf"([1-9]?[0-9]\.0\.0\.0\/8|{_OCTET}\.{_OCTET}\.0\.0\/16|{_OCTET}\.{_OCTET}\.{_OCTET}\.0\/24)"
_NETWORK6 = rf"({_GROUP}:){{3}}:\/48|({_GROUP}:){{4}}:\/64"
_LABEL = "[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?"
_HOST = rf"({_LABEL}\.){{0,3}}[a-z]([a-z0-9-]{{0,14}}[a-z0-9])?"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3})"
_PATH = r"(\/[A-Za-z0-9._~-]{1,32}){1,8}"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
#: Rule -> some of the texts that keep it. No such text needs an escape.
_FORMS: Mapping[str, str] = {
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,16}}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ip": f"({_IPV4}|{_IPV6})",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"https?:\/\/{_HOST}(:{_PORT})?({_PATH})?",
    "uri_ref": rf"(https?:\/\/{_HOST})?{_PATH}",
    "address": f"({_HOST}|{_IPV4})",
    "uuid": _UUID,
    "tuuid": f"{_HEX}{{32}}",
    "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
    "ip_with_prefixlen": rf"{_IPV4}\/([12]?[0-9]|3[0-2])",
    "ipv4_with_prefixlen": rf"{_IPV4}\/([12]?[0-9]|3[0-2])",
    "ipv6_with_prefixlen": rf"{_IPV6}\/([1-9]?[0-9]|1[01][0-9]|12[0-8])",
    "ip_prefix": _NETWORK4,
    "ipv4_prefix": _NETWORK4,
    "ipv6_prefix": _NETWORK6,
    "host_and_port": f"({_HOST}|{_IPV4}):{_PORT}",
    "protobuf_fqn": r"[A-Za-z_][A-Za-z0-9_]{0,31}(\.[A-Za-z_][A-Za-z0-9_]{0,31}){0,5}",
    "protobuf_dot_fqn": r"(\.[A-Za-z_][A-Za-z0-9_]{0,31}){1,6}",
}
#: Values of KnownRegex.
_KNOWN: Mapping[int, str] = {1: "[0-9A-Za-z!#$%&'*+.^_|~-]{1,64}", 2: r"[ !#-\[\]-~]{0,512}"}
#: Rules that hold only for texts without escapes, since an escape may hide what they look for.
_NEED_PLAIN = frozenset({"pattern", "not_in", "not_contains"})
_REGEX_SIGNS = re.compile(r"[.^$*+?{}\[\]\\|()/&~#-]")


def string(rules: Mapping[str, Any], max_chars: int, unheld: Callable[[str], None]) -> str:
    """Return a terminal of the strings that keep `rules`, by name of the rule; `unheld` gets the names of others.

    `max_chars` is the bound of strings that have none of their own.
    """
    char = UNESCAPED if _NEED_PLAIN & rules.keys() else _CHAR
    parts = _listed(rules) if {"const", "in"} & rules.keys() else _lengths(rules, max_chars, char, unheld)
    for name, value in rules.items():
        parts += _string_part(name, value, char, unheld)
    return " & ".join([part if part.startswith("~") else f"/{part}/" for part in parts])


def _listed(rules: Mapping[str, Any]) -> list[str]:
    """Return an expression of the listed texts that have the right lengths. Raise Unsatisfiable."""
    (least, most), (least_bytes, most_bytes) = [_bounds(rules, each, MAX_CHARS) for each in ("", "_bytes")]
    values = [rules["const"]] if "const" in rules else list(rules["in"])
    kept = [
        each
        for each in values
        if least <= len(each) <= most
        and least_bytes <= len(each.encode()) <= most_bytes
        and each in rules.get("in", values)
    ]
    if not kept:
        raise Unsatisfiable
    return [_one_of(kept)]


def _lengths(rules: Mapping[str, Any], max_chars: int, char: str, unheld: Callable[[str], None]) -> list[str]:
    """Return expressions of the texts with the prefix, and of the right lengths."""
    least_bytes, most_bytes = _bounds(rules, "_bytes", max_chars)
    least, most = _bounds(rules, "", max(max_chars, least_bytes))
    # Apart from the length, a long prefix would be too complex.
    prefix = rules.get("prefix", "")
    if len(prefix) > most:
        raise Unsatisfiable
    parts = [f'"{_literal(prefix)}{char}{{{max(least - len(prefix), 0)},{most - len(prefix)}}}"']
    if not _BYTE_LENGTHS & rules.keys():
        return parts
    if most >= least_bytes and all(rules.get(each, "").isascii() for each in ("prefix", "suffix", "contains")):
        return [*parts, f'"{_ASCII}{{{least_bytes},{most_bytes}}}"']
    for name in sorted(_BYTE_LENGTHS & rules.keys()):  # only texts beyond ASCII keep them
        unheld(name)
    return parts


def string_bytes(rules: Mapping[str, Any], max_chars: int, unheld: Callable[[str], None]) -> str:
    """Return a terminal of the bytes, in base64, that keep `rules`."""
    if "const" in rules or "in" in rules:
        values = [rules["const"]] if "const" in rules else list(rules["in"])
        return f"/{_one_of([base64.b64encode(each).decode() for each in values])}/"
    least, most = _bounds(rules, "", max_chars * 3 // 4)
    for name in rules:
        if name in _SIZES:
            least, most = _SIZES[name], _SIZES[name]
        elif name not in _LENGTHS:
            unheld(name)
    tails = ("", "[A-Za-z0-9+\\/][AQgw]==", "[A-Za-z0-9+\\/]{2}[AEIMQUYcgkosw048]=")
    ways = []
    for rest, tail in enumerate(tails):
        first, last = max(0, -((rest - least) // 3)), (most - rest) // 3
        if first <= last:
            ways.append(f"([A-Za-z0-9+\\/]{{4}}){{{first},{last}}}{tail}")
    return f'/"({"|".join(ways)})"/'


#: Rules of bytes that say how long they are; an IP address may be of version 4 or 6, and is of version 6 here.
_SIZES = {"ip": 16, "ipv4": 4, "ipv6": 16, "uuid": 16}
_LENGTHS = frozenset({"len", "min_len", "max_len"})
_BYTE_LENGTHS = frozenset({"len_bytes", "min_bytes", "max_bytes"})


def _bounds(rules: Mapping[str, Any], suffix: str, default: int) -> tuple[int, int]:
    """Return the least and the most length that the rules say."""
    if f"len{suffix}" in rules:
        return rules[f"len{suffix}"], rules[f"len{suffix}"]
    short = suffix or "_len"
    least = min(rules.get(f"min{short}", 0), MAX_CHARS + 1)
    return least, min(rules.get(f"max{short}", max(default, least, len(rules.get("prefix", "")))), MAX_CHARS)


def _string_part(name: str, value: Any, char: str, unheld: Callable[[str], None]) -> Iterator[str]:
    anything = f"{char}*"
    if name in _LENGTHS or name in _BYTE_LENGTHS or name in ("strict", "const", "in", "prefix"):
        return
    if name in _FORMS and value is True:
        yield f'"({_FORMS[name]})"'
    elif name == "well_known_regex" and value in _KNOWN:
        yield f'"({_KNOWN[value]})"'
    elif name == "not_in":
        yield f"~/{_one_of(value)}/"
    elif name in ("suffix", "contains"):
        yield f'"{anything}{_literal(value)}{"" if name == "suffix" else anything}"'
    elif name == "not_contains":
        yield f'~/"{anything}{_literal(value)}{anything}"/'
    elif name == "pattern" and (body := whole_text(value, f"{UNESCAPED}*")):
        yield f'"({body})"'
    elif value is not False:
        unheld(name)


def _one_of(values: Iterable[str]) -> str:
    return f'"({"|".join([_literal(each) for each in values])})"'


def _literal(text: str) -> str:
    """Return an expression of the JSON of `text`, without quotes."""
    return _REGEX_SIGNS.sub(r"\\\g<0>", json.dumps(text, ensure_ascii=False)[1:-1])
