"""Random conversations with every template: exactly the sampled tokens train, and the rest is context."""

import hashlib
import json
import os
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.agents.agents_of_users import TOOLS
from tests.agents.conftest import TOOLS as TOOL_FILE
from tests.data.conversations.templates import FAMILIES
from verl.agents.agents import Agents
from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.families import EngineFacts
from verl.programs.specs import agent_spec

FAMILY_NAMES = sorted(set(FAMILIES) - {"mistral_last_user"})
PER_FAMILY = 63  # conversations of each: 504 in all
ROLLOUT = "actor_rollout_ref.rollout"
WORDS = ["so", "então", "数", "🙂", "<think>hm</think>", "\n\n", "<tool_call>", "{", "a\tb", "  "]


class Scripted:
    """An engine with turns from a script: calls, several at once, malformed calls, text in between. It keeps its
    samples."""

    weight_version = 4
    facts = EngineFacts()

    def __init__(self, tokenizer):
        self.tokenizer, self.sampled, self.prompts = tokenizer, {}, {}
        self._kept, self._queue = {}, []

    def open(self, params, *, step, keep):
        assert keep
        return self

    def add(self, request):
        if isinstance(request, PromptRequest):
            for i in range(request.num_samples):
                key = (request.ordinal, request.first_sample + i)
                self._kept[key], self.sampled[key], self.prompts[key] = (
                    list(request.token_ids),
                    [],
                    len(request.token_ids),
                )
                self._queue.append((key, request.max_new_tokens))
        else:
            key = (request.ordinal, request.sample)
            assert request.token_ids
            self._kept[key] += request.token_ids
            self._queue.append((key, request.max_new_tokens))

    def poll(self, timeout_s=None):
        if not self._queue:
            return []
        key, limit = self._queue.pop(0)
        ids = [*in_pieces(self.tokenizer, script(key, len(self.sampled[key]))), self.tokenizer.eos_token_id]
        cut = ids[:limit]
        log_probs = [-0.5 - (i * 7 + key[0]) % 10 / 16 for i in range(len(cut))]
        self.sampled[key].append((len(self._kept[key]), cut, log_probs))
        self._kept[key] += cut
        return [Completion(*key, cut, log_probs, "stop" if len(ids) <= limit else "length", 4)]

    def abort(self, keys):
        pass

    def close(self):
        return {}


def in_pieces(tokenizer, text):
    """A text as a policy may sample it: the tokens of its chunks, seldom equal to the tokens of the text."""
    rng, ids, at = random.Random(text), [], 0
    while at < len(text):
        end = at + rng.randint(1, 6)
        ids += tokenizer.encode(text[at:end], add_special_tokens=False)
        at = end
    return ids


@cache
def merging(family):
    """The tokenizer of a family with merges, learned from texts of the scripts: a text has many tokenizations."""
    template, specials = FAMILIES[family]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, marks = pre_tokenizers.ByteLevel.alphabet(), ["<|pad|>", "<|im_start|>", *specials]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator((script((key, 0), turn) for key in range(30) for turn in range(8)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token=specials[-1])
    tokenizer.chat_template = template
    return tokenizer


def script(key, turn):
    rng = random.Random(hashlib.sha256(repr((key, turn)).encode()).digest())
    if turn >= rng.randint(1, 7):
        return " ".join(rng.choices(WORDS[:4], k=3))
    parts = ["</think>"]  # the prompts of some templates begin thoughts, and no call runs in a thought
    for _ in range(rng.randint(1, 3)):
        parts.append("".join(rng.choices(WORDS, k=rng.randint(0, 3))))
        kind = rng.random()
        text = "".join(rng.choices(WORDS, k=2))
        if kind < 0.6:
            call = json.dumps({"name": "echo", "arguments": {"text": text}}, ensure_ascii=rng.random() < 0.5)
            parts.append(f"<tool_call>\n{call}\n</tool_call>")
        elif kind < 0.75:
            parts.append('<tool_call>{"name": "echo", "arguments": "{oops"}</tool_call>')
        elif kind < 0.85:
            parts.append('<tool_call>{"name": "nothing", "arguments": {}}</tool_call>')
        elif kind < 0.95:
            call = json.dumps({"name": "break_things", "arguments": {"how": "control"}})
            parts.append(f"<tool_call>{call}</tool_call>")
        else:
            parts.append('<tool_call>{"name": </tool_call>')
    return "".join(parts)


@cache
def config(tmp):
    overrides = [
        "actor_rollout_ref.model.path=model", "data.train_files=x.jsonl", "data.max_prompt_length=700",
        "data.max_response_length=1200", f"trainer.default_local_dir={tmp}", f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path={TOOL_FILE}", f"{ROLLOUT}.multi_turn.max_parallel_calls=3",
        f"{ROLLOUT}.multi_turn.tool_sandbox=False", f"{ROLLOUT}.multi_turn.max_tool_response_length=60",
    ]  # fmt: skip
    return load_config(overrides).config


def smollm2():
    folder = os.environ.get("VERL_SMOLLM2", "")
    if not Path(folder, "config.json").is_file():
        pytest.skip("VERL_SMOLLM2 names no model folder")
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", [*FAMILY_NAMES, pytest.param("smollm2", marks=pytest.mark.slow)])
def test_what_trains_was_sampled(family, tmp_path_factory):
    tokenizer = smollm2() if family == "smollm2" else merging(family)
    again = [
        ids
        for key in range(20)
        if (ids := in_pieces(tokenizer, script((key, 0), 0)))
        and ids != tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
    ]
    assert len(again) > 15  # tokenizing a sampled turn again would change it
    engine = Scripted(tokenizer)
    spec = agent_spec(config(tmp_path_factory.getbasetemp()))
    agents = Agents(spec, tokenizer, engine, stop_token_ids=[tokenizer.eos_token_id])
    prompts = agents.context.continuity.prompt(
        [{"role": "user", "content": "Go."}], agents.context.tool_calls.schemas()
    )
    rows = DataProto.from_single_dict(
        {
            "ordinal": torch.arange(PER_FAMILY // 3),
            "prompt_token_ids": objects([prompts] * (PER_FAMILY // 3)),
            "raw_prompt": objects([[{"role": "user", "content": "Go."}]] * (PER_FAMILY // 3)),
        }
    )
    try:
        results = agents.generate(
            rows,
            SamplingParams(n=3, max_new_tokens=1200),
            step=1,
            split="train",
            dtype=np.float64,
            on_finish=lambda r: None,
        )
    finally:
        agents.close()
    assert [r.error for r in results] == [None] * PER_FAMILY
    num_turns = 0
    for result in results:
        row = result.trajectory.to_row()
        turns = engine.sampled[result.task.ordinal, result.task.sample]
        tokens = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        expected = np.zeros(len(tokens), dtype=bool)
        log_probs = np.zeros(len(tokens))
        for start, ids, values in turns:
            assert tokens[start : start + len(ids)] == ids
            expected[start : start + len(ids)] = True
            log_probs[start : start + len(ids)] = values
        assert (expected[len(prompts) :] == row.response_mask).all()
        assert (log_probs[len(prompts) :] == row.log_probs).all()
        context = [t for t, is_sampled in zip(tokens, expected, strict=True) if not is_sampled]
        stray = tokenizer.decode(context)
        assert (
            "I won" not in stray or "\u200b" in stray or not tokenizer.all_special_tokens
        )  # tools bring no control tokens
        num_turns += len(turns)
    assert num_turns > 2 * PER_FAMILY
    assert len(TOOLS) == 2


def objects(values):
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column
