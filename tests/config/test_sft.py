"""The config of supervised fine-tuning: keys of `sft_trainer_engine.yaml`, the older tree, and what scripts set."""

import pytest
from omegaconf import OmegaConf

from tests.compat.test_hydra_groups import composed
from verl.config import SFT, load_config
from verl.config.checks import check_config
from verl.config.load import load_composed
from verl.errors import ConfigError

from .helpers import fixture_lines

LISTED = [line.partition("=")[::2] for line in fixture_lines("sft_keys.txt")]
# in compat.yaml or docs/differences.md, with their reasons
DIFFERENT = {"trainer.logger", "trainer.device", "engine.dtype", "model.use_fused_kernels"}


def load(*overrides, **sources):
    return load_config(overrides, schema=SFT, **sources)


def refused(*overrides, match="", **sources):
    with pytest.raises(ConfigError, match=match or None) as caught:
        load(*overrides, **sources)
    return str(caught.value)


@pytest.mark.parametrize(("key", "default"), LISTED, ids=lambda v: v)
def test_every_known_key_is_accepted_at_its_default(key, default):
    loaded = load(f"{key}={default}")
    path = SFT.resolve(key)[0]
    assert SFT.locate(path), key
    same = load().config == loaded.config
    assert same or key in DIFFERENT, key


def test_all_known_defaults_together_are_accepted():
    load(*(f"{key}={default}" for key, default in LISTED))


# Ten override lists of keys that real SFT scripts set
SCRIPTS = {
    "gsm8k_full": "engine=fsdp data.train_files=~/data/gsm8k/train.parquet data.val_files=~/data/gsm8k/test.parquet "
    "data.messages_key=messages data.train_batch_size=256 data.micro_batch_size_per_gpu=4 data.max_length=1024 "
    "optim.lr=1e-4 model.path=Qwen/Qwen2.5-0.5B-Instruct trainer.project_name=gsm8k-sft trainer.experiment_name=qwen "
    "trainer.total_epochs=1 trainer.logger=['console','wandb'] trainer.default_local_dir=/tmp/sft",
    "dynamic": "data.use_dynamic_bsz=True data.max_token_len_per_gpu=8192 data.pad_mode=no_padding data.truncation=error "
    "optim.lr=2e-5 optim.lr_warmup_steps_ratio=0.01 optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0 "
    "optim.min_lr_ratio=0.1 optim.lr_scheduler_type=cosine engine.ulysses_sequence_parallel_size=1 engine.strategy=fsdp2 "
    "engine.fsdp_size=-1 engine=fsdp trainer.test_freq=after_each_epoch trainer.save_freq=-1 trainer.resume_mode=disable",
    "lora": "model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear model.use_liger=True engine=fsdp "
    "data.micro_batch_size_per_gpu=4 data.use_dynamic_bsz=False optim.lr=1e-4 trainer.total_epochs=1 trainer.save_freq=50",
    "sequence_parallel": "engine=fsdp engine.strategy=fsdp engine.ulysses_sequence_parallel_size=2 "
    "model.use_remove_padding=true data.train_batch_size=64 data.max_length=8192 data.truncation=right",
    "multi_turn": "data.messages_key=messages data.tools_key=tools data.enable_thinking_key=enable_thinking "
    "data.ignore_input_ids_mismatch=True data.enable_thinking_default=none data.train_batch_size=16 data.max_length=2048",
    "warm_up": "optim=fsdp optim.lr=1e-5 optim.lr_warmup_steps=100 optim.warmup_style=cosine optim.weight_decay=0 "
    "trainer.total_training_steps=1000 trainer.save_freq=after_each_epoch trainer.max_ckpt_to_keep=3",
    "checkpoints": "checkpoint.save_contents=[model,optimizer,extra,hf_model] trainer.save_freq=10 trainer.resume_mode=auto "
    "trainer.max_ckpt_to_keep=1 trainer.default_local_dir=/tmp/x model.path=HuggingFaceTB/SmolLM2-135M-Instruct",
    "composed": "model=hf_model engine=fsdp optim=fsdp data.train_files=[a.parquet,b.parquet] engine.model_dtype=bf16 "
    "engine.param_offload=True engine.optimizer_offload=True engine.reshard_after_forward=True engine.forward_prefetch=True",
    "padded": "data.pad_mode=right data.truncation=left data.max_length=512 data.use_dynamic_bsz=False "
    "data.micro_batch_size_per_gpu=64 data.num_workers=2 data.use_shm=False data.balance_dp_token=False",
    "verbose": "++trainer.nnodes=1 ++trainer.n_gpus_per_node=1 trainer.device=cpu trainer.seed=7 trainer.balance_batch=True "
    "+data.image_key=images +data.shuffle=True model.trust_remote_code=True model.enable_gradient_checkpointing=False "
    "+trainer.nccl_timeout=1800 hydra.run.dir=/x",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_lists_of_real_scripts_load(name):
    loaded = load(*SCRIPTS[name].split())
    assert all(notice.startswith(("No effect: ", "hydra.")) for notice in loaded.notices), loaded.notices


def test_what_they_set_acts():
    config = load(*SCRIPTS["dynamic"].split()).config
    assert (config.engine.strategy, config.optim.betas, config.optim.lr_scheduler_type) == (
        "fsdp2",
        [0.9, 0.95],
        "cosine",
    )
    assert (config.trainer.test_freq, config.trainer.save_freq) == ("after_each_epoch", -1)
    assert load("trainer.save_freq=5").config.trainer.save_freq == 5
    assert load(*SCRIPTS["warm_up"].split()).config.optim.lr_scheduler_type == "cosine"
    assert load().config.optim.lr == 1e-3


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_gives_defaults_and_a_key_decides(order):
    overrides = ["engine=fsdp", "engine.strategy=fsdp2"][::order]
    loaded = load(*overrides)
    assert loaded.config.engine.strategy == "fsdp2"
    assert loaded.origins["engine.strategy"] == "command line"
    assert load("engine=fsdp").notices == []


@pytest.mark.parametrize("engine", ["veomni", "automodel", "torchtitan"])
def test_another_engine_is_refused_and_its_keys_are_not_mentioned(engine):
    message = refused(
        f"engine={engine}", f"optim={engine}", "engine.some_key_of_it=2", "optim.decay_of_it=1", "optim.lr=1e-5"
    )
    assert "is not available in this version" in message
    assert len(message.splitlines()) == 1
    assert "did you mean" in refused("engine.some_key_of_it=2", "optim.lr_=1")
    refused("engine=fsdpp", match="there is no such option; there are fsdp, megatron")


def test_the_engine_of_a_defaults_list(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults:\n  - sft_trainer_engine\n  - engine: veomni\n  - _self_\noptim: {lr: 1e-5}\n")
    refused(config_path=str(file), match="This training engine")
    file.write_text("defaults:\n  - sft_trainer_engine\n  - engine@engine: fsdp\n  - _self_\noptim: {lr: 1e-5}\n")
    loaded = load(config_path=str(file))
    assert loaded.notices == []
    assert loaded.config.optim.lr == 1e-5


def test_keys_of_the_megatron_engine_are_noticed_for_another_one():
    notices = load("+engine.tensor_model_parallel_size=2", "optim.lr_decay_steps=9").notices
    assert len(notices) == 2
    assert "engine.strategy" in notices[0] or "strategy is not megatron" in notices[0]


def test_a_schedule_as_megatron_names_it():
    loaded = load("engine=megatron", "optim.lr=1e-5", "optim.lr_decay_style=cosine", "optim.min_lr=1e-6")
    assert (loaded.config.optim.lr_scheduler_type, loaded.config.optim.min_lr) == ("cosine", 1e-6)
    assert not [notice for notice in loaded.notices if "optim" in notice]
    refused(
        "optim.lr=1e-5",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr=1e-4",
        match="min_lr=0.0001 is above optim.lr=1e-05",
    )


OLDER = [
    ("model.partial_pretrain=/m", "model.path", "/m"),
    ("model.fsdp_config.model_dtype=bf16", "engine.model_dtype", "bf16"),
    ("model.fsdp_config.cpu_offload=True", "engine.param_offload", True),
    ("model.fsdp_config.offload_params=True", "engine.param_offload", True),
    ("model.fsdp_config.wrap_policy.min_num_params=9", "engine.wrap_policy.min_num_params", 9),
    ("model.strategy=fsdp2", "engine.strategy", "fsdp2"),
    ("model.lora_rank=8", "model.lora_rank", 8),
    ("data.multiturn.enable=True", "data.row_format", "messages"),
    ("data.multiturn.enable=False", "data.row_format", None),
    ("data.multiturn.messages_key=chat", "data.messages_key", "chat"),
    ("data.multiturn.tools_key=functions", "data.tools_key", "functions"),
    ("data.multiturn.enable_thinking_key=think", "data.enable_thinking_key", "think"),
    ("data.micro_batch_size=2", "data.micro_batch_size_per_gpu", 2),
    ("data.chat_template=t", "model.custom_chat_template", "t"),
    ("data.prompt_key=extra_info", "data.prompt_key", "extra_info"),
    ("data.response_key=extra_info", "data.response_key", "extra_info"),
    ("+data.prompt_dict_keys=['question']", "data.prompt_dict_keys", ["question"]),
    ("+data.response_dict_keys=['answer']", "data.response_dict_keys", ["answer"]),
    ("ulysses_sequence_parallel_size=2", "engine.ulysses_sequence_parallel_size", 2),
    ("use_remove_padding=true", "model.use_remove_padding", True),
    ("optim.lr_scheduler=constant", "optim.lr_scheduler_type", "constant"),
    ("optim.warmup_steps_ratio=0.2", "optim.lr_warmup_steps_ratio", 0.2),
    ("trainer.checkpoint.save_contents=[model]", "checkpoint.save_contents", ["model"]),
]


@pytest.mark.parametrize(("override", "key", "value"), OLDER, ids=lambda v: v if isinstance(v, str) else None)
def test_keys_of_the_older_program(override, key, value):
    config = load(override, config_name="sft_trainer").config
    assert SFT.flatten(config)[key] == value


def test_defaults_of_the_older_program():
    config = load(config_name="sft_trainer").config
    assert (config.optim.lr, config.optim.betas) == (1e-5, [0.9, 0.95])
    assert (config.optim.lr_warmup_steps_ratio, config.optim.lr_scheduler_type) == (0.1, "cosine")
    assert (config.data.prompt_key, config.data.response_key, config.data.use_dynamic_bsz) == (
        "question",
        "answer",
        False,
    )
    assert load(config_name="sft_trainer_engine").config == load().config
    assert load(config_name="sft_trainer", config_path="pkg://verl.trainer.config").config == config
    assert "verl train" in refused(config_name="ppo_trainer")


def test_devices_follow_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    loaded = load()
    assert (loaded.config.trainer.nnodes, loaded.config.trainer.n_gpus_per_node) == (2, 4)
    assert loaded.origins["trainer.n_gpus_per_node"] == "follows LOCAL_WORLD_SIZE"
    explicit = load("trainer.n_gpus_per_node=2").config.trainer
    assert (explicit.nnodes, explicit.n_gpus_per_node) == (1, 2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sft.loss=dfft"], "did you mean 'dft'"),
        (["model.neftune_alpha=-1"], "must be above 0"),
        (["data.loss_on=answers"], "is not one of null, assistant, completion, all"),
        (["data.row_format=prompt_response"], "needs data.prompt_key"),
        (["data.prompt_key=q"], "Set both"),
        (["data.max_length=1"], "at least 2"),
        (["trainer.save_freq=after_every_epoch"], "a whole number or after_each_epoch"),
        (["trainer.test_freq=1.5"], "whole number"),
        (["data.train_batch_size=0"], "at least 1"),
        (["optim.lr=0"], "above 0"),
        (["optim.betas=[0.9]"], "a list of 2 numbers"),
        (["+optim.override_optimizer_config.eps=1e-5"], "is not read"),
        (["checkpoint.save_contents=[models]"], "part of a checkpoint"),
        (["engine.strategy=fsdp3"], "no training engine 'fsdp3'"),
        (["trainer.guards.grad_norm.limit=2", "trainer.guards.grad_norm.action=rollback"], "saves none"),
        (["trainer.resume_mode=resume_path"], "a folder global_step_N"),
        (["trainer.default_hdfs_dir=hdfs://x"], "Saving to HDFS is not available"),
        (["data.custom_cls.path=mine.py"], "dataset class of one's own is not available"),
        (["actor_rollout_ref.actor.optim.lr=1e-6"], "did you mean 'optim.lr'"),
        (["data.max_lenght=5"], "did you mean 'data.max_length'"),
        (["assistant_only_loss=True"], "Set data.loss_on=assistant"),
        (["packing=True"], "rows are always packed"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)  # fmt: skip
def test_what_is_refused(overrides, words):
    assert words in refused(*overrides)


def test_rules_of_shared_sections_hold_once():
    problems = check_config(load_config(["optim.lr=-1", "checkpoint.save_contents=[x]"], schema=SFT, check=False))
    assert [p.key for p in problems if p.level == "error"] == [
        "optim.lr", "checkpoint.save_contents", "checkpoint.load_contents",
    ][:2]  # fmt: skip


def test_names_of_other_trainers_lead_to_keys_that_exist():
    for foreign, ours in SFT.compat.other_trainers.items():
        assert SFT.locate(ours.split()[0].partition("=")[0]), (foreign, ours)
        if foreign not in ("lr_scheduler_type", "weight_decay", "train_batch_size"):
            assert ours in refused(f"{foreign}=1", match="There is no key"), foreign


def test_the_composition_by_hydra_is_the_defaults():
    tree = composed(root_name="sft_trainer_engine")
    for resolve in (True, False):
        loaded = load_composed(OmegaConf.to_container(tree, resolve=resolve), schema=SFT)
        assert loaded.config == load().config
        assert (loaded.settings, loaded.notices) == ({}, [])
    missing = [path for path in SFT.leaves if OmegaConf.select(tree, path, default="?") == "?"]
    assert missing == []


def test_the_written_file_gives_the_same_config_again(tmp_path):
    loaded = load("trainer.save_freq=after_each_epoch", "optim.lr=2e-5", "trainer.seed=3")
    again = load_config([], str(loaded.write(tmp_path)), schema=SFT)
    assert again.config == loaded.config
    assert loaded.config.data.seed == 3
