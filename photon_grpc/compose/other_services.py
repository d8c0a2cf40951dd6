"""The services of `--service`, read for the model that answers them."""

from __future__ import annotations

from collections.abc import Sequence

from photon_grpc.compose.served_model import read_served_model
from photon_grpc.config.flags import ServeConfig, ServerConfig
from photon_grpc.config.service_files import ServiceFile, read_service_files
from photon_grpc.errors import ConfigError, InvalidRequest
from photon_grpc.frontend.model import ServedModel
from photon_grpc.server.services.answering import NO_OTHERS, OtherServices
from photon_grpc.server.services.prompt_form import PromptForm
from photon_grpc.server.services.service_set import read_services


def other_services(files: Sequence[ServiceFile], config: ServeConfig, model: ServedModel) -> OtherServices:
    """Return the services. Raise ConfigError for a file or a method that cannot be served."""
    if not files:
        return NO_OTHERS
    read = read_services(files, skip=config.server.service_skip, max_context_tokens=model.max_context_tokens)
    return OtherServices(read, PromptForm(model.template))


def check_services(config: ServerConfig) -> None:
    """Raise ConfigError for a file or a method of `--service` that cannot be served, whatever the model."""
    read_services(read_service_files(config.service, config.proto_path), skip=config.service_skip)


def explained(path: str, method: str, request: str, config: ServeConfig) -> str:
    """Return the prompt of a method, such as acme.v1.Triage.Sort, for a request's JSON. Raise ConfigError."""
    service, _, name = method.rpartition(".")
    model = read_served_model(config)
    files = read_service_files((f"{path}:{service}",), config.server.proto_path)
    read = read_services(files, skip=True, max_context_tokens=model.max_context_tokens)
    found = next((each for each in read.methods if each.name == name), None)
    if found is None:
        why = next((each for each in read.warnings if f"{method}:" in each), "")
        raise ConfigError(f"{path}: {why or f'the service {service} has no method {name}'}")
    message = found.parsed_request(request)
    try:
        found.rules.check_request(message)
        text = found.request_text.write(message)
    except InvalidRequest as error:
        raise ConfigError(f"the request is refused: {error}") from None
    return PromptForm(model.template).text(found, text)
