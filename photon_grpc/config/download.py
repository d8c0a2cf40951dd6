"""A model named by its id becomes a directory, before anything starts; never while serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.resolve import is_model_id
from photon_grpc.errors import ConfigError

#: Weights as safetensors only; nothing that could be code.
ALLOWED = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")
#: The same weights once more, in the spelling of another program.
IGNORED = ("original/*", "consolidated*", "onnx/*", "openvino/*")


def fetch_model(config: ServeConfig) -> ServeConfig:
    """`config` with a directory as its model and, where none was given, the id as the served name.

    Shows progress on stderr; what is in the cache already is not downloaded again. Raise ConfigError when it cannot be
    had.
    """
    model = config.model.model
    if not is_model_id(model):
        path = str(Path(model).expanduser().resolve()) if model else ""
        return replace(config, model=replace(config.model, model=path))
    names = config.model.served_model_name or (model,)
    return replace(config, model=replace(config.model, model=download(model), served_model_name=names))


def download(model_id: str) -> str:
    """The directory in huggingface_hub's cache. Raise ConfigError that says what to do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return str(snapshot_download(model_id, allow_patterns=list(ALLOWED), ignore_patterns=list(IGNORED)))
    except GatedRepoError:
        problem = "its owner wants to be asked: accept the terms on its page, then set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = "there is no such directory here and no such public model (a private one needs HF_TOKEN)"
    except LocalEntryNotFoundError:
        problem = "it is not in the cache and the model hub cannot be reached; without a network, give a directory"
    except (OSError, ValueError) as error:
        problem = f"the download failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    raise ConfigError(f"--model {model_id}: {problem}", field="--model")
