"""The text of the model card; release.py measures what goes into it."""

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
* **End of output**: `<|eos|>` after a document, `<|end|>` after a turn.

## Data and licence

The `*.py` files of the Python {python} standard library ({num_files:,} files, {num_megabytes:.1f} MB, tests included),
without generated tables (`encodings`, `pydoc_data`), files that do not parse, and site-packages; besides whole files,
functions and classes as documents of their own and as answers in conversations. {num_held_out} files
({held_out_share:.1f} % of the bytes), chosen by a hash of their path, were held out. They are wholly unseen, but the
library repeats itself (test idioms, licence headers), so that their loss flatters the models on other people's code.

Python and its standard library are under the Python Software Foundation License 2.0; some files are under other
permissive licences, listed in <https://docs.python.org/3/license.html>. Copyright © 2001 Python Software Foundation;
all rights reserved. The models can reproduce short passages of that source; such passages stay under its licences.
The weights, as far as rights in them exist, are under the licence of this repository.

## Held-out loss

Weights rounded to bf16, computed in float32; windows of the given length, each on its own.

| model | held-out files | context | nats per token | bits per byte |
|---|---|---:|---:|---:|
{losses}

The draft's most likely token is the target's at {agreement:.1%} of held-out positions (1,024-token windows, both
reading the held-out text); the mean overlap of the two distributions, Σ min(p, q), is {overlap:.1%}.

## Training

`{command}`
on {machine}, torch {torch_version}: {minutes:.1f} minutes in all.

{stages}

Every stage: Muon for the matrices inside the blocks and AdamW for the rest, batches of {batch_tokens:,} tokens in rows
of 1,024 and, every sixth batch, 4,096 tokens; linear warm-up, cosine decay. Each model after the first learns from the
data and from the probabilities of the one before it; a teacher is thrown away.

{check}

## Greedy continuations of the target

{samples}

## Greedy continuations of the draft

{draft_samples}
"""
