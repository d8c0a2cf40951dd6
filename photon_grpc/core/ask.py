"""A caller's request, unchecked: unset options are None.

Made for every call, hence msgspec.Structs: a frozen dataclass takes ten times as long to make. Options have the fields
that `core.fields` declares, durations with their unit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import msgspec

from photon_grpc.core.call_form import CallForm
from photon_grpc.core.fields import ask_columns
from photon_grpc.errors import Cancelled, DeadlinePassed, InternalFailure, PhotonError

#: Clients give up by their own clock, a little before the server's: `grpc-timeout` is rounded up by as much as 1 %.
_EARLY_S, _EARLY_SHARE = 0.02, 0.01
#: Of a constraint.
Kind = Literal["json_schema", "json_object", "regex", "choices", "grammar", "protobuf", "tool_calls"]


class TextInput(msgspec.Struct, frozen=True):
    text: str
    #: Spellings of special tokens become those tokens.
    parse_special_tokens: bool = False
    #: BOS and what else the tokenizer adds around text.
    add_special_tokens: bool = True


class IdsInput(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls_json: str = ""


class ToolChoice(msgspec.Struct, frozen=True):
    """The output must call tools."""

    #: Of the one that it calls; None: any.
    name: str | None = None


class ChatInput(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    template_args_json: str = ""
    tools_json: str = ""
    add_generation_prompt: bool = True
    #: None: the model decides.
    tool_choice: ToolChoice | None = None


def _columns(group: str) -> Any:
    return msgspec.defstruct(f"_{group.title()}", ask_columns(group), frozen=True)


class SamplingAsk(_columns("sampling")):  # type: ignore[misc]
    """`logit_bias` holds (id, bias), each id once; of `allowed_token_ids` None is all."""


class StopAsk(_columns("stop")):  # type: ignore[misc]
    pass


class OutputAsk(_columns("output")):  # type: ignore[misc]
    """`text` is None where the model decides: it is sent if there is a tokenizer."""

    @property
    def is_scored(self) -> bool:
        return (self.logprobs, self.prompt_logprobs, self.score_token_ids) != (None, None, None)


class ConstraintAsk(msgspec.Struct, frozen=True):
    """The form of every output."""

    kind: Kind
    #: Of json_schema, regex and grammar; of protobuf the grammar of its JSON, in Lark; of tool_calls the tools.
    text: str = ""
    #: Of tool_calls the name of the one that is called; none: any.
    choices: tuple[str, ...] = ()
    #: Of tool_calls.
    form: CallForm | None = None


#: Of typed output whose grammar is written once the request has its place (`Frontend.stream`).
UNWRITTEN = ConstraintAsk("protobuf")


class CacheAsk(_columns("cache")):  # type: ignore[misc]
    pass


class SchedulingAsk(_columns("scheduling")):  # type: ignore[misc]
    """`timeout_s` counts from arrival; the call's own deadline is in Origin."""


class StreamAsk(_columns("stream")):  # type: ignore[misc]
    #: The reader passes nothing on before the end: of a lost engine's output nothing has been sent.
    is_whole: bool = False


class Origin(msgspec.Struct):
    """Where a request comes from: known when it comes, but for its model, and its deadline where a field says an
    earlier one. Times are CLOCK_MONOTONIC seconds."""

    arrival_s: float
    request_id: str = ""
    #: The name of the caller's API key: ids are unique per owner, prefixes shared within one.
    owner: str = ""
    #: "Generate", "StreamGenerate", "MultiplexGenerate"; empty in a program without a server.
    method: str = ""
    #: As it is served; empty for a name that is not.
    model: str = ""
    #: The earlier of the call's own and the field's.
    deadline_s: float | None = None
    #: The W3C header as it came, not validated.
    traceparent: str = ""
    #: Whose share it counts against while it is prepared: the API key, else the host that it came from.
    caller: str = ""

    def reason(self, error: BaseException | None) -> str:
        """Return the reason of a request that ended by `error`; "" for None. A cancelled call has lost its caller, or
        run out of time."""
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
    #: A retried call (grpc-previous-rpc-attempts): it takes the place of its earlier attempt.
    replaces: bool = False


#: Its groups are the very objects that an Ask has which leaves them out.
NOTHING_SET = Ask(None, Origin(0.0))
