"""The options of a request, each declared once: type, bounds, what unset means, and how a command line spells it.

The codec, the checks, the structs of a request, the keywords of clients and of `LLM`, and the command-line flags are
made from these declarations; a test compares the protos with them. Standard library only: the client installs without
msgspec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict, get_type_hints

from photon_grpc.core.field import ANSWERS, CONVERSATIONS, ONE_REQUEST, Field, Interval


class SamplingOptions(TypedDict, total=False):
    """Options of sampling."""

    temperature: Annotated[float, Field(help="0 is greedy.", bounds=Interval(0.0), neutral=1.0)]
    top_p: Annotated[
        float,
        Field(
            help="Sample from the likeliest tokens with this share of probability.",
            bounds=Interval(0, 1, is_open=True),
            neutral=1.0,
            effect="filter",
        ),
    ]
    top_k: Annotated[
        int,
        Field(
            help="Sample from this many of the likeliest tokens; -1: all.",
            bounds=Interval(1, 2**31 - 1, off=-1),
            neutral=-1,
            effect="filter",
        ),
    ]
    min_p: Annotated[
        float,
        Field(
            help="Sample from tokens at least this likely relative to the likeliest.",
            bounds=Interval(0, 1),
            neutral=0.0,
            effect="filter",
        ),
    ]
    repetition_penalty: Annotated[
        float,
        Field(
            help="Divide logits of tokens in prompt or output; 1: leave them.",
            bounds=Interval(0.001, 1000),
            neutral=1.0,
            effect="penalty",
        ),
    ]
    presence_penalty: Annotated[
        float,
        Field(
            help="Subtract from the logits of tokens in the output.",
            bounds=Interval(-2, 2),
            neutral=0.0,
            effect="penalty",
        ),
    ]
    frequency_penalty: Annotated[
        float,
        Field(
            help="Subtract once for each time a token is in the output.",
            bounds=Interval(-2, 2),
            neutral=0.0,
            effect="penalty",
        ),
    ]
    seed: Annotated[
        int,
        Field(
            help="Seed of the sampling noise; unset: the server chooses one.",
            bounds=Interval(0, 2**64 - 1),
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float],
        Field(
            help="Add X to the logit of this token",
            metavar="ID=X",
            bounds=Interval(-100, 100),
            max_items="limits.max_logit_bias",
            default=(),
        ),
    ]
    allowed_token_ids: Annotated[
        Sequence[int],
        Field(help="Sample only these tokens", flag="--allowed-token-id", max_items="vocab_size"),
    ]
    num_outputs: Annotated[
        int,
        Field(
            help="Independent outputs of the one prompt.",
            bounds=Interval(1, "max_num_outputs"),
            verbs=ANSWERS,
        ),
    ]


class StopOptions(TypedDict, total=False):
    """Options of the end of an output."""

    max_tokens: Annotated[int, Field(help="Most tokens to produce; unset: as many as fit.", bounds=Interval(1))]
    min_tokens: Annotated[int, Field(help="Tokens to produce before the output may end or stop.", bounds=Interval(0))]
    stop_strings: Annotated[
        Sequence[str],
        Field(help="End before this text appears", flag="--stop", max_items="limits.max_stop_strings", default=()),
    ]
    stop_token_ids: Annotated[
        Sequence[int],
        Field(help="End when this token is sampled", flag="--stop-token-id", max_items="vocab_size", default=()),
    ]
    ignore_eos: Annotated[
        bool, Field(help="Treat the end of text as any other token and continue after it.", default=False)
    ]
    include_stop_in_text: Annotated[bool, Field(help="Include the text or token that ended the output.", default=False)]
    max_duration: Annotated[
        float, Field(help="End after this long and keep what was produced.", bounds=Interval(0.0), unit="s")
    ]


class ConstraintOptions(TypedDict, total=False):
    """Options of the form of an output; a request has at most one of them."""

    #: May be a Pydantic model class or a dataclass.
    json_schema: Annotated[
        str | Mapping[str, Any] | type,
        Field(help="The output is JSON that validates against this JSON Schema.", metavar="FILE"),
    ]
    json_object: Annotated[bool, Field(help="The output is a JSON object.")]
    regex: Annotated[str, Field(help="The output matches this regular expression as a whole.", metavar="REGEX")]
    choices: Annotated[Sequence[str], Field(help="The output is one of these", flag="--choice")]
    grammar: Annotated[str, Field(help="The output is a sentence of this Lark or EBNF grammar.", metavar="FILE")]
    #: A generated class, for `protobuf`.
    message_type: Annotated[
        type[Any],
        Field(
            help="The output is JSON of this message, which the file, a serialized FileDescriptorSet, describes.",
            flag="--protobuf",
            metavar="FILE MESSAGE",
        ),
    ]


class OutputOptions(TypedDict, total=False):
    """Options of what an answer contains."""

    text: Annotated[bool, Field(is_for_llm=False)]
    token_ids: Annotated[
        bool, Field(help="JSON holds the ids of the output, too.", default=False, is_for_llm=False, verbs=ANSWERS)
    ]
    prompt_token_ids: Annotated[
        bool, Field(help="JSON holds the ids of the prompt, too.", default=False, is_for_llm=False, verbs=ONE_REQUEST)
    ]
    logprobs: Annotated[
        int,
        Field(help="Show how likely each token was, and the N likeliest.", bounds=Interval(0, "max_logprobs")),
    ]
    prompt_logprobs: Annotated[int, Field(help="Like --logprobs, for the prompt.", bounds=Interval(0, "max_logprobs"))]
    score_token_ids: Annotated[
        Sequence[int],
        Field(help="Show how likely this token was", flag="--score-token-id", max_items="limits.max_logprobs"),
    ]
    skip_special_tokens: Annotated[
        bool, Field(help="Keep special tokens in the text.", flag="--keep-special-tokens", default=True)
    ]


class CacheOptions(TypedDict, total=False):
    """Options of the prefix cache."""

    session_id: Annotated[
        str,
        Field(
            help="Keep the prompt in the server's prefix cache for longer.",
            metavar="NAME",
            max_chars=256,
            default="",
            verbs=CONVERSATIONS,
        ),
    ]
    salt: Annotated[
        str, Field(help="Share cached prefixes only with requests of the same salt.", max_chars=256, default="")
    ]
    bypass_prefix_cache: Annotated[bool, Field(help="Neither read nor write the server's prefix cache.", default=False)]


class SchedulingOptions(TypedDict, total=False):
    """Options of priority, time limits and speculation; timeout is also the deadline of the call."""

    priority: Annotated[int, Field(help="Higher runs first.", bounds=Interval(-(2**31), 2**31 - 1), default=0)]
    max_queue_duration: Annotated[
        float,
        Field(help="Give up when waiting for a place takes longer.", bounds=Interval(0.0), unit="s", is_for_llm=False),
    ]
    timeout: Annotated[float, Field(help="Give up after this long.", bounds=Interval(0.0), unit="s", is_for_llm=False)]
    speculation: Annotated[
        int, Field(help="Most tokens that a step drafts; 0: none; unset: as many as pay.", bounds=Interval(0, 7))
    ]


class StreamOptions(TypedDict, total=False):
    """Options of the messages of a stream."""

    min_interval: Annotated[float, Field(bounds=Interval(0.0), unit="s", default=0.0, is_for_llm=False)]
    max_tokens_per_message: Annotated[int, Field(bounds=Interval(1), is_for_llm=False)]
    continuous_usage: Annotated[bool, Field(default=False, is_for_llm=False)]
    heartbeat_interval: Annotated[float, Field(bounds=Interval(1.0), unit="s", is_for_llm=False)]


class ChatOptions(TypedDict, total=False):
    """Options of a chat."""

    template_args_json: Annotated[
        str,
        Field(
            help="Variables for the chat template, as JSON: '{\"enable_thinking\": false}'.",
            flag="--template-args",
            metavar="JSON",
            verbs=CONVERSATIONS,
        ),
    ]
    #: Each `{"name": ..., "description": ..., "parameters": {...}}`, or that in the form of OpenAI's API.
    tools: Annotated[
        Sequence[Mapping[str, Any]],
        Field(
            help="Tools that the model may call: a JSON array.",
            metavar="FILE",
            verbs=CONVERSATIONS,
        ),
    ]
    tools_json: Annotated[
        str,
        Field(
            help="As --tools, a JSON array in the chat template's own form.",
            metavar="FILE",
            verbs=CONVERSATIONS,
        ),
    ]
    #: "auto" (unset), "required" or the name of the tool that is called.
    tool_choice: Annotated[
        str,
        Field(
            help="required: the output calls tools; or the name of the one that it calls.",
            metavar="CHOICE",
            verbs=CONVERSATIONS,
        ),
    ]
    add_generation_prompt: Annotated[bool, Field(default=True)]


class RequestOptions(TypedDict, total=False):
    """Options of the request as a whole."""

    model: Annotated[str, Field(help="A model that it serves; unset: its default.", metavar="NAME", is_for_llm=False)]
    request_id: Annotated[
        str,
        Field(
            help="The request's name in the server's log and traces.",
            metavar="ID",
            max_chars=128,
            is_for_llm=False,
            verbs=ONE_REQUEST,
        ),
    ]
    labels: Annotated[
        Mapping[str, str],
        Field(
            help="A note for the server's log, traces and metrics",
            flag="--label",
            metavar="KEY=VALUE",
            max_chars=128,
            default=(),
            is_for_llm=False,
            verbs=ANSWERS,
        ),
    ]
    parse_special_tokens: Annotated[bool, Field(help="Parse special tokens spelled out in the prompt.", verbs=ANSWERS)]
    continue_from: Annotated[
        Sequence[int],
        Field(
            help="Continue after these tokens of an output, which are not shown again.",
            metavar="ID,…",
            verbs=ONE_REQUEST,
        ),
    ]


class Options(
    RequestOptions,
    SamplingOptions,
    StopOptions,
    ConstraintOptions,
    OutputOptions,
    CacheOptions,
    SchedulingOptions,
    StreamOptions,
    ChatOptions,
    total=False,
):
    """Options of a generation; durations are seconds, and unset means the model's default.

    docs/api.md says what each means.
    """


_GROUPS: dict[str, Any] = {
    "": RequestOptions,
    "sampling": SamplingOptions,
    "stop": StopOptions,
    "structured_output": ConstraintOptions,
    "output": OutputOptions,
    "cache": CacheOptions,
    "scheduling": SchedulingOptions,
    "stream": StreamOptions,
    "chat": ChatOptions,
}


def _declared(group: str, options: Any) -> dict[str, Field]:
    hints = get_type_hints(options, include_extras=True)
    return {
        name: replace(hint.__metadata__[0], name=name, group=group, kind=hint.__origin__)
        for name, hint in hints.items()
    }


#: All options by name; names are unique across groups.
FIELDS: Mapping[str, Field] = {
    name: field for group, options in _GROUPS.items() for name, field in _declared(group, options).items()
}


def fields_of(group: str) -> tuple[Field, ...]:
    """Return the options in one message of GenerateRequest, by its field name."""
    return tuple(field for field in FIELDS.values() if field.group == group)


#: The neutral value of each sampling parameter that has one.
NEUTRAL: dict[str, Any] = {field.name: field.neutral for field in FIELDS.values() if field.neutral is not None}


def ask_columns(group: str) -> list[tuple[str, Any, Any]]:
    """List name, type and default of the options in an Ask; the default is None if unset differs from every value."""
    return [
        (field.attribute, field.stored_kind | None if field.default is None else field.stored_kind, field.default)
        for field in fields_of(group)
    ]
