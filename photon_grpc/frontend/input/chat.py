"""Chat templates: the model's own Jinja template renders messages to a prompt, sandboxed and bounded in time and size.

The template is trusted, its variables are not. Strings in them are escaped (markers.SpecialTokenEscaper), so that only
the template's own text and its token names can write special tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from photon_grpc.core.ask import ChatInput
from photon_grpc.errors import InvalidRequest, InvalidTemplate, ModelLoadError, PromptTooLong
from photon_grpc.frontend.input.chat_json import parsed
from photon_grpc.frontend.input.chat_variables import message_variables, tool_variables
from photon_grpc.frontend.input.markers import SpecialTokenEscaper

_MAX_MESSAGE = 500
_FILE = "<template>"
_TICK = "photon_tick"
#: Variables that a request's own fields set.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", _TICK}
)


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(self, source: str, token_names: dict[str, str] | None = None, *, max_cpu_s: float = 2.0) -> None:
        """Compile `source`. The template may write `token_names` as bos_token, eos_token and so on.

        Raise ModelLoadError naming the line.
        """
        self.source = source
        self._token_names = dict(token_names or {})
        self._max_cpu_s = max_cpu_s
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
            named = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the chat template is wrong in line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise ModelLoadError("the chat template is nested too deeply") from None
        #: Whether tools reach the prompt.
        self.takes_tools = "tools" in named
        #: Variables that template_args_json may set.
        self.arguments = frozenset(named) - _RESERVED - self._token_names.keys() - self._environment.globals.keys()

    def variables(
        self, chat: ChatInput, *, max_bytes: int | None = None, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """Return the template's variables. Raise InvalidRequest naming the field.

        Raise PromptTooLong if the messages exceed `max_bytes` without white space that templates strip, since rendering
        them would block a thread for seconds.
        """
        if not chat.messages:
            raise InvalidRequest("there are no messages", field="chat.messages")
        arguments: dict[str, Any] = parsed(chat.template_args_json, dict, "chat.template_args_json")
        for name in arguments:
            if name not in self.arguments:
                known = ", ".join(sorted(self.arguments)) or "none"
                raise InvalidRequest(
                    f"the template has no argument {name[:100]!r}; it has: {known}", field="chat.template_args_json"
                )
        messages = [message_variables(message, i) for i, message in enumerate(chat.messages)]
        if max_bytes is not None and _num_bytes(messages) > max_bytes:
            raise _too_long(max_bytes, max_tokens)
        return arguments | {
            "messages": messages,
            "tools": tool_variables(chat) or None,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def escape(
        self, variables: dict[str, Any], make_escaper: Callable[[tuple[str, ...]], SpecialTokenEscaper]
    ) -> tuple[dict[str, Any], SpecialTokenEscaper]:
        """Return `variables` with every string escaped, and the escaper."""
        escaper = make_escaper((self.source, *_strings(variables)))
        return _mapped(variables, escaper.escape), escaper

    def render(self, variables: dict[str, Any], *, max_bytes: int | None = None, max_tokens: int | None = None) -> str:
        """Return the prompt, within `max_cpu_s` seconds of this thread's CPU time.

        Raise InvalidTemplate if the template refuses, fails or takes too long, and PromptTooLong over `max_bytes`
        (by default 64 MiB).
        """
        limit = 2**26 if max_bytes is None else max_bytes
        budget = _Budget(self._max_cpu_s)
        pieces: list[str] = []
        num_bytes = 0
        try:
            for piece in self._template.generate({**self._token_names, **variables, _TICK: budget.tick}):
                budget.tick()
                num_bytes += len(piece.encode(errors="surrogatepass"))
                if num_bytes > limit:
                    raise _too_long(limit, max_tokens)
                pieces.append(piece)
        except (PromptTooLong, InvalidTemplate):
            raise
        except MemoryError:
            raise InvalidTemplate("the template needs too much memory", field="chat") from None
        except Exception as error:  # a template may raise anything
            raise _template_error(error) from None
        return "".join(pieces)


class _Budget:
    """The CPU time of one rendering, checked by a tick in every iteration and macro."""

    def __init__(self, max_cpu_s: float) -> None:
        self._max_cpu_s = max_cpu_s
        self._end = time.thread_time() + max_cpu_s
        self._ticks_to_check = 0

    def tick(self) -> str:
        self._ticks_to_check -= 1
        if self._ticks_to_check < 0:
            self._ticks_to_check = 50
            if time.thread_time() > self._end:
                raise InvalidTemplate(f"the template ran for more than {self._max_cpu_s:g} s", field="chat")
        return ""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks an assistant's text for training and here stands for its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that transformers sets up, with a tick in every loop and macro."""

    intercepted_binops = frozenset({"*", "**", "+"})
    #: The longest string or list that arithmetic may make.
    MAX_SIZE = 2**26

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for block in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            tick = nodes.ExprStmt(call).set_lineno(block.lineno, override=True).set_environment(self)
            cast(nodes.For, block).body.insert(0, tick)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = {"*": _product_size, "**": _power_size, "+": _sum_size}[operator](left, right)
        if size > self.MAX_SIZE:
            raise SecurityError(f"the result of {operator!r} would be too large")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 1


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    times = left if isinstance(left, int) else right if isinstance(right, int) else 1
    return _size(left) * _size(right) * max(int(times), 1)


def _power_size(left: Any, right: Any) -> int:
    is_whole = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() * max(right, 1) if is_whole else 1


def _sum_size(left: Any, right: Any) -> int:
    return _size(left) + _size(right)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode as JSON, unlike Jinja's own filter without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _template_error(error: Exception) -> InvalidTemplate:
    line = 0
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in (_FILE, "<unknown>"):
            line = step.tb_lineno
        step = step.tb_next
    text = "it recurs too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    where = f"line {line} of the chat template" if line else "the chat template"
    return InvalidTemplate(f"{where}: {text[:_MAX_MESSAGE]}", field="chat")


def _num_bytes(messages: list[dict[str, Any]]) -> int:
    values = [[message["content"], message.get("tool_calls")] for message in messages]
    return sum(len(text.strip().encode(errors="surrogatepass")) for text in _strings(values))


def _too_long(max_bytes: int, max_tokens: int | None) -> PromptTooLong:
    needed = max_tokens and max_tokens + 1
    return PromptTooLong(f"the chat takes more than {max_bytes} bytes", field="chat", needed=needed, limit=max_tokens)


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in `value`, including keys, in no particular order."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with every string changed, including keys, since callers write those, too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value
