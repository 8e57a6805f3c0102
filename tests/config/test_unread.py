"""A key that is set and not read is an error; one that asks for nothing, or only sizes hardware, is a notice."""

import pytest

from .helpers import ACTOR, GRPO, ROLLOUT, load, problems, refused

REF = "actor_rollout_ref.ref"

ERRORS = [
    ((f"{ACTOR}.kl_loss_coef=0.05", f"{ACTOR}.use_kl_loss=False"), f"{ACTOR}.use_kl_loss=True"),
    ((f"{ACTOR}.kl_loss_type=mse",), f"{ACTOR}.use_kl_loss=True"),
    ((*GRPO, "critic.optim.lr=3e-5"), "algorithm.adv_estimator=gae"),
    ((*GRPO, "critic.model.path=/models/x"), "algorithm.adv_estimator=gae"),
    ((*GRPO, "trainer.critic_warmup=5"), "algorithm.adv_estimator=gae"),
    ((*GRPO, "critic.cliprange_value=0.2"), "algorithm.adv_estimator=gae"),
    ((*GRPO, "algorithm.lam=0.95"), "algorithm.adv_estimator=gae"),
    ((*GRPO, "algorithm.gamma=0.99"), "reinforce_plus_plus"),
    (("algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=4", "algorithm.norm_adv_by_std_in_grpo=False"), "grpo"),
    (("algorithm.kl_ctrl.kl_coef=0.02",), "algorithm.use_kl_in_reward=True"),
    (("algorithm.kl_penalty=k3",), "algorithm.use_kl_in_reward=True"),
    (("algorithm.kl_ctrl.target_kl=0.5", "algorithm.use_kl_in_reward=True"), "kl_ctrl.type=adaptive"),
    (("algorithm.filter_groups.metric=acc",), "algorithm.filter_groups.enable=True"),
    (("algorithm.filter_groups.max_num_gen_batches=10",), "algorithm.filter_groups.enable=True"),
    (("data.gen_batch_size=2048",), "algorithm.filter_groups.enable=True"),
    (("algorithm.pf_ppo.weight_pow=3",), "algorithm.use_pf_ppo=True"),
    (("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.weight_pow=3"), "pow"),
    (("algorithm.rollout_correction.rollout_is_threshold=3.0",), "rollout_is=token"),
    (("algorithm.rollout_correction.rollout_rs_threshold=3.0",), "rollout_rs"),
    (("algorithm.rollout_correction.loss_type=reinforce",), "bypass_mode=True"),
    (("algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.policy_loss.loss_mode=gspo"), "loss_type"),
    (("algorithm.gdpo_reward_keys=[a,b]",), "adv_estimator=gdpo"),
    ((f"{ACTOR}.policy_loss.clip_cov_ratio=0.1",), "loss_mode=clip_cov"),
    ((f"{ACTOR}.policy_loss.ppo_kl_coef=0.5",), "loss_mode=kl_cov"),
    ((f"{ACTOR}.policy_loss.dro_beta=0.5",), "loss_mode=dro"),
    ((f"{ACTOR}.tau_neg=1.2",), "loss_mode=sapo"),
    ((f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.policy_loss.loss_mode=gpg"), "loss_mode"),
    ((f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"), "clip_ratio alone"),
    ((f"{ACTOR}.clip_ratio_c=10.0", f"{ACTOR}.policy_loss.loss_mode=gspo"), "loss_mode=vanilla"),
    ((f"{ACTOR}.loss_scale_factor=100",), "seq-mean-token-sum-norm"),
    ((f"{ACTOR}.optim.num_cycles=1.5",), "lr_scheduler_type=cosine"),
    ((f"{ACTOR}.optim.min_lr_ratio=0.1",), "lr_scheduler_type=cosine"),
    ((f"{ACTOR}.optim.lr_warmup_steps=10", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"), "lr_warmup_steps"),
    ((f"{ACTOR}.optim.lr_decay_style=cosine",), "lr_scheduler_type"),
    ((f"{ROLLOUT}.val_kwargs.temperature=0.7", f"{ROLLOUT}.val_kwargs.do_sample=False"), "do_sample=True"),
    ((f"{ROLLOUT}.val_kwargs.top_p=0.7",), "do_sample=True"),
    ((f"{ROLLOUT}.val_kwargs.also_greedy=True",), "do_sample=True"),
    ((f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.top_p=0.9"), "do_sample=True"),
    ((f"{ROLLOUT}.multi_turn.format=llama",), "multi_turn.enable=True"),
    (("reward.custom_reward_function.name=score",), "path"),
    (("custom_reward_function.reward_kwargs.x=1",), "path"),
    (("data.custom_cls.name=Mine",), "path"),
    (("reward.reward_manager.module.path=mine.py",), "source=importlib"),
    (("reward_model.model.path=/models/rm",), "reward_model.enable=True"),
    (("distillation.distillation_loss.topk=8",), "distillation.enabled=True"),
    (("trainer.resume_from_path=/x/global_step_5",), "resume_mode=resume_path"),
    (("actor_rollout_ref.model.lora_alpha=32",), "lora_rank"),
    ((f"{ACTOR}.fsdp_config.chunk_size=1024",), "use_3d_hybrid"),
    ((f"{REF}.fsdp_config.dtype=float32",), "use_kl_loss=True"),
    (("skip.rollout.action=reuse",), "enable=True"),
]  # fmt: skip

NOTICES = [
    (*GRPO, "trainer.critic_warmup=0"),
    ("algorithm.kl_ctrl.kl_coef=0.001",),
    ("algorithm.kl_ctrl.kl_coef=0.0",),
    (f"{ACTOR}.kl_loss_coef=0.0",),
    (f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.name=native"),
    (f"{ROLLOUT}.tensor_model_parallel_size=2",),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.strategy=fsdp"),
    (f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",),
    (f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",),
    (f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",),
    (f"{REF}.fsdp_config.param_offload=True",),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=16",),
    (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"),
    (*GRPO, "critic.ppo_micro_batch_size_per_gpu=4"),
    (f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.policy_loss.loss_mode=gpg"),
    ("global_profiler.tool=nsys",),
    ("data.return_raw_chat=True",),
    ("critic.enable=False", *GRPO, "critic.optim.lr=1e-5"),
]


@pytest.mark.parametrize(("overrides", "fix"), ERRORS, ids=lambda v: v[-1] if isinstance(v, tuple) else None)
def test_unread_keys_are_errors(overrides, fix):
    message = refused(*overrides, match="is not read")
    assert overrides[-1].partition("=")[0].lstrip("+") in message or overrides[0].partition("=")[0] in message
    assert fix in message
    assert "Remove it" in message


@pytest.mark.parametrize("overrides", NOTICES, ids=lambda v: v[-1])
def test_keys_that_ask_for_nothing_are_notices(overrides):
    notices = load(*overrides).notices
    assert any("No effect" in notice for notice in notices), notices


def test_one_notice_per_reason():
    notices = load(f"{ACTOR}.megatron.param_offload=True", f"{ACTOR}.megatron.seed=1", "data.use_shm=True").notices
    assert len(notices) == 2
    assert "megatron.param_offload=True" in notices[0]
    assert "megatron.seed=1" in notices[0]


def test_a_key_that_is_read_says_nothing():
    overrides = [
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.05",
        f"{REF}.log_prob_micro_batch_size_per_gpu=16",
    ]
    assert load(*overrides).notices == []


def test_a_users_own_estimator_may_read_anything():
    load(
        "algorithm.adv_estimator=mine.py:estimator", "critic.optim.lr=3e-5", "algorithm.lam=0.9", "algorithm.gamma=0.9"
    )


def test_validation_samples_where_a_temperature_is_given():
    loaded = load(f"{ROLLOUT}.val_kwargs.temperature=0.6", f"{ROLLOUT}.val_kwargs.top_p=0.95")
    assert loaded.config.actor_rollout_ref.rollout.val_kwargs.do_sample is True
    assert "temperature" in loaded.origins[f"{ROLLOUT}.val_kwargs.do_sample"]


def test_missing_features_are_said_once():
    message = refused(f"{ROLLOUT}.name=trtllm", match="not available in this version")
    assert f"{ROLLOUT}.name=native" in message
    assert problems("trainer.n_gpus_per_node=8", "trainer.nnodes=2") == []
