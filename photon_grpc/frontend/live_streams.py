"""The streams of a front end by the engine's handles of their outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from photon_grpc.core.frames import Abort, StepFrame
from photon_grpc.errors import InternalFailure, frames_of
from photon_grpc.frontend.output.output import OutputText
from photon_grpc.frontend.stream import TokenStream

_LOG = logging.getLogger(__name__)


class LiveStreams:
    """All streams whose reader has not come to the end. Delivers the engine's frames to them."""

    def __init__(self, send: Callable[[Abort], None]) -> None:
        """Send aborts to the engine by `send`."""
        self._send = send
        #: By handle, the outputs that the engine runs.
        self._running: dict[int, tuple[TokenStream, OutputText]] = {}
        self._first_handles: dict[TokenStream, int] = {}

    def __len__(self) -> int:
        return len(self._first_handles)

    def __iter__(self) -> Iterator[TokenStream]:
        return iter(self._first_handles)

    def add(self, stream: TokenStream, first: int) -> None:
        """Add a stream whose outputs have consecutive handles from `first` on."""
        for handle, output in enumerate(stream.outputs, first):
            self._running[handle] = stream, output
        self._first_handles[stream] = first

    def remove(self, stream: TokenStream) -> None:
        """Forget a stream and abort its running outputs."""
        self.abort(stream)
        self._first_handles.pop(stream, None)

    def take(self, frame: StepFrame) -> None:
        """Deliver the frame of one step to its streams."""
        running = self._running
        stopped: list[int] = []
        for started in frame.started:
            entry = running.get(started.handle)
            if entry is not None:
                entry[0].started(started)
        for handle in frame.preempted:
            entry = running.get(handle)
            if entry is not None:
                entry[0].preempted()
        if frame.logprobs or frame.prompt_logprobs:
            self._on_logprobs(frame)
        for handle, drafts in frame.drafts.items():
            entry = running.get(handle)
            if entry is not None:
                entry[1].drafted(*drafts)
        for handle, token_id in zip(frame.handles, frame.ids, strict=True):
            entry = running.get(handle)
            if entry is not None:
                stream, output = entry
                try:
                    is_over = stream.push(output, token_id)
                except Exception as error:
                    self._defect(stream, error)
                    continue
                if is_over:
                    del running[handle]
                    stopped.append(handle)
        if stopped:
            self._send(Abort(tuple(stopped), by_stop_string=True))
        for finished in frame.finished:
            entry = running.pop(finished.handle, None)
            if entry is not None:
                try:
                    entry[0].end(entry[1], finished)
                except Exception as error:
                    self._defect(entry[0], error)
        for failed in frame.failed:
            entry = running.pop(failed.handle, None)
            if entry is not None:
                self.abort(entry[0])
                entry[0].fail(failed.fault.error())

    def forget(self) -> set[TokenStream]:
        """Forget all running outputs, since the engine is lost; return their streams."""
        streams = {stream for stream, _ in self._running.values()}
        self._running.clear()
        return streams

    def abort(self, stream: TokenStream) -> None:
        """Abort the running outputs of `stream`."""
        first = self._first_handles.get(stream)
        if first is None:
            return
        handles = tuple(
            [handle for handle in range(first, first + len(stream.outputs)) if self._running.pop(handle, None)]
        )
        if handles:
            self._send(Abort(handles))

    def _on_logprobs(self, frame: StepFrame) -> None:
        for handle, records in frame.prompt_logprobs.items():
            entry = self._running.get(handle)
            if entry is not None:
                entry[0].prompt_scores.add(records)
        for handle, records in frame.logprobs.items():
            entry = self._running.get(handle)
            if entry is not None:
                entry[1].scores.add(records)

    def _defect(self, stream: TokenStream, error: Exception) -> None:
        """Fail one stream that met an internal error; the others go on."""
        # Log the frames of an unforeseen exception but not its text, which may quote generated text.
        frames = frames_of(error)
        _LOG.error("request %s: its stream failed: %s\n%s", stream.start.request_id, type(error).__name__, frames)
        self.abort(stream)
        stream.fail(InternalFailure("internal error while detokenizing"))
