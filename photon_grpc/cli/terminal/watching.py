"""`top`'s screen: a server's load."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from photon_grpc.cli.terminal.connection import admin_connection
from photon_grpc.client.admin import AdminClient, LoadSample, Replica

#: Samples that are kept for the graphs.
_MAX_SAMPLES = 60
_LEVELS = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH = 32
_OWNED, _CACHED, _FREE, _OTHER = "blue", "cyan", "bright_black", "yellow"


class View:
    """The latest samples of the load, and the screen that shows them."""

    def __init__(self, target: str, replica: Replica) -> None:
        self._target = target
        self._replica = replica
        self._samples: deque[LoadSample] = deque(maxlen=_MAX_SAMPLES)

    def add(self, sample: LoadSample) -> None:
        self._samples.append(sample)

    def render(self) -> RenderableType:
        """Return the screen; at least one sample must have been added."""
        load, samples = self._samples[-1], self._samples
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=len("tokens/s out"))
        table.add_column(style="bold", no_wrap=True, min_width=9, justify="right")
        table.add_column(no_wrap=True)
        out, into = load.output_tokens_per_s, load.prompt_tokens_per_s
        for row in (
            ("running", f"{load.running:,}", self._slots(load)),
            ("queued", f"{load.queued:,}", self._queue(load)),
            ("tokens/s out", f"{out:,.0f}", self._spark(sample.output_tokens_per_s for sample in samples)),
            ("tokens/s in", f"{into:,.0f}", self._spark(sample.prompt_tokens_per_s for sample in samples)),
            ("step", f"{_step_s(load) * 1000:,.1f} ms", self._spark(_step_s(sample) for sample in samples)),
            ("cache hits", f"{load.prefix_cache_hit_rate:.0%}", Text("of all prompt tokens", "dim")),
            ("preemptions", f"{load.num_preemptions:,}", self._preempted()),
            *self._drafts(load),
            ("KV blocks", f"{self._used(load):.0%}", self._blocks(load)),
        ):
            table.add_row(*row)
        return Group(self._heading(), "", table, self._key(load))

    def _heading(self) -> Text:
        replica = self._replica
        restarts = f" · engine restarted {replica.num_restarts} times" if replica.num_restarts else ""
        up = _duration(time.time() - replica.start_time_s)
        text = f"[bold]photon-grpc {escape(replica.version)}[/] · {escape(replica.device)} · up {up}{restarts}"
        return Text.from_markup(f"{text}\n[dim]{escape(self._target)}[/]")

    def _slots(self, load: LoadSample) -> Text:
        bar = _bar(((load.running, "green"), (self._replica.max_running - load.running, _FREE)))
        return bar.append(f" of {self._replica.max_running:,}", "dim")

    def _queue(self, load: LoadSample) -> Text:
        line = self._spark(sample.queued for sample in self._samples)
        return line.append(f" {load.queued_prompt_tokens:,} prompt tokens", "dim")

    def _preempted(self) -> Text:
        recent = self._samples[-1].num_preemptions - self._samples[0].num_preemptions
        return Text(f"{recent:,} of them recently", "dim") if recent > 0 else Text("")

    def _drafts(self, load: LoadSample) -> Iterable[tuple[str, str, Text]]:
        """Return a row with the share of right drafts, recent ones if there are any; none if nothing was drafted."""
        if not load.draft_tokens:
            return
        first = self._samples[0]
        drafted = load.draft_tokens - first.draft_tokens
        since = first if drafted > 0 else LoadSample()
        drafted = load.draft_tokens - since.draft_tokens
        kept = load.accepted_draft_tokens - since.accepted_draft_tokens
        when = "recently" if since is first else "since the start"
        yield "drafts", f"{kept / drafted:.0%}", Text(f"of {drafted:,} right {when}", "dim")

    def _used(self, load: LoadSample) -> float:
        return load.owned_blocks / max(self._replica.total_blocks, 1)

    def _blocks(self, load: LoadSample) -> Text:
        other = self._replica.total_blocks - load.owned_blocks - load.cached_blocks - load.free_blocks
        return _bar(
            (
                (load.owned_blocks, _OWNED),
                (max(other, 0), _OTHER),
                (load.cached_blocks, _CACHED),
                (load.free_blocks, _FREE),
            )
        )

    def _key(self, load: LoadSample) -> Text:
        line = Text("  ")
        for style, text in (
            (_OWNED, f"{load.owned_blocks:,} owned"),
            (_CACHED, f"{load.cached_blocks:,} cached"),
            (_FREE, f"{load.free_blocks:,} free"),
        ):
            line.append("■ ", style).append(f"{text}   ", "dim")
        return line.append(f"of {self._replica.total_blocks:,}, {self._replica.block_size} tokens each", "dim")

    def _spark(self, values: Iterable[float]) -> Text:
        """Draw the latest samples, the newest at the right, scaled to the largest."""
        if len(self._samples) < 2:
            return Text()
        newest = list(values)[-_BAR_WIDTH:]
        top = max(newest) or 1.0
        levels = [_LEVELS[round(value / top * (len(_LEVELS) - 1))] for value in newest]
        return Text("".join(levels).rjust(_BAR_WIDTH), "green")


async def look(target: str) -> None:
    """Print the load once. Raise PhotonError."""
    async with AdminClient(target, **admin_connection(target)) as client:
        view = View(target, await client.replica())
        async for sample in client.watch_load(1.0):
            view.add(sample)
            break
    Console(highlight=False).print(view.render(), soft_wrap=True)


async def watch(target: str, interval_s: float) -> None:
    """Show the load until the server ends. Raise PhotonError."""
    async with AdminClient(target, **admin_connection(target)) as client:
        view = View(target, await client.replica())
        newest = LatestSample(client, interval_s)
        reading = asyncio.create_task(newest.read())
        try:
            await newest.first()
            with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
                while not reading.done():
                    view.add(newest.sample)
                    live.update(view.render(), refresh=True)
                    await asyncio.wait((reading,), timeout=interval_s)
            await reading
        finally:
            reading.cancel()


class LatestSample:
    """The newest sample, which stays while the server sends none because nothing changes."""

    def __init__(self, client: AdminClient, interval_s: float) -> None:
        self.sample = LoadSample()
        self._client = client
        self._interval_s = interval_s
        self._has_come = asyncio.Event()

    async def read(self) -> None:
        try:
            async for sample in self._client.watch_load(self._interval_s):
                self.sample = sample
                self._has_come.set()
        finally:
            self._has_come.set()

    async def first(self) -> None:
        await self._has_come.wait()


def _step_s(load: LoadSample) -> float:
    """Return the duration of the last step; 0 if nothing runs."""
    return load.step_s if load.running else 0.0


def _bar(parts: Iterable[tuple[int, str]]) -> Text:
    """Draw a bar of parts; every part above 0 is visible."""
    shown = [(count, style) for count, style in parts if count > 0]
    total = sum(count for count, _ in shown) or 1
    widths = [max(round(count / total * _BAR_WIDTH), 1) for count, _ in shown]
    if widths:
        widths[widths.index(max(widths))] += _BAR_WIDTH - sum(widths)
    bar = Text()
    for (_, style), width in zip(shown, widths, strict=True):
        bar.append("█" * width if style != _FREE else "░" * width, style)
    return bar


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
