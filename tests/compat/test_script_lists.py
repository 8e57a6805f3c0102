"""Override lists as launch scripts write them: each trains two steps on a tiny model, or gets its sentence."""

import json

import pytest

from verl.config import load_config
from verl.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
FALLBACK = "trainer.engine_fallback=fsdp"
OVERLONG = "+reward_model.reward_kwargs.overlong_buffer_cfg"

# name -> overrides, to GRPO with 2 prompts x 2 samples
RUNS = {
    "grpo with a KL loss": f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 {ACTOR}.kl_loss_type=low_var_kl "
    f"{ACTOR}.entropy_coeff=0 algorithm.use_kl_in_reward=False",
    "dapo": f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10.0 "
    f"{ACTOR}.loss_agg_mode=token-mean reward_model.reward_manager=dapo {OVERLONG}.enable=True {OVERLONG}.len=2 "
    f"{OVERLONG}.penalty_factor=1.0 {OVERLONG}.log=False +reward_model.reward_kwargs.max_resp_len=4",
    "dr grpo": f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False",
    "gspo": f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4 "
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    "cispo": f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=0.2",
    "gpg": f"algorithm.adv_estimator=gpg {ACTOR}.policy_loss.loss_mode=gpg",
    "sapo": f"{ACTOR}.policy_loss.loss_mode=sapo +{ACTOR}.policy_loss.tau_pos=1.0 +{ACTOR}.policy_loss.tau_neg=1.05",
    "dppo": f"{ACTOR}.policy_loss.loss_mode=dppo_tv {ACTOR}.clip_ratio_low=0.15 {ACTOR}.clip_ratio_high=0.15",
    "geo mean": f"{ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_low=0.4 {ACTOR}.clip_ratio_high=0.4",
    "entropy, clip_cov": f"{ACTOR}.policy_loss.loss_mode=clip_cov {ACTOR}.policy_loss.clip_cov_ratio=0.0002",
    "entropy, kl_cov": f"{ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.kl_cov_ratio=0.002 "
    f"{ACTOR}.policy_loss.ppo_kl_coef=1",
    "rloo": "algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl "
    "algorithm.kl_ctrl.kl_coef=0.001",
    "reinforce++": "algorithm.adv_estimator=reinforce_plus_plus",
    "reinforce++ with a baseline": "algorithm.adv_estimator=reinforce_plus_plus_baseline",
    "remax": "algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True",
    "opo": "algorithm.adv_estimator=opo",
    "ppo": "algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path={model} "
    "critic.model.enable_gradient_checkpointing=True critic.model.fsdp_config.param_offload=False trainer.critic_warmup=0",
    "lora": "actor_rollout_ref.model.lora_rank=4 actor_rollout_ref.model.lora_alpha=8 "
    f"actor_rollout_ref.model.target_modules=all-linear {ROLLOUT}.load_format=safetensors {ROLLOUT}.layered_summon=True",
    "optimal token baseline": f"algorithm.adv_estimator=optimal_token_baseline {ROLLOUT}.calculate_log_probs=True",
    "importance weights and rejection": "algorithm.rollout_correction.rollout_is=token "
    "algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.rollout_rs=token_k1 "
    "algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6",
    "megatron with its keys, without Megatron": f"model_engine=megatron {MEGATRON}.tensor_model_parallel_size=1 "
    f"{MEGATRON}.param_offload=True {MEGATRON}.use_dist_checkpointing=False",
    "veomni": f"model_engine=veomni {ACTOR}.veomni.param_offload=True {ACTOR}.optim.lr_scheduler_name=cosine {FALLBACK}",
    "torchtitan": f"model_engine=torchtitan {ACTOR}.torchtitan.data_parallel_shard_size=1 "
    f"{ACTOR}.optim.min_lr_factor=0.1 {FALLBACK}",
    "fsdp_turbo": f"{ACTOR}.strategy=fsdp_turbo actor_rollout_ref.ref.strategy=fsdp_turbo {FALLBACK}",
    "megatron-lite": f"actor@actor_rollout_ref.actor=mlite_actor ref@actor_rollout_ref.ref=mlite_ref {FALLBACK}",
    "keys of trackers and of other engines": "trainer.tensorboard_dir=tb +trainer.rl_logging_board_dir=board "
    f"{ROLLOUT}.moe_tensor_parallel_size=1 actor_rollout_ref.actor.model_engine=megatron",
    "validation and console": f"{ROLLOUT}.val_kwargs.n=2 {ROLLOUT}.val_kwargs.do_sample=True "
    f"{ROLLOUT}.val_kwargs.temperature=1.0 trainer.test_freq=1 trainer.log_val_generations=1",
}  # fmt: skip
QUICK = ("dapo", "veomni", "megatron-lite")

# name -> (overrides, the sentence)
REFUSED = {
    "veomni": ("model_engine=veomni", r"\(model_engine=veomni\). Use model_engine=dp.*engine_fallback=fsdp"),
    "torchtitan": (f"model_engine=torchtitan {ACTOR}.optim.min_lr_factor=0.1", r"\(model_engine=torchtitan\)"),
    "fsdp_turbo": (f"{ACTOR}.strategy=fsdp_turbo", r"strategy=fsdp_turbo\).*engine_fallback=fsdp"),
    "megatron-lite": ("actor@actor_rollout_ref.actor=mlite_actor", r"strategy=mlite\).*engine_fallback=fsdp"),
    "npu": ("trainer.device=npu", r"kind of device is not available.*trainer.device=auto"),
    "qat": (f"{ACTOR}.fsdp_config.qat.enable=True", "Quantisation-aware training is not available"),
    "mtp": ("actor_rollout_ref.model.mtp.enable=True", "Multi-token prediction is not available"),
    "fp8 rollout": (f"{ROLLOUT}.quantization=fp8", "Rollout with quantised weights is not available"),
    "trtllm": (f"{ROLLOUT}.name=trtllm", "rollout engine is not available"),
    "dynamo": (f"{ROLLOUT}.name=dynamo", "there is no rollout engine 'dynamo'"),
    "collabllm": (f"{ROLLOUT}.multi_turn.num_repeat_rollouts=3", "Repetition of one trajectory is not available"),
    "samples of a former run": ("skip.rollout_tq.enable=True", "Training on samples of a former run is not available"),
    "hdfs": ("trainer.default_hdfs_dir=hdfs://x", "Saving to HDFS is not available"),
    "a callback after a save": ("trainer.checkpoint_callback_class=a.B", "callback after a save is not available"),
    "a manager with its own service": ("reward.reward_manager.name=remote", "reward manager is not available"),
    "another group": ("rollout@actor_rollout_ref.rollout=mine", "the groups here are: actor, ref, critic"),
}


def overrides(text, tree):
    flat = [
        f"actor_rollout_ref.model.path={tree['actor_rollout_ref']['model']['path']}", f"{ROLLOUT}.n=2",
        f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.fsdp_config.dtype=float32",
        *(f"data.{name}={value}" for name, value in tree["data"].items()),
        f"custom_reward_function.path={tree['custom_reward_function']['path']}", "reward.num_workers=1",
        "trainer.logger=[file]", "trainer.total_training_steps=2", "trainer.val_before_train=False",
        f"trainer.default_local_dir={tree['trainer']['default_local_dir']}",
    ]  # fmt: skip
    added = text.format(model=tree["actor_rollout_ref"]["model"]["path"]).split()
    estimator = [] if "adv_estimator" in text else ["algorithm.adv_estimator=grpo"]
    taken = {item.partition("=")[0].lstrip("+") for item in added}
    return [*(item for item in flat if item.partition("=")[0] not in taken), *estimator, *added]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS])
def test_a_list_trains_two_steps(name, tiny_tree):
    from verl.run.host import train

    assert train(load_config(overrides(RUNS[name], tiny_tree))) == 0
    lines = open(f"{tiny_tree['trainer']['default_local_dir']}/metrics.jsonl").read().splitlines()
    assert [row["step"] for row in map(json.loads, lines) if "actor/pg_loss" in row] == [1, 2]


@pytest.mark.parametrize("name", RUNS)
def test_a_list_passes_the_checks(name, tiny_tree):
    load_config(overrides(RUNS[name], tiny_tree))


@pytest.mark.parametrize("name", REFUSED)
def test_a_list_gets_its_sentence(name, tiny_tree):
    text, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        load_config(overrides(text, tiny_tree))


def test_float16_of_megatron_is_the_dtype_of_the_local_engine(tiny_tree):
    from verl.run.host import train

    keys = overrides(f"model_engine=megatron {MEGATRON}.dtype=float16 {ROLLOUT}.dtype=float16", tiny_tree)
    keys.remove(f"{ACTOR}.fsdp_config.dtype=float32")
    assert train(load_config(keys)) == 0
    lines = open(f"{tiny_tree['trainer']['default_local_dir']}/metrics.jsonl").read().splitlines()
    assert all(row["actor/loss_scale"] == 2.0**16 for row in map(json.loads, lines) if "actor/grad_norm" in row)
