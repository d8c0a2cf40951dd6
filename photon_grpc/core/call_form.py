"""Forms in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The places of call objects in a text."""

    open: str
    #: Empty: nothing closes a call.
    close: str = ""
    #: Also without `open`: first of all, and behind another call, perhaps after a semicolon.
    is_bare: bool = False
    #: The key under which models write them; any of _ARGUMENTS is read.
    arguments: str = "arguments"


#: Hermes, Qwen: text around any number of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
TAGGED = CallSyntax("<tool_call>", "</tool_call>")
#: Llama 3: nothing but `{"name": …, "parameters": {…}}`, perhaps behind a special token.
BARE = CallSyntax("<|python_tag|>", is_bare=True, arguments="parameters")


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of an output that is calls and nothing else."""

    syntax: CallSyntax
    #: What comes before them: none, some or none, or the rest of one that the prompt has opened.
    reasoning: Literal["none", "optional", "open"] = "none"
