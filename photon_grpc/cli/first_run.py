"""`make run`: start the service as a new user would, stream one generation through gRPC and show what to try next.

The HTTP server is open beside gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from photon_grpc.cli.first_addresses import target_of
from photon_grpc.cli.terminal.connection import connection
from photon_grpc.cli.terminal.terminal import write_text
from photon_grpc.cli.what_next import ServerAddress, examples
from photon_grpc.client import Client, Options, Unreachable
from photon_grpc.service.processes.signals import END_SIGNALS, IDLE_SIGNALS

T = TypeVar("T")

PROMPT = "class Stack:"
#: As long as a class; the embedded model does well with this seed.
OPTIONS: Options = {"max_tokens": 143, "min_tokens": 80, "temperature": 0.8, "top_p": 0.95, "seed": 24}

#: The command line of the service, without its flags.
SERVE = (sys.executable, "-m", "photon_grpc", "serve")

_READY_CHECK_S = 0.1
_TROUBLE = re.compile("warning|error|critical|traceback", re.IGNORECASE)


def first_run(flags: Sequence[str], address: str, *, once: bool, page: str = "", prompt: str = PROMPT) -> int:
    """Run `photon-grpc serve` on `address` until Ctrl-C, or with `once` until the generation is done.

    `page` is the URL of the page that the flags open, if they do.
    Return 0 after a generation and a clean drain, the service's exit code if it ended by itself. Raise PhotonError if
    the generation fails.
    """
    return asyncio.run(_first_run([*flags, "--listen", address], target_of(address), page, once=once, prompt=prompt))


async def _first_run(flags: list[str], target: str, page: str, *, once: bool, prompt: str) -> int:
    console = Console(highlight=False)
    async with ServeProcess.started(flags) as service:
        if not await service.unless_stopped(_ready(service, target, console)):
            return await service.ended()
        await service.unless_stopped(_show_generation(target, prompt, console))
        if not once and (what := await service.unless_stopped(_what_next(target, page))):
            _show_what_next(what, f"{target} and {page}" if page else target, console)
            service.stream_one_generation()
            await service.ended_or_stopped()
        return await service.stop()


class ServeProcess:
    """`photon-grpc serve` in a child process.

    It has its own process group, so that a Ctrl-C reaches it once, through this process.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: list[str] = []
        self._is_quiet = True
        self._stopping = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, flags: Sequence[str]) -> AsyncIterator[ServeProcess]:
        process = await asyncio.create_subprocess_exec(*SERVE, *flags, stderr=asyncio.subprocess.PIPE, process_group=0)
        service = cls(process)
        with service._signals_forwarded():
            try:
                yield service
            finally:
                await service.stop()

    @property
    def stage(self) -> str:
        """The last line of its log, without the time."""
        return self._lines[-1].partition(" ")[2] if self._lines else "starting"

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stream_one_generation(self) -> None:
        """Show its warnings and errors so far, and every later line, on stderr."""
        self._is_quiet = False
        self._show(line for line in self._lines if _TROUBLE.search(line))

    async def ended(self) -> int:
        """Wait for its end and return its exit code; show its log if it ended before it was ready.

        If a signal ended it, return 0 for our SIGTERM that came before it could drain, otherwise 1.
        """
        code = await self._process.wait()
        await self._reading
        if self._is_quiet and not self.is_stopping:
            self._show(self._lines)
            self._lines.clear()
        if code == -signal.SIGTERM and self.is_stopping:
            return 0
        return code if code >= 0 else 1

    async def ended_or_stopped(self) -> None:
        """Wait until it ends by itself or a stop is requested."""
        waits = [asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(self._stopping.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if a stop is requested, which cancels it and ignores how it fails."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not self.is_stopping:
            return await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    async def stop(self) -> int:
        """Request a drain, wait for the end and return the exit code."""
        if self.is_running and not self.is_stopping:
            self._request_stop()
        return await self.ended()

    def _request_stop(self) -> None:
        """Send SIGTERM; a second one makes the service end at once."""
        self._stopping.set()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    @contextlib.contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in END_SIGNALS:
            loop.add_signal_handler(signum, self._request_stop)
        idle = [signum for signum in IDLE_SIGNALS if signal.getsignal(signum) is signal.SIG_DFL]
        for signum in idle:
            loop.add_signal_handler(signum, self._show, [f"{signum.name} is ignored; press Ctrl-C to stop"])
        try:
            yield
        finally:
            for signum in (*END_SIGNALS, *idle):
                loop.remove_signal_handler(signum)

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if not self._is_quiet:
                self._lines.clear()
                self._show([line])

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, file=sys.stderr, flush=True)


async def _ready(service: ServeProcess, target: str, console: Console) -> bool:
    """Show progress until the health service reports ready; return False if the service ends before."""
    started_s = time.monotonic()
    with console.status("") as status:
        async with Client(target, retries=0, **connection()) as client:
            while service.is_running and not service.is_stopping:
                if await _is_ready(client):
                    console.print(await _introduction(client, time.monotonic() - started_s))
                    return True
                status.update(f"{escape(service.stage)} [dim]{time.monotonic() - started_s:.0f} s[/]")
                await asyncio.sleep(_READY_CHECK_S)
    return False


async def _introduction(client: Client, seconds: float) -> str:
    model = await client.model()
    facts = f"{model.dtype}, context of {model.max_context_tokens:,} tokens"
    return f"[green]✓[/] [bold]{escape(model.name)}[/] is ready after {seconds:.1f} s [dim]({escape(facts)})[/]"


async def _is_ready(client: Client) -> bool:
    try:
        return await client.is_ready()
    except Unreachable:
        return False


async def _show_generation(target: str, prompt: str, console: Console) -> None:
    console.rule("[dim]photon_grpc.v1.InferenceService/StreamGenerate[/]", style="dim")
    console.print(Text(prompt, style="bold cyan"), end="")
    async with Client(target, **connection()) as client, client.stream(prompt, **OPTIONS) as stream:
        summary = await write_text(stream, sys.stdout)
    console.rule(f"[dim]{summary}[/]", style="dim")


async def _what_next(target: str, page: str) -> list[tuple[str, str]]:
    async with Client(target, **connection()) as client:
        model = await client.model()
    return examples(ServerAddress(target, page, model.name, "CHAT" in model.features))


def _show_what_next(what: list[tuple[str, str]], places: str, console: Console) -> None:
    """Print what to try next, without a frame at the sides, so that every line can be copied."""
    console.print(f"[green]serving on [bold]{places}[/bold] until Ctrl-C[/]; to paste meanwhile:\n", soft_wrap=True)
    for title, example in what:
        if title:
            console.print(f"[dim]# {title}[/]")
        console.print(Text(example), soft_wrap=True)
    console.rule(style="dim")
