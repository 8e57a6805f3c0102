"""Entries of other programs' files: computed as the program does, or refused by their names."""

import dataclasses
import random

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
    written_adapter,
)
from verl.errors import ModelError
from verl.models.foreign_entries import ADAPTER, uncomputed_entry
from verl.models.lora import read_adapter
from verl.models.tiny import make_tiny_model
from verl.runner.models import with_adapters, write_script_model


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
