"""`chat`: a conversation with the served model, with answers on stdout and everything else on stderr."""

from __future__ import annotations

import difflib
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from photon_grpc.cli.terminal.connection import connection
from photon_grpc.cli.terminal.logprob_lines import Scores
from photon_grpc.cli.terminal.option_values import check_name, read_option, set_option
from photon_grpc.cli.terminal.printable import printable
from photon_grpc.cli.terminal.terminal import ReasoningText, Stopwatch, Written, remark
from photon_grpc.client import Delta, Options, SyncClient, ToolCall
from photon_grpc.errors import PhotonError

HINT = "/help lists the commands, Ctrl-D quits"
_MAX_SHOWN_CHARS = 60


@dataclass(slots=True)
class ChatAnswer:
    """The first output of a turn so far, with which the conversation continues."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if delta.index == 0:
            self.texts.append(delta.text)
            self.calls.extend(delta.tool_calls)

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation."""
        message = {"role": "assistant", "content": "".join(self.texts)}
        return message | ({"tool_calls": [asdict(call) for call in self.calls]} if self.calls else {})


class Chat:
    """A conversation: its messages, and the commands that begin with a slash."""

    def __init__(self, client: SyncClient, options: Options, system: str = "", *, has_parts: bool = False) -> None:
        """Begin a conversation; with `has_parts` answers have reasoning, which is shown but not kept."""
        self._client = client
        self._options = options
        self._has_parts = has_parts
        self.system = system
        self.history: list[dict[str, Any]] = []

    def run(self, lines: Iterable[str]) -> None:
        """Answer line after line until the last one or /quit. Ctrl-C stops the current answer."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text.startswith("/"):
                self._run_command(*text.partition(" ")[::2])
            elif text:
                self._answer({"role": "user", "content": text})

    # Commands.

    def _run_command(self, verb: str, rest: str) -> None:
        _, _, command = COMMANDS.get(verb, ("", "", None))
        if command is None:
            near = difflib.get_close_matches(verb[1:], [known[1:] for known in COMMANDS], n=1)
            remark(f"there is no {verb}" + (f"; did you mean /{near[0]}?" if near else "; /help lists the commands"))
        else:
            command(self, rest.strip())

    def help(self, _rest: str) -> None:
        width = max(len(usage) for usage, _, _ in COMMANDS.values())
        for usage, text, _ in COMMANDS.values():
            remark(f"{usage:{width}}  {text}")
        remark("Ctrl-C stops an answer; Alt-Enter begins a new line; several lines can be pasted at once")

    def reset(self, _rest: str) -> None:
        self.history.clear()
        remark("the conversation starts over")

    def instruct(self, text: str) -> None:
        self.system = text
        remark(f"the instructions are now {text!r}" if text else "there are no instructions now")

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        options: dict[str, Any] = self._options  # type: ignore[assignment]
        try:
            if name and value:
                set_option(options, name, read_option(name, value.strip()))
            elif name:
                options.pop(check_name(name), None)
        except (ValueError, PhotonError) as error:
            remark(str(error))
        shown = [f"{name} {_shown(value)}" for name, value in options.items() if name != "session_id"]
        remark(" · ".join(shown) or "all options have the model's defaults")

    def answer_call(self, text: str) -> None:
        waiting = self._waiting_calls()
        if not waiting:
            remark("no tool call is waiting for an answer")
        elif len(waiting) > 1:
            self.history.append(_tool_message(text, waiting[0]))
            remark(f"{len(waiting) - 1} more wait for an answer")
        else:
            self._answer(_tool_message(text, waiting[0]))

    def _waiting_calls(self) -> list[dict[str, Any]]:
        """Return the calls of the last answer that no tool message answers yet, in order."""
        for num_answers, message in enumerate(reversed(self.history)):
            if message["role"] != "tool":
                return list(message.get("tool_calls", ()))[num_answers:]
        return []

    def save(self, path: str) -> None:
        if not path:
            remark("/save needs the name of a file")
            return
        try:
            text = json.dumps(self._messages(), ensure_ascii=False, indent=1)
            Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
            remark(f"saved {len(self._messages())} messages to {path}")
        except (OSError, RuntimeError) as error:
            remark(f"not saved: {error}")

    # Answers.

    def _answer(self, message: dict[str, Any]) -> None:
        self.history.append(message)
        answer = ChatAnswer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            remark("stopped")
        except PhotonError as error:
            remark(f"{error.reason}: {error}" + (" (/reset starts over)" if error.reason == "PROMPT_TOO_LONG" else ""))
        if answer.texts:
            self.history.append(answer.message())
        else:
            self.history.pop()

    def _stream(self, answer: ChatAnswer) -> None:
        stopwatch, written, scores, reason = Stopwatch(), Written(sys.stdout), Scores(), ""
        thoughts = ReasoningText(sys.stderr)
        with self._client.stream(self._messages(), **self._options) as stream:
            try:
                for delta in stream:
                    stopwatch.message()
                    visible = thoughts.add(delta) if self._has_parts else delta
                    written.add(visible)
                    scores.add(delta)
                    answer.add(visible)
                    reason = delta.finish.reason if delta.finish else reason
            finally:
                thoughts.end()
                written.end()
        for call in answer.calls:
            named = f"call {call.id} {call.name}" if call.id else f"call {call.name}"
            remark(printable(f"{named} {call.arguments_json} (answer it with /tool TEXT)"))
        scores.print(stream.start, sys.stderr)
        remark(stopwatch.summary(stream.usage, stream.timing, reason))

    def _messages(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.history]


#: By command: its usage, its description and its method; /quit has none.
COMMANDS: dict[str, tuple[str, str, Callable[[Chat, str], None] | None]] = {
    "/reset": ("/reset", "start the conversation over", Chat.reset),
    "/system": ("/system TEXT", "set the instructions; without TEXT remove them", Chat.instruct),
    "/tool": ("/tool TEXT", "answer a tool call of the model (with --tools)", Chat.answer_call),
    "/set": (
        "/set NAME VALUE",
        'set an option: /set temperature 0.2, /set choices ["yes", "no"]; without VALUE return to the model\'s '
        "default; without NAME show the options",
        Chat.set,
    ),
    "/save": ("/save FILE", "write the conversation as JSON: a list of messages", Chat.save),
    "/help": ("/help", "list these commands", Chat.help),
    "/quit": ("/quit", "quit; so does Ctrl-D", None),
}


def chat(target: str, options: Options, system: str = "") -> None:
    """Converse with the user at the terminal, or with the lines of stdin. Raise PhotonError if no server answers."""
    with SyncClient(target, **connection()) as client:
        model = client.model(options.get("model", ""))
        remark(f"{model.name} at {target} · {HINT}")
        # Each prompt begins with all earlier turns; the session has the server keep them cached.
        session: Options = {"session_id": uuid.uuid4().hex, **options}
        has_parts = not {"REASONING", "TOOL_CALLS"}.isdisjoint(model.features)
        Chat(client, session, system, has_parts=has_parts).run(_lines())


def _lines() -> Iterator[str]:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return iter(sys.stdin)
    from photon_grpc.cli.terminal.typed_lines import typed_lines

    return typed_lines(COMMANDS)


def _tool_message(text: str, call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({"tool_call_id": call["id"]} if call["id"] else {})


def _shown(value: Any) -> str:
    """Return an option's value, shortened for one line."""
    message_type = getattr(value, "DESCRIPTOR", None)
    text = message_type.full_name if message_type else " ".join(str(value).split())
    return printable(text) if len(text) <= _MAX_SHOWN_CHARS else f"{printable(text[:_MAX_SHOWN_CHARS])}…"
