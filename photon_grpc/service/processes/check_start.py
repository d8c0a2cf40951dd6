"""The checks of `serve`'s processes at their start, without loading weights.

`python -m photon_grpc.service.processes.check_start` reads a ServeConfig as JSON from stdin and prints a StartReport as
a JSON list.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from photon_grpc import demo
from photon_grpc.compose.access import read_certificates, read_keys
from photon_grpc.compose.assemble import check_parallel, check_step_trace, pick_device, pick_dtype, pick_kernels
from photon_grpc.compose.kv_form import choose_kv_form
from photon_grpc.compose.other_services import check_services
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.compose.speculation import check as check_speculation
from photon_grpc.compose.speculation import check_tensors as check_drafter
from photon_grpc.compose.split_model import decoders_of_ranks
from photon_grpc.compose.threads import cores_of
from photon_grpc.compose.tracing import check_tracing
from photon_grpc.config import resolve
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.sizes import decide_sizes
from photon_grpc.config.weight_bytes import format_of, refuse_without_room
from photon_grpc.errors import StartupError
from photon_grpc.models import weights
from photon_grpc.runner.numerics import numerics
from photon_grpc.service.endpoints.http import HttpEndpoint
from photon_grpc.service.endpoints.listen import check_admin, check_distinct, plan_service
from photon_grpc.service.processes.start_report import StartReport, torch_devices

#: Values of weights are read for so long; loading checks the others.
READING_TIME_S = 60.0


def report(config: ServeConfig) -> StartReport:
    """Return the reasons why `serve` would not start, what was not checked, and the version of its numerics."""
    notes: list[str] = []
    return StartReport(reasons(config, notes), numerics_version(config), notes=tuple(notes))


def numerics_version(config: ServeConfig) -> str:
    """Return what GetModel would show; "" if device, kernels or model cannot be had."""
    if resolve.is_model_id(config.model.model):
        return ""
    with contextlib.suppress(StartupError):
        device, kernels = pick_kernels(config)
        model_config = read_model_dir(config.model.model or demo.TARGET)
        weight_format = format_of(model_config, config.model)
        dtype = pick_dtype(model_config, config)
        sizes = decide_sizes(model_config, config, on_cuda=device.type == "cuda")
        is_long = model_config.has_long_rotary(sizes.max_model_len)
        kv_form = choose_kv_form(config, model_config, device, kernels).name
        found = numerics(
            config.device.numerics, kernels, device, dtype, weight_format, sizes.block_size, is_long=is_long,
            kv_form=kv_form, cuts=config.parallel.cuts,
        )  # fmt: skip
        return found.version
    return ""


def reasons(config: ServeConfig, notes: list[str] | None = None) -> list[str]:
    """Return the reasons why `serve` would not start, each once; a check that fails unexpectedly is one, too.

    What was not checked is added to `notes`.
    """
    found: dict[str, None] = {}
    for check in _checks(config, [] if notes is None else notes):
        try:
            check()
        except StartupError as error:
            found[str(error)] = None
        except Exception as error:
            traceback.print_exc()
            found[f"a check failed unexpectedly with {type(error).__name__}: {error}"] = None
    return list(found)


def _checks(config: ServeConfig, notes: list[str]) -> Iterator[Callable[[], object]]:
    """Yield the checks of supervisor, front end and engine, without those of a model that is not downloaded yet."""
    server = config.server
    yield partial(check_distinct, server)
    yield lambda: plan_service(server).close()
    yield partial(check_admin, server.admin_listen)
    yield partial(check_metrics, server.metrics_listen)
    yield partial(read_certificates, server)
    yield partial(read_keys, server)
    yield partial(check_tracing, server)
    yield partial(check_services, server)
    yield partial(check_step_trace, config)
    yield lambda: check_parallel(config.parallel, pick_device(config.device.device))
    yield partial(pick_kernels, config)
    if not resolve.is_model_id(config.model.model):
        yield from _model_checks(config, notes)


def _model_checks(config: ServeConfig, notes: list[str]) -> Iterator[Callable[[], object]]:
    """Yield the checks of the model; only the first if the directory holds no model."""
    holds_model = partial(resolve.check_model, config.model.model, random_weights=config.model.load_format == "dummy")
    try:
        holds_model()
    except StartupError:
        yield holds_model
    else:
        yield partial(read_served_model, config)
        yield lambda: notes.extend(check_model(config))


def check_metrics(address: str) -> None:
    """Raise ConfigError if the address cannot be bound."""

    async def listen() -> None:
        endpoint = HttpEndpoint({})
        await endpoint.start(address)
        endpoint.close()

    if address:
        asyncio.run(listen())


def check_model(config: ServeConfig) -> list[str]:
    """Check sizes, what drafts, and tensors by the headers of their files and by values; return what was not read.

    Raise ConfigError for sizes and drafters that the model does not allow, and ModelLoadError naming a tensor that is
    missing, surplus, of a wrong shape or dtype, or has wrong values; ConfigError for a tensor of a drafter.
    """
    model_config = read_model_dir(config.model.model or demo.TARGET)
    on_cuda = config.device.device != "cpu" and torch.cuda.is_available()
    sizes = decide_sizes(model_config, config, on_cuda=on_cuda)
    # Behind the sizes: they are checked also where the device is missing.
    choose_kv_form(config, model_config, *pick_kernels(config))
    check_speculation(config.speculation, model_config, sizes, config.parallel.pipeline_parallel_size)
    if on_cuda:
        refuse_without_room(model_config, config.model, torch.cuda.mem_get_info()[1], config.parallel.num_ranks)
    decoders = list(decoders_of_ranks(config, model_config, sizes))
    if config.model.load_format == "dummy":
        return []
    until_s = time.monotonic() + READING_TIME_S
    unread = sum(weights.check_values(decoder, model_config, until_s) for decoder in decoders)
    unread += check_drafter(config, model_config, sizes, decoders[0], until_s)
    within = f"were not searched for NaN within {READING_TIME_S:.0f} s; loading does that"
    return [f"{unread / 1e9:.1f} GB of weights {within}"] if unread else []


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServeConfig)
    # As many as the engine will have, since they are a part of its numerics on a CPU.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores_of(config.parallel.num_ranks)))
    print(msgspec.json.encode(report(config)._replace(torch=torch_devices())).decode())


if __name__ == "__main__":
    main()
