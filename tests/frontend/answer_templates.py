"""Chat templates that write reasoning and tool calls as those of real families do, in few lines."""

QWEN3 = r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '\nReturn <tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if '</think>' in message.content %}{{- message.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

#: The prompt itself opens the reasoning.
DEEPSEEK = r"""
{%- for message in messages %}{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|' + message['role'] + '|>' + content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}
"""

LLAMA3 = r"""
{{- bos_token }}{%- if tools %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
