"""Losses of distillation: the distance of the student's next-token distribution to the teacher's, token by token.

An estimator uses only the sampled token (`verl.algorithms.kl.kl_penalty` of student and teacher). The other losses compare
distributions on the teacher's most probable tokens, given as log-probs [batch, response, k] of both models at the same tokens.
"""

import torch
from torch import Tensor

_LEAST_REMAINDER = 1e-6  # probability; below it the logarithm of 1 - sum(p) is rounding


def forward_kl(student: Tensor, teacher: Tensor, log_prob_min: float | None = None) -> Tensor:
    """sum_i p_T (log p_T - log p_S) over the listed tokens, not normalised: [batch, response, k] -> [batch, response].

    Log-probs below `log_prob_min` are clamped to it, without gradient. With all of the vocabulary it is KL(teacher || student),
    with the teacher's k most probable tokens the loss_mode forward_kl_topk of existing releases.
    """
    if log_prob_min is not None:
        student, teacher = student.clamp(min=log_prob_min), teacher.clamp(min=log_prob_min)
    return (teacher.exp() * (teacher - student)).sum(dim=-1)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of GKD (2306.13649, eq. 1): [batch, response, k] -> [batch, response].

    beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S; KL(T || S) at beta 0 and KL(S || T) at beta 1, its
    limits up to scale. The distributions must be complete: all tokens, or some and `with_remainder`.
    """
    if beta == 0:
        return forward_kl(student, teacher)
    if beta == 1:
        return forward_kl(teacher, student)
    weight = student.new_tensor(beta)
    mixture = torch.logaddexp(student + torch.log1p(-weight), teacher + weight.log())
    return beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)


def with_remainder(log_probs: Tensor) -> Tensor:
    """A further entry for all other tokens together, log(1 - sum p): [..., k] -> [..., k + 1].

    Merging tokens of the distributions does not increase their divergence (data processing inequality).
    """
    rest = (1 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp(min=_LEAST_REMAINDER)
    return torch.cat([log_probs, rest.log()], dim=-1)


def overlap_ratio(student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
    """Share of the teacher's k tokens that are among the student's k most probable ones (2604.13016): [batch, response, k]
    token ids of both -> [batch, response]."""
    return (teacher_ids.unsqueeze(-1) == student_ids.unsqueeze(-2)).any(dim=-1).float().mean(dim=-1)
