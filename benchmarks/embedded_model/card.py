"""The model card: its text, and the tables in it."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from .corpus import MAX_PACKAGE_CHARS, Corpus
from .llama import Llama, num_parameters
from .packages import Package
from .release import samples

CARD = """# The embedded models

Two Llama-architecture language models of Python code, trained from nothing for photon_grpc: `target/`
({target_parameters:,} parameters) and `draft/` ({draft_parameters:,} parameters, same tokenizer, for speculative
decoding). They exist so that a fresh clone serves something real, so that the tests have a trained model, and so that
quantization and speculation have a quality to be measured on. They continue Python text plausibly; they do not know
what is true, and their code is not to be relied upon.

* **Files**: plain Hugging Face directories; weights stored as bf16, `dtype` float32; context 4,096 tokens.
* **Tokenizer**: byte-level BPE, 4,096 ids, 8 of them special; every text round-trips.
* **Chat form**: `<|user|>…<|end|><|assistant|>…<|end|>`; the models have seen docstrings as questions and the
  functions and classes that they document as answers. They know no other kind of question.
* **End of output**: `<|eos|>` after a document, `<|end|>` after a turn. One line break after an indented line reads as
  the end of a document, because a line break and the indent after it are one token: end prompts without it.

## Data and licence

Python files of {num_packages} packages, and of the standard library of Python {python}: {num_files:,} files,
{num_megabytes:.0f} MB; besides whole files, their functions and classes as documents of their own and as answers in
conversations.
[`benchmarks/embedded_model/packages.tsv`](../../benchmarks/embedded_model/packages.tsv) names each
package, those held out too, with its version and the licence that its metadata states:
{licences}.
Left out: tests, vendored and generated files, tables, files that mention another licence, comments above the first
statement, files that share more than 40 % of their lines with an earlier one, and of each package what exceeds
{max_package_megabytes:g} MB.

Held out are {num_held_out_packages} whole packages, so that their loss is on other people's code, and
{num_held_out_library} files of the standard library, chosen by a hash of their path. What is like them was not learnt
either.

The authors of that code keep their copyright. Python and its standard library are under the Python Software Foundation
License 2.0; some of its files are under other permissive licences, listed in <https://docs.python.org/3/license.html>.
Copyright © 2001 Python Software Foundation; all rights reserved. The models can reproduce short passages of what they
learnt; such passages stay under the licence of the package that they are from. The weights, as far as rights in them
exist, are under the licence of this repository.

## Held-out loss

Weights rounded to bf16, computed in float32; windows of the given length, each on its own. Tokens differ between
tokenizers; bits per byte compare.

| model | held-out files | context | nats per token | bits per byte |
|---|---|---:|---:|---:|
{losses}

The draft's most likely token is the target's at {equal:.1%} of held-out positions (1,024-token windows, both
reading the held-out text); the mean overlap of the two distributions, Σ min(p, q), is {overlap:.1%}.

## What they write

{num_functions} functions of the held-out packages, of which the models read the signature and the docstring: the share
that they complete to Python that parses, within 160 tokens, and how many lines they add. {num_openings} beginnings of
held-out files, continued greedily by 160 tokens: the share of lines that stood in the text before.

| model | parse, greedy | T = 0.2 | T = 0.8 | lines, greedy | T = 0.2 | T = 0.8 | repeated lines |
|---|---:|---:|---:|---:|---:|---:|---:|
{written}

## Training

`{command}`
on {machine}, torch {torch_version}: {minutes:.1f} minutes in all.

{stages}

Every stage: Muon for the matrices inside the blocks and AdamW for the rest, batches of {batch_tokens:,} tokens in rows
of 1,024 and, every sixth batch, 4,096 tokens; linear warm-up, cosine decay. Kept are the weights with the lowest loss
on held-out files, looked at sixteen times a stage: as a rule the last.

{check}

## Greedy continuations of the target

{samples}

## Greedy continuations of the draft

{draft_samples}
"""


@dataclass(frozen=True)
class Trained:
    """The models of one run, what they were made from, and the figures that evaluate.py found for each."""

    corpus: Corpus
    packages: list[Package]
    tokenizer: Tokenizer
    models: dict[str, Llama]
    figures: dict[str, dict[str, Any]]


def card_text(trained: Trained, **facts: Any) -> str:
    """The card; `facts` are what only the run knows: its command, machine, minutes."""
    target, draft = trained.models["target"], trained.models["draft"]
    figures, corpus = trained.figures, trained.corpus
    licences = Counter(package.licence for package in trained.packages)
    return CARD.format(
        target_parameters=num_parameters(target),
        draft_parameters=num_parameters(draft),
        num_packages=corpus.num_packages,
        num_held_out_packages=corpus.num_held_out_packages,
        num_held_out_library=len(list(corpus.held_out.values())[-1]),
        num_files=len(corpus.learnt),
        num_megabytes=sum(map(len, corpus.files)) / 1e6,
        python=corpus.python,
        max_package_megabytes=MAX_PACKAGE_CHARS / 1e6,
        licences=textwrap.fill(", ".join(f"{name} ({count})" for name, count in licences.most_common()), 119),
        losses="\n".join(row for name, values in figures.items() for row in _loss_rows(name, values["loss"])),
        written="\n".join(_written_row(name, values) for name, values in figures.items()),
        num_functions=figures["target"]["functions"]["0"]["num"],
        num_openings=figures["target"]["openings"]["num"],
        samples=samples(target, trained.tokenizer),
        draft_samples=samples(draft, trained.tokenizer),
        torch_version=torch.__version__,
        **facts,
    )


def _loss_rows(name: str, loss: dict[str, Any]) -> list[str]:
    return [
        f"| {name} | {origin} | {int(length):,} | {values['nats_per_token']:.3f} | {values['bits_per_byte']:.3f} |"
        for origin, by_length in loss.items()
        for length, values in by_length.items()
    ]


def _written_row(name: str, values: dict[str, Any]) -> str:
    functions = values["functions"].values()
    shares = " | ".join(f"{drawn['python_share']:.0%}" for drawn in functions)
    lines = " | ".join(f"{drawn['mean_body_lines']:.1f}" for drawn in functions)
    return f"| {name} | {shares} | {lines} | {values['openings']['repeated_share']:.0%} |"
