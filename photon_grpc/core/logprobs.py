"""Log-probabilities that a request asks for, and the records that carry them.

A logprob is the log-softmax, in float32, of the raw logits: before temperature, filters, bans, masks and every other
transform. Records stay packed from the runner to the front end, which alone looks into them.
"""

from __future__ import annotations

import struct

import msgspec

#: One scored id, little endian: id int32, logprob float32, rank int32. Its rank is 1 + the ids with a greater logit.
RECORD = struct.Struct("<ifi")
#: The same, its logprob as the four bytes that it is in a message, too.
UNREAD_RECORD = struct.Struct("<I4sI")


class LogprobParams(msgspec.Struct, frozen=True, array_like=True):
    """Ids to score at a position, at most the vocabulary's.

    A position is `records` (of an output) or `prompt_records` (of a prompt) RECORDs: the chosen id, in a prompt the one
    that stands there; the N best, best first, of equal ones the lowest id first; in an output the given ids in their
    order. The first id of a prompt has no scores.
    """

    #: N of every output position; -1: no scores, but with `token_ids` those of the chosen id and of the given ones.
    logprobs: int = -1
    #: N of every prompt position; -1: no scores.
    prompt_logprobs: int = -1
    #: Given ids.
    token_ids: tuple[int, ...] = ()

    @property
    def records(self) -> int:
        """RECORDs of an output position; 0: none is scored."""
        given = len(self.token_ids)
        return 1 + max(self.logprobs, 0) + given if self.logprobs >= 0 or given else 0

    @property
    def prompt_records(self) -> int:
        """RECORDs of a prompt position; 0: none is scored."""
        return 1 + self.prompt_logprobs


NO_LOGPROBS = LogprobParams()
