"""The chat template of the demo's model, in the manner of Qwen3.5's: what an agent loop relies on, and no more.

- Turns are `<|im_start|>role\n…<|im_end|>\n`; an assistant turn is `<think>\n…\n</think>\n\n…`.
- Think blocks stay in all turns after the last real question. A user turn wrapped in `<tool_response>` is no
  question, so an agent's earlier plans stay in its prompt, and each turn's prompt extends the last one.
- Thinking is off by default, as in Qwen3.5's small models: without `enable_thinking=True` the reply opens with an
  empty think block.
- Images and videos become pad tokens between vision marks. Function definitions (`tools`) are refused: this
  model's calls are JSON that its system prompt describes.
"""

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- elif content is defined and content is not none -%}
        {{- raise_exception('A message content must be text or a list of parts.') -}}
    {%- endif -%}
{%- endmacro -%}

{%- macro turn(role, body) -%}
    {{- '<|im_start|>' + role + '\n' + body + '<|im_end|>\n' -}}
{%- endmacro -%}

{%- if tools -%}
    {{- raise_exception('This template takes no function definitions; describe the tools in the system message.') -}}
{%- endif -%}

{#- Where the last real question stands: results of tools come as user turns too, but are wrapped. -#}
{%- set found = namespace(question=-1) -%}
{%- for message in messages -%}
    {%- set body = text_of(message.content) | trim -%}
    {%- set wrapped = body.startswith('<tool_response>') and body.endswith('</tool_response>') -%}
    {%- if message.role == 'user' and not wrapped -%}
        {%- set found.question = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- if found.question < 0 -%}
    {{- raise_exception('No user query found in messages.') -}}
{%- endif -%}

{%- for message in messages -%}
    {%- set body = text_of(message.content) | trim -%}
    {%- if message.role == 'system' -%}
        {%- if not loop.first -%}
            {{- raise_exception('System message must be at the beginning.') -}}
        {%- endif -%}
        {{- turn('system', body) -}}
    {%- elif message.role == 'user' -%}
        {{- turn('user', body) -}}
    {%- elif message.role == 'tool' -%}
        {#- Neighbouring results share one user turn. -#}
        {%- if not loop.previtem or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' + body + '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- set plan = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set plan = message.reasoning_content -%}
        {%- elif '</think>' in body -%}
            {%- set plan = body.split('</think>')[0].split('<think>')[-1] -%}
            {%- set body = body.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {%- if loop.index0 > found.question -%}
            {%- set body = '<think>\n' + plan | trim + '\n</think>\n\n' + body -%}
        {%- endif -%}
        {{- turn('assistant', body) -}}
    {%- else -%}
        {{- raise_exception('Unexpected message role.') -}}
    {%- endif -%}
{%- endfor -%}

{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n<think>\n' -}}
    {%- if enable_thinking is not defined or enable_thinking is not true -%}
        {{- '\n</think>\n\n' -}}
    {%- endif -%}
{%- endif -%}
""".strip()
