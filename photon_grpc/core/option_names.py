"""Messages for options that do not exist: callers know some by the names of other APIs."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: OpenAI's name, vLLM's or transformers' -> ours.
_OURS = {
    "stop": "stop_strings",
    "n": "num_outputs",
    "num_return_sequences": "num_outputs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "echo": "prompt_logprobs",
    "tools": "tools_json",
    "functions": "tools_json",
    "function_call": "tool_choice",
    "reasoning_effort": "template_args_json",
    "chat_template_kwargs": "template_args_json",
    "prompt_cache_key": "session_id",
    "stream_options": "continuous_usage",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
}

#: Those that are no option here.
_INSTEAD = {
    "messages": 'the messages of a chat are the prompt: [{"role": "user", "content": "..."}]',
    "input": "the input is the prompt, the first argument",
    "response_format": "json_schema= takes a schema or a class, json_object=True any object",
    "text_format": "json_schema= takes a schema or a class",
    "stream": "stream(...) gives an output as it is produced, generate(...) the whole",
    "extra_headers": "metadata of the client goes with every call",
    "model": "the model is that of LLM(model)",
}


def our_name(name: str, known: Collection[str]) -> str:
    """The option of `known` that `name` means or resembles; "" where there is none."""
    ours = _OURS.get(name, "")
    return ours if ours in known else next(iter(difflib.get_close_matches(name, known, n=1)), "")


def unknown_option(name: str, known: Collection[str]) -> str:
    """The message of a TypeError."""
    told = f"there is no option {name!r}"
    if name in _INSTEAD:
        return f"{told}; {_INSTEAD[name]}"
    ours = our_name(name, known)
    if not ours:
        return told
    return f"{told}; {name}= is called {ours}= here" if name in _OURS else f"{told}; did you mean {ours!r}?"
