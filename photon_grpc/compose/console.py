"""The output of the service on stderr: one line per event, and the progress of loading. No torch, no grpc."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    # For annotations only: `batch` draws its bar in a client install, which has no msgspec.
    from photon_grpc.core.frames import Facts

log = logging.getLogger("photon_grpc")

#: Interval of progress lines if there is no terminal.
_PROGRESS_INTERVAL_S = 3.0


def page_urls(addresses: tuple[str, ...], *, has_tls: bool) -> tuple[str, ...]:
    """Return the URLs of the HTTP server's page."""
    return tuple(f"{'https' if has_tls else 'http'}://{address}/" for address in addresses)


def ready_line(addresses: tuple[str, ...], model: str, facts: Facts, pages: tuple[str, ...] = ()) -> str:
    """Return `ready on 127.0.0.1:50051 · demo · cpu float32 · 4096 KV blocks of 16 tokens · kernels torch`.

    The URLs of the `pages` come second.
    """
    parts = [
        f"ready on {', '.join(addresses)}",
        ", ".join(pages),
        model,
        f"{facts.device} {facts.dtype}",
        f"weights {facts.quantization}" if facts.quantization else "",
        f"{facts.num_blocks} KV blocks of {facts.kv.block_size} tokens",
        f"kernels {facts.kernels}" if facts.kernels else "",
    ]
    return " · ".join(part for part in parts if part)


class LoadingDisplay:
    """Progress of loading: a bar on a terminal, otherwise a line every 3 s."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown_s = time.monotonic()

    def show(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage, in bytes for `weights`, otherwise in steps."""
        if self._stream.isatty():
            self._draw(stage, done, total)
        elif time.monotonic() - self._shown_s >= _PROGRESS_INTERVAL_S:
            self._shown_s = time.monotonic()
            share = f" {100 * done // total} %" if total > 1 else ""
            log.info("loading: %s%s", stage, share)

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._tasks.clear()

    def _draw(self, stage: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _new_bar(self._stream)
            self._bar.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)


@contextmanager
def bar_of(things: str, total: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr within the block; yield the function that advances it by one."""
    if not is_shown:
        yield lambda: None
        return
    with _new_bar(sys.stderr) as bar:
        task = bar.add_task(things, total=total)
        yield lambda: bar.advance(task)


def _new_bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=stream), transient=True)
