"""Draw docs/terminal.svg: what `make run` shows, run here and now.

python docs/terminal_picture.py
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

SHOWN = "make run"
COMMAND = [sys.executable, "-m", "photon_grpc", "run", "--once"]
WIDTH = 84
PICTURE = Path(__file__).parent / "terminal.svg"


def recorded(command: list[str]) -> str:
    """What it writes to a terminal of WIDTH columns. Raise RuntimeError where it fails."""
    written = io.BytesIO()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        written.write(data)
        return b"." * bool(data)  # a dot a piece, on the terminal of the caller

    os.environ |= {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    if pty.spawn(command, read):
        raise RuntimeError(f"{' '.join(command)} failed")
    return written.getvalue().decode()


def settled(text: str) -> str:
    """Without what was drawn over: of a line that was erased, what was written last; no spinner."""
    text = re.sub(r"\x1b\[\?[0-9]+[hl]", "", text).replace("\r\n", "\n")
    lines = [re.split(r"\x1b\[2K|\r", line)[-1] for line in text.split("\n")]
    return "\n".join(line for line in lines if not re.search("[⠀-⣿]", line))


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold green]$[/] {SHOWN}")
    console.print(Text.from_ansi(settled(recorded(COMMAND)).rstrip()))
    PICTURE.write_text(console.export_svg(title="photon_grpc"), encoding="utf-8")


if __name__ == "__main__":
    main()
