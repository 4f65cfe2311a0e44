"""A tokenizer with control tokens of chats, and chat templates of our own in the forms that published ones take."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|end|>"),
]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are no control tokens."""
TEXT = "the answer of the model is what the user has asked for, system and tools or not\n\n"


def make_tokenizer(folder: Path, template: str = "") -> str:
    """Write a byte-level tokenizer of some 325 ids."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=342, initial_alphabet=alphabet))
    inner.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def without_marks(template: str) -> str:
    """The same template as most are published: it does not mark answers."""
    for tag in ("{%- generation -%}", "{% generation %}", "{%- endgeneration -%}", "{% endgeneration %}"):
        template = template.replace(tag, "" if tag.startswith("{% ") else "{%- if true -%}{%- endif -%}")
    return template


_CHATML_TURN = """\
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"""
_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_LLAMA_3 = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation -%}{{ message['content'] | trim + '<|eot_id|>' }}{%- endgeneration -%}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
_MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system, turns = messages[0].content + '\n\n', messages[1:] %}
{%- else %}{%- set system, turns = '', messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- else %}
        {%- generation -%}{{ ' ' + message.content + eos_token }}{%- endgeneration -%}
    {%- endif %}
{%- endfor %}
"""
_GEMMA = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content | trim + '\n\n' %}
    {%- elif message.role == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation -%}{{ message.content | trim + '<end_of_turn>' }}{%- endgeneration -%}{{ '\n' }}
    {%- else %}
        {{- '<start_of_turn>user\n' + ns.system + message.content | trim + '<end_of_turn>\n' }}
        {%- set ns.system = '' %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
_DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' }}{%- generation -%}{{ message.content + eos_token }}{%- endgeneration -%}
    {%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""
_QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation -%}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration -%}
        {{- '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
_THINKING = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last_user and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation -%}{{- content + '<|im_end|>' }}{%- endgeneration -%}
    {%- else %}{{- content + '<|im_end|>' }}{%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
_REASONING = """\
{%- for message in messages %}
    {{- '<|' + ('Assistant' if message.role == 'assistant' else 'User') + '|>' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}
            {%- generation -%}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endgeneration -%}
        {%- endif %}
        {%- generation -%}{{- message.content + '<|end|>' }}{%- endgeneration -%}
    {%- else %}{{- message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""
_WORDS = """\
{%- for message in messages %}
    {{- '### ' + message.role | capitalize + ':\n' }}
    {%- if message.role == 'assistant' %}{%- generation -%}{{ message.content + eos_token }}{%- endgeneration -%}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Assistant:\n' }}{%- endif %}
"""
_SYSTEM = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
_CHATML = f"{{% for message in messages %}}{_CHATML_TURN}{{% endfor %}}{_CHATML_PROMPT}"
TEMPLATES = {
    "chatml": _CHATML,
    "chatml, system by default": _SYSTEM + _CHATML,
    "headers, as Llama 3": _LLAMA_3,
    "[INST], as Mistral": _MISTRAL,
    "turns, as Gemma": _GEMMA,
    "roles as tokens, as DeepSeek": _DEEPSEEK,
    "tools, as Qwen": _QWEN_TOOLS,
    "thinking of earlier turns stripped, as Qwen 3": _THINKING,
    "reasoning apart": _REASONING,
    "roles as words": _WORDS,
}
"""With a generation block around what the model writes, up to the token that ends it."""
ENDS = dict.fromkeys(TEMPLATES, "<|im_end|>") | {
    "headers, as Llama 3": "<|eot_id|>",
    "[INST], as Mistral": "</s>",
    "turns, as Gemma": "<end_of_turn>",
    "roles as tokens, as DeepSeek": "</s>",
    "reasoning apart": "<|end|>",
    "roles as words": "</s>",
}
"""The token that ends an answer."""
