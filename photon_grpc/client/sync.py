"""The same calls without asyncio, for scripts and notebooks' threads: an event loop of its own, driven by the
caller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from photon_grpc.client.channel import MAX_RETRIES
from photon_grpc.client.client import Client
from photon_grpc.client.generation import Delta, Generation
from photon_grpc.client.model import Model
from photon_grpc.client.options import Options
from photon_grpc.client.stream import Stream
from photon_grpc.core.generation import Prompt, Start, Timing, Usage

T = TypeVar("T")


class SyncStream:
    """Stream as a plain iterator. Leaving early: `cancel()`, `with`, or dropping the object."""

    def __init__(self, stream: Stream, runner: asyncio.Runner) -> None:
        self._stream = stream
        self._runner = runner

    @property
    def start(self) -> Start | None:
        return self._stream.start

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def timing(self) -> Timing | None:
        return self._stream.timing

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = self._runner.run(self._next())
        if delta is None:
            raise StopIteration
        return delta

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def _next(self) -> Delta | None:
        return await anext(self._stream, None)


class SyncClient:
    """Client for one thread: every call blocks, one at a time. Not to be called inside a running event loop: use Client
    there."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        retries: int = MAX_RETRIES,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._client = Client(target, credentials=credentials, retries=retries, metadata=metadata)
        self._runner = asyncio.Runner()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """See Client.generate."""
        return self._run(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> SyncStream:
        """See Client.stream."""

        async def start() -> Stream:
            return self._client.stream(prompt, **options)

        return SyncStream(self._run(start()), self._runner)

    def models(self) -> list[Model]:
        """See Client.models."""
        return self._run(self._client.models())

    def model(self, name: str = "") -> Model:
        """See Client.model."""
        return self._run(self._client.model(name))

    def tokenize(self, prompt: Prompt, *, model: str = "", parse_special_tokens: bool = False) -> tuple[int, ...]:
        """See Client.tokenize."""
        return self._run(self._client.tokenize(prompt, model=model, parse_special_tokens=parse_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None) -> str:
        """See Client.detokenize."""
        return self._run(self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens))

    def is_ready(self) -> bool:
        """See Client.is_ready."""
        return self._run(self._client.is_ready())

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """See Client.wait_until_ready."""
        self._run(self._client.wait_until_ready(timeout_s))

    def close(self) -> None:
        """Close the connection; the object cannot be used any more."""
        self._run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)
