"""The ways in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The marks of a text around the JSON objects that are calls."""

    open: str
    #: Empty if nothing closes a call.
    close: str = ""
    #: Calls may also stand without `open`: at the start, or after another call with an optional semicolon.
    is_bare: bool = False
    #: Calls are the entries of one JSON list.
    is_list: bool = False
    #: The key under which the model writes the arguments; any of _ARGUMENTS is read.
    arguments: str = "arguments"


#: Hermes and Qwen write any number of these within text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
TAGGED = CallSyntax("<tool_call>", "</tool_call>")
#: Llama 3 writes only `{"name": …, "parameters": {…}}`, possibly after a special token.
BARE = CallSyntax("<|python_tag|>", is_bare=True, arguments="parameters")
#: Mistral writes one list `[{"name": …, "arguments": {…}}, …]` after a special token.
LISTED = CallSyntax("[TOOL_CALLS]", is_bare=True, is_list=True)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of an output that consists of calls only."""

    syntax: CallSyntax
    #: The reasoning before the calls: none, optional, or the rest of reasoning that the prompt opened.
    reasoning: Literal["none", "optional", "open"] = "none"
