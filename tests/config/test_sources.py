"""YAML files, origins, other spellings, and the file in the run folder."""

import json
from pathlib import Path

import pytest

from verl.config import PPO, load_config
from verl.config.loaded import scalar

from .helpers import ACTOR, GRPO, ROLLOUT, load, refused


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


GRPO_YAML = """
defaults: [ppo_trainer, _self_]
hydra:
  searchpath: [file://verl/trainer/config]
data:
  train_batch_size: 32
  max_prompt_length: 256
actor_rollout_ref:
  actor:
    _target_: some.Class
    optim: {lr: 1e-5}
  rollout:
    n: 4
  ref:
algorithm:
  adv_estimator: grpo
trainer:
  default_local_dir: runs/${trainer.project_name}
  project_name: demo
  logger: [console]
  total_training_steps: ???
"""


def test_yaml_file_and_overrides_and_origins(tmp_path):
    file = write(tmp_path, "run.yaml", GRPO_YAML)
    loaded = load_config(["data.train_batch_size=16", "custom_reward_function.path=r.py"], config_path=file)
    config, origins = loaded.config, loaded.origins
    assert config.data.train_batch_size == 16
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.actor_rollout_ref.rollout.prompt_length == 256
    assert config.trainer.default_local_dir == "runs/demo"
    assert config.trainer.total_training_steps is None
    assert config.reward.custom_reward_function.path == "r.py"
    assert origins["data.train_batch_size"] == "command line"
    assert origins["data.max_prompt_length"] == f"file {file}"
    assert origins[f"{ROLLOUT}.prompt_length"] == "follows data.max_prompt_length"
    assert origins["reward.custom_reward_function.path"] == "command line, renamed from custom_reward_function.path"
    assert origins["trainer.total_epochs"] == "default"
    assert any(notice.startswith("hydra:") for notice in loaded.notices)


def test_folder_and_name(tmp_path):
    write(tmp_path, "base.yaml", "trainer: {total_epochs: 3, save_freq: 7}")
    write(tmp_path, "run.yaml", "defaults: [base, other_group, _self_]\ntrainer: {total_epochs: 4}")
    for name in ("run", "run.yaml"):
        loaded = load_config([], str(tmp_path), name)
        assert loaded.config.trainer.total_epochs == 4
        assert loaded.config.trainer.save_freq == 7
        assert any("other_group" in notice for notice in loaded.notices)


def test_names_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config([], None, "ppo_trainer").config == load().config
    write(tmp_path, "here.yaml", "trainer: {total_epochs: 3}")
    assert load_config([], None, "here").config.trainer.total_epochs == 3


def test_bad_sources_are_sentences(tmp_path):
    assert "ppo_trainer" in refused(config_name="ppo_trainr")
    assert "Use verl sft" in refused(config_name="sft_trainer")
    assert "--config-name" in refused(config_path=str(tmp_path))
    write(tmp_path, "run.yaml", "trainer: {total_epochs: 3}")
    assert "run.yaml" in refused(config_path=str(tmp_path), config_name="rum")
    assert "cannot be read" in refused(config_path=write(tmp_path, "a.yaml", "trainer: [1"))
    assert "sections" in refused(config_path=write(tmp_path, "b.yaml", "- 1"))
    assert "not a list" in refused(config_path=write(tmp_path, "c.yaml", "defaults: 3"))
    assert "includes itself" in refused(config_path=write(tmp_path, "d.yaml", "defaults: [d]"))
    message = refused(config_path=write(tmp_path, "e.yaml", "trainer: {total_epoch: 3}"))
    assert "e.yaml" in message
    assert "'trainer.total_epochs'" in message


@pytest.mark.parametrize("folder", ["config", "./config", "verl/trainer/config", "pkg://verl.trainer.config"])
def test_the_folder_of_the_package_as_scripts_name_it(tmp_path, monkeypatch, folder):
    """`--config-path=config --config-name=ppo_trainer` is relative to the installed package for Hydra."""
    monkeypatch.chdir(tmp_path)
    assert load_config([], folder, "ppo_trainer.yaml").config == load().config
    config = load_config([], folder, "ppo_megatron_trainer.yaml").config
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    assert "does not exist" in refused(config_path=folder, config_name="mine")
    if not folder.startswith("pkg"):
        Path(folder).mkdir(parents=True)
        write(Path(folder), "ppo_megatron_trainer.yaml", "trainer: {total_epochs: 3}")  # the user's own goes before
        assert load_config([], folder, "ppo_megatron_trainer").config.trainer.total_epochs == 3


def test_modules_of_the_environment_come_before_modules_of_the_config(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "json, csv")
    key = "actor_rollout_ref.model.external_lib"
    loaded = load(f"{key}=decimal,json")
    assert loaded.config.actor_rollout_ref.model.external_lib == ["json", "csv", "decimal"]
    assert loaded.origins[key] == "follows VERL_USE_EXTERNAL_MODULES"


def test_adapters_bring_their_rank_and_scale(tmp_path):
    model = "actor_rollout_ref.model"
    saved = {"r": 8, "lora_alpha": 24, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    loaded = load(f"{model}.lora_adapter_path={tmp_path}", "actor_rollout_ref.actor.optim.lr=1e-4")
    section = loaded.config.actor_rollout_ref.model
    assert (section.lora_rank, section.lora_alpha, section.target_modules) == (8, 24, ["q_proj", "v_proj"])
    assert loaded.origins[f"{model}.lora_rank"] == f"follows {model}.lora_adapter_path"
    assert loaded.notices == []
    explicit = load(f"{model}.lora_adapter_path={tmp_path}", f"{model}.lora_rank=4").config.actor_rollout_ref.model
    assert (explicit.lora_rank, explicit.lora_alpha) == (4, 16)  # the engine compares them with the adapters
    refused(f"{model}.lora_adapter_path={tmp_path / 'none'}", match="is no folder with adapters")
    refused(f"critic.model.lora_adapter_path={tmp_path / 'none'}", match="is no folder with adapters")


def test_every_built_in_file_loads():
    from verl.config.sources import BUILT_IN, built_in_names

    assert "ppo_trainer" in built_in_names(PPO)
    for file in BUILT_IN.glob("*.yaml"):
        if file.stem in built_in_names(PPO):
            load_config([], None, file.stem)


def test_interpolation(monkeypatch):
    monkeypatch.setenv("RUN_NAME", "night")
    config = load(
        "trainer.experiment_name=${oc.env:RUN_NAME}",
        "data.max_response_length=${data.max_prompt_length}",
        "data.max_prompt_length=64",
        f"{ROLLOUT}.max_num_seqs=${{oc.select:no.such.key,12}}",
        "ray_kwargs.ray_init=${oc.create:{num_gpus: 0}}",
    ).config
    assert config.trainer.experiment_name == "night"
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/night"
    assert config.actor_rollout_ref.rollout.response_length == 64
    assert config.actor_rollout_ref.rollout.max_num_seqs == 12
    assert config.ray_kwargs.ray_init == {**load("ray_kwargs.ray_init={num_gpus: 0}").config.ray_kwargs.ray_init}


def test_interpolation_that_leads_nowhere():
    assert "trainer.experiment_name" in refused("trainer.experiment_name=${no.such.key}", match="cannot be resolved")
    refused("trainer.total_epochs=${trainer.project_name}", match="whole number")


def test_cross_references():
    config = load(
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        f"{ROLLOUT}.n=3",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=999",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"{ACTOR}.checkpoint.save_contents=[model]",
        "critic.ppo_max_token_len_per_gpu=777",
        "critic.ppo_micro_batch_size_per_gpu=32",
        f"{ACTOR}.fsdp_config.dtype=fp32",
        "actor_rollout_ref.model.path=/m",
        "trainer.project_name=p",
        "trainer.experiment_name=e",
    ).config
    group = config.actor_rollout_ref
    assert (group.rollout.prompt_length, group.rollout.response_length) == (64, 32)
    assert group.actor.rollout_n == group.ref.rollout_n == config.critic.rollout_n == 3
    assert group.ref.log_prob_use_dynamic_bsz
    assert group.rollout.log_prob_use_dynamic_bsz
    assert group.ref.log_prob_max_token_len_per_gpu == group.rollout.log_prob_max_token_len_per_gpu == 999
    assert (config.critic.ppo_epochs, config.critic.loss_agg_mode, config.critic.use_dynamic_bsz) == (
        2,
        "token-sum",
        True,
    )
    assert config.critic.forward_max_token_len_per_gpu == 777
    assert config.critic.forward_micro_batch_size_per_gpu == 32
    assert group.actor.checkpoint.load_contents == ["model"]
    assert group.ref.fsdp_config.dtype == config.critic.fsdp.dtype == "fp32"
    assert config.critic.model.path == "/m"
    assert config.trainer.default_local_dir == "checkpoints/p/e"
    assert config.data.seed == 42


MODEL_CONFIG = "actor_rollout_ref.model.override_config"
SPELLINGS = [
    ("attn_implementation=sdpa", MODEL_CONFIG, {"attn_implementation": "sdpa"}),
    (
        "actor_rollout_ref.model.attn_implementation=flash_attn_2",
        MODEL_CONFIG,
        {"attn_implementation": "flash_attention_2"},
    ),
    ("actor_rollout_ref.model.lora.type=dora", "actor_rollout_ref.model.use_dora", True),
    ("critic.model.lora.target_modules=[linear_qkv]", "critic.model.target_modules", ["linear_qkv"]),
    ("custom_reward_function.path=r.py", "reward.custom_reward_function.path", "r.py"),
    ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
    ("reward_model.num_workers=3", "reward.num_workers", 3),
    ("reward_batch_size=16", "reward.reward_model.reward_batch_size", 16),
    ("reward_model.reward_batch_size=16", "reward.reward_model.reward_batch_size", 16),
    ("rollout_config.prefetch_num=2", "actor_rollout_ref.rollout.prefetch_num", 2),
    ("+reward_model.reward_kwargs.max_resp_len=9", "reward.reward_kwargs", {"max_resp_len": 9}),
    (f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad", 0.5),
    (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
    (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
    ("critic.model.fsdp_config.param_offload=True", "critic.fsdp.param_offload", True),
    ("critic.grad_clip=0.5", "critic.optim.clip_grad", 0.5),
    ("trainer.log_with=tensorboard", "trainer.logger", ["tensorboard"]),
    ("algorithm.cliprange=0.3", f"{ACTOR}.clip_ratio", 0.3),
    ("actor_model.fsdp_config.forward_prefetch=true", f"{ACTOR}.fsdp_config.forward_prefetch", True),
    ("mixed_precision.param_dtype=bf16", f"{ACTOR}.fsdp_config.dtype", "bf16"),
    ("model.use_fused_kernels=true", "actor_rollout_ref.model.use_fused_kernels", True),
    ("data.tokenizer=/t", "actor_rollout_ref.model.tokenizer_path", "/t"),
    (f"{ACTOR}.checkpoint.contents=[model]", f"{ACTOR}.checkpoint.save_contents", ["model"]),
    (f"{ACTOR}.tis_imp_ratio_cap=3.0", "algorithm.rollout_correction.rollout_is_threshold", 3.0),
    ("trainer.val_generations_to_log_to_wandb=4", "trainer.log_val_generations", 4),
    ("ray_init.num_cpus=4", "ray_kwargs.ray_init", {"num_cpus": 4, "runtime_env": {"py_executable": None}}),
]


@pytest.mark.parametrize(("override", "key", "value"), SPELLINGS, ids=lambda v: v if isinstance(v, str) else None)
def test_other_spellings(override, key, value):
    loaded = load(override)
    node = loaded.config
    for name in key.split("."):
        node = node[name]
    assert node == value
    assert loaded.origins[key] == f"command line, renamed from {override.partition('=')[0].lstrip('+')}"


def test_a_cap_of_importance_ratios_means_weights_of_tokens():
    assert load(f"{ACTOR}.tis_imp_ratio_cap=3.0").config.algorithm.rollout_correction.rollout_is == "token"
    assert load(f"{ACTOR}.tis_imp_ratio_cap=-1").config.algorithm.rollout_correction.rollout_is is None


def test_keys_of_older_releases_are_told_once_for_each_reason():
    older = (
        "reward_model.micro_batch_size_per_gpu=32",
        "reward_model.model.fsdp_config.param_offload=True",
        "trainer.remove_previous_ckpt_in_save=False",
    )
    notices = load(*older).notices
    assert sum("reward_model." in notice for notice in notices) == 1
    shared = next(notice for notice in notices if "reward_model." in notice)
    assert "micro_batch_size_per_gpu=32, reward_model.model.fsdp_config.param_offload=True (" in shared
    assert any("trainer.remove_previous_ckpt_in_save=False" in notice for notice in notices)
    refused("trainer.remove_previous_ckpt_in_save=True", match="trainer.max_actor_ckpt_to_keep=1")
    assert PPO.locate(older[0].partition("=")[0]) is None  # a key of the tree needs no such row


@pytest.mark.parametrize("row", PPO.compat.removed, ids=lambda row: row.key)
def test_a_key_that_is_gone_is_no_other_spelling(row):
    assert PPO.locate(PPO.resolve(row.key.rstrip("."))[0]) is None


@pytest.mark.parametrize(("foreign", "ours"), PPO.compat.other_trainers.items())
def test_names_of_other_trainers_lead_to_keys_that_exist(foreign, ours):
    assert ours in refused(f"{foreign}=1", match="There is no key")
    words = [word.strip("();,").partition("=")[0] for word in ours.split()]
    named = [word for word in words if "." in word[1:]]
    assert named
    assert all(PPO.locate(name) for name in named), named


@pytest.mark.parametrize(
    ("spelled", "key"),
    {
        "actor_rollout_ref.actor.optim.learning_rate": "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.learning_rate": "actor_rollout_ref.actor.optim.lr",
        "critic.optim.learning_rate": "critic.optim.lr",
        "data.batch_size": "data.train_batch_size",
        "actor_rollout_ref.rollout.num_generations": "actor_rollout_ref.rollout.n",
        "trainer.max_steps": "trainer.total_training_steps",
    }.items(),
)
def test_a_name_of_another_trainer_below_a_section_leads_to_the_key_there(spelled, key):
    assert f"Set {key} instead" in refused(f"{spelled}=1", match="There is no key")


def test_two_spellings_that_disagree_are_refused():
    message = refused(
        "custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py", match="two spellings"
    )
    assert "a.py" in message
    assert "b.py" in message
    refused("reward_model.reward_kwargs.x=1", "reward.reward_kwargs.x=2", match="two spellings")
    load("custom_reward_function.path=a.py", "reward.custom_reward_function.path=a.py")
    load("reward_model.reward_kwargs.x=1", "reward.reward_kwargs.y=2")


def test_the_command_line_wins_over_the_file_whatever_the_spelling(tmp_path):
    file = write(tmp_path, "run.yaml", "custom_reward_function: {path: a.py}")
    config = load_config(["reward.custom_reward_function.path=b.py"], config_path=file).config
    assert config.reward.custom_reward_function.path == "b.py"


def test_only_kl_coef_means_kl_in_the_reward():
    algorithm = load("algorithm.kl_coef=0.02").config.algorithm
    assert (algorithm.kl_ctrl.kl_coef, algorithm.use_kl_in_reward) == (0.02, True)
    assert load("algorithm.use_kl_in_reward=True", "algorithm.kl_coef=0.02").config.algorithm.use_kl_in_reward


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            *GRPO,
            "data.train_batch_size=8",
            f"{ACTOR}.optim.lr=3e-6",
            "actor_rollout_ref.model.path=/m",
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:9,log:null}",
            "trainer.experiment_name='a # \"b\": [c]'",
            f"{ROLLOUT}.stop=['\n','é']",
        ],
        ["critic.optim.betas=[0.9,0.95]", "algorithm.rollout_correction.rollout_is=token", "data.gen_batch_size=null"],
    ],
)
def test_the_written_file_gives_the_same_config_again(tmp_path, overrides):
    loaded = load(*overrides)
    file = loaded.write(tmp_path / "run")
    assert file == tmp_path / "run" / "config.yaml"
    again = load_config([], config_path=str(file))
    assert again.config == loaded.config
    text = file.read_text(encoding="utf-8")
    for key, origin in loaded.origins.items():
        if origin == "command line":
            assert f"{key.rpartition('.')[2]}: " in text
    assert text.count("# command line") == sum(o.startswith("command line") for o in loaded.origins.values())
    assert again.notices == [n for n in loaded.notices if not n.startswith("No effect")]


@pytest.mark.parametrize(
    "value", [1e-6, 1.5, 1e20, float("inf"), -float("inf"), 3, True, None, "1e3", "null", [1, "a"], {"a": None}]
)
def test_scalars_survive_yaml(tmp_path, value):
    from omegaconf import OmegaConf

    (tmp_path / "x.yaml").write_text(f"x: {scalar(value)}\n", encoding="utf-8")
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "x.yaml"))["x"] == value


@pytest.mark.parametrize("text", ["a\\${b}", "\\${x", "$\\{", "plain $5"])
def test_text_that_looks_like_an_interpolation_is_read_back(text, tmp_path):
    """`\\${` on the command line is the text `${`; the config.yaml of the run has it again."""
    loaded = load_config([f"trainer.experiment_name={text}"], check=False)
    file = tmp_path / "config.yaml"
    file.write_text(loaded.to_yaml())
    assert (
        load_config([], str(file), check=False).config.trainer.experiment_name == loaded.config.trainer.experiment_name
    )
