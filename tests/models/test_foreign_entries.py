"""Entries of other programs' files: computed as the program does, or refused by their names."""

import dataclasses
import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.foreign_entries import (
    FIELDS,
    INITIAL,
    SPEC,
    cases,
    logits_with,
    refusal,
    tokenizer_with,
    written_adapter,
)
from verl.config import DataConfig, ModelConfig, PPOConfig
from verl.config.sections.data import PreferenceDataConfig, SFTDataConfig
from verl.data.conversations.dataset import load_conversations
from verl.data.dataset import load_dataset
from verl.data.preferences.dataset import load_preferences
from verl.data.prompts import PromptEncoder
from verl.errors import ModelError
from verl.models.foreign_entries import ADAPTER, uncomputed_entry
from verl.models.load import load_tokenizer
from verl.models.lora import read_adapter
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.programs.ppo_data import tokenizer_notices
from verl.runner.models import with_adapters, write_script_model

END = "<|im_end|>"


def as_tokens(values):
    """Token ids of bytes and of control tokens (256 and above)."""
    encode = make_tokenizer().encode
    return [number for value in values for number in ([value] if value > 255 else encode(chr(value)))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("name", FIELDS)
def test_an_entry_that_changes_the_computation_is_refused_by_name(name, model, tmp_path):
    adapter = written_adapter(tmp_path / "adapter", model, **{name: {"q_proj": 2}})
    with pytest.raises(ModelError, match=f"of a kind that verl has not: {name}=.*'q_proj': 2"):
        read_adapter(adapter, SPEC, str(model))


@pytest.mark.parametrize("initial", INITIAL)
def test_adapters_compute_what_peft_computes_or_are_refused(initial, model, tmp_path):
    """peft changes the weights of the model too when it loads adapters of PiSSA, OLoRA and others."""
    if INITIAL[initial]:
        adapter = written_adapter(tmp_path / "adapter", model, init_lora_weights=initial)
        theirs = pytest.importorskip("peft").PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model), adapter
        )
        expected = theirs.eval()(torch.arange(8).unsqueeze(0)).logits
        assert torch.allclose(logits_with(adapter, model), expected, atol=1e-5)
    else:
        adapter = written_adapter(tmp_path / "adapter", model, init_lora_weights=initial)
        sentence = refusal(lambda: read_adapter(adapter, SPEC, str(model)))
        assert f"init_lora_weights='{initial}'" in sentence
        assert "belong to other weights than the model's" in sentence


def test_a_script_keeps_the_weights_behind_an_initialization(model, tmp_path):
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "pissa"}
    module = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**settings)).eval()
    files = write_script_model(with_adapters(module, None), tmp_path)
    expected = module(torch.arange(8).unsqueeze(0)).logits
    assert torch.allclose(logits_with(files["lora_adapter_path"], files["path"]), expected, atol=1e-5)


def test_defaults_of_every_field_of_peft_are_neutral():
    config = pytest.importorskip("peft").LoraConfig(r=4)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    assert uncomputed_entry({**fields, "peft_type": "LORA", "runtime_config": {}}, ADAPTER) is None


def test_entries_at_random(tmp_path):
    outcomes = {outcome for _, outcome in cases(random.Random(0), 300, tmp_path)}
    assert outcomes == {"refused", "computed"}


CUT = {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}}
PADDED = {"padding": {"strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 256,
                      "pad_type_id": 0, "pad_token": "<|pad|>"}}  # fmt: skip
SETTINGS = {  # files of a tokenizer -> tokens before a text
    "plain": ({}, []),
    "an end": ({"after": [END]}, []),
    "a beginning": ({"before": ["<|im_start|>"]}, [257]),
    "a beginning and an end": ({"before": ["<|im_start|>"], "after": [END]}, [257]),
    "two ends": ({"after": [END, "<|pad|>"]}, []),
    "a limit in tokenizer.json": ({"content": CUT}, []),
    "padding in tokenizer.json": ({"content": PADDED}, []),
    "a limit": ({"model_max_length": 2, "truncation_side": "left", "padding_side": "left"}, []),
    "an entry of an end": ({"add_eos_token": True}, []),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_programs_read_the_same_texts_with_every_setting_of_a_tokenizer(name, model, tmp_path):
    """No end behind a prompt (the policy would sample after the end); one behind a text that trains."""
    settings, before = SETTINGS[name]
    tokenizer = tokenizer_with(shutil.copytree(model, tmp_path / "model"), **settings)
    prompt, answer = [*before, *b"Say"], [*b" it", 258]

    def rows(**row):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        return str(file)

    assert PromptEncoder(tokenizer, DataConfig()).encode("Say", "row 0") == as_tokens(prompt)
    row = {"prompt": "Say", "data_source": "x", "reward_model": {"ground_truth": "x"}}
    for data in (DataConfig(), DataConfig(filter_overlong_prompts=True, max_prompt_length=len(prompt))):
        assert len(load_dataset(rows(**row), tokenizer, data)) == 1
    for row in ({"text": "Say it"}, {"prompt": "Say", "completion": " it"}):
        batch = load_conversations(rows(**row), tokenizer, SFTDataConfig()).batch([0]).batch
        ids = [*batch["prompts"][0][batch["prompt_mask"][0]], *batch["responses"][0]]
        assert ids == as_tokens(prompt + answer)
    pair = {"prompt": "Say", "chosen": " it", "rejected": " no"}
    batch = load_preferences(rows(**pair), tokenizer, PreferenceDataConfig()).batch([0]).batch
    assert batch["prompts"][0][batch["prompt_mask"][0]].tolist() == as_tokens(prompt)
    assert batch["responses"].tolist() == [as_tokens(answer), as_tokens([*b" no", 258])]


def test_control_tokens_that_are_read_as_text_are_refused(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    with pytest.raises(ModelError, match="split_special_tokens=true, so that the control tokens of chat templates"):
        tokenizer_with(folder, split_special_tokens=True)


def test_entries_of_sampling_that_a_run_does_not_follow_are_named(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    policy = replace(PPOConfig().actor_rollout_ref, model=ModelConfig(path=str(folder)))
    config = replace(PPOConfig(), actor_rollout_ref=policy)
    entries = {"temperature": 0.7, "top_k": 20, "eos_token_id": 258, "repetition_penalty": 1.0, "do_sample": True}
    file = folder / "generation_config.json"
    file.write_text(json.dumps(entries))
    assert not any("generation_config" in s for s in tokenizer_notices(config, load_tokenizer(str(folder))))
    file.write_text(json.dumps({**entries, "repetition_penalty": 1.05, "suppress_tokens": [7], "bad_words_ids": [[1]]}))
    (notice,) = tokenizer_notices(config, load_tokenizer(str(folder)))
    assert "repetition_penalty=1.05, suppress_tokens=[7], bad_words_ids=[[1]]" in notice
