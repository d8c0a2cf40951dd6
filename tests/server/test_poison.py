"""One request that crashes the engine whenever it is computed, among two dozen that our client retries.

Client, server, front end and scheduler are real. The runner is a fake, and a new engine follows each one that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from photon_grpc.client.client import Client
from photon_grpc.client.stream import Stream
from photon_grpc.core.batch import Batch
from photon_grpc.core.frames import Add, Down
from photon_grpc.core.ports import Pending
from photon_grpc.errors import RequestQuarantined
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting
from tests.frontend.fake_engine import FakeLink, served
from tests.server.fake_frontend import serving

NUM_STREAMS = 24
NUM_TOKENS = 100
POISON = 0


class EngineDied(Exception):
    """The crash of an engine process, as an exception."""


class MortalService(FakeLink):
    """A front end's link to an engine on the same loop, and to the next one after its death.

    The next one loads long enough for all lost requests to be retried before it starts.
    """

    def __init__(self, depth: int) -> None:
        self._setting = Setting(num_blocks=400, max_num_seqs=32, depth=depth, max_model_len=128)
        self.num_deaths = 0
        self._num_lost = 0
        self._begin({}, b"")
        super().__init__(self._engine.facts)

    def send(self, frame: Down) -> None:
        super().send(frame)
        self._engine.post.put(frame)

    async def run(self) -> None:
        """Step, deliver and start the next engine, without end."""
        while True:
            h = self._engine
            if sum(isinstance(frame, Add) for _, frame in h.post.inbox) < self._num_lost:
                await asyncio.sleep(0.001)
                continue
            self._num_lost = 0
            if h.post.inbox or h.scheduler.live.has_work():
                try:
                    h.engine.step()
                except EngineDied:
                    self._die()
                    continue
                self._deliver()
            # A step takes time, so that the early requests still run when the poison arrives.
            await asyncio.sleep(0.001)

    def _begin(self, in_flight: dict[bytes, int], known: bytes) -> None:
        self._engine = Harness(self._setting, None, in_flight, known)
        self._num_delivered = 0
        submit = self._engine.runner.submit

        def submit_or_die(batch: Batch) -> Pending:
            live = self._engine.scheduler.live
            if any(seq.request.prompt_ids[0] == POISON for seq in live.running if seq.slot in batch.slots):
                raise EngineDied
            return submit(batch)

        self._engine.runner.submit = submit_or_die  # type: ignore[method-assign]

    def _deliver(self) -> None:
        frames = self._engine.post.sent[self._num_delivered :]
        self._num_delivered += len(frames)
        for _, frame in frames:
            self.on_frame(frame)

    def _die(self) -> None:
        self.num_deaths += 1
        recorder, live = self._engine.recorder, self._engine.scheduler.live
        self._num_lost = len(live.running) + live.num_queued
        self.lose()
        self._begin(recorder.in_flight(), recorder.known)
        self.facts = self._engine.facts
        self.on_frame(self.facts)


@contextlib.asynccontextmanager
async def mortal_service(depth: int) -> AsyncIterator[tuple[MortalService, str]]:
    link = MortalService(depth)
    with ThreadPoolExecutor(1) as pool:
        frontend = Frontend(link=link, model=served(), encoder=ThreadEncoder(served(), pool))
        running = asyncio.create_task(link.run())
        async with serving(frontend) as address:  # type: ignore[arg-type]
            yield link, address
        running.cancel()


@pytest.mark.parametrize(("is_multiplexed", "depth"), [(False, 1), (True, 0)])
async def test_a_poison_request_ends_two_engines_and_is_refused_and_no_other_request_is(
    is_multiplexed: bool, depth: int
) -> None:
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        link, address = await stack.enter_async_context(mortal_service(depth))
        client = await stack.enter_async_context(Client(address))
        source = await stack.enter_async_context(client.multiplex()) if is_multiplexed else client

        def stream(number: int) -> Stream:
            options = {"seed": number, "max_tokens": NUM_TOKENS, "ignore_eos": True, "token_ids": True, "text": False}
            return source.stream([number, 5, 6], **options)  # type: ignore[arg-type]

        async def read(stream: Stream, ids: list[int]) -> list[int]:
            async for delta in stream:
                ids += delta.token_ids
            return ids

        # Half of the requests have output when the poison arrives; the other half arrives with it.
        early = [stream(number) for number in range(1, NUM_STREAMS // 2)]
        begun = [list((await anext(each)).token_ids) for each in early]
        late = [stream(number) for number in range(NUM_STREAMS // 2, NUM_STREAMS)]
        poison = asyncio.create_task(read(stream(POISON), []))
        streams = zip(early + late, begun + [[] for _ in late], strict=True)
        outputs = await asyncio.gather(*[read(each, ids) for each, ids in streams])
        with pytest.raises(RequestQuarantined):
            await poison
        assert outputs == [complete([number, 5, 6], NUM_TOKENS, number) for number in range(1, NUM_STREAMS)]
        assert link.num_deaths == 2
