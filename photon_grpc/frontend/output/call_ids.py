"""Ids of tool calls, by which a tool message says which call it answers."""

from __future__ import annotations

import hashlib
import string

import msgspec

_CHARACTERS = string.digits + string.ascii_letters
#: Mistral's templates accept no other length, and nothing but letters and digits.
_LENGTH = 9


class CallIds(msgspec.Struct, frozen=True):
    """The ids of the calls of one output: the same whenever the output is produced again under its request's id.

    The prompt's length tells apart the turns of a conversation whose requests all have one id.
    """

    request_id: str
    output_index: int
    num_prompt_tokens: int

    def of(self, index: int) -> str:
        """Return the id of the call at `index` in its output."""
        source = f"{self.request_id}\n{self.num_prompt_tokens}\n{self.output_index}\n{index}"
        number = int.from_bytes(hashlib.sha256(source.encode(errors="surrogatepass")).digest())
        digits = []
        for _ in range(_LENGTH):
            number, digit = divmod(number, len(_CHARACTERS))
            digits.append(_CHARACTERS[digit])
        return "".join(digits)
