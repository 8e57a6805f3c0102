"""`actor_rollout_ref.actor`, `actor_rollout_ref.ref` and `critic`: the policy, its frozen copy and the value model."""

import math
from dataclasses import dataclass

from verl.config.keys import ALWAYS, Family, Section, section, used
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.config.sections.fsdp import STRATEGIES, FSDPConfig
from verl.config.sections.megatron import MegatronConfig
from verl.config.sections.model import ModelConfig, OptimConfig
from verl.config.sections.trainer import ProfilerConfig
from verl.families import KL_KINDS, LOSS_AGG_MODES, POLICY_LOSSES

KL_LOSS = "actor_rollout_ref.actor.use_kl_loss"

_PARTS = Family("part of a checkpoint", ("model", "optimizer", "extra", "hf_model"))


@dataclass(frozen=True)
class PolicyLossConfig(Section):
    loss_mode: str = used(
        "vanilla",
        "policy loss, a name or path/to/file.py:function",
        family=Family("policy loss", POLICY_LOSSES, plugins=True),
        when="no_bypass",
        strict="existing releases apply it to the sampler's log-probabilities",
    )
    clip_cov_ratio: float = used(0.0002, "share of tokens that clip_cov leaves out", when="clip_cov_ratio")
    clip_cov_lb: float = used(1.0, "lowest covariance that clip_cov leaves out", when="clip_cov_lb")
    clip_cov_ub: float = used(5.0, "highest covariance that clip_cov leaves out", when="clip_cov_ub")
    kl_cov_ratio: float = used(0.0002, "share of tokens that kl_cov penalises", when="kl_cov_ratio")
    ppo_kl_coef: float = used(0.1, "weight of that penalty", when="ppo_kl_coef")
    dro_beta: float | None = used(None, "regularisation of dro", when="dro_beta", gt=0)


@dataclass(frozen=True)
class CheckpointConfig(Section):
    save_contents: list[str] = used(
        ["model", "optimizer", "extra"], "parts of a checkpoint: model, optimizer, extra, hf_model", family=_PARTS
    )
    load_contents: list[str] = used(["model", "optimizer", "extra"], "parts that a resumed run reads", family=_PARTS)
    async_save: bool = used(False, "write checkpoints in the background, from a copy in the node's memory", sizing=True)
    save_lora_only: bool = used(False, "with LoRA, save only the adapters, without the merged model", sizing=True)


@dataclass(frozen=True)
class RouterReplayConfig(Section):
    mode: str = used(
        "disabled",
        "experts with which a mixture trains: of the pass for old log-probs (R2), or of rollout (R3)",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(frozen=True)
class QATConfig(Section):
    enable: bool = used(False, "train through the rounding to few bits (docs/low-precision.md)")
    mode: str = used(
        "int8",
        "int8: the sampler's weights and inputs, needs rollout.quantization=int8; w4a16: weights in NVFP4",
        choices=("int8", "w4a16"),
        when=".enable",
    )
    ignore_patterns: list[str] = used(
        ["lm_head", "embed_tokens", "re:.*mlp.gate$"],
        "layers that w4a16 does not round: a part of the name, a pattern with *, or re: and a regular expression",
        when=".mode=w4a16",
    )


@dataclass(frozen=True)
class ActorConfig(Section):
    strategy: str = used("fsdp", "training engine; fsdp and fsdp2 are the PyTorch-native one", family=STRATEGIES)
    optim: OptimConfig = section(OptimConfig, "optimizer of the policy")
    fsdp_config: FSDPConfig = section(FSDPConfig, "PyTorch-native engine")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron engine", when=".strategy=megatron", sizing=True)
    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig, "DeepSpeed engine", when=".strategy=deepspeed", sizing=True)
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
    clip_ratio: float = used(0.2, "clip range of the policy ratio on both sides", when="clips_both", ge=0)
    clip_ratio_low: float | None = used(
        None, "clip range below 1; null: clip_ratio", when="clip_ratio_low", neutral=(0.2,), ge=0
    )
    clip_ratio_high: float | None = used(
        None, "clip range above 1; null: clip_ratio", when="clip_ratio_high", neutral=(0.2,), ge=0, also=(math.inf,)
    )
    clip_ratio_c: float = used(
        3.0,
        "lower bound of dual-clip PPO for negative advantages; inf: none",
        when="clip_ratio_c",
        gt=1,
        also=(math.inf,),
    )
    tau_pos: float = used(1.0, "temperature of sapo for positive advantages", when="tau_pos", gt=0)
    tau_neg: float = used(1.05, "temperature of sapo for negative advantages", when="tau_neg", gt=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss, and its parameters")
    loss_agg_mode: str = used("token-mean", "how token losses become one number", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = used(
        None,
        "divisor of seq-mean-token-sum-norm; null: the response length",
        when=".loss_agg_mode=seq-mean-token-sum-norm",
        gt=0,
    )
    skip_zero_advantages: bool = used(
        True, "do not compute samples whose advantages are all 0, if the loss is zero on them", sizing=True
    )
    entropy_coeff: float = used(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = used(False, "report the entropy even if its weight is 0")
    use_kl_loss: bool = used(False, "add a KL term towards the reference policy to the loss")
    kl_loss_coef: float = used(0.001, "weight of that term", when=KL_LOSS, neutral=(0.0,), ge=0)
    kl_loss_type: str = used(
        "low_var_kl",
        "KL estimator of that term; low_var_kl (k3) is at most 10 for a token, without a gradient beyond",
        when=KL_LOSS,
        choices=KL_KINDS,
    )
    freeze_vision_tower: bool = used(False, "do not train the vision tower of a vision-language model")
    profiler: ProfilerConfig = section(ProfilerConfig, "traces of the actor's ranks")
    router_replay: RouterReplayConfig = section(RouterReplayConfig, "experts of an earlier forward")
    qat: QATConfig = section(QATConfig, "quantization-aware training")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "parts of a checkpoint")


@dataclass(frozen=True)
class RefConfig(Section):
    strategy: str = used("fsdp", "training engine of the reference policy", family=STRATEGIES)
    fsdp_config: FSDPConfig = section(FSDPConfig, "PyTorch-native engine", defaults={"forward_only": True})
    memory_map: bool = used(
        False,
        "read the reference's weights from a file in the run folder that is mapped into memory, in place of a second copy of "
        "the model; each device its shards. A GPU copies a layer at a time from it, for every micro-batch",
        when="reference",
        sizing=True,
    )
    megatron: MegatronConfig = section(MegatronConfig, "Megatron engine", when=".strategy=megatron", sizing=True)
    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig, "DeepSpeed engine", when=".strategy=deepspeed", sizing=True)
    log_prob_micro_batch_size: int | None = used(None, "older form of log_prob_micro_batch_size_per_gpu", sizing=True)
    log_prob_micro_batch_size_per_gpu: int | None = used(
        None, "samples per forward pass; null: cut by token count", when="log_prob_fixed_bsz", sizing=True, ge=1
    )
    log_prob_use_dynamic_bsz: bool = used(False, "cut by token count even if the former is set", sizing=True)
    log_prob_max_token_len_per_gpu: int = used(
        16384, "tokens per forward pass when cut by token count", sizing=True, ge=1
    )
    profiler: ProfilerConfig = section(ProfilerConfig, "traces of the reference's ranks")


@dataclass(frozen=True)
class CriticConfig(Section):
    enable: bool | None = used(None, "train a value model; null: where the advantage estimator needs one", when=ALWAYS)
    strategy: str = used("fsdp", "training engine of the critic", family=STRATEGIES)
    model: ModelConfig = section(ModelConfig, "the model that the value head is put on")
    optim: OptimConfig = section(OptimConfig, "optimizer of the critic", defaults={"lr": 1e-5})
    fsdp: FSDPConfig = section(FSDPConfig, "PyTorch-native engine")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron engine", when=".strategy=megatron", sizing=True)
    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig, "DeepSpeed engine", when=".strategy=deepspeed", sizing=True)
    checkpoint: CheckpointConfig = section(CheckpointConfig, "parts of a checkpoint")
    ppo_mini_batch_size: int = used(256, "prompts per optimizer step", ge=1)
    ppo_micro_batch_size: int | None = used(None, "older form of ppo_micro_batch_size_per_gpu", sizing=True)
    ppo_micro_batch_size_per_gpu: int | None = used(
        None, "samples per forward and backward pass; null: cut by token count", when="fixed_bsz", sizing=True, ge=1
    )
    use_dynamic_bsz: bool = used(False, "cut micro-batches by token count even if the former is set", sizing=True)
    ppo_max_token_len_per_gpu: int = used(32768, "tokens per micro-batch when cut by token count", sizing=True, ge=1)
    forward_micro_batch_size: int | None = used(None, "older form of forward_micro_batch_size_per_gpu", sizing=True)
    forward_micro_batch_size_per_gpu: int | None = used(
        None, "samples per pass that only reads values", when="fixed_bsz", sizing=True
    )
    forward_max_token_len_per_gpu: int = used(32768, "tokens of such a pass", sizing=True)
    ppo_epochs: int = used(1, "passes over each batch", ge=1)
    shuffle: bool = used(False, "shuffle the batch before each pass")
    data_loader_seed: int = used(42, "seed of that shuffle")
    profiler: ProfilerConfig = section(ProfilerConfig, "traces of the critic's ranks")
    cliprange_value: float = used(0.5, "clip range of the value around the old one", ge=0)
    loss_agg_mode: str = used("token-mean", "how token losses become one number", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = used(
        None,
        "divisor of seq-mean-token-sum-norm; null: the response length",
        when=".loss_agg_mode=seq-mean-token-sum-norm",
    )
