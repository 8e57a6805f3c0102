"""Defaults of our commands and of existing releases."""

import dataclasses

import pytest

from verl.cli.arguments import parse
from verl.compat.commands import RELEASE
from verl.config import PPO, PREFERENCE, RM, SFT, load_config, with_fitting_defaults
from verl.config.checks import check_config
from verl.config.command_defaults import DEFAULTS, ORIGIN, Facts
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
        (PPO, ("algorithm.adv_estimator=mine.py:f",), {N: 8}),
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


@pytest.mark.parametrize(
    ("num_rows", "devices", "size"),
    [
        (5, 1, 5),
        (16, 1, 16),
        (24, 1, 12),
        (17, 1, 16),
        (25, 1, 12),
        (100, 1, 14),
        (200, 1, 15),
        (1000, 1, 16),
        (24, 8, 16),
        (24, 0, 12),
    ],
)
def test_a_default_batch_fits_the_rows(num_rows, devices, size):
    """It has no more rows than train, and is smaller if that leaves out fewer rows of an epoch."""
    loaded = load_config([GRPO, f"trainer.n_gpus_per_node={devices}"], check=False, defaults="command")
    fitted = with_fitting_defaults(loaded, Facts(num_rows)) or loaded
    config = fitted.config
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (size, size)
    assert fitted.origins[BATCH] == (ORIGIN if size == 16 else "the number of rows")
    assert with_fitting_defaults(fitted, Facts(num_rows)) is None


def test_a_small_model_learns_at_a_higher_rate():
    def rate(*overrides, width):
        loaded = load_config([GRPO, *overrides], check=False, defaults="command")
        return (with_fitting_defaults(loaded, Facts(None, width)) or loaded).config.actor_rollout_ref.actor.optim.lr

    assert [rate(width=width) for width in (576, 1024, 1536, None)] == [5e-6, 5e-6, 1e-6, 1e-6]
    assert (rate(LORA, width=576), rate(f"{LR}=1e-4", width=576)) == (1e-5, 1e-4)


def test_a_key_that_contradicts_the_batch_of_the_rows_is_refused():
    loaded = load_config([GRPO, "actor_rollout_ref.actor.ppo_mini_batch_size=8"], check=False, defaults="command")
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=7 is smaller than .*ppo_mini_batch_size=8"):
        with_fitting_defaults(loaded, Facts(7))
    assert with_fitting_defaults(loaded, Facts(8)).config.data.train_batch_size == 8


def test_what_a_user_or_a_run_has_set_stays():
    for key, num_rows in ((BATCH, 5), ("actor_rollout_ref.actor.ppo_mini_batch_size", 24)):
        loaded = load_config([GRPO, "data.seed=7", f"{key}=8"], check=False, defaults="command")
        assert with_fitting_defaults(loaded, Facts(num_rows)) is None
    assert with_fitting_defaults(load_config([GRPO], check=False), Facts(5, 64)) is None  # of existing releases
    loaded = load_config([GRPO, "data.seed=7"], check=False, defaults="command")
    trainer = dataclasses.replace(loaded.config.trainer, resume_mode="resume_path", default_local_dir="named")
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, trainer=trainer))
    fitted = with_fitting_defaults(loaded, Facts(5)).config
    assert (fitted.data.seed, fitted.data.train_batch_size, fitted.trainer) == (7, 5, trainer)


def test_a_preset_has_groups_on_a_file_with_defaults_of_existing_releases(tmp_path):
    (tmp_path / "theirs.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 1}")
    for n, argv in ((8, ["--preset=dapo"]), (1, []), (1, ["--preset=ppo"]), (2, ["--preset=grpo", f"{N}=2"])):
        for base in ([f"--config-path={tmp_path}", "--config-name=theirs"], ["--config-name=ppo_trainer"]):
            config = parse("train", "", [*base, *argv]).load(check=False).config
            assert (config.actor_rollout_ref.rollout.n, config.trainer.total_epochs) == (n, 30)
    assert (
        parse("generate", "", ["--preset=grpo"], defaults="release")
        .load(check=False)
        .config.actor_rollout_ref.rollout.n
        == 1
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_keys_of_its_algorithm(name):
    texts = ["actor_rollout_ref.model.path=m", "data.train_files=t.jsonl"]
    loaded = load_config(texts, check=False, defaults="command", fallbacks=preset_settings(name))
    flat = PPO.flatten(loaded.config)
    assert {key: flat[key] for key in PRESETS[name].settings} == PRESETS[name].settings
    assert not [p for p in check_config(loaded) if any(key in p.sentence for key in PRESETS[name].settings)]
    changed = load_config(
        [f"{LR}=1e-3", "algorithm.adv_estimator=opo"], check=False, fallbacks=preset_settings(name)
    ).config
    assert changed.algorithm.adv_estimator == "opo"


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo"])
def test_a_clip_ratio_of_the_user_goes_before_the_range_of_a_preset(name):
    for other, expected in (([], (None, None)), (["actor_rollout_ref.actor.clip_ratio_high=0.5"], (None, 0.5))):
        keys = ["actor_rollout_ref.actor.clip_ratio=0.1", *other]
        actor = load_config(keys, check=False, fallbacks=preset_settings(name)).config.actor_rollout_ref.actor
        assert (actor.clip_ratio_low, actor.clip_ratio_high) == expected


@pytest.mark.parametrize(("name", "hint"), [("dap", "; did you mean 'dapo'"), ("", "; there are ppo, grpo")])
def test_an_unknown_preset_is_refused(name, hint):
    """An empty name is a shell variable that is not set."""
    with pytest.raises(ConfigError, match=f"no preset '{name}'{hint}"):
        parse("train", "", ["--preset", name])


def test_keys_that_undo_a_preset_are_named(tmp_path):
    """A file with another estimator trains another algorithm than the name of the preset says."""
    file = tmp_path / "theirs.yaml"
    file.write_text("algorithm: {adv_estimator: gae}")
    mean = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"

    def notices(*argv):
        return [n for n in parse("train", "", list(argv)).load().notices if n.startswith("--preset")]

    assert notices("--preset=DAPO", f"--config-path={file}", mean) == [
        f"--preset DAPO gives way to algorithm.adv_estimator='gae' (file {file}), "
        "actor_rollout_ref.actor.loss_agg_mode='seq-mean-token-mean' (command line)."
    ]
    for argv in (["algorithm.adv_estimator=grpo"], [], ["actor_rollout_ref.actor.clip_ratio=0.1"]):
        assert notices("--preset=dapo", *argv) == []
