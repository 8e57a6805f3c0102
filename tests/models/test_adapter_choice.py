"""Layers that get adapters, and adapters loaded from a folder; against peft itself see test_lora.py."""

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.engines.tiny import make_engine
from verl.config import ModelConfig
from verl.errors import ConfigError, ModelError
from verl.models.load import empty_model, load_causal_lm
from verl.models.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoRASpec,
    adapted_layers,
    add_adapters,
    load_adapter,
    peft_names,
    read_adapter,
)


@pytest.fixture(scope="module")
def folder(tiny_llama):
    return tiny_llama


@given(
    key=st.sampled_from(["target_modules", "exclude_modules"]),
    valid=st.lists(st.sampled_from(["q_proj", "v_proj", "down_proj"]), min_size=1),
    place=st.integers(0, 3),
    typo=st.sampled_from(["q_prj", "vproj_typo", "", "proj", "Q_PROJ", "layers.9.q_proj", "q_proj.", "embed_tokens"]),
)
@settings(max_examples=30, deadline=None)
def test_an_entry_that_matches_nothing_is_refused_wherever_it_stands(folder, key, valid, place, typo):
    assume(key == "target_modules" or typo != "embed_tokens")  # it exists, and takes no adapter
    module = empty_model(ModelConfig(path=str(folder)), "lm", torch.float32, False)
    given_keys = {"target_modules": "all-linear", key: valid}
    adapted_layers(module, LoRASpec.of(ModelConfig(path="x", lora_rank=2, **given_keys)))
    given_keys[key] = [*valid[:place], typo, *valid[place:]]
    with pytest.raises(ConfigError, match=f"model.{key}: '{typo}' matches no"):
        adapted_layers(module, LoRASpec.of(ModelConfig(path="x", lora_rank=2, **given_keys)))


def test_a_pattern_that_is_none_and_a_rank_that_no_layer_has(folder):
    plain = empty_model(ModelConfig(path=str(folder)), "lm", torch.float32, False)
    with pytest.raises(ConfigError, match="neither all-linear nor a regular expression"):
        adapted_layers(plain, LoRASpec(4, 8, "*proj"))
    with pytest.raises(ConfigError, match="lora_rank=1000000000 is larger"):
        adapted_layers(plain, LoRASpec(10**9, 8, "all-linear"))


@pytest.fixture
def adapter(folder, tmp_path):
    """(folder of adapters that were trained on `folder`, their spec, the module that has them)."""
    module, spec = load_causal_lm(folder), LoRASpec(4, 8, "all-linear")
    names = add_adapters(module, spec, torch.float32)
    trained = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    save_file(peft_names(trained), tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(spec.to_json(str(folder), names)))
    return tmp_path, spec, module


def edit(adapter, **changes):
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_adapters_of_another_base_are_noticed(folder, adapter, caplog):
    path, spec, module = adapter
    with caplog.at_level("INFO", logger="verl"):
        load_adapter(module, read_adapter(path, spec, str(folder)))
        assert "were trained on" not in caplog.text
        edit(path, base_model_name_or_path="someone/other-7b", lora_dropout=0.9)
        read_adapter(path, spec, str(folder))
    assert "were trained on someone/other-7b and are used on" in caplog.text
    assert "lora_dropout=0.9" in caplog.text


@pytest.mark.parametrize("listed", [[0], 0])
def test_adapters_of_layers_that_their_config_leaves_out_are_refused(folder, adapter, listed):
    path, spec, _ = adapter
    edit(path, layers_to_transform=[0, 1])
    read_adapter(path, spec, str(folder))
    edit(path, layers_to_transform=listed)
    with pytest.raises(ModelError, match="have layer 1, which layers_to_transform"):
        read_adapter(path, spec, str(folder))


def test_adapters_name_only_the_modules_that_have_tensors(folder_of):
    """A frozen vision tower has adapters in the module, and none in the files."""
    path, settings = folder_of("qwen2_vl"), {"lora_rank": 2, "lora_alpha": 4}
    state = make_engine(path, model=settings, freezes_vision_tower=True).state()
    named, tensors = state.adapter.config["target_modules"], state.adapter.tensors
    assert named
    assert {f"base_model.model.{name}.lora_A.weight" for name in named} == {n for n in tensors if "lora_A" in n}
    again = make_engine(path, model={**settings, "target_modules": named}).state()
    assert again.adapter.tensors.keys() == tensors.keys()
