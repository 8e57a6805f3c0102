"""The objective of a student: the policy loss plus a teacher's term, or only the teacher's term."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algorithms.distillation import forward_kl, generalized_jsd, overlap_ratio, with_remainder
from verl.algorithms.kl import kl_penalty
from verl.algorithms.masked import token_mean
from verl.algorithms.policy_losses import policy_loss
from verl.algorithms.reduce import Aggregate
from verl.config.sections.distillation import DistillationLossConfig
from verl.data_proto.metrics import Metric
from verl.parallel.device import to_device, to_match
from verl.roles.objectives.policy import PolicyObjective

TEACHER_COLUMNS = ("candidate_ids", "teacher_top_log_probs")


def lists_tokens(loss: DistillationLossConfig) -> bool:
    """Whether the loss compares distributions on tokens that the teacher lists."""
    return loss.loss_mode in ("forward_kl_topk", "jsd")


def teacher_outputs(loss: DistillationLossConfig, vocabulary: int) -> dict[str, str]:
    """The teacher's outputs that the loss reads, by the columns that they become."""
    if not lists_tokens(loss):
        return {"log_probs": "teacher_log_prob"}
    count = vocabulary if loss.topk == -1 else loss.topk
    return {f"top_ids@{count}": TEACHER_COLUMNS[0], f"top_log_probs@{count}": TEACHER_COLUMNS[1]}


class DistillationObjective(PolicyObjective):
    """As PolicyObjective, with the distance to the teacher in the place of the policy loss, or added to it.

    Reads the columns of `teacher_outputs`. The metrics distillation/* are means over the tokens of the mini-batch, and `_min`
    and `_max` of them: loss, abs_loss; if tokens are listed also student_mass and teacher_mass (probability of these tokens)
    and overlap_ratio.
    """

    def __init__(self, loss: DistillationLossConfig, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.teacher = loss
        clips = {name: loss[name] for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}
        self.clips = {**self.params, **clips}
        if lists_tokens(loss):
            top_ids = () if loss.topk == -1 else (f"top_ids@{loss.topk}",)
            self.outputs = (*self.outputs, "candidate_log_probs", *top_ids)

    def _first_term(
        self, outputs: dict[str, Tensor], columns: TensorDict, mask: Tensor, old: Tensor, agg: Aggregate
    ) -> tuple[Tensor, dict[str, Metric]]:
        distance, metrics = self._distance(outputs, columns, mask)
        if self.teacher.use_policy_gradient:
            loss, policy_metrics = policy_loss(
                self.teacher.policy_loss_mode,
                old_log_prob=old,
                log_prob=outputs["log_probs"],
                advantages=-distance.detach(),
                response_mask=mask,
                agg=agg,
                params=self.clips,
                config=self.config,
                generator=self.generator,
            )
            metrics |= {f"distillation/{name}": metric for name, metric in policy_metrics.items()}
        else:
            loss = agg(distance, mask)
        if not self.teacher.use_task_rewards:
            return loss, metrics
        policy, policy_metrics = super()._first_term(outputs, columns, mask, old, agg)
        return policy + self.teacher.distillation_loss_coef * loss, {**policy_metrics, **metrics}

    def _distance(
        self, outputs: Mapping[str, Tensor], columns: TensorDict, mask: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """[batch, response], with its metrics."""
        rule, log_probs = self.teacher, outputs["log_probs"]
        measured: dict[str, Tensor] = {}
        if lists_tokens(rule):
            student, teacher = outputs["candidate_log_probs"], to_match(columns[TEACHER_COLUMNS[1]], log_probs)
            measured = {"student_mass": student.exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
            if rule.topk != -1:
                ids = to_device(columns[TEACHER_COLUMNS[0]], log_probs.device)
                measured["overlap_ratio"] = overlap_ratio(outputs[f"top_ids@{rule.topk}"], ids)
            distance = self._divergence(student, teacher)
        else:
            distance = kl_penalty(log_probs, to_match(columns["teacher_log_prob"], log_probs), rule.loss_mode)
        measured |= {"abs_loss": distance.abs(), "loss": distance}
        if rule.loss_max_clamp is not None:
            distance = distance.clamp(-rule.loss_max_clamp, rule.loss_max_clamp)
        return distance, {k: m for name, values in measured.items() for k, m in _measures(name, values, mask).items()}

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        rule = self.teacher
        if rule.loss_mode == "forward_kl_topk":
            return forward_kl(student, teacher, rule.log_prob_min_clamp)
        if rule.topk != -1:
            student, teacher = with_remainder(student), with_remainder(teacher)
        return generalized_jsd(student, teacher, rule.jsd_beta)


def _measures(name: str, values: Tensor, mask: Tensor) -> dict[str, Metric]:
    values = values.detach()
    metrics = {f"distillation/{name}": token_mean(values, mask)}
    if name in ("loss", "student_mass", "teacher_mass"):
        metrics[f"distillation/{name}_min"] = Metric.min(values.where(mask, torch.inf).min())
        metrics[f"distillation/{name}_max"] = Metric.max(values.where(mask, -torch.inf).max())
    return metrics
