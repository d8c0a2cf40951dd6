"""Scores (log-probabilities of tokens) in wire form, added to messages that have everything else.

They are written by hand from the engine's records: as protobuf objects a scored id costs four times as much, and a
token has up to 41 of them. The fields of a message may have any order; a token's text, which never changes, comes
first so that it can be kept. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache

from google.protobuf.message import Message

from photon_grpc.core.logprobs import UNREAD_RECORD
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS, TokenLogprobs
from photon_grpc.frontend.output.update import OutputDelta, Result, Update
from photon_grpc.server.wire.varint import varint
from photon_grpc.v1 import inference_pb2 as pb

#: Above this many scored ids a thread writes them. This many take 1 ms of processor time, 5 ms with ranks of several
#: bytes, 10 ms if every id is new; a thread would hold the interpreter for 5 ms (sys.getswitchinterval).
MANY = 4096
#: Tags: the field's number and its wire type, 0 for a varint, 2 for length-prefixed data, 5 for four bytes.
OUTPUT_SCORES, _PROMPT_SCORES = b"\x22", b"\x12"  # Output.scores, PromptInfo.scores
_ID, _LOGPROB, _RANK, _BYTES = b"\x08", b"\x15", b"\x18", b"\x22"  # TokenScore and Candidate
_CANDIDATE = b"\x2a"  # TokenScore.candidates
#: Bytes of a logprob and a one-byte rank with its tag.
_NUM_TAIL_BYTES = 6
_SHORT_RANKS = tuple([_RANK + varint(rank) for rank in range(0x80)])


class _Candidates(dict[int, bytes]):
    """Id -> its Candidate with a one-byte rank, up to the logprob. Filled as ids occur, with 120 bytes each."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        text = self._token_bytes(token_id)
        body = _ID + varint(token_id)
        if text:
            body += _BYTES + varint(len(text)) + text
        body += _LOGPROB
        self[token_id] = beginning = _CANDIDATE + varint(len(body) + _NUM_TAIL_BYTES) + body
        return beginning


#: One per vocabulary in the process.
_candidates = lru_cache(maxsize=4)(_Candidates)


def written(scores: TokenLogprobs, tag: bytes) -> bytes:
    """Return TokenScores in wire form, each as a field with this tag."""
    candidates = _candidates(scores.token_bytes)
    parts: list[bytes] = []
    for token_id in scores.unscored:
        body = _body(candidates[token_id])[: -len(_LOGPROB)]
        parts += (tag, varint(len(body)), body)
    each = UNREAD_RECORD.iter_unpack(scores.records)
    # No function calls for the usual record, since this may run half a million times per second.
    for records in zip(*[each] * scores.num_records, strict=True):
        token_id, logprob, rank = records[0]
        score = [_body(candidates[token_id]), logprob, _RANK, varint(rank)]
        for token_id, logprob, rank in records[1:]:
            if rank < 0x80:
                score += (candidates[token_id], logprob, _SHORT_RANKS[rank])
            else:
                score += _candidate(candidates[token_id], logprob, rank)
        body = b"".join(score)
        parts += (tag, varint(len(body)), body)
    return b"".join(parts)


def _body(candidate: bytes) -> bytes:
    """Return a beginning without its tag and length."""
    end = 1
    while candidate[end] >= 0x80:
        end += 1
    return candidate[end + 1 :]


def _candidate(beginning: bytes, logprob: bytes, rank: int) -> tuple[bytes, ...]:
    """Return a Candidate with a rank of any length, in parts."""
    body, rank_bytes = _body(beginning), varint(rank)
    num_bytes = len(body) + _NUM_TAIL_BYTES - 1 + len(rank_bytes)
    return _CANDIDATE, varint(num_bytes), body, logprob, _RANK, rank_bytes


async def add_to_message(message: pb.StreamGenerateResponse, update: Update) -> None:
    """Add the scores of `update` to its message."""
    additions = _of_outputs(message.deltas, update.deltas)
    if update.prompt_scores is not NO_TOKEN_LOGPROBS:
        additions.append((message.start.prompt, update.prompt_scores, _PROMPT_SCORES))
    await _add_all(additions)


async def add_to_response(response: pb.GenerateResponse, result: Result) -> None:
    """Add the scores of `result` to its response."""
    additions = _of_outputs(response.outputs, result.outputs)
    if result.prompt_scores is not NO_TOKEN_LOGPROBS:
        additions.append((response.prompt, result.prompt_scores, _PROMPT_SCORES))
    await _add_all(additions)


#: A message, its scores, and their tag in it.
_Addition = tuple[Message, TokenLogprobs, bytes]


def _of_outputs(outputs: Iterable[pb.Output], deltas: tuple[OutputDelta, ...]) -> list[_Addition]:
    pairs = zip(outputs, deltas, strict=True)
    return [(output, delta.scores, OUTPUT_SCORES) for output, delta in pairs if delta.scores is not NO_TOKEN_LOGPROBS]


async def _add_all(additions: list[_Addition]) -> None:
    is_large = sum([scores.num_ids for _, scores, _ in additions]) > MANY
    for each in additions:
        if is_large:
            await asyncio.to_thread(_add, *each)
        else:
            _add(*each)


def _add(message: Message, scores: TokenLogprobs, tag: bytes) -> None:
    message.MergeFromString(written(scores, tag))
