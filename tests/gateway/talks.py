"""A scripted server to a model that thinks and calls tools, with official clients and the records of its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2

from photon_grpc.core.request import FinishReason
from photon_grpc.errors import EngineFailure
from photon_grpc.frontend.record import Observers, RequestRecord
from tests.frontend.answer_templates import QWEN3
from tests.gateway.scripted import SayingLink, Scripted, scripted
from tests.late import Late

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Late("anthropic"), Late("openai")

ROOMY = {"max_model_len": 1 << 15, "num_blocks": 1 << 12, "max_queued_tokens": 1 << 16, "has_grammars": True}


class Line(NamedTuple):
    """What the engine says, and why it ends; the engine fails after a line without a reason."""

    text: str
    reason: FinishReason | None = FinishReason.EOS


class RecordsKept(list[RequestRecord]):
    def ended(self, record: RequestRecord) -> None:
        self.append(record)


class Talk(NamedTuple):
    made: Scripted
    records: RecordsKept
    #: The answers that the clients got.
    responses: list[httpx2.Response]

    @property
    def link(self) -> SayingLink:
        return self.made.link

    def prompt(self, number: int = -1) -> str:
        """Return the prompt of a request as text."""
        return self.made.prompt(number)

    def says(self, *script: Line | str) -> None:
        """Have the engine say these lines to the next requests. All end like the first."""
        lines = [Line(each) if isinstance(each, str) else each for each in script]
        self.link.texts = [line.text for line in lines]
        self.link.reason = lines[0].reason or FinishReason.EOS
        self.link.fails_with = None if lines[0].reason else EngineFailure("the engine has failed")

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.made.url, http_client=self._client(), **_KEYLESS | options)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.made.url}/v1", http_client=self._client(), **_KEYLESS | options)

    def _client(self) -> httpx2.AsyncClient:
        async def keep(response: httpx2.Response) -> None:
            self.responses.append(response)

        # Reading the certificates of this machine takes longer than a test.
        return httpx2.AsyncClient(event_hooks={"response": [keep]}, timeout=60, verify=False)


_KEYLESS = {"api_key": "none", "max_retries": 0}


@asynccontextmanager
async def talking(template: str = QWEN3, *, keys: Path | None = None, **facts: Any) -> AsyncIterator[Talk]:
    async with scripted(template, keys=keys, **ROOMY | facts) as made:
        talk = Talk(made, RecordsKept(), [])
        made.front._observers = Observers([talk.records])
        yield talk
