"""The same calls without asyncio, for scripts, threads and notebooks. Their event loop runs in its own thread."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from photon_grpc.client.channel import MAX_RETRIES
from photon_grpc.client.client import Client
from photon_grpc.client.generation import Delta, Generation
from photon_grpc.client.loop_thread import LoopThread
from photon_grpc.client.many import CONCURRENCY
from photon_grpc.client.message_type import M
from photon_grpc.client.model import Model
from photon_grpc.client.multiplex import Multiplex
from photon_grpc.client.retry_policy import DEFAULT_TIMEOUT_S
from photon_grpc.client.stream import Stream
from photon_grpc.core.fields import ChatOptions, Options
from photon_grpc.core.generation import Prompt, Start, Timing, Usage
from photon_grpc.errors import Closed

T = TypeVar("T")


class SyncStream:
    """Stream as a plain iterator. To leave early, call `cancel()`, use `with` or drop the object."""

    def __init__(self, stream: Stream, thread: LoopThread, client: SyncClient) -> None:
        self._stream = stream
        self._thread = thread
        #: Keeps the client alive in `for delta in SyncClient().stream("def ")`.
        self._client = client
        self._ready: deque[Delta] = deque()

    @property
    def start(self) -> Start | None:
        return self._stream.start

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def timing(self) -> Timing | None:
        return self._stream.timing

    @property
    def is_bit_exact(self) -> bool:
        return self._stream.is_bit_exact

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if not self._ready:
            # Fetches all deltas of a message, since each fetch switches threads.
            self._ready.extend(self._thread.run(self._stream.next_deltas()))
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        self._thread.call_soon(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # `cancel` runs on the loop's thread, to which the call belongs.
        self.cancel()


class SyncMultiplex:
    """Multiplex for threads. A call blocks only its own thread; all share one stream."""

    def __init__(self, multiplex: Multiplex, thread: LoopThread, client: SyncClient) -> None:
        self._multiplex = multiplex
        self._thread = thread
        self._client = client

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """See Client.generate."""
        return self._thread.run(self._multiplex.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> SyncStream:
        """See Client.stream."""
        return _streamed(self._client, self._thread, lambda: self._multiplex.stream(prompt, **options))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.run(self._multiplex.__aexit__(kind, error, traceback))


class SyncClient:
    """Client for callers without a usable event loop. Calls block their thread; any number of threads may call."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        retries: int = MAX_RETRIES,
        resume: bool = True,
        timeout: float = DEFAULT_TIMEOUT_S,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._client = Client(
            target, credentials=credentials, retries=retries, resume=resume, timeout=timeout, metadata=metadata
        )
        self._thread = LoopThread()
        # Also closes a client that is dropped without `close`, or at the end of the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._client, self._thread)

    def generate(self, prompt: Prompt, *, hedge_after: float | None = None, **options: Unpack[Options]) -> Generation:
        """See Client.generate."""
        return self._run(self._client.generate(prompt, hedge_after=hedge_after, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> SyncStream:
        """See Client.stream."""
        return _streamed(self, self._thread, lambda: self._client.stream(prompt, **options))

    def generate_message(self, prompt: Prompt, message_type: type[M], /, **options: Unpack[Options]) -> M:
        """See Client.generate_message."""
        return self._run(self._client.generate_message(prompt, message_type, **options))

    def stream_messages(self, prompt: Prompt, message_type: type[M], /, **options: Unpack[Options]) -> Iterator[M]:
        """See Client.stream_messages."""

        async def start() -> AsyncGenerator[M, None]:
            return self._client.stream_messages(prompt, message_type, **options)

        yield from self._thread.iterate(self._run(start()))

    def map(
        self, prompts: Iterable[Prompt], *, concurrency: int = CONCURRENCY, **options: Unpack[Options]
    ) -> Iterator[Generation]:
        """See Client.map. The prompts are read in the client's own thread."""
        return self._iterate(self._client.map(prompts, concurrency=concurrency, **options))

    def map_unordered(
        self, prompts: Iterable[Prompt], *, concurrency: int = CONCURRENCY, **options: Unpack[Options]
    ) -> Iterator[tuple[int, Generation]]:
        """See Client.map_unordered. The prompts are read in the client's own thread."""
        return self._iterate(self._client.map_unordered(prompts, concurrency=concurrency, **options))

    def multiplex(self) -> SyncMultiplex:
        """See Client.multiplex."""
        return SyncMultiplex(self._client.multiplex(), self._thread, self)

    def models(self) -> list[Model]:
        """See Client.models."""
        return self._run(self._client.models())

    def model(self, name: str = "") -> Model:
        """See Client.model."""
        return self._run(self._client.model(name))

    def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        parse_special_tokens: bool = False,
        add_special_tokens: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """See Client.tokenize."""
        special = {"parse_special_tokens": parse_special_tokens, "add_special_tokens": add_special_tokens}
        return self._run(self._client.tokenize(prompt, model=model, **special, **chat))

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
        """Close the connection. Calls in flight and later calls raise Closed. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _iterate(self, results: AsyncGenerator[T, None]) -> Iterator[T]:
        # A generator method, so that the generator keeps this object alive.
        yield from self._thread.iterate(results)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)


def _streamed(client: SyncClient, thread: LoopThread, start: Callable[[], Stream]) -> SyncStream:
    async def started() -> Stream:
        return start()

    return SyncStream(thread.run(started()), thread, client)


def _end(client: Client, thread: LoopThread) -> None:
    # RuntimeError: the loop's own thread dropped the client.
    with contextlib.suppress(Closed, RuntimeError):
        thread.run(client.close())
    thread.close()
