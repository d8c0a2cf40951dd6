"""Lines typed at a terminal, with editing, history and completion; lines pasted together are one message."""

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
    """Yield messages: Enter sends one, Alt-Enter begins a new line, Ctrl-C clears the input, Ctrl-D ends."""
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
    """Return the key bindings of a message of several lines, in which Enter sends and Alt-Enter begins a line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    """Keep the history in the user's state directory, readable by the user only; in memory if that is not writable."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / _HISTORY
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))
