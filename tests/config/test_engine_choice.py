"""The choice of a training engine by scripts: names that stand for Megatron, its sections, and what stands in for an engine."""

import importlib.util

import pytest

from verl.config import SCHEMAS, load_config
from verl.config.derived_defaults import ELSEWHERE
from verl.errors import ConfigError, MissingExtraError
from verl.programs.ppo_roles import ppo_roles
from verl.runtime.rank import check_meshes

ACTOR = "actor_rollout_ref.actor"
BASE = ["actor_rollout_ref.model.path=x"]


def actor(*overrides):
    return load_config([*BASE, *overrides], check=False).config.actor_rollout_ref.actor


@pytest.mark.parametrize(
    ("overrides", "name"),
    [([], "ppo_megatron_trainer"), (["model_engine=megatron"], None), ([f"{ACTOR}.strategy=megatron"], None)],
)
def test_three_spellings_of_the_megatron_engine(overrides, name):
    sizes = [f"{ACTOR}.megatron.tensor_model_parallel_size=2", "++critic.megatron.tensor_model_parallel_size=4"]
    config = load_config([*BASE, *overrides, *sizes], None, name, check=False).config
    group = config.actor_rollout_ref
    assert [group.actor.strategy, group.ref.strategy, config.critic.strategy] == ["megatron"] * 3
    tensor_sizes = [role.megatron.tensor_model_parallel_size for role in (group.actor, group.ref, config.critic)]
    assert tensor_sizes == [2, 2, 4]


def test_the_engine_group_of_fine_tuning():
    overrides = ["model.path=x", "engine=megatron", "engine.pipeline_model_parallel_size=2", "engine.use_mbridge=True"]
    engine = load_config(overrides, schema=SCHEMAS["sft"], check=False).config.engine
    assert (engine.strategy, engine.megatron.pipeline_model_parallel_size) == ("megatron", 2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["use_megatron_fsdp=True"], "use_megatron_fsdp"),
        (["virtual_pipeline_model_parallel_size=2"], "needs pipeline_model_parallel_size of at least 3"),
    ],
)
def test_what_the_megatron_engine_does_not_do_is_refused(overrides, words):
    keys = [f"+{ACTOR}.megatron.{override}" for override in overrides]
    with pytest.raises(ConfigError, match=words):
        load_config([*BASE, "data.train_files=x", "data.val_files=x", f"{ACTOR}.strategy=megatron", *keys])


def test_settings_of_layers_that_do_not_act_are_notices():
    layers = f"+{ACTOR}.megatron.override_transformer_config"
    keys = ("moe_aux_loss_coeff=0.001", "num_layers=3", "apply_rope_fusion=True", "fp8=hybrid", "fp8_recipe=blockwise")
    overrides = [
        "data.train_files=x",
        "data.val_files=x",
        "model_engine=megatron",
        *(f"{layers}.{key}" for key in keys),
    ]
    notices = [notice for notice in load_config([*BASE, *overrides]).notices if "override_transformer_config" in notice]
    assert "{moe_aux_loss_coeff, num_layers}" in notices[0]
    assert "{fp8, fp8_recipe} (layers multiply" in notices[1]


@pytest.mark.parametrize(("engine", "package"), [("megatron", "megatron-core"), ("deepspeed", "deepspeed")])
def test_a_library_that_is_missing_is_named_before_anything_starts(around, engine, package):
    around(importlib.util, "find_spec", lambda find, n: None if n.startswith(engine) else find(n))
    config = load_config([*BASE, f"{ACTOR}.strategy={engine}"], check=False).config
    specs = ppo_roles(config)
    words = rf"strategy={engine} needs the package '{package}'.*pip install '{package}[=<>].*engine_fallback=fsdp"
    with pytest.raises(MissingExtraError, match=words):
        check_meshes(specs, specs.place(2))


def test_an_engine_that_is_not_built_falls_back_to_fsdp(caplog):
    assert actor(f"{ACTOR}.strategy=veomni", "trainer.engine_fallback=fsdp").strategy == "fsdp2"
    assert "veomni is not available: fsdp2 instead." in caplog.text
    assert actor(f"{ACTOR}.strategy=veomni").strategy == "veomni"  # checks refuse it


def test_a_kind_of_device_that_is_not_there_falls_back_to_auto(caplog):
    chosen = load_config([*BASE, "trainer.device=npu", "trainer.engine_fallback=fsdp"], check=False).config.trainer
    assert chosen.device == "auto"
    assert "trainer.device=npu is not available: auto instead." in caplog.text
    other = load_config([*BASE, "trainer.device=cpu", "trainer.engine_fallback=fsdp"], check=False).config.trainer
    assert other.device == "cpu"


GRPO = [*BASE, "data.train_files=x", "data.val_files=x", "algorithm.adv_estimator=grpo"]


@pytest.mark.parametrize("engine", ELSEWHERE)
def test_model_engine_falls_back_with_one_notice_for_the_keys_of_the_engine(engine):
    keys = [f"model_engine={engine}", f"{ACTOR}.optim.min_lr_factor=0.1", f"{ACTOR}.{engine}.some_size=2"]
    loaded = load_config([*GRPO, *keys, "trainer.engine_fallback=fsdp"])
    group = loaded.config.actor_rollout_ref
    assert [group.actor.strategy, group.ref.strategy, loaded.config.model_engine] == ["fsdp2", "fsdp2", "dp"]
    assert f"No effect: {ACTOR}.optim.min_lr_factor (a key of {engine})." in loaded.notices
    with pytest.raises(ConfigError, match=f"model_engine={engine}.*engine_fallback=fsdp") as refusal:
        load_config([*GRPO, *keys])
    assert "min_lr_factor" not in str(refusal.value)


def test_keys_of_an_engine_of_fine_tuning_fall_back():
    keys = ["engine=automodel", "engine.distributed_strategy=fsdp2", "engine.tp_size=1", "trainer.engine_fallback=fsdp"]
    data = ["model.path=x", "data.train_files=x"]
    loaded = load_config([*data, *keys], schema=SCHEMAS["sft"])
    assert loaded.config.engine.strategy == "fsdp2"
    fused = [*data, "optim.optimizer=FusedAdam", "optim.optimizer_impl=no_such_package.optimizers"]
    optim = load_config(fused, schema=SCHEMAS["sft"]).config.optim
    assert (optim.optimizer, optim.optimizer_impl) == ("AdamW", "torch.optim")
    assert "No effect: engine.distributed_strategy, engine.tp_size (a key of automodel)." in loaded.notices
    with pytest.raises(ConfigError, match="engine.strategy=automodel.*engine_fallback=fsdp"):
        load_config([*data, *keys[:-1]], schema=SCHEMAS["sft"])
    with pytest.raises(ConfigError, match="There is no key 'engine.distributed_strategy'"):
        load_config([*data, *keys[1:]], schema=SCHEMAS["sft"])


def test_sizes_of_megatron_become_sizes_of_fsdp(around, caplog):
    around(importlib.util, "find_spec", lambda find, n: None if n.startswith("megatron") else find(n))
    sizes = {"tensor": 2, "expert": 4, "pipeline": 3}
    keys = [f"{ACTOR}.megatron.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    section = actor("model_engine=megatron", "trainer.engine_fallback=fsdp", *keys)
    assert section.strategy == "fsdp2"
    assert (section.fsdp_config.tensor_parallel_size, section.fsdp_config.expert_parallel_size) == (2, 4)
    assert "tensor_model_parallel_size=2 as tensor_parallel_size" in caplog.text
    assert "3 stages as data-parallel shards" in caplog.text


def test_an_engine_that_is_there_falls_back_for_what_it_lacks(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    fallback = ["model_engine=megatron", "trainer.engine_fallback=fsdp"]
    assert actor(*fallback).strategy == "megatron"
    group = load_config([*BASE, *fallback, f"{ACTOR}.megatron.use_megatron_fsdp=True"], check=False).config
    assert [role.strategy for role in (group.actor_rollout_ref.actor, group.actor_rollout_ref.ref)] == ["fsdp2"] * 2
    for family, strategy in (("llama", "megatron"), ("gemma", "fsdp2")):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
        assert actor(*fallback, f"actor_rollout_ref.model.path={tmp_path}").strategy == strategy
    assert "is not available for gemma: fsdp2 instead." in caplog.text
