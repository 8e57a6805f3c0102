"""Override lists as launch scripts of Megatron have them, sizes divided to two or four ranks: each trains for two steps."""

import pytest

from tests.runtime.ranks import run
from verl.models.tiny import make_tiny_model

pytestmark = pytest.mark.slow

POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = (f"{POLICY}.{role}" for role in ("actor", "ref", "rollout"))
LAYERS = f"+{ACTOR}.megatron.override_transformer_config"


def sizes(role="actor", prefix=f"{POLICY}.", **named):
    """Keys of `megatron.` by the first word of their name."""
    long = {"tensor": "tensor_model", "pipeline": "pipeline_model", "virtual": "virtual_pipeline_model"}
    long |= {"context": "context", "expert": "expert_model", "expert_tensor": "expert_tensor"}
    return [f"{prefix}{role}.megatron.{long[name]}_parallel_size={size}" for name, size in named.items()]


def offload(*roles):
    return [
        f"{role}.megatron.{what}_offload=True"
        for role in roles
        for what in (("param",) if role == REF else ("param", "optimizer", "grad"))
    ]


KL_LOSS = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.001", f"{ACTOR}.kl_loss_type=low_var_kl"]
RECOMPUTE = [
    f"{LAYERS}.recompute_granularity=full",
    f"{LAYERS}.recompute_method=uniform",
    f"{LAYERS}.recompute_num_layers=1",
]
DYNAMIC = [
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=128",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=128",
    f"{REF}.log_prob_use_dynamic_bsz=True",
    f"{REF}.log_prob_max_token_len_per_gpu=128",
]
SCRIPTS = {  # name -> ranks, family of the model, overrides
    "grpo, dense, tensor and pipeline": (4, "qwen2", [
        "model_engine=megatron",
        *sizes(tensor=2, pipeline=2), *sizes("ref", tensor=2, pipeline=2),
        f"{ACTOR}.megatron.use_mbridge=True",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{REF}.log_prob_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        *KL_LOSS, f"{ACTOR}.entropy_coeff=0", "algorithm.use_kl_in_reward=False",
    ]),
    "grpo, offload of every role": (2, "qwen3", [
        f"{ACTOR}.strategy=megatron",
        *sizes(tensor=2), *sizes("ref", tensor=2), *offload(ACTOR, REF),
        f"{ACTOR}.megatron.vanilla_mbridge=False",
        f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.gpu_memory_utilization=0.6",
        *KL_LOSS, *DYNAMIC,
    ]),
    "ppo with a critic": (2, "llama", [
        "model_engine=megatron",
        "algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=False",
        *sizes(pipeline=2), *sizes("ref", pipeline=2), *sizes("critic", "", pipeline=2),
        "critic.optim.lr=1e-5", "critic.model.enable_gradient_checkpointing=False",
        "critic.ppo_micro_batch_size_per_gpu=2", *offload("critic"),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    ]),
    "dapo": (2, "qwen2", [
        "model_engine=megatron",
        *sizes(pipeline=2), *offload(ACTOR, REF),
        f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0",
        f"{ACTOR}.loss_agg_mode=token-mean", f"{ACTOR}.optim.lr_warmup_steps=1", f"{ACTOR}.optim.weight_decay=0.1",
        f"{ACTOR}.optim.clip_grad=1.0", f"{ACTOR}.use_kl_loss=False",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=2",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        "+reward_model.reward_kwargs.max_resp_len=6",
        f"{ROLLOUT}.val_kwargs.n=2", f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1.0",
        f"{ROLLOUT}.val_kwargs.top_p=0.7",
        *DYNAMIC,
    ]),
    "mixture, experts over devices": (4, "qwen3_moe", [
        "model_engine=megatron",
        *sizes(tensor=2, pipeline=1, expert=2, expert_tensor=1, context=1),
        *sizes("ref", tensor=2, pipeline=1, expert=2, expert_tensor=1, context=1),
        *offload(ACTOR, REF), *RECOMPUTE,
        f"{LAYERS}.moe_router_dtype=fp32", f"{LAYERS}.moe_permute_fusion=True", f"{LAYERS}.moe_enable_deepep=True",
        f"{LAYERS}.moe_token_dispatcher_type=flex", f"{LAYERS}.apply_rope_fusion=True",
        f"{LAYERS}.gradient_accumulation_fusion=True",
        f"{ACTOR}.megatron.use_dist_checkpointing=False",
        f"{ROLLOUT}.tensor_model_parallel_size=2", *KL_LOSS, *DYNAMIC,
    ]),
    "gspo on a mixture": (4, "qwen3_moe", [
        f"{ACTOR}.strategy=megatron",
        *sizes(pipeline=2, expert=2), *sizes("ref", pipeline=2, expert=2),
        f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low=0.0003", f"{ACTOR}.clip_ratio_high=0.0004",
        f"{ACTOR}.megatron.override_ddp_config={{grad_reduce_in_fp32: True}}",
        *DYNAMIC,
    ]),
    "large mixture, uneven stages": (4, "mixtral", [
        "model_engine=megatron",
        *sizes(pipeline=4, expert=1, expert_tensor=1), *sizes("ref", pipeline=4, expert=1, expert_tensor=1),
        f"{LAYERS}.num_layers_in_first_pipeline_stage=2", f"{LAYERS}.num_layers_in_last_pipeline_stage=1",
        *RECOMPUTE, *offload(ACTOR, REF),
        f"+{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction=1",
        f"+{ACTOR}.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True",
        f"+{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer=True",
        f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
        f"{ACTOR}.optim.lr_decay_style=constant",
        f"{LAYERS}.attention_backend=flash",
    ]),
    "interleaved stages": (4, "llama", [
        "model_engine=megatron",
        *sizes(pipeline=4, virtual=2), *sizes("ref", pipeline=4, virtual=2),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{REF}.log_prob_micro_batch_size_per_gpu=1", *KL_LOSS,
    ]),
    "whole optimizer, no sequence parallelism": (2, "mistral", [
        f"{ACTOR}.strategy=megatron",
        *sizes(tensor=2), f"{ACTOR}.megatron.sequence_parallel=False",
        f"{ACTOR}.megatron.use_distributed_optimizer=False", f"{ACTOR}.megatron.seed=7",
        f"{ACTOR}.checkpoint.save_contents=['model','optimizer','extra']", f"{ACTOR}.ppo_epochs=2",
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.test_freq=1", "trainer.save_freq=1",
    ]),
    "importance correction": (2, "qwen3", [
        "model_engine=megatron",
        *sizes(pipeline=2, context=1), *RECOMPUTE,
        "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0",
        f"{ROLLOUT}.calculate_log_probs=True", f"{ROLLOUT}.mode=async", "trainer.balance_batch=True",
        "data.filter_overlong_prompts=True", "data.truncation=error", "trainer.critic_warmup=0",
        "trainer.log_val_generations=2", *DYNAMIC,
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_list_of_overrides_trains(jobs, tmp_path, name):
    pytest.importorskip("megatron.core", reason="needs the extra megatron")
    num_ranks, family, overrides = SCRIPTS[name]
    num_layers = {"interleaved stages": 8, "large mixture, uneven stages": 7}.get(name, 4)
    model = make_tiny_model(tmp_path / "model", family, num_hidden_layers=num_layers)
    here = [
        f"{POLICY}.model.path={model}",
        f"{ACTOR}.fsdp_config.dtype=bfloat16",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "data.train_batch_size=6",
        f"trainer.n_gpus_per_node={num_ranks}",
    ]
    jobs.add(name := f"script_{list(SCRIPTS).index(name)}", *here, *overrides)
    run(num_ranks, "tests.runtime.several_runs", jobs.file(), timeout_s=240)
    rows = jobs.run(name).rows
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert (jobs.run(name).folder / "global_step_2/actor/huggingface/model.safetensors").is_file()
