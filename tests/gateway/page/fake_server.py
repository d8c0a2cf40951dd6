"""A server that answers as the service does, for the page alone: `python -m tests.gateway.page.fake_server`.

Its engine only counts, and its answers are what a test gives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from photon_grpc.gateway.page import FILES, HEADERS
from tests.gateway.page.fake_engine import FakeEngine

Delta = dict[str, Any]
STORY = (
    "Each request has a lane. In every step the engine computes one token for each lane, so the requests move "
    "forward together, and a lane that ends is free for the next request in the queue. "
)


def story(body: dict[str, Any]) -> list[Delta]:
    """As many words as tokens are asked for."""
    most = body.get("max_completion_tokens") or body.get("max_tokens") or 64
    words = STORY.split()
    return [{"content": words[number % len(words)] + " "} for number in range(most)]


class FakeHttpServer:
    """Args:
    answer: deltas of the answer to a body.
    key: what calls must bring, if any.
    has_chat: whether the model has a chat template.
    pictures: frames of the feed; those of the engine if None.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], list[Delta]] = story,
        *,
        key: str = "",
        has_chat: bool = True,
        pictures: list[dict[str, Any]] | None = None,
        engine: FakeEngine | None = None,
    ) -> None:
        self.answer, self.key, self.has_chat, self.pictures = answer, key, has_chat, pictures
        self.engine = engine or FakeEngine()
        #: (path, JSON of the body) of every call that was let in.
        self.calls: list[tuple[str, Any]] = []
        self.paths: list[str] = []
        self.num_feeds = 0
        #: Answers that the caller left before their end.
        self.num_left = 0
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/engine/events", self.feed),
            Route("/{path:path}", self.file),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(self.engine.run())
        yield
        running.cancel()

    async def file(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        if request.url.path not in FILES:
            return failure(404, "not_found", "there is nothing here")
        content, content_type = FILES[request.url.path]
        return Response(content, headers={**HEADERS, "Content-Type": content_type})

    def refused(self, request: Request) -> Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return failure(401, "UNAUTHENTICATED", "the call has no API key that this server knows")
        return None

    async def models(self, request: Request) -> Response:
        model = {
            "id": "fake-model",
            "object": "model",
            "default": True,
            "max_model_len": 4096,
            "features": ["CHAT"] if self.has_chat else [],
        }
        return self.refused(request) or JSONResponse({"object": "list", "data": [model]})

    async def generate(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        body = await request.json()
        self.calls.append((request.url.path, body))
        deltas = self.answer(body)
        if deltas and "refused" in deltas[0]:
            return failure(*deltas[0]["refused"])
        return StreamingResponse(self.chunks(prompts_of(body), deltas), media_type="text/event-stream")

    async def chunks(self, prompts: list[str], deltas: list[Delta]) -> AsyncIterator[str]:
        """Yield the answers to all prompts as they come, an error that `deltas` end with, or the usage."""
        failed, deltas = (deltas[-1], deltas[:-1]) if "error" in deltas[-1] else (None, deltas)
        is_done = False
        try:
            yield ": a comment, as every 15 s\n\n"
            async for index, delta in self.engine.ask(prompts, [*deltas, {}]):
                finish = None if delta else failed or "length"
                if finish != failed or delta:
                    choice = {"delta": delta, "text": delta.get("content", ""), "index": index}
                    yield event({"choices": [{**choice, "finish_reason": finish}]})
            is_done = True
            usage = {"prompt_tokens": len(" ".join(prompts).split()), "completion_tokens": len(prompts) * len(deltas)}
            yield event(failed) if failed else event({"choices": [], "usage": usage}) + "data: [DONE]\n\n"
        finally:
            self.num_left += not is_done

    async def feed(self, request: Request) -> Response:
        return self.refused(request) or StreamingResponse(self.frames(), media_type="text/event-stream")

    async def frames(self) -> AsyncIterator[str]:
        self.num_feeds += 1
        try:
            for picture in self.pictures or ():
                yield event(picture)
                await asyncio.sleep(0.02)
            while self.pictures is None:
                yield event(self.engine.picture())
                await asyncio.sleep(0.1)
            while True:
                yield ": nothing\n\n"
                await asyncio.sleep(1)
        finally:
            self.num_feeds -= 1


def prompts_of(body: dict[str, Any]) -> list[str]:
    if "messages" in body:
        return [" ".join(each["content"] for each in body["messages"])]
    return body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def failure(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error", "param": None, "code": code}}, status)


@contextlib.contextmanager
def opened(fake: FakeHttpServer) -> Iterator[str]:
    """Serve in a thread; yield the address of the page."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(fake.app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    with opened(FakeHttpServer()) as url:
        print(url)
        threading.Event().wait()
