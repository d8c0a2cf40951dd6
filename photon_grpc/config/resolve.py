"""A ServeConfig from flags, PHOTON_ variables and defaults, with the source of each value.

A flag overrides a variable, a variable overrides the default. Invalid values are refused here, before anything is
loaded, in one line with the value and the allowed ones.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from photon_grpc.config.flags import NO_ADMIN, ServeConfig, ServerConfig, SpeculationConfig
from photon_grpc.config.formats import WANTED, foreign_weights
from photon_grpc.config.http_callers import check_http_callers
from photon_grpc.config.label_key import LABEL_KEY, LABEL_KEY_RULE, MAX_LABELS
from photon_grpc.config.settings import Setting, by_name, section_class, settings
from photon_grpc.errors import ConfigError

#: Variables that clients read, of which `serve` must not warn as unknown.
CLIENT_VARIABLES = (
    "PHOTON_TARGET",
    "PHOTON_API_KEY",
    "PHOTON_TLS_CA",
    "PHOTON_CLIENT_TLS_CERT",
    "PHOTON_CLIENT_TLS_KEY",
)

#: The values of --speculative-model that are no directory.
DRAFTERS = NGRAM, GRAMMAR = "ngram", "grammar"

_PREFIX = "PHOTON_"
_MAX_ID_CHARS = 128
_COLLECTOR = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^/:\s\[\]@]+):[0-9]{1,5}/?")

#: organisation/name, as on model hubs; a path may look alike, so an existing directory takes precedence.
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")

#: Variables that Kubernetes sets in every pod for a Service named photon or photon-…: PHOTON_SERVICE_HOST,
#: PHOTON_PORT_50051_TCP_ADDR. Its PHOTON_PORT is a URL; a bare number was set by a person, and causes a warning.
_SERVICE_LINK = re.compile(
    r"PHOTON(_\w+)?_(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=\d+|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*)"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of `serve`, and their sources."""

    config: ServeConfig
    #: Setting name -> source of its value: "--dtype", "PHOTON_DTYPE" or "default".
    origins: dict[str, str]
    #: Lines about problems with which the service still starts.
    warnings: tuple[str, ...] = ()


def resolve(given: Mapping[str, Any], environ: Mapping[str, str], *, any_directory: bool = False) -> Resolved:
    """Resolve all settings; `given` maps names to texts from flags or values from Python callers, None if unset.

    Raise ConfigError for the first invalid value; with `any_directory` a directory without a model is valid.
    """
    _refuse_unknown(given)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings():
        values[setting.name], origins[setting.name] = _value(setting, given, environ)
    config = _assemble(values)
    check(config, origins, any_directory=any_directory)
    return Resolved(config, origins, tuple(_warnings(environ)))


def resolve_program(given: Mapping[str, Any], environ: Mapping[str, str]) -> Resolved:
    """Resolve the settings of a model in the caller's own program, ignoring variables of the server.

    Raise ConfigError also for a setting of the server.
    """
    of_server = [setting for setting in settings() if setting.section == "server"]
    for setting in of_server:
        if given.get(setting.name) is not None:
            message = f"{setting.name} is a setting of `photon-grpc serve` only"
            raise ConfigError(message, field=setting.flag)
    variables = {setting.variable for setting in of_server}
    return resolve(given, {name: value for name, value in environ.items() if name not in variables})


def check(config: ServeConfig, origins: Mapping[str, str], *, any_directory: bool = False) -> None:
    """Check values against each other and against the file system. Raise ConfigError."""
    for address in config.server.listen:
        split_address(address, origins["listen"])
    _check_replica_id(config.server.replica_id, origins["replica_id"])
    _check_collector(config.server.otlp_endpoint)
    _check_tls(config.server)
    _check_connection_age(config.server)
    _check_admin(config.server, origins["admin_listen"])
    if config.server.metrics_listen:
        _check_http_address(config.server.metrics_listen, origins["metrics_listen"])
    for address in config.server.http_listen:
        _check_http_address(address, origins["http_listen"])
    check_http_callers(config.server, origins)
    _check_metrics_labels(config.server, origins["metrics_label"])
    _check_distinct(config.server)
    _check_speculation(config.speculation, origins)
    try:
        if any_directory and model_path(config.model.model).is_dir():
            return
        check_model(config.model.model, origins["model"], random_weights=config.model.load_format == "dummy")
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise ConfigError(f"{origins['model']}: {config.model.model}: {error.strerror}", field="--model") from None


def check_model(model: str, source: str = "--model", *, random_weights: bool = False) -> None:
    """Raise ConfigError unless `model` is "", a directory with config.json and weights, or looks like a hub's id."""
    directory = model_path(model)
    has_config = (directory / "config.json").is_file()
    if not model or is_model_id(model) or (has_config and (random_weights or any(directory.glob("*.safetensors")))):
        return
    if directory.is_dir():
        problem = _directory_problem(model, directory, has_config, random_weights)
    elif directory.exists():
        problem = f"{foreign_weights([model]) or f'{model} is a file'}; a model is {WANTED}"
    else:
        problem = f"no directory {model}, and it is not an id like organisation/name"
    raise ConfigError(f"{source}: {problem}", field="--model")


def _directory_problem(model: str, directory: Path, has_config: bool, random_weights: bool) -> str:
    if random_weights:
        return f"the directory {model} holds no config.json"
    if foreign := foreign_weights(file.name for file in directory.iterdir()):
        return f"{model} holds no *.safetensors ({foreign}); a model is {WANTED}"
    if has_config:
        return f"{model} holds no *.safetensors; --load-format dummy serves its config.json with random weights"
    return f"the directory {model} holds no model; a model is {WANTED}"


def model_path(model: str) -> Path:
    """Return the directory, with `~` expanded if this user has a home."""
    return Path(os.path.expanduser(model))


def is_model_id(model: str) -> bool:
    """Return whether it must be downloaded: there is no such directory, and it looks like an id."""
    return not model_path(model).exists() and _MODEL_ID.fullmatch(model) is not None


def split_address(address: str, source: str = "--listen") -> tuple[str, int]:
    """Return a pair such as ("127.0.0.1", 50051) or ("unix:/run/photon.sock", 0). Raise ConfigError."""
    if address.startswith("unix:") and address.removeprefix("unix:").strip("/"):
        return address, 0
    host, colon, port = address.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not colon or not host or is_bare_ipv6 or address.startswith("unix:"):
        raise _bad_address(source, f"{address!r} is not an address; write HOST:PORT, [IPV6]:PORT or unix:PATH")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise _bad_address(source, f"{port!r} in {address!r} is not a port; ports are 0 (any free one) to 65535")
    try:
        host.encode("idna")  # as for a resolver
    except UnicodeError:
        raise _bad_address(source, f"{host!r} in {address!r} is not a host name") from None
    return host, int(port)


def open_to_the_network(server: ServerConfig) -> tuple[str, ...]:
    """Return the addresses that other machines can call in clear text and without a key."""
    if server.tls_cert or server.api_keys_file:
        return ()
    return tuple(address for address in (*server.listen, *server.http_listen) if not _is_local(address))


def _is_local(address: str) -> bool:
    host = split_address(address)[0].strip("[]")
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, perhaps of an interface
        return False


def _check_replica_id(replica_id: str, source: str) -> None:
    if len(replica_id) > _MAX_ID_CHARS or not (replica_id.isascii() and replica_id.isprintable()):
        message = f"{source}: must be at most {_MAX_ID_CHARS} printable ASCII characters, since it is sent as metadata"
        raise ConfigError(message, field="--replica-id")


def _check_collector(endpoint: str) -> None:
    if endpoint and not _COLLECTOR.fullmatch(endpoint):
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: must be http://HOST:PORT or https://HOST:PORT (collectors use port 4317)",
            field="--otlp-endpoint",
        )


def _check_tls(server: ServerConfig) -> None:
    given = {"--tls-cert": server.tls_cert, "--tls-key": server.tls_key, "--tls-client-ca": server.tls_client_ca}
    missing = [flag for flag in ("--tls-cert", "--tls-key") if not given[flag]]
    if any(given.values()) and missing:
        raise ConfigError(
            f"{' and '.join(flag for flag in given if given[flag])} without {' and '.join(missing)}: "
            "TLS needs a certificate and its key",
            field=missing[0],
        )


def _check_admin(server: ServerConfig, source: str) -> None:
    if server.admin_listen in ("", NO_ADMIN):
        return
    split_address(server.admin_listen, source)
    if not server.admin_listen.startswith("unix:") and not server.api_keys_file:
        problem = "without API keys every caller could end the service; add --api-keys-file, or use unix:PATH"
        raise ConfigError(f"{source} {server.admin_listen}: {problem}", field="--admin-listen")


def _check_connection_age(server: ServerConfig) -> None:
    if server.max_connection_age_grace is not None and server.max_connection_age is None:
        flag = "--max-connection-age-grace"
        raise ConfigError(f"{flag}: has no effect without --max-connection-age; set both", field=flag)


def _check_speculation(speculation: SpeculationConfig, origins: Mapping[str, str]) -> None:
    name = speculation.speculative_model
    alone = {
        "num_speculative_tokens": speculation.num_speculative_tokens is not None,
        "speculation_control": speculation.speculation_control == "fixed",
    }
    for each, is_given in alone.items():
        if is_given and not name:
            raise ConfigError(f"{origins[each]}: has no effect without --speculative-model; set both", field=each)
    if name not in ("", *DRAFTERS) and not (Path(name) / "config.json").is_file():
        problem = f"{name} is none of {', '.join(DRAFTERS)}, and no directory with a config.json"
        raise ConfigError(f"{origins['speculative_model']}: {problem}", field="speculative_model")


def _check_http_address(address: str, source: str) -> None:
    if split_address(address, source)[0] == address:
        raise _bad_address(source, f"{address!r} is not an HTTP address; write HOST:PORT or [IPV6]:PORT")


def _check_metrics_labels(server: ServerConfig, source: str) -> None:
    keys, flag = server.metrics_label, "--metrics-label"
    if keys and not server.has_metrics:
        message = f"{source}: has no effect without --metrics-listen or --http-listen; set one of them, too"
        raise ConfigError(message, field=flag)
    if len(keys) > MAX_LABELS:
        raise ConfigError(f"{source}: {len(keys)} labels are given; {MAX_LABELS} are allowed", field=flag)
    for key in keys:
        if not LABEL_KEY.fullmatch(key):
            raise ConfigError(f"{source} {key}: the key of a label is {LABEL_KEY_RULE}", field=flag)


def _check_distinct(server: ServerConfig) -> None:
    addresses = [*server.listen, *server.http_listen, server.admin_listen, server.metrics_listen]
    for address in filter(None, addresses):
        if addresses.count(address) > 1 and not address.endswith(":0"):
            flags = "--listen, --http-listen, --admin-listen, --metrics-listen"
            raise _bad_address(flags, f"{address} is given more than once")


def _bad_address(source: str, problem: str) -> ConfigError:
    return ConfigError(f"{source}: {problem}", field="--listen")


def _value(setting: Setting, given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Any, str]:
    if (value := given.get(setting.name)) is not None and not (setting.many and value in ((), [])):
        return setting.convert(value, setting.flag), setting.flag
    if text := environ.get(setting.variable, "").strip():
        return setting.convert(setting.split(text), setting.variable), setting.variable
    return setting.default, "default"


def _assemble(values: Mapping[str, Any]) -> ServeConfig:
    parts = {}
    for section in fields(ServeConfig):
        cls = section_class(section)
        parts[section.name] = cls(**{field.name: values[field.name] for field in fields(cls)})
    return ServeConfig(**parts)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in by_name():
            raise ConfigError(f"there is no setting {name!r}{_did_you_mean(name, by_name())}", field=name)


def _warnings(environ: Mapping[str, str]) -> Iterable[str]:
    known = {setting.variable for setting in settings()} | set(CLIENT_VARIABLES)
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known and not _is_service_link(variable, environ):
            yield f"{variable} in the environment is not a setting{_did_you_mean(variable, known, _PREFIX)}"


def _is_service_link(variable: str, environ: Mapping[str, str]) -> bool:
    return _SERVICE_LINK.fullmatch(f"{variable}={environ[variable]}") is not None


def _did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the nearest name as a question; "" if none is near. Names are compared without `prefix`."""
    names = [name.removeprefix(prefix) for name in known]
    near = difflib.get_close_matches(word.removeprefix(prefix), names, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
