"""The download of a model that is named by its id, before the service starts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.formats import FOREIGN, WANTED, about_tokenizer, foreign_weights, has_weights
from photon_grpc.config.resolve import is_model_id, model_path
from photon_grpc.errors import ConfigError, ModelLoadError

#: All files that are read except the weights; none that may hold code.
DESCRIPTION = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "spiece.model")
WEIGHTS = ("*.safetensors",)
#: Copies of the same weights in the format of another program.
IGNORED = ("*/*", "consolidated*")


def fetch_model(config: ServeConfig) -> ServeConfig:
    """Return `config` with a directory as its model and, unless a name is set, the id as the served name.

    Shows progress on stderr; files in the cache are not downloaded again. Raise ConfigError if the model is not
    available.
    """
    model, revision = config.model.model, config.model.revision
    if not is_model_id(model):
        if revision:
            raise ConfigError(
                f"--revision {revision} applies to a model id, but --model is not one", field="--revision"
            )
        path = str(model_path(model).resolve()) if model else ""
        return replace(config, model=replace(config.model, model=path))
    names = config.model.served_model_name or (model,)
    directory = download(model, revision)
    return replace(config, model=replace(config.model, model=directory, served_model_name=names))


def download(model_id: str, revision: str = "") -> str:
    """Download a model and return its directory in huggingface_hub's cache.

    Its files, its architecture and the disk space are checked before weights are downloaded. Raise ConfigError with a
    remedy.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return _download(model_id, revision)
    except GatedRepoError:
        problem = "its owner restricts access: accept the terms on its page, then set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = "there is no such directory here and no such public model (a private one needs HF_TOKEN)"
    except RevisionNotFoundError:
        raise ConfigError(f"--revision {revision}: {model_id} has no such branch, tag or commit") from None
    except LocalEntryNotFoundError:
        problem = "it is not in the cache and the model hub cannot be reached; without a network, give a directory"
    except RuntimeError:  # from pathlib
        problem = "this user has no home directory for the cache of models: set HF_HOME to a writable directory"
    except (OSError, ValueError) as error:
        problem = f"the download failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    raise ConfigError(f"--model {model_id}: {problem}", field="--model")


def _download(model_id: str, revision: str) -> str:
    from huggingface_hub.errors import DryRunError

    try:
        files = _fetch(
            model_id, revision, (*DESCRIPTION, *WEIGHTS, *(f"*{ending}" for ending in FOREIGN)), dry_run=True
        )
    except DryRunError:  # the hub cannot be reached: use the cache
        return str(_fetch(model_id, revision, (*DESCRIPTION, *WEIGHTS)))
    _check_files(model_id, [file.filename for file in files])
    commit = files[0].commit_hash
    _check_config(model_id, Path(_fetch(model_id, commit, DESCRIPTION)))
    missing = [file for file in files if has_weights([file.filename]) and file.will_download]
    if missing:
        _check_room(model_id, sum(file.file_size for file in missing), Path(missing[0].local_path))
    return str(_fetch(model_id, commit, (*DESCRIPTION, *WEIGHTS)))


def _fetch(model_id: str, revision: str, patterns: Sequence[str], *, dry_run: bool = False) -> Any:
    """Return the directory of the model; with `dry_run` the list of its files."""
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model_id,
        revision=revision or None,
        allow_patterns=list(patterns),
        ignore_patterns=list(IGNORED),
        dry_run=dry_run,
    )


def _check_files(model_id: str, names: Sequence[str]) -> None:
    if "config.json" not in names or not has_weights(names):
        missing = "*.safetensors" if "config.json" in names else "config.json"
        foreign = foreign_weights(names)
        problem = f"it holds no {missing}{f' ({foreign})' if foreign else ''}; a model is {WANTED}"
        raise ConfigError(f"--model {model_id}: {problem}", field="--model")
    if advice := about_tokenizer(names):
        print(f"photon-grpc: {model_id}: {advice}", file=sys.stderr)


def _check_config(model_id: str, directory: Path) -> None:
    from photon_grpc.config.model_dir import read_model_dir

    try:
        read_model_dir(directory, has_weights=False)
    except ModelLoadError as error:
        raise ConfigError(f"--model {model_id}: {error} (no weights were downloaded)", field="--model") from None


def _check_room(model_id: str, num_bytes: int, path: Path) -> None:
    """Print the size of the download. Raise ConfigError if it does not fit on the disk."""
    there = next(parent for parent in path.parents if parent.exists())
    num_free = shutil.disk_usage(there).free
    size = f"{num_bytes / 1e9:,.2f} GB"
    if num_bytes > num_free:
        problem = (
            f"its weights are {size}, but the disk of {there} has {num_free / 1e9:,.2f} GB left (set HF_HOME to use "
            "another)"
        )
        raise ConfigError(f"--model {model_id}: {problem}", field="--model", needed=num_bytes, limit=num_free)
    print(f"photon-grpc: {model_id}: downloading {size} of weights", file=sys.stderr)
