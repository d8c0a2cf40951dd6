"""Chat templates as Gemma 3, Phi-4-mini, OLMo 2 and Mistral have them: transformers' prompts, and their calls."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Reference
from transformers import PreTrainedTokenizerFast

from photon_grpc.core.ask import ChatInput, ChatMessage
from photon_grpc.core.call_form import LISTED
from photon_grpc.errors import InvalidTemplate
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.frontend.output.answer import PLAIN, AnswerFormat
from tests.frontend.small_tokenizers import definition
from tests.frontend.tool_templates import MISTRAL

GEMMA3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}"""

PHI4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not "
    "none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + "
    "'<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
    "message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + "
    "eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)

TEMPLATES = {"gemma3": GEMMA3, "phi4-mini": PHI4_MINI, "olmo2": OLMO2, "mistral": MISTRAL}
NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
CHATS = [
    [("user", " What? ")],
    [("user", "a\n"), ("assistant", "b"), ("user", "日本 <x>")],
    [("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c")],
]


def chat_of(turns: list[tuple[str, str]]) -> ChatInput:
    return ChatInput(tuple(ChatMessage(role, content) for role, content in turns))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", CHATS)
def test_prompts_are_those_of_transformers(name: str, turns: list[tuple[str, str]]) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Reference.from_str(definition("byte_level")), chat_template=TEMPLATES[name], **NAMES
    )
    expected = reference.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, tokenize=False
    )
    template = ChatTemplate(TEMPLATES[name], NAMES)
    assert template.render(template.variables(chat_of(turns))) == expected


def test_what_a_template_refuses_is_told() -> None:
    template = ChatTemplate(GEMMA3, NAMES)
    with pytest.raises(InvalidTemplate, match="roles must alternate"):
        template.render(template.variables(chat_of([("user", "a"), ("user", "b")])))


def test_only_mistrals_template_shows_a_syntax_of_calls() -> None:
    formats = {name: AnswerFormat.of(template) for name, template in TEMPLATES.items()}
    assert formats == dict.fromkeys(TEMPLATES, PLAIN) | {"mistral": AnswerFormat(calls=LISTED)}
