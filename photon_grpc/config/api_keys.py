"""The file of `--api-keys-file`: the API keys with their scopes and quotas.

    [[key]]
    name = "search"                      # owner of its requests; request ids and cached prefixes are per owner
    sha256 = "2c26b46b68ffc68ff99b…"     # of the key, in hex; the key itself is not stored
    scopes = ["generate", "models"]
    max_concurrent = 64                  # unset: no limit
    tokens_per_minute = 100000           # unset: no limit
    weight = 2                           # unset: 1; under load, twice the tokens of a key with 1

`photon-grpc keys new` writes such a block.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from typing import Annotated

import msgspec

from photon_grpc.config.regular_file import read_regular_file
from photon_grpc.errors import ConfigError

#: "service:" and a full name allows one service of --service.
Scope = Annotated[str, msgspec.Meta(pattern=r"\A(generate|models|admin|service:[A-Za-z_][A-Za-z0-9_.]*)\Z")]

_FLAG = "--api-keys-file"
_Limit = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[key]] of the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)]
    #: Requests in flight.
    max_concurrent: _Limit | None = None
    #: Prompt and output tokens.
    tokens_per_minute: _Limit | None = None
    #: Weight of its share while other keys wait, too.
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[tuple[ApiKey, ...], msgspec.Meta(min_length=1)]


def read_api_keys(path: str) -> tuple[ApiKey, ...]:
    """Read the keys. Raise ConfigError naming the file and the place in it, also if it holds no key."""
    try:
        file = msgspec.convert(tomllib.loads(read_regular_file(path).decode()), _File)
    except OSError as error:
        raise _bad_file(path, error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise _bad_file(path, "is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise _bad_file(path, f"is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise _bad_file(path, str(error)) from None
    for what in ("name", "sha256"):
        value, count = Counter(getattr(key, what) for key in file.key).most_common(1)[0]
        if count > 1:
            raise _bad_file(path, f"{count} keys have the {what} {value!r}")
    return file.key


def _bad_file(path: str, problem: str) -> ConfigError:
    return ConfigError(f"{_FLAG} {path}: {problem}", field=_FLAG)
