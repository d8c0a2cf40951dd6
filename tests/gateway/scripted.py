"""The HTTP server on a free port, with the real front end and an engine that says what a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.core.frames import Add, Down, Failed
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import PhotonError
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.gateway.app import application
from photon_grpc.gateway.calls.guard import HttpRules
from photon_grpc.gateway.connections.http_server import HttpServer
from photon_grpc.observe.failure_log import FailureLog
from tests.frontend.fake_engine import FACTS, FakeLink, done, frontend, served

#: A chat as ChatML has it, without tools and reasoning.
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LONG_FACTS = msgspec.structs.replace(FACTS, max_model_len=4096, num_blocks=512, max_queued_tokens=4096)
MAX_BODY_BYTES = 2**20


class NoPages:
    async def page(self, path: str, accept: str) -> Any:
        raise NotImplementedError


class SayingLink(FakeLink):
    """An engine that answers each request with the next text, one token per step."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(msgspec.structs.replace(LONG_FACTS, **facts))
        #: Texts of the next requests; the last one also answers all that follow.
        self.texts: list[str] = ["Hello!"]
        self.encode: Callable[[str], Sequence[int]] = lambda text: ()
        #: Outputs stop coming after this many tokens, without an end.
        self.halts_after: int | None = None
        #: The end of a request after its tokens.
        self.fails_with: PhotonError | None = None
        self.reason = FinishReason.EOS
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, frame: Down) -> None:
        super().send(frame)
        if isinstance(frame, Add):
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
            self._tasks.add(task := asyncio.get_running_loop().create_task(self._say(frame, text)))
            task.add_done_callback(self._tasks.discard)

    async def _say(self, add: Add, text: str) -> None:
        handles = range(add.handle, add.handle + add.request.num_outputs)
        ids, reason = self.encode(text), self.reason
        if len(ids) >= add.request.stop.max_tokens:
            ids, reason = ids[: add.request.stop.max_tokens], FinishReason.MAX_TOKENS
        for id in ids[: self.halts_after]:
            await asyncio.sleep(0)
            self.step(*[(handle, id) for handle in handles])
        await asyncio.sleep(0)
        if self.fails_with is not None:
            self.step(failed=tuple([Failed.of(handle, self.fails_with) for handle in handles]))
        elif self.halts_after is None:
            self.step(finished=tuple([done(handle, reason) for handle in handles]))


@dataclass
class Scripted:
    """A server and its parts."""

    url: str
    link: SayingLink
    front: Frontend

    def prompt(self, number: int = -1) -> str:
        """Return the prompt of a request as text."""
        tokenizer = self.front._model.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(self.link.adds[number].request.prompt_ids, skip_special_tokens=False)


@asynccontextmanager
async def scripted(template: str = CHATML, *, keys: Path | None = None, **facts: Any) -> AsyncIterator[Scripted]:
    """Start a server of a model with this chat template."""
    link = SayingLink(**facts)
    with frontend(served("byte_level", template=template), link=link) as (front, _):
        tokenizer = front._model.tokenizer
        assert tokenizer is not None
        link.encode = lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)
        rules = HttpRules(FailureLog(), "r-1", KeyRing(str(keys)) if keys else None)
        server = HttpServer(application(front, rules, NoPages(), max_body_bytes=MAX_BODY_BYTES))
        (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
        try:
            yield Scripted(f"http://{address}", link, front)
        finally:
            await server.stop(0)
