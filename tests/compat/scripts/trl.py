"""Configs with the names and defaults of TRL 1.16 that the scripts beside this file set; TRL itself is not needed."""

from dataclasses import dataclass

from transformers import TrainingArguments


@dataclass
class SFTConfig(TrainingArguments):
    max_length: int | None = 1024
    packing: bool = False
    assistant_only_loss: bool = False


@dataclass
class GRPOConfig(TrainingArguments):
    num_generations: int = 8
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    num_iterations: int = 1
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    reward_weights: list[float] | None = None
    sync_ref_model: bool = False
