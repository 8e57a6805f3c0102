"""`distillation`: on-policy distillation from a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.keys import Section, section, used
from verl.config.sections.reward import EngineSizesConfig


@dataclass(frozen=True)
class DistillationLossConfig(Section):
    loss_mode: str = used("k3", "distance to the teacher")
    topk: int = used(32, "teacher's tokens in forward_kl_topk")
    use_task_rewards: bool = used(True, "add the reward's own loss")
    distillation_loss_coef: float = used(1.0, "weight of the distance")
    loss_max_clamp: float | None = used(None, "upper bound of a token's loss")
    log_prob_min_clamp: float | None = used(None, "lower bound of a log-probability")
    use_policy_gradient: bool = used(False, "use the distance as an advantage")
    policy_loss_mode: str = used("vanilla", "policy loss of that")
    clip_ratio: float = used(0.2, "its clip range")
    clip_ratio_low: float = used(0.2, "its clip range below 1")
    clip_ratio_high: float = used(0.2, "its clip range above 1")


@dataclass(frozen=True)
class TeacherModelConfig(Section):
    key: str | None = used(None, "value of teacher_key that chooses this teacher")
    model_path: str | None = used(None, "folder or hub name")
    num_replicas: int = used(0, "copies")
    inference: EngineSizesConfig = section(
        EngineSizesConfig, "engine that serves it", defaults={"skip_tokenizer_init": True}
    )


@dataclass(frozen=True)
class TeacherModelsConfig(Section):
    teacher_model: TeacherModelConfig = section(TeacherModelConfig, "a teacher")


@dataclass(frozen=True)
class DistillationConfig(Section):
    enabled: bool = used(False, "learn from a teacher")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, "the loss", when="distillation")
    teacher_models: TeacherModelsConfig = section(TeacherModelsConfig, "the teachers", when="distillation")
    teacher_key: str = used("data_source", "field of a row that chooses the teacher", when="distillation")
    n_gpus_per_node: int = used(8, "devices per node of the teachers", when="distillation", sizing=True)
    nnodes: int = used(0, "nodes of the teachers", when="distillation", sizing=True)
