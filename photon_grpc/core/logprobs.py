"""Log-probabilities that a request asks for, and the records that carry them.

A logprob is the log-softmax, in float32, of the raw logits: before temperature, filters, bans, masks and every other
transform. Records stay packed from the runner to the front end; only the front end unpacks them.
"""

from __future__ import annotations

import struct

import msgspec

#: One token id with its log-probability, little endian: id int32, logprob float32, rank int32. The rank is 1 + the
#: number of ids with a greater logit.
RECORD = struct.Struct("<ifi")
#: The same, with the logprob left as four bytes, which are the same in a message.
UNREAD_RECORD = struct.Struct("<I4sI")


class LogprobParams(msgspec.Struct, frozen=True, array_like=True):
    """The token ids whose log-probabilities are wanted at each position, at most the size of the vocabulary.

    An output position has `num_records` RECORDs and a prompt position `num_prompt_records`, in this order: the sampled
    id, or in a prompt the id at that position; the N most likely ids, ties in ascending order of id; in an output also
    `token_ids` in their order. The first id of a prompt has no log-probabilities.
    """

    #: N at every output position. -1: none; with `token_ids`, only the sampled id and those.
    num_logprobs: int = -1
    #: N at every prompt position; -1: none.
    num_prompt_logprobs: int = -1
    #: Ids that the caller named, for output positions.
    token_ids: tuple[int, ...] = ()

    @property
    def num_records(self) -> int:
        """RECORDs of an output position; 0 if none are wanted."""
        num_named = len(self.token_ids)
        return 1 + max(self.num_logprobs, 0) + num_named if self.num_logprobs >= 0 or num_named else 0

    @property
    def num_prompt_records(self) -> int:
        """RECORDs of a prompt position; 0 if none are wanted."""
        return 1 + self.num_prompt_logprobs


NO_LOGPROBS = LogprobParams()
