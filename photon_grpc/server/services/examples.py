"""The examples of a method as its prompts show them: like requests and answers, without hidden fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from photon_grpc.errors import AnswerInvalid, InvalidConstraint, InvalidRequest
from photon_grpc.server.services.request_text import RequestText


class ExampleText:
    """Writes one side of examples.

    Args:
        message_class: the request's or the answer's.
        text: writes its messages.
        check: raises InvalidRequest or AnswerInvalid for a message that breaks a rule, which would teach to break it.
    """

    def __init__(self, message_class: type[Message], text: RequestText, check: Callable[[Message], None]) -> None:
        self._message_class = message_class
        self._text = text
        self._check = check

    def request(self, given: str) -> str:
        """Return the JSON, as of a request that is called with it. Raise InvalidConstraint."""
        return self._shown(given, lambda message, written: self._text.write(message))

    def answer(self, given: str) -> str:
        """Return the JSON of each line without spaces, as the grammar has it. Raise InvalidConstraint."""
        return "\n".join([self._shown(line, self._text.write_as) for line in given.splitlines()])

    def _shown(self, given: str, write: Callable[[Message, Any], str]) -> str:
        message, written = self._parsed(given)
        try:
            self._check(message)
            return write(message, written)
        except (InvalidRequest, AnswerInvalid) as error:
            raise InvalidConstraint(f"option examples: {error}") from None

    def _parsed(self, given: str) -> tuple[Message, Any]:
        try:
            written = json.loads(given)
            return ParseDict(written, self._message_class()), written
        except Exception as error:  # protobuf's parser raises many kinds
            name = self._message_class.DESCRIPTOR.full_name
            raise InvalidConstraint(f"option examples: {given[:80]!r} is not a {name}: {str(error)[:200]}") from None
