"""`critic`: the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.keys import Section, section, used
from verl.config.names import LOSS_AGG_MODES
from verl.config.sections.actor import CheckpointConfig
from verl.config.sections.fsdp import FSDPConfig
from verl.config.sections.model import ModelConfig
from verl.config.sections.optim import OptimConfig


@dataclass(frozen=True)
class CriticConfig(Section):
    enable: bool | None = used(None, "train a value model; null: where the advantage estimator needs one")
    model: ModelConfig = section(ModelConfig, "the model that the value head is put on", when="critic")
    optim: OptimConfig = section(OptimConfig, "optimizer of the critic", when="critic", defaults={"lr": 1e-5})
    fsdp: FSDPConfig = section(FSDPConfig, "PyTorch-native engine", when="critic")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what is saved", when="critic")
    ppo_mini_batch_size: int = used(256, "prompts per optimizer step", when="critic", ge=1)
    ppo_micro_batch_size: int | None = used(
        None, "older form of ppo_micro_batch_size_per_gpu", when="critic", sizing=True
    )
    ppo_micro_batch_size_per_gpu: int | None = used(
        None,
        "samples per forward and backward pass; null: cut by token count",
        when="critic_fixed_bsz",
        sizing=True,
        ge=1,
    )
    use_dynamic_bsz: bool = used(
        False, "cut micro-batches by token count even if the former is set", when="critic", sizing=True
    )
    ppo_max_token_len_per_gpu: int = used(
        32768, "tokens per micro-batch when cut by token count", when="critic", sizing=True, ge=1
    )
    forward_micro_batch_size: int | None = used(
        None, "older form of forward_micro_batch_size_per_gpu", when="critic", sizing=True
    )
    forward_micro_batch_size_per_gpu: int | None = used(
        None, "samples per pass that only reads values", when="critic_fixed_bsz", sizing=True
    )
    forward_max_token_len_per_gpu: int = used(32768, "tokens of such a pass", when="critic", sizing=True)
    ppo_epochs: int = used(1, "passes over each batch", when="critic", ge=1)
    shuffle: bool = used(False, "shuffle the batch before each pass", when="critic")
    data_loader_seed: int = used(42, "seed of that shuffle", when="critic")
    cliprange_value: float = used(0.5, "clip range of the value around the old one", when="critic", ge=0)
    loss_agg_mode: str = used("token-mean", "how token losses become one number", when="critic", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = used(
        None, "divisor of seq-mean-token-sum-norm; null: the response length", when="critic_sum_norm"
    )
