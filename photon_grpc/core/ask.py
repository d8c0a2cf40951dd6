"""A caller's request, unchecked: unset options are None.

These are msgspec.Structs since they are made for every call, and a frozen dataclass takes ten times as long to make.
Options have the fields that `core.fields` declares; the names of durations end with their unit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import msgspec

from photon_grpc.core.call_form import CallForm
from photon_grpc.core.fields import ask_columns
from photon_grpc.core.generation import ToolCall
from photon_grpc.errors import Cancelled, DeadlinePassed, InternalFailure, PhotonError

#: Clients give up by their own clock, a little before the server does: `grpc-timeout` is rounded up by up to 1 %.
_EARLY_S, _EARLY_SHARE = 0.02, 0.01
#: Kind of a constraint.
Kind = Literal["json_schema", "json_object", "regex", "choices", "grammar", "protobuf", "tool_calls"]


class TextInput(msgspec.Struct, frozen=True):
    text: str
    #: Whether spellings of special tokens in the text become those tokens.
    parse_special_tokens: bool = False
    #: Whether to add BOS and whatever else the tokenizer puts around text.
    add_special_tokens: bool = True


class IdsInput(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls_json: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    #: A JSON Schema of its arguments; empty: it takes none.
    parameters_json: str = ""
    #: Whether arguments that a tool_choice requires follow that schema; None: they do.
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """The requirement that the output calls tools."""

    #: The name of the tool to call; None allows any.
    name: str | None = None
    #: Any tool, but only one call; a named one is called once.
    is_one: bool = False


class ChatInput(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    template_args_json: str = ""
    tools_json: str = ""
    add_generation_prompt: bool = True
    #: None lets the model decide.
    tool_choice: ToolChoice | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or "{" in self.tools_json


def _columns(group: str) -> Any:
    return msgspec.defstruct(f"_{group.title()}", ask_columns(group), frozen=True)


class SamplingAsk(_columns("sampling")):  # type: ignore[misc]
    """Sampling options. `logit_bias` holds (id, bias) pairs, each id once; None for `allowed_token_ids` allows all."""


class StopAsk(_columns("stop")):  # type: ignore[misc]
    pass


class OutputAsk(_columns("output")):  # type: ignore[misc]
    """Options of the output. `text` None means that text is sent if the model has a tokenizer."""

    @property
    def is_scored(self) -> bool:
        return (self.logprobs, self.prompt_logprobs, self.score_token_ids) != (None, None, None)


class ConstraintAsk(msgspec.Struct, frozen=True):
    """The form of every output."""

    kind: Kind
    #: The schema, regular expression or grammar; for protobuf a Lark grammar of its JSON; for tool_calls the tools.
    text: str = ""
    #: The choices; for tool_calls the tools of which one is called once, or empty for any calls.
    choices: tuple[str, ...] = ()
    #: For tool_calls only.
    form: CallForm | None = None
    #: For tool_calls only: the field that defines the tools.
    tools_field: Literal["chat.tools", "chat.tools_json"] = "chat.tools_json"


#: The constraint of typed output until its grammar is written, once the request has its place (`Frontend.stream`).
UNWRITTEN = ConstraintAsk("protobuf")


class CacheAsk(_columns("cache")):  # type: ignore[misc]
    pass


class SchedulingAsk(_columns("scheduling")):  # type: ignore[misc]
    """Scheduling options. `timeout_s` counts from arrival; the call's own deadline is in Origin."""


class StreamAsk(_columns("stream")):  # type: ignore[misc]
    #: The reader passes nothing on before the end, so nothing was sent if the engine is lost.
    is_whole: bool = False


class Origin(msgspec.Struct):
    """Where a request comes from. Times are CLOCK_MONOTONIC seconds, except `create_time_s`.

    All is known on arrival except the model, and the deadline if a field sets an earlier one.
    """

    arrival_s: float
    request_id: str = ""
    #: The name of the caller's API key: ids are unique per owner, prefixes shared within one.
    owner: str = ""
    #: "Generate", "StreamGenerate", "MultiplexGenerate"; empty in a program without a server.
    method: str = ""
    #: The served name of the model; empty for an unknown one.
    model: str = ""
    #: The earlier of the call's deadline and that of the field.
    deadline_s: float | None = None
    #: The W3C traceparent header as received, not validated.
    traceparent: str = ""
    #: Whose share of preparation it uses: the API key, else the host that it came from.
    caller: str = ""
    #: When it arrived, in wall-clock seconds since the epoch; only reported.
    create_time_s: float = 0.0
    #: The caller's notes for observers, checked; by key.
    labels: tuple[tuple[str, str], ...] = ()

    def reason(self, error: BaseException | None) -> str:
        """Return the reason of a request that ended with `error`; "" for None.

        A cancelled call has lost its caller or reached its deadline.
        """
        if isinstance(error, PhotonError):
            return error.reason
        if isinstance(error, asyncio.CancelledError):
            return DeadlinePassed.reason if is_out_of_time(self.arrival_s, self.deadline_s) else Cancelled.reason
        return "" if error is None else InternalFailure.reason


def is_out_of_time(arrival_s: float, deadline_s: float | None) -> bool:
    """Return whether a call that ends now, unanswered, has reached its deadline."""
    if deadline_s is None:
        return False
    return time.monotonic() >= deadline_s - _EARLY_S - _EARLY_SHARE * (deadline_s - arrival_s)


class Ask(msgspec.Struct, frozen=True):
    """One request for generation."""

    input: TextInput | IdsInput | ChatInput | None
    origin: Origin
    model: str = ""
    sampling: SamplingAsk = SamplingAsk()
    stop: StopAsk = StopAsk()
    output: OutputAsk = OutputAsk()
    cache: CacheAsk = CacheAsk()
    scheduling: SchedulingAsk = SchedulingAsk()
    stream: StreamAsk = StreamAsk()
    #: Output ids that were produced elsewhere.
    continue_from: tuple[int, ...] = ()
    constraint: ConstraintAsk | None = None
    #: This is a retried call (grpc-previous-rpc-attempts), which replaces its earlier attempt.
    replaces: bool = False


#: Its groups are the same objects that an Ask gets for groups it leaves out.
NOTHING_SET = Ask(None, Origin(0.0))
