"""Prompts, suffixes and calls against the package `renderers` with hand-written formats of model families."""

import asyncio
import json
import random

import pytest

from tests.agents.agents_of_users import SCHEMAS
from tests.data.conversations.templates import LLAMA3, with_template
from verl.agents.continuity import ChatContinuity
from verl.agents.parsers import ToolParser

renderers = pytest.importorskip("renderers", reason="the package renderers is not installed", exc_type=ImportError)

# as Qwen3's, without its thoughts
QWEN3 = (
    "{% set h = '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>' %}"
    "{% set f = '\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\' %}'
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ h }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{{ f }}<|im_end|>{{ '\n' }}"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>{{ '\n' }}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{{ '\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eom_id|>")
WORDS = ["so", "então", "数", "🙂", "\n\n", "{", "a\tb", "  ", "5"]


def qwen3():
    tokenizer = with_template(QWEN3, (*MARKS, "<|im_end|>"))
    return tokenizer, renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig(thinking_retention="all"))


def llama3():
    tokenizer = with_template(LLAMA3, (*LLAMA_MARKS, "<|eot_id|>"))
    return tokenizer, renderers.create_renderer(tokenizer, renderers.Llama3RendererConfig())


def text(rng):
    return "x" + "".join(rng.choices(WORDS, k=rng.randint(0, 6)))  # no space around it: Llama's template takes it away


@pytest.mark.parametrize("tools", [None, SCHEMAS])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be good."}]])
def test_prompts_are_equal(tools, system):
    tokenizer, oracle = qwen3()
    messages = [*system, {"role": "user", "content": "How much is 2 + 3? ünï"}]
    assert ChatContinuity(tokenizer).prompt(messages, tools) == oracle.render_ids(
        messages, tools=tools, add_generation_prompt=True
    )


@pytest.mark.parametrize("family", [qwen3, llama3])
def test_turns_follow_what_was_sampled_alike(family):
    tokenizer, oracle = family()
    continuity, rng, end = ChatContinuity(tokenizer), random.Random(7), tokenizer.eos_token_id
    for _ in range(50):
        prompt = continuity.prompt([{"role": "user", "content": text(rng)}])
        for _ in range(rng.randint(1, 5)):
            sampled = tokenizer.encode(text(rng), add_special_tokens=False)
            sampled += [end] * (rng.random() < 0.8)  # else a limit has cut the turn
            tool = family is qwen3 and rng.random() < 0.6
            count = rng.randint(1, 3) if tool else 1
            new = [{"role": "tool" if tool else "user", "content": text(rng).strip()} for _ in range(count)]
            ours = [*prompt, *sampled, *continuity.suffix(new, sampled[-1], [end])]
            assert ours == oracle.bridge_to_next_turn(prompt, sampled, new).token_ids
            prompt = ours


def test_calls_are_read_alike():
    tokenizer, oracle = qwen3()
    parser, rng = ToolParser.get_tool_parser("hermes", tokenizer), random.Random(8)
    num_calls = 0
    for _ in range(100):
        calls = [{"name": "echo", "arguments": {"text": text(rng)}} for _ in range(rng.randint(0, 3))]
        written = "".join(f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
        ids = tokenizer.encode(text(rng) + written, add_special_tokens=False) + [tokenizer.eos_token_id]
        _, ours = asyncio.run(parser.extract_tool_calls(ids, SCHEMAS))
        theirs = oracle.parse_response(ids).tool_calls or []
        assert [(c.name, c.parsed()) for c in ours] == [(c.name, c.arguments) for c in theirs]
        num_calls += len(ours)
    assert num_calls > 100
