"""Tokenizers and chat templates for these tests: short ones with the behaviour of real model families."""

from functools import cache

from verl.config.sections.data import SFTDataConfig
from verl.data.conversations.formats import example_of
from verl.data.conversations.tokens import ConversationEncoder
from verl.models.tiny import CHAT_TEMPLATE, make_tokenizer

MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# a default system message, tools in the system message, calls inside <tool_call>, results as a user turn
QWEN25 = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Be good.{% endif %}"
    "{% if tools %}{{ '\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>{{ '\n' }}"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# rewrites history: reasoning stays only after the last question, and the last turn always gets a block for it
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant{{ '\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}<|im_end|>{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# no system role, strict alternation, no generation prompt
MISTRAL = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
# the system message goes into the last message if that is the user's: it is gone as soon as there is an answer
MISTRAL_LAST_USER = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last and messages[0].role == 'system' %} {{ messages[0].content }}\n\n{% endif %} {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# the generation prompt opens a thought that the rendering of the answer no longer has
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)

# template, its special tokens, the last of them ends a turn
FAMILIES = {
    "chatml": (CHAT_TEMPLATE, ("<|im_end|>",)),
    "marked_chatml": (MARKED_CHATML, ("<|im_end|>",)),
    "llama3": (LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "qwen2.5": (QWEN25, ("<|im_end|>",)),
    "qwen3": (QWEN3, ("<|im_end|>",)),
    "mistral": (MISTRAL, ("<s>", "</s>")),
    "mistral_last_user": (MISTRAL_LAST_USER, ("<s>", "</s>")),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "r1": (R1, ("<|User|>", "<|Assistant|>", "<|eos|>")),
}


def with_template(template, specials=("<|im_end|>",)):
    """The byte-level tokenizer of verl/models/tiny.py with other special tokens and another template."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(specials), special_tokens=True)
    tokenizer.eos_token = specials[-1]
    tokenizer.chat_template = template
    return tokenizer


@cache
def tokenizer_of(family):
    return with_template(*FAMILIES[family])


def encode(tokenizer, row, **settings):
    """The sequences of a row, uncut."""
    config = SFTDataConfig(**settings)
    return ConversationEncoder(tokenizer, config).encode(example_of(row, config), "here")


def shown(tokenizer, sequence):
    """The text of a sequence, with what trains in [[ ]]."""
    text = ""
    ids, mask = sequence.input_ids.tolist(), sequence.loss_mask.tolist()
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            part = tokenizer.decode(ids[start:end])
            text += f"[[{part}]]" if mask[start] else part
            start = end
    return text


def chat(*contents, system=None):
    """User and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + messages
