"""Rows that all write one schema, and their masks as the engine makes them."""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Iterable
from itertools import chain, cycle, islice
from typing import Any, ClassVar

import llguidance
import torch

from benchmarks.engine import Work
from photon_grpc.compose.threads import available_cores
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.ports import Pending
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs
from photon_grpc.engine.constraints.guidance import GuidanceGrammars
from photon_grpc.frontend.constraints.constraint import write_grammar
from photon_grpc.runner.upload import host_memory

_TEXT, _DATE = {"type": "string", "maxLength": 40}, {"type": "string", "format": "date"}
_ITEM = {
    "type": "object",
    "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "count": {"type": "integer"}},
    "required": ["sku", "count"],
    "additionalProperties": False,
}
_ADDRESS = {
    "type": "object",
    "properties": {"street": _TEXT, "city": _TEXT, "zip": _TEXT},
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "customer": _TEXT,
        "status": {"enum": ["open", "paid", "shipped", "returned"]},
        "ordered": _DATE,
        "items": {"type": "array", "items": _ITEM, "minItems": 1},
        "total": {"type": "number"},
        "notes": {"type": "array", "items": _TEXT},
        "address": _ADDRESS,
        "gift": {"type": "boolean"},
    },
    "required": ["id", "customer", "status", "items", "total"],
    "additionalProperties": False,
}
_LATER_REQUESTS, _COMPILATION_S = 20, 0.02
_NUM_TEXTS, _MAX_TOKEN_BYTES = 12, 16


class NoMasks:
    """Of rows that may draw every id."""

    def __init__(self, work: Work, num_rows: int) -> None:
        self.masked: tuple[int, ...] = ()

    def give(self, batch: Batch, pending: Pending) -> None:
        """Nothing waits for masks."""

    def read(self, pending: Pending) -> StepOutput:
        return pending.result()


class OpenMasks(NoMasks):
    """Of rows whose masks allow every id: what masks cost beside making them."""

    def __init__(self, work: Work, num_rows: int) -> None:
        self.masked = tuple(range(num_rows))
        num_bytes = 4 * num_rows * -(-work.facts.vocab_size // 32)
        self._masks = host_memory(num_bytes, torch.device("cpu" if work.facts.device == "cpu" else "cuda"))
        self._masks[:] = b"\xff" * num_bytes

    def give(self, batch: Batch, pending: Pending) -> None:
        pending.sample(self._masks)


class DrawnMasks(NoMasks):
    """Of rows whose outputs are what they draw. Random weights run every string to the end that the schema sets it.

    Compiles the schema; the lexers are kept, as those of a service that knows it."""

    schema: ClassVar[dict[str, Any]] = SCHEMA

    def __init__(self, work: Work, num_rows: int) -> None:
        if work.vocabulary is None:
            raise SystemExit("the model has no tokenizer that grammars know")
        self.masked = tuple(range(num_rows))
        self._mask_bytes = 4 * -(-work.facts.vocab_size // 32)
        grammars = GuidanceGrammars(work.vocabulary, work.wake, num_threads=max(1, available_cores() - 1))
        self._outputs = ConstrainedOutputs(grammars, work.facts.vocab_size, work.mask_memory)
        constraint = write_grammar(ConstraintAsk("json_schema", json.dumps(self.schema)))
        request = Request("schema", (1,), SamplingParams(0.0), StopParams(1 << 20), 0.0, constraint=constraint)
        self._seqs = [Sequence(request, row, 0, 0, (0.0, row)) for row in self.masked]
        for seq in self._seqs:
            self._begin(seq)
        # As in a service: a step shows how many rows obey the grammar, requests that come later have it compiled again,
        # and outputs that begin then are shared out over the lexers.
        matchers = {row: self._outputs.matchers[seq] for row, seq in enumerate(self._seqs)}
        grammars.filler(matchers, self._mask_bytes).fill(memoryview(bytearray(num_rows * self._mask_bytes)))
        for _ in range(_LATER_REQUESTS):
            self._begin(self._seqs[0])
            time.sleep(_COMPILATION_S)
        for seq in self._seqs:
            self._begin(seq)

    def _begin(self, seq: Sequence) -> None:
        self._outputs.forget(seq)
        while self._outputs.begin([seq]) is not None:
            time.sleep(0.001)

    def give(self, batch: Batch, pending: Pending) -> None:
        masks, failures = self._outputs.masks(batch, self._seqs, pending.drafts())
        if failures:
            raise SystemExit(f"a matcher failed: {next(iter(failures.values()))}")
        pending.sample(masks)

    def read(self, pending: Pending) -> StepOutput:
        output = pending.result()
        for seq, token in zip(self._seqs, self._ids(output), strict=True):
            self._advance(seq, token)
        return output

    def _advance(self, seq: Sequence, token: int) -> None:
        if self._outputs.advance(seq, token):
            self._begin(seq)

    def _ids(self, output: StepOutput) -> Iterable[int]:
        """Return the ids that the rows continue with, in order."""
        return output.ids


class WrittenMasks(DrawnMasks):
    """Masks of rows whose outputs are texts such as a trained model writes, each at a different place.

    Masks and samples are made as usual; the ids sampled by random weights are ignored.
    """

    def __init__(self, work: Work, num_rows: int) -> None:
        super().__init__(work, num_rows)
        draw = random.Random(5)
        texts = self._texts(work.vocabulary, draw)
        self._scripts = [cycle(chain(*draw.sample(texts, _NUM_TEXTS))) for _ in self.masked]
        for seq, script in zip(self._seqs, self._scripts, strict=True):
            self._begin(seq)
            for token in islice(script, draw.randrange(len(texts[0]))):
                self._advance(seq, token)

    def _ids(self, output: StepOutput) -> Iterable[int]:
        return map(next, self._scripts)

    def _texts(self, vocabulary: llguidance.LLTokenizer, draw: random.Random) -> list[list[int]]:
        """In the longest tokens that masks allow."""
        ids = {vocabulary.decode_bytes([token]): token for token in range(vocabulary.vocab_size)}
        words = [token.decode() for token in ids if token.isalpha() and token.isascii()]
        texts = [json.dumps(_order(words, draw), separators=(",", ":")).encode() for _ in range(_NUM_TEXTS)]
        return [self._tokenized(text, ids) for text in texts]

    def _tokenized(self, text: bytes, ids: dict[bytes, int]) -> list[int]:
        self._begin(self._seqs[0])
        matcher, mask, tokens, at = self._outputs.matchers[self._seqs[0]], bytearray(self._mask_bytes), [], 0
        while at < len(text):
            matcher.fill(memoryview(mask))
            known = (
                (size, ids.get(text[at : at + size])) for size in range(min(_MAX_TOKEN_BYTES, len(text) - at), 0, -1)
            )
            size, token = next(
                (size, token) for size, token in known if token is not None and mask[token >> 3] >> (token & 7) & 1
            )
            matcher.accept(token)
            tokens.append(token)
            at += size
        return tokens


class UnboundedMasks(WrittenMasks):
    """Masks of the same texts, by a schema whose strings may be of any length.

    At the end of a string with a `maxLength` the library walks most of the vocabulary.
    """

    schema: ClassVar[dict[str, Any]] = json.loads(json.dumps(SCHEMA).replace(', "maxLength": 40', ""))


def _order(words: list[str], draw: random.Random) -> dict[str, Any]:
    """Return an object that obeys SCHEMA."""

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))[: _TEXT["maxLength"]]

    sku = "".join(draw.choices(string.ascii_uppercase, k=3))
    items = [
        {"sku": f"{sku}-{draw.randint(1000, 9999)}", "count": draw.randint(1, 99)} for _ in range(draw.randint(1, 3))
    ]
    return {
        "id": draw.randrange(10**6),
        "customer": text(2, 3),
        "status": draw.choice(["open", "paid", "shipped", "returned"]),
        "ordered": f"20{draw.randint(10, 29)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
        "items": items,
        "total": draw.randrange(10**6) / 100,
        "notes": [text(2, 6) for _ in range(draw.randint(0, 2))],
        "address": {"street": text(1, 3), "city": text(1, 2), "zip": str(draw.randint(10000, 99999))},
        "gift": draw.random() < 0.5,
    }
