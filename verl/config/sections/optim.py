"""`*.optim`: the optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, used

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
_MAX_LR = 10.0  # Adam changes each weight by about the learning rate in a step


@dataclass(frozen=True)
class OptimConfig(Section):
    optimizer: str = used("AdamW", "class of the optimizer")
    optimizer_impl: str = used("torch.optim", "module that holds the class")
    lr: float = used(1e-6, "learning rate after warm-up", gt=0, le=_MAX_LR)
    lr_warmup_steps_ratio: float = used(
        0.0, "length of the linear warm-up as a share of all steps", when="no_warmup_steps", neutral=(0.0,), ge=0, le=1
    )
    total_training_steps: int = used(-1, "steps that the schedule spans; -1: the trainer's steps")
    weight_decay: float = used(0.01, "decoupled weight decay", ge=0)
    lr_warmup_steps: int = used(-1, "length of the linear warm-up in steps; 0 or less: lr_warmup_steps_ratio decides")
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
