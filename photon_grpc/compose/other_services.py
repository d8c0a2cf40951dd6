"""The services of `--service`, read for the model that answers them."""

from __future__ import annotations

from collections.abc import Sequence

from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.service_files import ServiceFile
from photon_grpc.frontend.model import ServedModel
from photon_grpc.server.services.answering import NO_OTHERS, OtherServices
from photon_grpc.server.services.prompt_form import PromptForm
from photon_grpc.server.services.service_set import read_services


def other_services(files: Sequence[ServiceFile], config: ServeConfig, model: ServedModel) -> OtherServices:
    """Return the services. Raise ConfigError for a file or a method that cannot be served."""
    if not files:
        return NO_OTHERS
    skip = config.server.service_skip
    read = read_services(files, skip=skip, max_context_tokens=model.max_context_tokens)
    return OtherServices(read, PromptForm(model.template))
