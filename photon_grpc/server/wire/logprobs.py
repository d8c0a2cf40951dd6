"""Scores in wire form, and into messages that are made but for them.

They are written by hand, from records as they came: as objects of protobuf a scored id costs four times as much, and a
token has up to 41 of them. A reader takes a message's fields in any order; the bytes of a token, which are always the
same, come first. https://protobuf.dev/programming-guides/encoding
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

#: More are written beside the event loop. So many take 1 ms of processor time, 5 with ranks of several bytes, 10 where
#: every id is met first; a thread would hold the interpreter for 5 (sys.getswitchinterval).
MANY = 4096
#: Tags: the field's number and its type, 0 for a varint, 2 for what has a length, 5 for four bytes.
OUTPUT_SCORES, _PROMPT_SCORES = b"\x22", b"\x12"  # Output.scores, PromptInfo.scores
_ID, _LOGPROB, _RANK, _BYTES = b"\x08", b"\x15", b"\x18", b"\x22"  # TokenScore and Candidate
_CANDIDATE = b"\x2a"  # TokenScore.candidates
#: Bytes of a logprob and of a rank of one byte, with the rank's tag.
_NUM_BEHIND = 6
_SHORT_RANKS = tuple([_RANK + varint(rank) for rank in range(0x80)])


class _Candidates(dict[int, bytes]):
    """Id -> the beginning of its Candidate with a short rank, up to the tag of its logprob. Filled as ids occur: 120
    bytes each, at most one for each id of the vocabulary."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        spelled = self._token_bytes(token_id)
        body = _ID + varint(token_id)
        if spelled:
            body += _BYTES + varint(len(spelled)) + spelled
        body += _LOGPROB
        self[token_id] = begun = _CANDIDATE + varint(len(body) + _NUM_BEHIND) + body
        return begun


#: Of as many vocabularies as a process has.
_candidates = lru_cache(maxsize=4)(_Candidates)


def written(scores: TokenLogprobs, tag: bytes) -> bytes:
    """TokenScores, each a field with this tag."""
    candidates = _candidates(scores.token_bytes)
    parts: list[bytes] = []
    for token_id in scores.unscored:
        body = _body(candidates[token_id])[: -len(_LOGPROB)]
        parts += (tag, varint(len(body)), body)
    each = UNREAD_RECORD.iter_unpack(scores.records)
    # Without calls for what nearly every record is: this may run half a million times a second.
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
    """Return the same without its tag and its length."""
    end = 1
    while candidate[end] >= 0x80:
        end += 1
    return candidate[end + 1 :]


def _candidate(begun: bytes, logprob: bytes, rank: int) -> tuple[bytes, ...]:
    """With a rank of any length."""
    body, place = _body(begun), varint(rank)
    num_bytes = len(body) + _NUM_BEHIND - 1 + len(place)
    return _CANDIDATE, varint(num_bytes), body, logprob, _RANK, place


async def add_to_message(message: pb.StreamGenerateResponse, update: Update) -> None:
    """The scores of `update` to its message."""
    wanted = _of_outputs(message.deltas, update.deltas)
    if update.prompt_scores is not NO_TOKEN_LOGPROBS:
        wanted.append((message.start.prompt, update.prompt_scores, _PROMPT_SCORES))
    await _add_all(wanted)


async def add_to_response(response: pb.GenerateResponse, result: Result) -> None:
    """The scores of `result` to its answer."""
    wanted = _of_outputs(response.outputs, result.outputs)
    if result.prompt_scores is not NO_TOKEN_LOGPROBS:
        wanted.append((response.prompt, result.prompt_scores, _PROMPT_SCORES))
    await _add_all(wanted)


#: A message, its scores, and their tag in it.
_Wanted = tuple[Message, TokenLogprobs, bytes]


def _of_outputs(outputs: Iterable[pb.Output], deltas: tuple[OutputDelta, ...]) -> list[_Wanted]:
    pairs = zip(outputs, deltas, strict=True)
    return [(output, delta.scores, OUTPUT_SCORES) for output, delta in pairs if delta.scores is not NO_TOKEN_LOGPROBS]


async def _add_all(wanted: list[_Wanted]) -> None:
    is_large = sum([scores.num_ids for _, scores, _ in wanted]) > MANY
    for each in wanted:
        if is_large:
            await asyncio.to_thread(_add, *each)
        else:
            _add(*each)


def _add(message: Message, scores: TokenLogprobs, tag: bytes) -> None:
    message.MergeFromString(written(scores, tag))
