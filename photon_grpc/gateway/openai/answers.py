"""Parts of OpenAI's answers: usage, and log-probabilities in the two forms of its endpoints."""

from __future__ import annotations

import asyncio
import codecs
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from photon_grpc.core.generation import Start, TokenScore, Usage

#: Log-probabilities that take a few milliseconds to write.
_MANY = 1024


def head_of(answer_id: str, kind: str, start: Start) -> dict[str, Any]:
    """Return the fields with which every answer and every chunk of a stream begins."""
    return {
        "id": answer_id,
        "object": kind,
        "created": int(start.create_time_s),
        "model": start.model,
        "system_fingerprint": "-".join(part for part in (start.release, start.numerics_version) if part),
    }


def usage_of(usages: Iterable[Usage]) -> dict[str, Any]:
    """Return the sum as an answer has it, with drafts where there were some; none of those refused is output."""
    total: Counter[str] = Counter()
    for usage in usages:
        total.update(asdict(usage))
    num_prompt, num_output, num_drafts = total["prompt_tokens"], total["output_tokens"], total["draft_tokens"]
    num_right = total["accepted_draft_tokens"]
    drafts = {"accepted_prediction_tokens": num_right, "rejected_prediction_tokens": num_drafts - num_right}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": total["cached_prompt_tokens"]},
    } | ({"completion_tokens_details": drafts} if num_drafts else {})


def token_text(token_bytes: bytes) -> str:
    """Return a token as text; bytes that are part of a character are shown as U+FFFD."""
    return token_bytes.decode("utf-8", "replace")


async def off_the_loop(make: Callable[[], bytes], num_scored: int) -> bytes:
    """Return what `make` returns. In a thread if it writes so many log-probabilities that others would wait."""
    return await asyncio.to_thread(make) if num_scored > _MANY else make()


def chat_logprobs(scores: Iterable[TokenScore]) -> list[dict[str, Any]]:
    """Return log-probabilities as the chat endpoint has them."""
    return [
        _entry(score.token_bytes, score.logprob)
        | {"top_logprobs": [_entry(each.token_bytes, each.logprob) for each in score.candidates]}
        for score in scores
    ]


def _entry(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


class TextOffsets:
    """Where in a text its tokens begin, in characters. A token within a character begins where that does."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def ending_at(cls, end: int, scores: Iterable[TokenScore]) -> TextOffsets:
        """Return the offsets of a prompt of `end` characters. What its tokens have beyond them, as BOS, is at 0."""
        return cls(end - len(token_text(b"".join([score.token_bytes for score in scores]))))

    def next(self, token_bytes: bytes) -> int:
        """Return the offset of the next token."""
        offset = self._offset
        self._offset += len(self._decoder.decode(token_bytes))
        return max(offset, 0)


def completion_logprobs(scores: Iterable[TokenScore], offsets: TextOffsets) -> dict[str, Any]:
    """Return log-probabilities as the completions endpoint has them."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for score in scores:
        text = token_text(score.token_bytes)
        found["tokens"].append(text)
        found["token_logprobs"].append(_finite(score.logprob))
        found["text_offset"].append(offsets.next(score.token_bytes))
        found["top_logprobs"].append(None if score.logprob is None else _by_text(score, text))
    return found


def _finite(logprob: float | None) -> float | None:
    # JSON has no infinity; this is what OpenAI writes.
    return None if logprob is None else max(logprob, -9999.0)


def _by_text(score: TokenScore, text: str) -> dict[str, float | None]:
    # Several tokens may look the same as text; the likeliest, which comes first, stands for them.
    found: dict[str, float | None] = {}
    for each in score.candidates:
        found.setdefault(token_text(each.token_bytes), _finite(each.logprob))
    found.setdefault(text, _finite(score.logprob))
    return found
