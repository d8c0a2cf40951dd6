"""`convert`: the tokenizer.json that a model directory lacks, made from its vocabulary by transformers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from photon_grpc.config.formats import CONVERTIBLE
from photon_grpc.errors import ConfigError, StartupError

EXTRA = "pip install '.[convert]' in the clone"
TARGET = "tokenizer.json"
#: Texts that both tokenizers must encode alike: words, runs of spaces, digits, scripts, an emoji of several parts.
#: None begins with a space, where transformers omits the second space that SentencePiece puts before a text.
SAMPLES = (
    "Hello world, how are you?",
    "def f(x):\n    return x  # twice   the  space\n\n\tand a tab",
    "1234567890 3.14159 1e-9 0xFF",
    "Grüße, naïve café; Привет мир; こんにちは世界; مرحبا‌ها",
    "👩‍💻 🇩🇪 e\u0301 \u200d",
)


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help=f"Replace an existing {TARGET}.")
def convert(directory: Path, force: bool) -> None:
    """Write the tokenizer.json that DIRECTORY lacks, so that its model accepts and returns text.

    transformers (the extra `convert`) makes it from tokenizer.model, vocab.json with merges.txt, or tekken.json; no
    code in the directory is run. The file is written only if it yields the same ids as the original.
    """
    if (directory / TARGET).exists() and not force:
        raise ConfigError(f"{directory} has a {TARGET} already; --force replaces it")
    if not any((directory / name).is_file() for name in CONVERTIBLE):
        raise ConfigError(f"there is nothing to convert: {directory} holds none of {', '.join(CONVERTIBLE)}")
    original = _read_original(directory)
    num_tokens = _write(directory, original)
    click.echo(f"wrote {directory / TARGET}: {num_tokens:,} tokens")


def _read_original(directory: Path) -> Any:
    """Return the tokenizer as transformers reads it. Raise StartupError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise StartupError(f"converting needs transformers: {EXTRA}") from None
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the libraries that read vocabularies raise all kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StartupError(f"transformers cannot read the tokenizer of {directory}: {lines[0]}") from None


def _write(directory: Path, original: Any) -> int:
    """Write the file atomically; return its number of tokens. Raise StartupError if ids differ."""
    descriptor, name = tempfile.mkstemp(prefix=".tokenizer", suffix=".json", dir=directory)
    os.close(descriptor)
    try:
        original.backend_tokenizer.save(name)
        _check_ids(Path(name), original, directory / "tokenizer.model")
        Path(name).chmod(0o644)
        Path(name).replace(directory / TARGET)
    finally:
        Path(name).unlink(missing_ok=True)
    return int(original.backend_tokenizer.get_vocab_size())


def _check_ids(written: Path, original: Any, sentencepiece_model: Path) -> None:
    from photon_grpc.frontend.input.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(written)
    pieces = _pieces(sentencepiece_model)
    for text in SAMPLES:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        if ids != original.encode(text, add_special_tokens=False) or (pieces and ids != pieces.encode(text)):
            raise StartupError(f"{TARGET} was not written: it gives {text!r} other ids than the original vocabulary")


def _pieces(model: Path) -> Any:
    """Return the file's SentencePiece model; None if the file is of another kind or absent."""
    if not model.is_file():
        return None
    try:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(str(model))
    except (ImportError, RuntimeError, OSError):
        return None
