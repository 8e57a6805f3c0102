"""Defaults of our commands and of existing releases."""

import pytest

from verl.cli.arguments import parse
from verl.compat.commands import RELEASE
from verl.config import PPO, PREFERENCE, RM, SFT, load_config, with_smaller_batch
from verl.config.checks import check_config
from verl.config.command_defaults import DEFAULTS
from verl.config.presets import PRESETS, preset_settings
from verl.errors import ConfigError

LR, N, BATCH = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n", "data.train_batch_size"
GRPO, LORA = "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=8"


def values(schema, *overrides, defaults="command", **sources):
    loaded = load_config(overrides, schema=schema, check=False, defaults=defaults, **sources)
    return schema.flatten(loaded.config)


@pytest.mark.parametrize(
    ("schema", "overrides", "expected"),
    [
        (PPO, (), {N: 1, LR: 1e-6, BATCH: 16, "actor_rollout_ref.actor.ppo_mini_batch_size": 16}),
        (
            PPO,
            (GRPO,),
            {N: 8, "data.val_files": [], "trainer.total_epochs": 1, "trainer.save_freq": "after_each_epoch"},
        ),
        (PPO, (GRPO, f"{N}=1", "trainer.save_freq=-1"), {N: 1, "trainer.save_freq": -1}),
        (PPO, (LORA,), {LR: 1e-5}),
        (PPO, (LORA, f"{LR}=0.1"), {LR: 0.1}),
        (PPO, ("actor_rollout_ref.model.lora_adapter_path=adapters",), {LR: 1e-5}),
        (SFT, (), {"optim.lr": 1e-5, BATCH: 32, "trainer.val_before_train": True}),
        (SFT, ("model.lora_rank=8",), {"optim.lr": 1e-4}),
        (PREFERENCE, (), {"optim.lr": 5e-7}),
        (PREFERENCE, ("preference.loss=orpo",), {"optim.lr": 8e-6}),
        (PREFERENCE, ("preference.loss=orpo", "model.lora_rank=8"), {"optim.lr": 5e-6}),
        (RM, ("model.lora_rank=8",), {"optim.lr": 1e-4}),
    ],
)
def test_a_command_has_defaults_that_train(schema, overrides, expected):
    config = values(schema, *overrides)
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("schema", [PPO, SFT, PREFERENCE, RM], ids=lambda schema: schema.name)
def test_scripts_keep_the_defaults_of_existing_releases(schema):
    expected = {path: leaf.default for path, leaf in schema.leaves.items()}
    config = values(schema, defaults="release")
    assert {d.key: config[d.key] for d in DEFAULTS[schema.name]} == {
        d.key: expected[d.key] for d in DEFAULTS[schema.name]
    }
    for argv, face in (([], "command"), (list(RELEASE), "release")):
        assert parse("train", "", argv, schema=schema).defaults == face


def test_a_file_that_builds_on_a_config_of_existing_releases_keeps_their_defaults(tmp_path):
    for name, lines, epochs in (
        ("own", "data: {seed: 1}", 1),
        ("theirs", "defaults: [ppo_trainer, _self_]\ndata: {seed: 1}", 30),
        ("above", "defaults: [theirs, _self_]\ndata: {seed: 2}", 30),
        ("top", "defaults: [own, {model_engine: dp}, above]\ntrainer: {test_freq: 1}", 30),
        ("on_own", "defaults: [own]", 1),
        ("only", "defaults: [ppo_trainer]", 30),
    ):
        (tmp_path / f"{name}.yaml").write_text(lines)
        assert values(PPO, config_path=str(tmp_path), config_name=name)["trainer.total_epochs"] == epochs
    assert values(PPO, config_name="ppo_trainer")["trainer.total_epochs"] == 30


def test_a_default_batch_has_no_more_rows_than_train():
    loaded = load_config([GRPO, "data.seed=7"], check=False, defaults="command")
    smaller = with_smaller_batch(loaded, 5)
    assert (smaller.config.data.train_batch_size, smaller.config.actor_rollout_ref.actor.ppo_mini_batch_size) == (5, 5)
    assert (smaller.config.data.seed, smaller.origins[BATCH]) == (7, "the number of rows")
    for defaults, override in (("command", [f"{BATCH}=8"]), ("release", [])):
        assert with_smaller_batch(load_config(override, check=False, defaults=defaults), 5) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_keys_of_its_algorithm(name):
    texts = ["actor_rollout_ref.model.path=m", "data.train_files=t.jsonl"]
    loaded = load_config(texts, check=False, defaults="command", fallbacks=preset_settings(name))
    flat = PPO.flatten(loaded.config)
    assert {key: flat[key] for key in PRESETS[name].settings} == PRESETS[name].settings
    assert not [p for p in check_config(loaded) if any(key in p.sentence for key in PRESETS[name].settings)]
    own = load_config(
        [f"{LR}=1e-3", "algorithm.adv_estimator=opo"], check=False, fallbacks=preset_settings(name)
    ).config
    assert own.algorithm.adv_estimator == "opo"


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo"])
def test_a_clip_ratio_of_the_user_goes_before_the_range_of_a_preset(name):
    for other, expected in (([], (None, None)), (["actor_rollout_ref.actor.clip_ratio_high=0.5"], (None, 0.5))):
        keys = ["actor_rollout_ref.actor.clip_ratio=0.1", *other]
        actor = load_config(keys, check=False, fallbacks=preset_settings(name)).config.actor_rollout_ref.actor
        assert (actor.clip_ratio_low, actor.clip_ratio_high) == expected


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="no preset 'dap'; did you mean 'dapo'"):
        preset_settings("dap")
