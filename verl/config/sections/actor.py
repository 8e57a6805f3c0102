"""`actor_rollout_ref.actor` and `actor_rollout_ref.ref`: the policy being trained and the frozen one beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, inert, section, used
from verl.config.names import KL_KINDS, LOSS_AGG_MODES
from verl.config.sections.fsdp import FUSED_LOG_PROBS, FSDPConfig
from verl.config.sections.megatron import MegatronConfig
from verl.config.sections.optim import OptimConfig

NO_COMPILE = "modules are not compiled in this version"
NO_PADDING = "padding is never computed"
PROFILER = "each step reports where its time went; no profiler is attached in this version"


@dataclass(frozen=True)
class PolicyLossConfig(Section):
    loss_mode: str = used(
        "vanilla",
        "policy loss, a name or path/to/file.py:function",
        when="no_bypass",
        strict="existing releases apply it to the sampler's log-probabilities",
    )
    clip_cov_ratio: float = used(0.0002, "share of tokens that clip_cov leaves out", when="clip_cov")
    clip_cov_lb: float = used(1.0, "lowest covariance that clip_cov leaves out", when="clip_cov")
    clip_cov_ub: float = used(5.0, "highest covariance that clip_cov leaves out", when="clip_cov")
    kl_cov_ratio: float = used(0.0002, "share of tokens that kl_cov penalises", when="kl_cov")
    ppo_kl_coef: float = used(0.1, "weight of that penalty", when="kl_cov")
    dro_beta: float | None = used(None, "regularisation of dro", when="dro", gt=0)


@dataclass(frozen=True)
class CheckpointConfig(Section):
    save_contents: list[str] = used(
        ["model", "optimizer", "extra"], "parts of a checkpoint: model, optimizer, extra, hf_model"
    )
    load_contents: list[str] = used(["model", "optimizer", "extra"], "parts that a resumed run reads")
    async_save: bool = used(
        False, "write checkpoints while training goes on, from a copy in the host's memory", sizing=True
    )
    strict: bool = inert(True, "every tensor must fit", "every tensor must always fit")
    save_lora_only: bool = used(False, "with LoRA, save the adapters alone, without the merged model", sizing=True)
    mbridge_config: dict[str, Any] = inert({}, "settings of Megatron's bridge", "only the Megatron engine reads it")


@dataclass(frozen=True)
class ActorConfig(Section):
    strategy: str = used("fsdp", "training engine; fsdp and fsdp2 are the PyTorch-native one")
    optim: OptimConfig = section(OptimConfig, "optimizer of the policy")
    fsdp_config: FSDPConfig = section(FSDPConfig, "PyTorch-native engine")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron engine")
    ppo_mini_batch_size: int = used(256, "prompts per optimizer step (times rollout.n samples)", ge=1)
    ppo_micro_batch_size: int | None = used(None, "older form of ppo_micro_batch_size_per_gpu", sizing=True, ge=1)
    ppo_micro_batch_size_per_gpu: int | None = used(
        None, "samples per forward and backward pass; null: cut by token count", when="fixed_bsz", sizing=True, ge=1
    )
    use_dynamic_bsz: bool = used(False, "cut micro-batches by token count even if ppo_micro_batch_size_per_gpu is set")
    ppo_max_token_len_per_gpu: int = used(16384, "tokens per micro-batch when cut by token count", sizing=True, ge=1)
    ppo_epochs: int = used(1, "passes over each batch", ge=1)
    shuffle: bool = used(False, "shuffle the batch before each pass")
    data_loader_seed: int = used(42, "seed of that shuffle")
    rollout_n: int = inert(1, "samples per prompt", "it always equals rollout.n")
    clip_ratio: float = used(0.2, "clip range of the policy ratio on both sides", when="clips_both", ge=0)
    clip_ratio_low: float | None = used(
        None, "clip range below 1; null: clip_ratio", when="clips", neutral=(0.2,), ge=0
    )
    clip_ratio_high: float | None = used(
        None, "clip range above 1; null: clip_ratio", when="clips", neutral=(0.2,), ge=0
    )
    clip_ratio_c: float = used(3.0, "lower bound of dual-clip PPO for negative advantages", when="dual_clips", gt=1)
    tau_pos: float = used(1.0, "temperature of sapo for positive advantages", when="sapo", gt=0)
    tau_neg: float = used(1.05, "temperature of sapo for negative advantages", when="sapo", gt=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss, and its parameters")
    loss_agg_mode: str = used("token-mean", "how token losses become one number", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = used(
        None, "divisor of seq-mean-token-sum-norm; null: the response length", when="sum_norm", gt=0
    )
    skip_zero_advantages: bool = used(
        True, "do not compute samples whose advantages are all 0, if the loss is zero on them", sizing=True
    )
    entropy_coeff: float = used(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = used(False, "report the entropy even if its weight is 0")
    calculate_sum_pi_squared: bool = inert(
        False, "compute sums of squared probabilities", "they are computed exactly where the estimator reads them"
    )
    use_kl_loss: bool = used(False, "add a KL term towards the reference policy to the loss")
    kl_loss_coef: float = used(0.001, "weight of that term", when="kl_loss", neutral=(0.0,), ge=0)
    kl_loss_type: str = used("low_var_kl", "KL estimator of that term", when="kl_loss", choices=KL_KINDS)
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what is saved")
    freeze_vision_tower: bool = inert(False, "do not train the vision tower", "models are text models in this version")
    use_prefix_grouper: bool = inert(False, "compute shared prompts once", "a shared prompt is always computed once")
    use_torch_compile: bool = inert(True, "compile the modules", NO_COMPILE)
    use_fused_kernels: bool = inert(False, "fused log-probability kernel", "log-probabilities are always fused")
    use_remove_padding: bool = inert(True, "compute no padding", NO_PADDING)
    entropy_from_logits_with_chunking: bool = inert(False, "entropy chunk by chunk", FUSED_LOG_PROBS)
    entropy_from_logits_chunk_size: int = inert(2048, "rows of such a chunk", FUSED_LOG_PROBS)
    entropy_checkpointing: bool = inert(False, "recompute the entropy in the backward pass", FUSED_LOG_PROBS)
    pad_to_length: bool = inert(False, "pad packed rows", NO_PADDING)
    load_weight: bool = inert(True, "load weights at start", "weights are always loaded")
    profiler: dict[str, Any] = inert({}, "profiling of this role", PROFILER)
    qat: dict[str, Any] = inert({}, "quantisation-aware training", "weights are not quantised in this version")


@dataclass(frozen=True)
class RefConfig(Section):
    strategy: str = inert("fsdp", "engine of the reference policy", "it always equals the actor's")
    fsdp_config: FSDPConfig = section(FSDPConfig, "PyTorch-native engine", defaults={"forward_only": True})
    megatron: MegatronConfig = section(MegatronConfig, "Megatron engine")
    log_prob_micro_batch_size: int | None = used(None, "older form of log_prob_micro_batch_size_per_gpu", sizing=True)
    log_prob_micro_batch_size_per_gpu: int | None = used(
        None, "samples per forward pass; null: cut by token count", when="ref_fixed_bsz", sizing=True, ge=1
    )
    log_prob_use_dynamic_bsz: bool = used(False, "cut by token count even if the former is set", sizing=True)
    log_prob_max_token_len_per_gpu: int = used(
        16384, "tokens per forward pass when cut by token count", sizing=True, ge=1
    )
    rollout_n: int = inert(1, "samples per prompt", "it always equals rollout.n")
    use_torch_compile: bool = inert(True, "compile the modules", NO_COMPILE)
    entropy_from_logits_with_chunking: bool = inert(False, "entropy chunk by chunk", FUSED_LOG_PROBS)
    entropy_from_logits_chunk_size: int = inert(2048, "rows of such a chunk", FUSED_LOG_PROBS)
    entropy_checkpointing: bool = inert(False, "recompute the entropy in the backward pass", FUSED_LOG_PROBS)
    pad_to_length: bool = inert(False, "pad packed rows", NO_PADDING)
    load_weight: bool = inert(True, "load weights at start", "weights are always loaded")
    profiler: dict[str, Any] = inert({}, "profiling of this role", PROFILER)
