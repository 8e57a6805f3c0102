"""`distillation`: a student that learns from the next-token distributions of teachers."""

from dataclasses import dataclass, replace
from typing import Any

from verl.config.keys import ALWAYS, Family, Section, ours, section, used
from verl.config.sections.fsdp import DTYPES
from verl.families import DISTILLATION_LOSSES, POLICY_LOSSES

_LISTS_TOKENS = ".loss_mode=forward_kl_topk|jsd"


@dataclass(frozen=True)
class DistillationLossConfig(Section):
    loss_mode: str = used(
        "k3",
        "distance to the teacher: an estimator on the sampled token (k1, k2, k3, abs, ...), forward_kl_topk (KL(teacher || "
        "student) on the teacher's topk tokens) or jsd (generalised Jensen-Shannon divergence of GKD, arXiv 2306.13649)",
        choices=DISTILLATION_LOSSES,
    )
    topk: int = used(
        32, "tokens of the teacher's distribution that are compared; -1: the whole vocabulary", when=_LISTS_TOKENS, ge=1,
        also=(-1,),
    )  # fmt: skip
    jsd_beta: float = ours(
        0.5,
        "interpolation of jsd: 0 is KL(teacher || student), 1 is KL(student || teacher)",
        when=".loss_mode=jsd",
        ge=0,
        le=1,
    )
    use_task_rewards: bool = used(True, "add the policy loss of the rewards; False: only the teacher's loss")
    distillation_loss_coef: float = used(
        1.0, "weight of the distance in the sum with that loss", when=".use_task_rewards", ge=0
    )
    loss_max_clamp: float | None = used(None, "bound of the absolute distance of a token; null: none", gt=0)
    log_prob_min_clamp: float | None = used(
        None, "log-probabilities below it count as that; null: none", when=".loss_mode=forward_kl_topk"
    )
    use_policy_gradient: bool = used(
        False, "take the negative distance of a sampled token as its advantage, instead of its gradient"
    )
    policy_loss_mode: str = used(
        "vanilla",
        "policy loss of those advantages",
        when=".use_policy_gradient",
        family=Family("policy loss", POLICY_LOSSES, plugins=True),
    )
    clip_ratio: float = used(
        0.2, "its clip range, where one of the next two is null", when=".use_policy_gradient", ge=0
    )
    clip_ratio_low: float | None = used(0.2, "its clip range below 1", when=".use_policy_gradient", ge=0)
    clip_ratio_high: float | None = used(0.2, "its clip range above 1", when=".use_policy_gradient", ge=0)


@dataclass(frozen=True)
class TeacherInferenceConfig(Section):
    temperature: float = used(1.0, "the teacher's logits are divided by it", ge=0)
    dtype: str = used("auto", "compute dtype; auto: bfloat16 where the device computes it natively", choices=DTYPES)
    max_num_batched_tokens: int = used(8192, "tokens computed at once", sizing=True, ge=1)


@dataclass(frozen=True)
class TeacherConfig(Section):
    key: str | None = used(None, "value of a row's teacher_key that chooses this teacher; null: it is the only one")
    model_path: str | None = used(
        None, "folder or hub name of the teacher, which has the student's vocabulary", path=True
    )
    inference: TeacherInferenceConfig = section(TeacherInferenceConfig, "how its outputs are computed")


@dataclass(frozen=True)
class TeacherModelsConfig(Section):
    teacher_model: TeacherConfig = section(TeacherConfig, "the teacher")


@dataclass(frozen=True)
class DistillationConfig(Section):
    enabled: bool = used(False, "learn from a teacher", when=ALWAYS)
    teacher_key: str = used("data_source", "field of a row that chooses its teacher, where there are several")
    n_gpus_per_node: int = used(8, "devices per node of the teachers' own pool", when="teacher_pool", sizing=True, ge=1)
    nnodes: int = used(0, "nodes of the teachers' own pool; 0: they share the policy's devices", ge=0)
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, "the loss")
    teacher_models: TeacherModelsConfig = section(TeacherModelsConfig, "the teachers")
    other_teachers: dict[str, Any] = used(
        {}, "further teachers, {name: {key, model_path, inference}}; also spelled teacher_models.NAME"
    )
    on_policy_share: float = ours(
        1.0,
        "share of steps that train on samples of the student (lambda of GKD); the others train on the rows' own responses",
        ge=0,
        le=1,
    )
    response_key: str = ours("response", "field of a row with its response, a text or token ids", when="off_policy")
    stored_outputs: bool = ours(
        False,
        "take the teacher's outputs from the rows: teacher_ids and teacher_log_probs, a list of tokens per token of the "
        "response. The sample files of a run with topk have them",
        when="off_policy",
    )

    def teachers(self) -> dict[str, TeacherConfig]:
        """All teachers by name. Each of `other_teachers` takes the inference keys that it lacks from teacher_model."""
        first = self.teacher_models.teacher_model
        teachers = {} if first.model_path is None else {"teacher_model": first}
        for name, entry in self.other_teachers.items():
            inference = {k: v for k, v in (entry.get("inference") or {}).items() if k in first.inference}
            teachers[name] = TeacherConfig(
                key=entry.get("key"), model_path=entry["model_path"], inference=replace(first.inference, **inference)
            )
        return teachers
