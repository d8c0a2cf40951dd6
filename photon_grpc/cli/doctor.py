"""`doctor`: the settings of `serve` and their sources, versions, devices, kernels, the model, the addresses.

It works without torch: a child process that checks whether `serve` would start queries torch, too, or, if the server's
libraries are not installed, another one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from photon_grpc import __version__, demo
from photon_grpc.cli.server_libraries import HTTP_LIBRARIES, need_http, need_server
from photon_grpc.config.download import fetch_model
from photon_grpc.config.flags import ModelFlags, ServeConfig, ServerConfig
from photon_grpc.config.formats import about_tokenizer
from photon_grpc.config.resolve import Resolved, check_model, is_model_id, model_path, split_address
from photon_grpc.config.settings import sections
from photon_grpc.errors import ConfigError, PhotonError, StartupError
from photon_grpc.server.addresses import check
from photon_grpc.service.processes.address_space import check_limit
from photon_grpc.service.processes.start_report import StartReport

if TYPE_CHECKING:
    from photon_grpc.config.experts import ExpertSpec

EXTRA = "pip install '.[serve]' in the clone"

_PACKAGES = (
    *("grpcio", "protobuf", "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "uvloop"),
    *HTTP_LIBRARIES,
)
#: Longer than check_start reads values (`READING_TIME_S`).
_TORCH_TIMEOUT_S = 180
#: Settings that stay unset; the device and the model decide all others without a value.
_NEVER_DECIDED = ("max_connection_age", "max_connection_age_grace", "num_speculative_tokens")

#: Run by a Python that has torch.
_ASK_TORCH = """
import json
from photon_grpc.service.processes.start_report import torch_devices
print(json.dumps(torch_devices()))
"""


@dataclass(frozen=True, slots=True)
class SettingLine:
    """A setting: its value for people, its value for programs, and the source of the value."""

    title: str
    flag: str
    shown: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `doctor` shows."""

    settings: list[SettingLine]
    installed: dict[str, str]
    runs_on: dict[str, str]
    model: dict[str, str]
    addresses: dict[str, str]
    warnings: list[str]
    problems: list[str]


def doctor(resolved: Resolved, *, as_json: bool = False) -> int:
    """Print the report on stdout; return 1 if `serve` would refuse to start, else 0."""
    report = _examine(resolved)
    if as_json:
        _print_json(report)
    else:
        _print_tables(report)
    return 1 if report.problems else 0


def _examine(resolved: Resolved) -> Report:
    problems, numerics_version, torch, notes = _start(resolved.config)
    torch = torch or ask_torch()
    device = _device(torch, resolved.config.device.device)
    return Report(
        _settings(resolved, device),
        {name: _version(name) for name in _PACKAGES},
        dict(_devices(torch, device, resolved)) | ({"numerics": numerics_version} if numerics_version else {}),
        dict(_model(resolved)),
        _addresses(resolved.config.server),
        [*resolved.warnings, *notes],
        problems,
    )


def _print_json(report: Report) -> None:
    settings = {line.flag: {"value": line.value, "from": line.origin} for line in report.settings}
    versions = {"version": __version__, "python": platform.python_version(), "platform": platform.platform()}
    print(json.dumps(versions | asdict(report) | {"settings": settings}, indent=2))


def _print_tables(report: Report) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]photon-grpc {__version__}[/] on Python {platform.python_version()}, {platform.platform()}\n")
    console.print(_settings_table(report.settings))
    for title, rows in (
        ("Installed", report.installed),
        ("Runs on", report.runs_on),
        ("Model", report.model),
        ("Addresses", report.addresses),
    ):
        console.print(_table(title, rows))
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for problem in report.problems:
        console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)


def ask_torch() -> dict[str, Any] | None:
    """Return torch's view of this machine; None if torch is missing or broken."""
    if importlib.util.find_spec("torch") is None:
        return None
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=True)
        return dict(json.loads(answer.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _settings(resolved: Resolved, device: str) -> list[SettingLine]:
    known = _known(resolved.config, device)
    lines = []
    for title, settings in sections().items():
        for setting in settings:
            value = getattr(getattr(resolved.config, setting.section), setting.name)
            origin = resolved.origins[setting.name]
            if setting.name in known and origin == "default":
                value, origin = known[setting.name]
            lines.append(SettingLine(title, setting.flag, shown(setting.name, value), value, origin))
    return lines


def _known(config: ServeConfig, device: str) -> dict[str, tuple[Any, str]]:
    """Return the values that config.json and the device decide, with their source; {} if the model is unreadable."""
    known: dict[str, tuple[Any, str]] = {}
    if is_model_id(config.model.model):
        return known
    with contextlib.suppress(ImportError, PhotonError):
        from photon_grpc.config.model_dir import read_model_dir
        from photon_grpc.config.sizes import decide_sizes

        model = read_model_dir(model_path(config.model.model) if config.model.model else demo.TARGET)
        known["dtype"] = model.dtype, "config.json"
        if model.quantization is not None:
            known["quantization"] = model.quantization.name, "config.json"
        sizes = decide_sizes(model, config, on_cuda=device == "cuda")
        known["max_model_len"] = sizes.max_model_len, "config.json"
        if device:
            of_device = ("block_size", "max_num_seqs", "max_num_batched_tokens")
            known |= {name: (getattr(sizes, name), device) for name in of_device}
            known["async_depth"] = sizes.depth, device
    return known


def _settings_table(lines: list[SettingLine]) -> Table:
    table = Table(title="Settings", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("setting", "value", "from"):
        table.add_column(heading, header_style="dim", overflow="fold")
    for title, of_title in groupby(lines, lambda line: line.title):
        table.add_row(f"[bold]{title}[/]")
        for line in of_title:
            style = "dim" if line.origin == "default" else "cyan"
            table.add_row(f"  {line.flag}", escape(line.shown), f"[{style}]{line.origin}[/]")
    table.add_row("")
    return table


def _table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    for name, value in rows.items():
        table.add_row(f"  {escape(name)}", escape(value))
    table.add_row("")
    return table


def shown(name: str, value: Any) -> str:
    """Return the value of a setting as people read it."""
    if value is None:
        return "unset" if name in _NEVER_DECIDED else "decided at start"
    if isinstance(value, tuple):
        return ", ".join(value) or "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device(torch: dict[str, Any] | None, setting: str) -> str:
    """Return "cuda" or "cpu"; "" if the setting is "auto" and torch is missing."""
    if setting == "auto" and torch is not None:
        return "cuda" if torch["devices"] else "cpu"
    return "" if setting == "auto" else setting


def _devices(torch: dict[str, Any] | None, device: str, resolved: Resolved) -> list[tuple[str, str]]:
    rows = [("processor", f"{_num_cpus()} CPU cores usable, {platform.machine()}")]
    if torch is None:
        return [*rows, ("torch", f"missing or broken; to serve: {EXTRA}")]
    for index, found in enumerate(torch["devices"]):
        memory = f"{found['bytes'] / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", f"{found['name']}, {memory}, compute capability {found['capability']}"))
    if not torch["devices"]:
        rows.append(("cuda", f"no device (torch is built for CUDA {torch['cuda']})" if torch["cuda"] else "no device"))
    if len(torch["devices"]) > 1:
        rows.append(("peers", _peers(torch["apart"])))
    if device == "cuda" and not torch["devices"]:
        return [*rows, ("serves on", "cuda, which is missing")]
    return [*rows, ("serves on", device), ("kernels", _kernels(resolved.config.device.kernels, device))]


def _peers(apart: list[list[int]]) -> str:
    """Say whether GPUs reach each other; `apart` are the pairs that do not."""
    if not apart:
        return "all GPUs reach each other directly"
    pairs = ", ".join(f"cuda:{second} and cuda:{first}" for first, second in apart)
    return f"not directly, through the host's memory, which slows --tensor-parallel-size: {pairs}"


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kernels(kernels: str, device: str) -> str:
    has_triton = importlib.util.find_spec("triton") is not None
    if kernels == "auto":
        kernels = "triton" if device == "cuda" and has_triton else "torch"
    return kernels if has_triton or kernels == "torch" else "triton, which is not installed"


def _model(resolved: Resolved) -> list[tuple[str, str]]:
    model = resolved.config.model.model
    if model and is_model_id(model):
        return [("id", f"{model}: looked up and downloaded when the server starts")]
    directory = model_path(model) if model else demo.TARGET
    rows = [("directory", str(directory) if model else "the embedded demo model")]
    try:
        return [*rows, *_model_directory(directory, resolved.config), *_kv_cache(resolved.config, directory)]
    except ImportError as error:
        return [*rows, ("model", f"{error.name} is missing: {EXTRA}")]
    except PhotonError:
        return rows


def _model_directory(directory: Path, config: ServeConfig) -> list[tuple[str, str]]:
    from photon_grpc.config.model_dir import read_model_dir
    from photon_grpc.config.weight_bytes import described, shown_bytes

    model = read_model_dir(directory)
    num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    latent, kept = model.latent, f"{model.num_kv_heads} KV heads of {model.head_dim}"
    if latent is not None:
        kept = f"latent attention: rank {latent.rank}, {latent.rotated} rotated dimensions"
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, {kept}"
    has_chat = model.has_tokenizer and model.chat_template is not None
    parts = [name for name, has in (("text", model.has_tokenizer), ("chat", has_chat)) if has]
    ids_only = about_tokenizer(file.name for file in directory.iterdir())
    return [
        ("architecture", f"{model.architecture}: {shape}"),
        ("weights", f"{shown_bytes(num_bytes)} of safetensors" if num_bytes else "none (only --load-format dummy)"),
        ("dtype", model.dtype),
        *_experts(model.experts),
        ("quantization", described(model, config.model, config.cache.kv_cache_dtype)),
        ("vocabulary", f"{model.vocab_size:,}; EOS: {', '.join(map(str, model.eos_token_ids)) or 'none'}"),
        ("context", f"{model.max_position_embeddings:,} tokens{_windows(model.windows)}"),
        ("speaks", " and ".join(parts) or ids_only),
        ("revision", model.revision[:16]),
    ]


def _experts(experts: ExpertSpec | None) -> list[tuple[str, str]]:
    """Return how many experts the layers have, if they have some, and how many a step is expected to activate."""
    if experts is None:
        return []
    shared = f", {experts.num_shared} shared" if experts.num_shared else ""
    said = f"{experts.top_k} of {experts.num_experts} per token{shared}, {experts.intermediate_size:,} wide"
    layers = f"in {sum(experts.layers)} of {len(experts.layers)} layers"
    reached = " / ".join(f"{experts.reached(tokens):.3g}" for tokens in (1, 8, 64))
    return [("experts", f"{said}, {layers}"), ("experts per step", f"{reached} at 1 / 8 / 64 tokens if evenly routed")]


def _kv_cache(config: ServeConfig, directory: Path) -> list[tuple[str, str]]:
    """Return the form of the KV cache if it is not that of the layers."""
    from photon_grpc.config.kv_calibration import source_of_scales

    if config.cache.kv_cache_dtype == "auto":
        return []
    has_weights = config.model.load_format != "dummy"
    source = source_of_scales(directory, config.cache.kv_calibration, has_weights=has_weights)
    if source is None:
        scales = "scales of 1; keys and values beyond 448 are clipped: photon-grpc calibrate finds better ones"
    else:
        scales = f"scales of {'the checkpoint' if source == directory else source}"
    return [("kv cache", f"float8_e4m3fn, {scales}")]


def _start(config: ServeConfig) -> StartReport:
    try:
        need_server()
        need_http(config.server)
        check_limit()
        return ask_start(config if is_model_id(config.model.model) else fetch_model(config))
    except StartupError as error:
        return StartReport([str(error), *_directory_problem(config.model)], "")


def _directory_problem(model: ModelFlags) -> list[str]:
    try:
        check_model(model.model, random_weights=model.load_format == "dummy")
    except ConfigError as error:
        return [str(error)]
    return []


def ask_start(config: ServeConfig) -> StartReport:
    """Run `service/processes/check_start.py` in a child process, so that torch is not kept; return its report."""
    import msgspec

    command = [sys.executable, "-m", "photon_grpc.service.processes.check_start"]
    settings = msgspec.json.encode(config)
    try:
        done = subprocess.run(command, input=settings, stdout=subprocess.PIPE, timeout=_TORCH_TIMEOUT_S, check=True)
        # A module that is imported there may print its own lines first.
        return StartReport(*json.loads(done.stdout.splitlines()[-1]))
    except (OSError, TypeError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return StartReport([f"the start check failed: {error}"], "")


def _windows(windows: tuple[int, ...]) -> str:
    """Describe the attention window of each layer, where 0 is no window."""
    counts = Counter(filter(None, windows))
    return "".join(f"; {count} of {len(windows)} layers attend the last {n:,}" for n, count in sorted(counts.items()))


def _addresses(server: ServerConfig) -> dict[str, str]:
    grpc = {address: _address_state(address) for address in server.listen}
    return grpc | {f"{address} (HTTP)": _address_state(address) for address in server.http_listen}


def _address_state(address: str) -> str:
    try:
        check(address, reuse_port=False)
    except ConfigError:
        return "in use or not available"
    return "any free port" if split_address(address)[1] == 0 and not address.startswith("unix:") else "free"
