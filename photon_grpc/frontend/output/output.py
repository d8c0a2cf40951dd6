"""One output of a stream: ids in, safe text out. Knows neither time nor messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from photon_grpc.core.generation import OutputUsage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.output.answer import NO_ANSWER, AnswerParser
from photon_grpc.frontend.output.detokenizer import Detokenizer
from photon_grpc.frontend.output.logprobs import OutputLogprobs
from photon_grpc.frontend.output.stop_strings import StopMatcher
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish


@dataclass(frozen=True, slots=True)
class Ending:
    """The ids that end an output, and when and how they do."""

    #: EOS and stop tokens in force.
    token_ids: frozenset[int] = frozenset()
    #: Neither an id nor a stop string ends an output with fewer tokens.
    min_tokens: int = 0
    #: Whether the text keeps the stop token or stop string.
    is_shown: bool = False


_NO_ENDING = Ending()


class OutputText:
    """The text of one output: decoded, searched for stop strings, gathered until it is read, and counted."""

    __slots__ = (
        "_detokenizer",
        "_ending",
        "_ending_ids",
        "_ids",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_num_taken",
        "_parser",
        "_parts",
        "_wants_ids",
        "_wants_text",
        "finish",
        "index",
        "is_finish_taken",
        "last_id",
        "num_replayed",
        "num_accepted",
        "num_drafts",
        "num_tokens",
        "scores",
    )

    def __init__(
        self,
        index: int,
        *,
        detokenizer: Detokenizer | None,
        matcher: StopMatcher | None = None,
        wants_text: bool = True,
        wants_ids: bool = False,
        ending: Ending = _NO_ENDING,
        scores: OutputLogprobs | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        """Start an empty output.

        `detokenizer` is None if neither text nor stop strings are asked for, `scores` if no log-probabilities are,
        `parser` if the text has no parts.
        """
        self.index = index
        #: Counts all ids, including the one that ended the output.
        self.num_tokens = 0
        #: Counts the ids that another call delivered.
        self.num_replayed = 0
        #: Tokens that were drafted for it, and those that became output.
        self.num_drafts = self.num_accepted = 0
        self.last_id: int | None = None
        self.finish: OutputFinish | None = None
        #: Whether `finish` has been taken.
        self.is_finish_taken = False
        #: Those of an id are added before the id itself.
        self.scores = OutputLogprobs(0) if scores is None else scores
        self._parser = parser
        self._num_taken = 0
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._wants_text = wants_text
        self._wants_ids = wants_ids
        self._include_stop = ending.is_shown
        self._min_tokens = ending.min_tokens
        self._ending_ids = ending.token_ids
        #: A token that should end the output; its text is held back until `end` or the next id.
        self._ending: int | None = None
        self._parts: list[str] = []
        self._ids: list[int] = []

    def push(self, token_id: int) -> bool:
        """Add the next id; return whether a stop string ended the output with it."""
        self.num_tokens += 1
        self.last_id = token_id
        if self._wants_ids:
            self._ids.append(token_id)
        if self._detokenizer is None:
            return False
        if self._ending is not None:
            self._release(self._detokenizer.push(self._ending))
            self._ending = None
        if token_id in self._ending_ids and self.num_tokens > self._min_tokens:
            self._ending = token_id
            return False
        return self._release(self._detokenizer.push(token_id))

    def replay(self, token_ids: Sequence[int]) -> None:
        """Add ids that another call delivered with their text. Raise InvalidRequest if one follows the output's end."""
        for token_id in token_ids:
            if self._is_over():
                field = f"continue_from.ids[{self.num_tokens}]"
                raise InvalidRequest(f"{field}: the output had ended before it", field=field)
            self.push(token_id)
            self.num_replayed += 1
        self.drop()

    def _is_over(self) -> bool:
        is_ended = self.last_id in self._ending_ids and self.num_tokens > self._min_tokens
        return is_ended or self.finish is not None

    def end(self, reason: FinishReason) -> None:
        """End the output as the engine reports it."""
        stop = self.last_id if reason is FinishReason.STOP_TOKEN else None
        eos = self.last_id if reason is FinishReason.EOS else None
        if self._detokenizer is not None:
            self._flush(self._detokenizer, self._include_stop or (eos is None and stop is None))
        self.finish = OutputFinish(reason, stop_token_id=stop, eos_token_id=eos)

    def drafted(self, num_drafts: int, num_accepted: int) -> None:
        """Count drafts, of which so many are among the ids that come next."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    @property
    def usage(self) -> OutputUsage:
        # A stop string may have ended the output before the last accepted ids.
        return OutputUsage(self.num_delivered, self.num_drafts, min(self.num_accepted, self.num_delivered))

    @property
    def num_delivered(self) -> int:
        return self.num_tokens - self.num_replayed

    def has_new_text(self) -> bool:
        return bool(
            self._parts or self._ids or self.scores.has_any() or (self.finish is not None and not self.is_finish_taken)
        )

    def take(self) -> OutputDelta:
        """Return all that has gathered."""
        finish = None if self.is_finish_taken else self.finish
        delta = OutputDelta(
            self.index,
            "".join(self._parts),
            tuple(self._ids),
            finish,
            self.scores.take(self.num_tokens - self._num_taken),
            NO_ANSWER if self._parser is None else self._parser.take(is_over=self.finish is not None),
            None if finish is None else self.usage,
        )
        self._parts = []
        self._ids = []
        self._num_taken = self.num_tokens
        self.is_finish_taken = self.finish is not None
        return delta

    def drop(self) -> None:
        """Forget what has not been read."""
        if self._parser is not None:
            self._parser.take(is_over=self.finish is not None)
        self._parts = []
        self._ids = []
        self.scores.drop()
        self._num_taken = self.num_tokens

    def _release(self, text: str) -> bool:
        matcher = self._matcher
        if matcher is not None and text:
            text = matcher.push(text, self.num_tokens >= self._min_tokens)
            if matcher.matched is not None:
                self.finish = OutputFinish(FinishReason.STOP_STRING, stop_string=matcher.matched)
        self._keep(text)
        return self.finish is not None

    def _flush(self, detokenizer: Detokenizer, with_ending: bool) -> None:
        """Release what is held back: a stop string's beginning, an unfinished character, the ending token."""
        text = self._matcher.flush() if self._matcher is not None else ""
        if self._ending is not None and with_ending:
            text += detokenizer.push(self._ending)
        text += detokenizer.finish()
        self._keep(text)

    def _keep(self, text: str) -> None:
        if text and self._wants_text:
            self._parts.append(text)
            if self._parser is not None:
                self._parser.push(text)
