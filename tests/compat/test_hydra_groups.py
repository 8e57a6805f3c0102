"""verl/trainer/config: what programs of users compose by Hydra is the tree, and is read as if it had been given here."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.config.helpers import ACTOR, GRPO, ROLLOUT, load
from verl.compat.hydra_groups import GROUPS, files, main
from verl.config import PPO
from verl.config.checks import verdicts
from verl.config.derived_defaults import COMPOSED_NULLS
from verl.config.load import load_composed

FOLDER = Path(__file__).parents[2] / "verl/trainer/config"


def composed(*overrides, root_name="ppo_trainer"):
    """The tree as Hydra composes it, made with only OmegaConf for installations without Hydra."""
    root = OmegaConf.load(FOLDER / f"{root_name}.yaml")
    tree = OmegaConf.create({"model_engine": "dp"} if root_name == "ppo_trainer" else {})
    for entry in root.pop("defaults"):
        if isinstance(entry, str) or "model_engine" in entry:
            continue
        ((group, name),) = OmegaConf.to_container(entry, resolve=False).items()
        name = name.replace("${model_engine}", "dp")
        part = OmegaConf.load(FOLDER / group.partition("@")[0] / f"{name}.yaml")
        OmegaConf.update(tree, group.partition("@")[2], part, merge=True)
    tree = OmegaConf.merge(tree, root)
    OmegaConf.set_struct(tree, True)
    for override in overrides:
        tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([override]))
    return tree


def by_hydra(*overrides, name="ppo_trainer"):
    hydra = pytest.importorskip("hydra", reason="needs the extra 'scripts'")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(name, overrides=list(overrides))


def test_writing_the_files_again_touches_none(tmp_path):
    main([str(tmp_path)])
    written = {str(file.relative_to(tmp_path)): file.stat().st_mtime_ns for file in tmp_path.rglob("*.yaml")}
    main([str(tmp_path)])
    assert written == {name: (tmp_path / name).stat().st_mtime_ns for name in files()}


@pytest.mark.parametrize("compose", [composed, by_hydra])
@pytest.mark.parametrize("resolve", [False, True])
def test_the_plain_composition_is_the_defaults(compose, resolve):
    loaded = load_composed(OmegaConf.to_container(compose(), resolve=resolve))
    assert loaded.config == load().config
    assert loaded.settings == {}
    assert loaded.notices == []


def test_keys_that_programs_add_by_plus_have_no_value():
    """SPO adds data.gen_batch_size, scripts for TensorRT-LLM add enable_sleep_mode; Hydra appends only to a null."""
    assert [OmegaConf.select(composed(), path) for path in COMPOSED_NULLS] == [None, None]


@pytest.mark.parametrize("compose", [composed, by_hydra])
def test_overrides_on_top_of_a_composed_config(compose):
    overrides = [
        *GRPO, "data.train_batch_size=16", "data.max_prompt_length=99", "custom_reward_function.path=r.py",
        "critic.model.path=/c", "actor_rollout_ref.model.path=/m", "reward_model.reward_manager=dapo", f"{ACTOR}.grad_clip=0.5",
        "trainer.project_name=p", f"{ROLLOUT}.val_kwargs.temperature=0.7", f"{ACTOR}.ppo_epochs=2",
    ]  # fmt: skip
    loaded = load_composed(OmegaConf.to_container(compose(*overrides), resolve=True))
    assert loaded.config == load(*overrides).config
    assert verdicts(loaded).keys() == verdicts(load(*overrides)).keys()


@pytest.mark.parametrize(("name", "chosen"), [("ppo_trainer", ["model_engine=megatron"]), ("ppo_megatron_trainer", [])])
def test_megatron_is_chosen_by_group_or_by_name(name, chosen):
    sizes = [
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"+{ACTOR}.megatron.override_transformer_config.fp8=null",
    ]
    tree = by_hydra(*GRPO, *chosen, *sizes, name=name)
    ours = load(*GRPO, "model_engine=megatron", *sizes)
    assert load_composed(OmegaConf.to_container(tree, resolve=True)).config == ours.config


def test_every_key_is_there():
    tree = composed()
    missing = [path for path in PPO.leaves if OmegaConf.select(tree, path, default="?") == "?"]
    assert missing == []
    assert len(GROUPS) == 10
    text = (FOLDER / "ppo_trainer.yaml").read_text()
    assert re.search(r"- actor@actor_rollout_ref\.actor: \$\{model_engine\}_actor", text)


def test_the_runtime_environment_of_ray_jobs_is_there():
    environment = OmegaConf.load(FOLDER.parent / "runtime_env.yaml")
    assert environment.working_dir == "./"
    assert all(isinstance(value, str) for value in environment.env_vars.values())


OFF = [
    f"algorithm.rollout_correction.{key}=null" for key in ("rollout_rs_threshold_lower", "rollout_token_veto_threshold")
]


def test_keys_of_earlier_releases_that_scripts_override():
    """Their own newest config lacks them; a composed config takes them as the command line does."""
    length = "reward.reward_kwargs.max_resp_len=64"
    penalty = [f"reward_model.overlong_buffer.{key}" for key in ("enable=True", "len=16", "penalty_factor=1.0")]
    dropped = ["trainer.use_legacy_worker_impl=disable", "data.min_response_length=4"]
    tree = OmegaConf.to_container(composed("reward_model.reward_manager=dapo", *penalty, *dropped, *OFF), resolve=True)
    tree["reward"]["reward_kwargs"] = {"max_resp_len": 64}
    loaded = load_composed(tree)
    assert loaded.config == load("reward_model.reward_manager=dapo", length, *penalty, *dropped).config
    assert all(any(key in notice for notice in loaded.notices) for key in dropped)
