"""A caller's request, unchecked: unset options are None.

Made for every call, hence msgspec.Structs: a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from photon_grpc.frontend.tool_calls import CallForm

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


class SamplingAsk(msgspec.Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    #: (id, bias), each id once.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: None: all.
    allowed_token_ids: tuple[int, ...] | None = None
    num_outputs: int | None = None


class StopAsk(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_text: bool = False
    max_duration_s: float | None = None


class OutputAsk(msgspec.Struct, frozen=True):
    #: None: where the model has a tokenizer.
    text: bool | None = None
    token_ids: bool = False
    prompt_token_ids: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    score_token_ids: tuple[int, ...] | None = None

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


class CacheAsk(msgspec.Struct, frozen=True):
    session_id: str = ""
    salt: str = ""
    bypass_prefix_cache: bool = False


class SchedulingAsk(msgspec.Struct, frozen=True):
    priority: int = 0
    max_queue_duration_s: float | None = None
    #: From arrival; what the field says. The call's own deadline is Ask.deadline_s.
    timeout_s: float | None = None


class StreamAsk(msgspec.Struct, frozen=True):
    min_interval_s: float = 0.0
    max_tokens_per_message: int | None = None
    continuous_usage: bool = False
    #: The reader passes nothing on before the end: of a lost engine's output nothing has been sent.
    is_whole: bool = False


class Ask(msgspec.Struct, frozen=True):
    """One Generate or StreamGenerate call. Times are CLOCK_MONOTONIC seconds."""

    input: TextInput | IdsInput | ChatInput | None
    arrival_s: float
    request_id: str = ""
    model: str = ""
    sampling: SamplingAsk = SamplingAsk()
    stop: StopAsk = StopAsk()
    output: OutputAsk = OutputAsk()
    cache: CacheAsk = CacheAsk()
    scheduling: SchedulingAsk = SchedulingAsk()
    stream: StreamAsk = StreamAsk()
    #: The call's own deadline.
    deadline_s: float | None = None
    #: The caller's credential: ids are unique per owner, prefixes shared within one.
    owner: str = ""
    #: Output ids that were produced elsewhere.
    continue_from: tuple[int, ...] = ()
    constraint: ConstraintAsk | None = None
    #: A retried call (grpc-previous-rpc-attempts): it takes the place of its earlier attempt.
    replaces: bool = False
    #: For the record of the request (record.Origin).
    method: str = ""
    traceparent: str = ""
    #: Whose share it counts against while it is prepared.
    caller: str = ""
