"""Token ids of files that the embedded models have not learnt."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.embedded_model.corpus import Corpus, hold_out
from benchmarks.embedded_model.duplicates import Duplicates
from benchmarks.embedded_model.packages import download, read_packages
from benchmarks.embedded_model.tokenizer import encode_documents, render_document
from photon_grpc import demo


def held_out_documents(wheels: Path | None) -> list[np.ndarray]:
    """Return the ids of the held-out files: those of the packages whose wheels are in `wheels` or can be downloaded to
    it, and without a directory those of this interpreter's library.
    """
    packages = [package for package in read_packages() if package.is_held_out] if wheels else []
    if wheels:
        download(packages, wheels)
    corpus = Corpus(platform.python_version())
    hold_out(corpus, wheels or Path(), Path(sysconfig.get_path("stdlib")), packages, Duplicates())
    library, of_packages = reversed(corpus.held_out.values())
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    return encode_documents(tokenizer, [render_document(source) for source in (of_packages if wheels else library)])


def windows(documents: Iterable[np.ndarray], length: int, count: int) -> list[list[int]]:
    """Return `count` windows of `length` ids, evenly spread over the documents laid end to end; fewer if these are
    shorter.
    """
    stream = np.concatenate(list(documents)).tolist()
    every = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    return [every[index * len(every) // count] for index in range(count)] if len(every) > count else every


def beginnings(documents: Iterable[np.ndarray], length: int, count: int) -> list[list[int]]:
    """Return the first ids of `count` documents that are longer."""
    return [ids[:length].tolist() for ids in documents if len(ids) > length][:count]
