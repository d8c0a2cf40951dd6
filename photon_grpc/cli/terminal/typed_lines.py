"""Lines typed at a terminal: edited, remembered, completed; several pasted at once are one message."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output

_HISTORY = "photon-grpc/chat_history"


def typed_lines(commands: Iterable[str]) -> Iterator[str]:
    """Read a message: Enter sends, Alt-Enter begins a new line. Ctrl-C empties the line, Ctrl-D ends."""
    session: PromptSession[str] = PromptSession(
        "› ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_bindings(),
        history=_history(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        # stdout is for answers.
        output=create_output(stdout=os.fdopen(os.dup(2), "w")),
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _bindings() -> KeyBindings:
    """Of a message that may have several lines: Enter sends it all the same."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    """In the user's state directory, readable by the user alone; in memory where that cannot be written."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / _HISTORY
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))
