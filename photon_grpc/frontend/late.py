"""Tokens that the engine counted and that are not billed: they reached the front end when their output was over there,
or their request failed before any of them was sent.

By them alone, what the engine counted exceeds what requests were billed.
"""

from __future__ import annotations

from photon_grpc.core.frames import Finished, Started
from photon_grpc.core.generation import Usage


class LateTokens:
    def __init__(self) -> None:
        self._prompt = self._cached = self._output = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt, self._cached, self._output)

    def output_tokens(self, num_tokens: int) -> None:
        self._output += num_tokens

    def prompt(self, told: Started | Finished) -> None:
        """News of an output that is over; it may be the one with which the engine counts the prompt."""
        if told.num_prompt:
            self._prompt += told.num_prompt
            self._cached += told.num_cached_prompt
