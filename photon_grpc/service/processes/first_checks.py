"""The checks of `serve` before it downloads a model or starts a process: the device and the files that flags name.

They load neither torch nor gRPC. Whatever they find, `doctor` finds, too (check_start.py).
"""

from __future__ import annotations

from photon_grpc.config.api_keys import read_api_keys
from photon_grpc.config.cuda_device import check_device
from photon_grpc.config.flags import ServeConfig, ServerConfig
from photon_grpc.config.tls_files import read_tls_files, tls_files
from photon_grpc.engine.trace_file import check_trace_file
from photon_grpc.errors import ConfigError


def check_first(config: ServeConfig) -> None:
    """Raise ConfigError for a device that this machine lacks, and for a file that cannot be used."""
    try:
        check_device(config.device.device)
        _check_files(config.server)
        if config.scheduler.step_trace:
            check_trace_file(config.scheduler.step_trace)
    except ConfigError as error:
        raise ConfigError(f"cannot start: {error}", field=error.field) from None


def _check_files(config: ServerConfig) -> None:
    if config.api_keys_file:
        read_api_keys(config.api_keys_file)
    if config.tls_cert:
        read_tls_files(tls_files(config.tls_cert, config.tls_key, config.tls_client_ca))
