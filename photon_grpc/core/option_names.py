"""Messages for unknown options, some of which callers know by the names of other APIs."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: Name in the API of OpenAI, vLLM or transformers -> our name.
_OURS = {
    "stop": "stop_strings",
    "n": "num_outputs",
    "num_return_sequences": "num_outputs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "functions": "tools",
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

#: Least similarity of a misspelt name. length_penalty and presence_penalty have 0.67.
_LEAST_RATIO = 0.7

#: Options of other APIs without a counterpart here -> what to use instead.
_INSTEAD = {
    "messages": 'the messages of a chat are the prompt: [{"role": "user", "content": "..."}]',
    "input": "the input is the prompt, the first argument",
    "response_format": "json_schema= takes a schema or a class, json_object=True any object",
    "text_format": "json_schema= takes a schema or a class",
    "stream": "stream(...) gives an output as it is produced, generate(...) the whole",
    "extra_headers": "metadata of the client goes with every call",
    "model": "the model is that of LLM(model)",
    "echo": "the prompt is not repeated in the output; prompt_logprobs= scores its tokens",
    "best_of": "num_outputs= samples several outputs; rank them by their logprobs",
    "do_sample": "temperature=0 always takes the most probable token, a higher one samples",
    "user": "the caller is known by its API key; session_id= names a conversation",
    "suffix": "filling in the middle is not supported; write the text after the gap into the prompt",
    "length_penalty": "there is no beam search; max_tokens= bounds the length",
}


def our_name(name: str, known: Collection[str]) -> str:
    """Return the option in `known` that `name` means or resembles; "" if there is none."""
    ours = _OURS.get(name, "")
    if ours in known:
        return ours
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_RATIO)), "")


def unknown_option(name: str, known: Collection[str]) -> str:
    """Return the message of the TypeError for an unknown option."""
    message = f"there is no option {name!r}"
    if name in _INSTEAD:
        return f"{message}; {_INSTEAD[name]}"
    ours = our_name(name, known)
    if not ours:
        return message
    return f"{message}; {name}= is called {ours}= here" if name in _OURS else f"{message}; did you mean {ours!r}?"
