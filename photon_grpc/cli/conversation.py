"""`chat`: a conversation with the served model, through the gRPC client. Answers go to stdout, everything about them to
stderr."""

from __future__ import annotations

import difflib
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from photon_grpc.cli.connection import connection
from photon_grpc.cli.score_lines import Scores
from photon_grpc.cli.terminal import Stopwatch, Thoughts, Written, remark
from photon_grpc.client import Options, SyncClient
from photon_grpc.errors import PhotonError

#: Options that /set takes: those of one number, switch or text.
_SCALARS: dict[str, type] = {
    name: kind for name, kind in get_type_hints(Options).items() if kind in (int, float, bool, str)
}
_SWITCHES = {"true": True, "on": True, "false": False, "off": False}
HINT = "/help says what can be typed, Ctrl-D leaves"


class Chat:
    """A conversation: what was said, and the commands that begin with a slash."""

    def __init__(self, client: SyncClient, options: Options, system: str = "", *, has_reasoning: bool = False) -> None:
        """`has_reasoning`: the model's reasoning is shown, but is no part of the conversation."""
        self._client = client
        self._options = options
        self._has_reasoning = has_reasoning
        self.system = system
        self.history: list[dict[str, str]] = []

    def run(self, lines: Iterable[str]) -> None:
        """Answer line after line until there is none, or /quit. Ctrl-C stops the answer at hand."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text.startswith("/"):
                self._obey(*text.partition(" ")[::2])
            elif text:
                self._answer(text)

    # Commands.

    def _obey(self, verb: str, rest: str) -> None:
        _, _, command = COMMANDS.get(verb, ("", "", None))
        if command is None:
            near = difflib.get_close_matches(verb, COMMANDS, n=1)
            remark(f"there is no {verb}" + (f"; did you mean {near[0]}?" if near else "; /help lists what there is"))
        else:
            command(self, rest.strip())

    def help(self, _rest: str) -> None:
        width = max(len(usage) for usage, _, _ in COMMANDS.values())
        for usage, told, _ in COMMANDS.values():
            remark(f"{usage:{width}}  {told}")
        remark("Ctrl-C stops an answer; Alt-Enter begins a new line; several lines can be pasted at once")

    def reset(self, _rest: str) -> None:
        self.history.clear()
        remark("the conversation is forgotten")

    def instruct(self, text: str) -> None:
        self.system = text
        remark("the instructions are " + (repr(text) if text else "none"))

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        options: dict[str, Any] = self._options  # type: ignore[assignment]
        try:
            if name and value:
                options[name] = _read_option(name, value.strip())
            elif name:
                options.pop(_known(name), None)
        except ValueError as error:
            remark(str(error))
        shown = {name: value for name, value in options.items() if name != "session_id"}
        remark(" · ".join(f"{name} {value}" for name, value in shown.items()) or "all options are the model's own")

    def save(self, path: str) -> None:
        if not path:
            remark("/save takes a file's name")
            return
        try:
            text = json.dumps(self._messages(), ensure_ascii=False, indent=1)
            Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
            remark(f"{len(self._messages())} messages in {path}")
        except (OSError, RuntimeError) as error:
            remark(f"not saved: {error}")

    # Answers.

    def _answer(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})
        answered: list[str] = []
        try:
            self._stream(answered)
        except KeyboardInterrupt:
            remark("stopped")
        except PhotonError as error:
            remark(f"{error.reason}: {error}" + (" (/reset makes room)" if error.reason == "PROMPT_TOO_LONG" else ""))
        if answered:
            self.history.append({"role": "assistant", "content": "".join(answered)})
        else:
            self.history.pop()

    def _stream(self, answered: list[str]) -> None:
        stopwatch, written, scores, reason = Stopwatch(), Written(sys.stdout), Scores(), ""
        thoughts = Thoughts(sys.stderr)
        with self._client.stream(self._messages(), **self._options) as stream:
            try:
                for delta in stream:
                    stopwatch.message()
                    spoken = thoughts.add(delta) if self._has_reasoning else delta
                    written.add(spoken)
                    scores.add(delta)
                    answered.append(spoken.text)
                    reason = delta.finish.reason if delta.finish else reason
            finally:
                thoughts.end()
                written.end()
        scores.print(stream.start, sys.stderr)
        remark(stopwatch.summary(stream.usage, stream.timing, reason))

    def _messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.history]


#: By the word: how it is written, what it does, and its method; /quit has none.
COMMANDS: dict[str, tuple[str, str, Callable[[Chat, str], None] | None]] = {
    "/reset": ("/reset", "forgets the conversation", Chat.reset),
    "/system": ("/system TEXT", "sets the instructions; without TEXT there are none", Chat.instruct),
    "/set": (
        "/set NAME VALUE",
        "sets an option: /set temperature 0.2; without VALUE back to the model's; alone: shows them",
        Chat.set,
    ),
    "/save": ("/save FILE", "writes the conversation as JSON: a list of messages", Chat.save),
    "/help": ("/help", "lists these commands", Chat.help),
    "/quit": ("/quit", "leaves; so does Ctrl-D", None),
}


def chat(target: str, options: Options, system: str = "") -> None:
    """Converse with the user at the terminal, or with the lines of stdin. Raise PhotonError where no server answers."""
    with SyncClient(target, **connection()) as client:
        model = client.model(options.get("model", ""))
        remark(f"{model.name} at {target} · {HINT}")
        # Each turn begins with all turns before it: the server is to keep them.
        session: Options = {"session_id": uuid.uuid4().hex, **options}
        has_reasoning = "REASONING" in model.features
        Chat(client, session, system, has_reasoning=has_reasoning).run(_lines())


def _lines() -> Iterator[str]:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return iter(sys.stdin)
    from photon_grpc.cli.typed_lines import typed_lines

    return typed_lines(COMMANDS)


def _known(name: str) -> str:
    """Raise ValueError for an option that /set does not take."""
    if name not in _SCALARS:
        near = difflib.get_close_matches(name, _SCALARS, n=1)
        raise ValueError(f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return name


def _read_option(name: str, text: str) -> Any:
    """Raise ValueError."""
    kind = _SCALARS[_known(name)]
    try:
        return _SWITCHES[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{name} takes {wanted}, not {text!r}") from None
