"""Configs with the names and defaults of TRL 1.16 that the scripts in this folder set, and its packing of rows that fill
blocks; TRL itself is not needed."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class SFTConfig(TrainingArguments):
    max_length: int | None = 1024
    packing: bool = False
    packing_strategy: str = "bfd"
    eval_packing: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"
    dataset_text_field: str = "text"
    eos_token: str | None = None
    model_init_kwargs: dict | None = None


@dataclass
class GRPOConfig(TrainingArguments):
    num_generations: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    num_iterations: int = 1
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    reward_weights: list[float] | None = None
    min_p: float | None = None
    log_completions: bool = False
    sync_ref_model: bool = False
    steps_per_generation: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps


@dataclass
class DPOConfig(TrainingArguments):
    beta: float = 0.1
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    label_smoothing: float = 0.0
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    use_weighting: bool = False
    discopop_tau: float = 0.05
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    disable_dropout: bool = True
    precompute_ref_log_probs: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512


@dataclass
class KTOConfig(TrainingArguments):
    beta: float = 0.1
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    max_length: int | None = 1024
    train_sampling_strategy: str = "sequential"


@dataclass
class RewardConfig(TrainingArguments):
    max_length: int | None = 1024
    center_rewards_coefficient: float | None = None


@dataclass
class RLOOConfig(TrainingArguments):
    num_generations: int = 2
    max_completion_length: int = 256
    beta: float = 0.05
    epsilon: float = 0.2


def pack_dataset(dataset, seq_length, strategy):
    """Blocks of cut rows, the longest row first in the first block with space, or of all tokens back to back."""
    rows = dataset.to_list()
    if strategy == "wrapped":
        joined = {name: [value for row in rows for value in row[name]] for name in rows[0]}
        starts = range(0, len(joined["input_ids"]), seq_length)
        return type(dataset).from_list(
            [{n: v[start : start + seq_length] for n, v in joined.items()} for start in starts]
        )
    blocks = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        row = {name: values[:seq_length] for name, values in row.items()}
        length = len(row["input_ids"])
        block = next((b for b in blocks if sum(b["seq_lengths"]) + length <= seq_length), None)
        if block is None:
            blocks.append(block := {**{name: [] for name in row}, "seq_lengths": []})
        for name, values in row.items():
            block[name] += values
        block["seq_lengths"].append(length)
    return type(dataset).from_list(blocks)
