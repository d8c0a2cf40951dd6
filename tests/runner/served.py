"""A real model behind a real engine, without the wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.config.flags import (
    CacheConfig,
    DeviceConfig,
    ModelFlags,
    SchedulerConfig,
    ServeConfig,
    SpeculationConfig,
)
from photon_grpc.core.frames import Add, Failed, Finished, StepFrame
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.request import Request, SamplingParams, StopParams
from tests.engine.fakes import FakeBridge


@dataclass
class Output:
    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""


class Served:
    def __init__(
        self,
        directory: Path,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        device: str = "cpu",
        eager: bool = False,
        speculation: str = "",
        num_drafts: int | None = None,
        **model: object,
    ) -> None:
        config = ServeConfig(
            model=ModelFlags(model=str(directory), **model),  # type: ignore[arg-type]
            device=DeviceConfig(device=device, enforce_eager=eager),
            cache=cache or CacheConfig(num_blocks=64),
            scheduler=scheduler or SchedulerConfig(max_num_seqs=8),
            speculation=SpeculationConfig(speculation, num_drafts, "fixed"),
        )
        self.assembled: Assembled = assemble(config, lambda stage, done, total: None)
        self.post = FakeBridge()
        self.engine = self.assembled.engine(EnginePorts(self.post, self.post, NoHeartbeat()))
        # Nothing here sleeps, so the Load is told after every step that changed it.
        self.engine._broadcaster._interval_s = 0.0
        self.outputs: dict[int, Output] = {}
        self._handles = 0
        self._read = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        sampling: SamplingParams | None = None,
        *,
        min_tokens: int = 0,
        stop: tuple[int, ...] = (),
        num_outputs: int = 1,
        **more: object,
    ) -> int:
        handle = self._handles
        self._handles += num_outputs
        for index in range(num_outputs):
            self.outputs[handle + index] = Output()
        request = Request(
            request_id=f"r{handle}",
            prompt_ids=tuple(prompt),
            sampling=sampling or SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens, min_tokens=min_tokens, stop_token_ids=stop),
            arrival_s=time.monotonic(),
            num_outputs=num_outputs,
            **more,  # type: ignore[arg-type]
        )
        self.post.put(Add(handle, request))
        return handle

    def step(self) -> None:
        self.engine.step()
        self.engine.scheduler.pool.check()
        for _, frame in self.post.sent[self._read :]:
            if isinstance(frame, StepFrame):
                self._read_frame(frame)
        self._read = len(self.post.sent)

    def run(self) -> None:
        try:
            while True:
                self.step()
        except EOFError:
            return

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, **more: object) -> list[list[int]]:
        handles = [self.add(prompt, max_tokens, **more) for prompt in prompts]  # type: ignore[arg-type]
        self.run()
        assert all(self.outputs[handle].failed is None for handle in handles)
        return [self.outputs[handle].ids for handle in handles]

    def _read_frame(self, frame: StepFrame) -> None:
        for handle, token in zip(frame.handles, frame.ids, strict=True):
            self.outputs[handle].ids.append(token)
        for handle, records in frame.logprobs.items():
            self.outputs[handle].logprobs += records
        for handle, records in frame.prompt_logprobs.items():
            self.outputs[handle].prompt_logprobs += records
        for finished in frame.finished:
            self.outputs[finished.handle].finished = finished
        for failed in frame.failed:
            self.outputs[failed.handle].failed = failed
