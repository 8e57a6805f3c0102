"""`actor_rollout_ref.model` and `critic.model`: the model and how it is built; `*.optim`: its optimizer and schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.keys import Section, section, used

OWN_SCHEDULES = ("constant", "linear", "cosine")
# of transformers.get_scheduler: name -> its arguments, as the schedule's function has them
SCHEDULES = {
    "constant_with_warmup": (),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles",
    ),
}  # fmt: skip
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
_MAX_LR = 10.0  # Adam changes each weight by about the learning rate in a step


@dataclass(frozen=True)
class OptimConfig(Section):
    optimizer: str = used("AdamW", "class of the optimizer; Muon steps matrices, and AdamW the other parameters")
    optimizer_impl: str = used("torch.optim", "module that holds the class")
    lr: float = used(1e-6, "learning rate after warm-up", gt=0, le=_MAX_LR)
    lr_warmup_steps_ratio: float = used(
        0.0, "length of the linear warm-up as a share of all steps", when="no_warmup_steps", neutral=(0.0,), ge=0, le=1
    )
    total_training_steps: int = used(-1, "steps that the schedule spans; -1: the trainer's steps")
    weight_decay: float = used(0.01, "decoupled weight decay", ge=0)
    lr_warmup_steps: int | None = used(
        -1, "length of the linear warm-up in steps; null, 0 or less: lr_warmup_steps_ratio decides"
    )
    betas: list[float] = used([0.9, 0.999], "decay rates of the two moments of Adam", ge=0, lt=1, length=2)
    clip_grad: float = used(1.0, "gradients are scaled down to this global L2 norm", gt=0, also=(math.inf,))
    min_lr_ratio: float = used(
        0.0,
        "lowest learning rate of the cosine as a share of lr",
        when=".lr_scheduler_type=cosine",
        neutral=(0.0, None),
        ge=0,
        le=1,
    )
    min_lr: float = used(
        0.0,
        "lowest learning rate of the cosine, in place of min_lr_ratio",
        when=".lr_scheduler_type=cosine",
        neutral=(0.0,),
        ge=0,
    )
    num_cycles: float = used(0.5, "waves of the cosine; 0.5 falls once", when=".lr_scheduler_type=cosine")
    lr_scheduler_type: str = used("constant", "schedule after the warm-up", choices=(*OWN_SCHEDULES, *SCHEDULES))
    lr_scheduler_kwargs: dict[str, Any] = used(
        {},
        "further arguments of the schedule, by the names of transformers.get_scheduler",
        when=f".lr_scheduler_type={'|'.join(name for name, arguments in SCHEDULES.items() if arguments)}",
    )
    zero_indexed_step: bool = used(True, "whether the first step is step 0 of the schedule")

    @property
    def over_all_steps(self) -> str:
        """The setting that depends on the number of all steps; "" if the rate of a step does not."""
        if (self.lr_warmup_steps or 0) <= 0 < self.lr_warmup_steps_ratio:
            return "lr_warmup_steps_ratio"
        return "" if self.lr_scheduler_type in _ENDLESS else f"lr_scheduler_type={self.lr_scheduler_type}"


@dataclass(frozen=True)
class MTPConfig(Section):
    """The head of a checkpoint that predicts the token after the next (multi-token prediction)."""

    enable: bool = used(False, "use it; without, checkpoints and exports have it as it is")
    enable_train: bool = used(
        False, "train it in addition to the policy, with a loss that does not change the policy", when=".enable=True"
    )
    enable_rollout: bool = used(False, "draft with it, as rollout.speculative.methods=[mtp] does", when=".enable=True")
    mtp_loss_scaling_factor: float = used(0.1, "weight of its loss", when=".enable_train=True", gt=0)
    num_speculative_tokens: int = used(
        1, "most drafts of a sample in a step, for rollout.speculative", when=".enable_rollout=True", ge=1, le=63
    )


@dataclass(frozen=True)
class ModelConfig(Section):
    path: str = used("~/models/deepseek-llm-7b-chat", "folder or hub name of a Hugging Face model", path=True)
    tokenizer_path: str | None = used(None, "folder or hub name of the tokenizer; null: the model's", path=True)
    trust_remote_code: bool = used(False, "run Python code that comes with the model")
    custom_chat_template: str | None = used(
        None, "chat template in place of the tokenizer's: Jinja text, or a file of it", path=True
    )
    text_tokens: list[str] = used(
        [], "special tokens that count as text, such as <think>: reward functions, judges and samples see them"
    )
    external_lib: str | list[str] | None = used(
        None, "Python modules that are imported first, to register models, losses or estimators", path=True
    )
    override_config: dict[str, Any] = used({}, "entries of the model's config.json to replace")
    enable_gradient_checkpointing: bool | str = used(
        True,
        "recompute activations in the backward pass, for memory: True all of a layer, of which the input is kept; selective "
        "norms, rotary embedding and SwiGLU, which cost little",
        choices=(True, False, "selective"),
    )
    enable_activation_offload: bool = used(
        False,
        "on a GPU, hold the layers' inputs that recomputing keeps in the host's memory between forward and backward",
        when=".enable_gradient_checkpointing=True",
    )
    use_fused_kernels: bool = used(
        True, "compute log-probabilities in chunks, without whole logits; false: whole logits by torch, for comparison"
    )
    lora_rank: int = used(0, "rank of LoRA adapters; 0: train all weights")
    lora_alpha: int = used(16, "scale of LoRA adapters", when="lora")
    target_modules: Any = used("all-linear", "modules that get an adapter", when="lora")
    exclude_modules: Any = used(None, "modules that get none", when="lora")
    use_rslora: bool = used(False, "scale adapters by lora_alpha / sqrt(lora_rank) (rsLoRA)", when="lora")
    use_dora: bool = used(False, "train the lengths of the weights' rows too (DoRA)", when="lora")
    quantization: str | None = used(
        None, "nf4: hold the frozen weights below adapters in four bits (QLoRA, by torchao)", choices=(None, "nf4")
    )
    mtp: MTPConfig = section(MTPConfig, "a head that predicts the token after the next")
    modules_to_save: list[str] = used([], "modules that train as a whole in addition to adapters", when="lora")
    lora_adapter_path: str | None = used(
        None, "folder of adapters to start from; without lora_rank they bring their rank and scale", path=True
    )

    @property
    def recompute(self) -> Literal["none", "selective", "full"]:
        """The parts of a layer that the backward computes again."""
        if isinstance(self.enable_gradient_checkpointing, str):
            return "selective"
        return "full" if self.enable_gradient_checkpointing else "none"

    @property
    def lends_its_base(self) -> bool:
        """Whether the model without its adapters is the one that training has started from."""
        return self.lora_rank > 0 and not (self.modules_to_save or self.lora_adapter_path)


@dataclass(frozen=True)
class RowsModelConfig(ModelConfig):
    """`model` of programs that train on given rows, and sample nothing."""

    lora_dropout: float = used(0.0, "rate of dropout on the inputs of adapters in training", when="lora", ge=0, lt=1)


@dataclass(frozen=True)
class SFTModelConfig(RowsModelConfig):
    neftune_alpha: float | None = used(
        None, "scale of uniform noise on the embeddings in training (NEFTune, arXiv 2310.05914); null: none", gt=0
    )
