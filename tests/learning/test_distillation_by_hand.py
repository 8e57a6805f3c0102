"""One on-policy step of each distillation loss equals its formula: loss, distance to the teacher, and gradient norm."""

import pytest
import torch

from tests.learning.by_hand import chosen, k3, load, log_softmax
from tests.learning.small_runs import ROLLOUT, small_run
from verl.models.tiny import make_tiny_model

LOSS = "distillation.distillation_loss"
TOP = 32


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


def jsd(student, teacher, _):
    middle = ((student.exp() + teacher.exp()) / 2).log()
    return (kl(teacher, middle) + kl(student, middle)) / 2


def top(teacher, *distributions, with_remainder=False):
    """The teacher's likeliest tokens in each distribution, and the probability of all others as one more."""
    ids = teacher.topk(TOP, dim=-1).indices
    for values in (d.gather(-1, ids) for d in distributions):
        remainder = (1 - values.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()
        yield torch.cat([values, remainder], -1) if with_remainder else values


def jsd_of_top(student, teacher, _):
    return kl(*top(teacher, student, teacher, with_remainder=True))


def forward_of_top(student, teacher, _):
    return kl(*top(teacher, teacher, student))


def ratio(student, teacher, tokens):
    """Log-ratios of the sampled tokens."""
    return student.gather(-1, tokens[:, None])[:, 0] - teacher.gather(-1, tokens[:, None])[:, 0]


# name: (distance of each token, overrides)
CASES = {
    "reverse KL": (lambda s, t, _: kl(s, t), ["loss_mode=jsd", "jsd_beta=1.0", "topk=-1"]),
    "half": (jsd, ["loss_mode=jsd", "jsd_beta=0.5", "topk=-1"]),
    "forward KL": (lambda s, t, _: kl(t, s), ["loss_mode=jsd", "jsd_beta=0.0", "topk=-1"]),
    "forward KL of 32": (forward_of_top, ["loss_mode=forward_kl_topk", f"topk={TOP}"]),
    "reverse KL of 32": (jsd_of_top, ["loss_mode=jsd", "jsd_beta=1.0", f"topk={TOP}"]),
    "k1 by policy gradient": (ratio, ["loss_mode=k1", "use_policy_gradient=True"]),
    "k3": (lambda *d: k3(ratio(*d)), ["loss_mode=k3"]),  # with its bound
    "half at temperature 0.7": (jsd, ["loss_mode=jsd", "jsd_beta=0.5", "topk=-1"]),
    "half with rewards": (
        jsd, ["loss_mode=jsd", "jsd_beta=0.5", "topk=-1", "use_task_rewards=True", "distillation_loss_coef=0.3"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_follows_the_formula(name, tiny_llama, tmp_path):
    distance_of, keys = CASES[name]
    temperature = 0.7 if "0.7" in name else 1.0
    teacher_folder = make_tiny_model(tmp_path / "teacher", "llama", seed=7)
    teacher_key = "distillation.teacher_models.teacher_model"
    changes = [
        "distillation.enabled=True", f"{teacher_key}.model_path={teacher_folder}", f"{teacher_key}.inference.dtype=float32",
        f"{ROLLOUT}.temperature={temperature}", "trainer.total_training_steps=1", "trainer.save_freq=-1",
        *([] if "rewards" in name else [f"{LOSS}.use_task_rewards=False"]), *(f"{LOSS}.{key}" for key in keys),
    ]  # fmt: skip
    run = small_run(tiny_llama, tmp_path, changes)
    (row,), rows = run.training_rows(), run.samples_of()
    student, teacher = load(tiny_llama), load(teacher_folder)
    ours = log_softmax(student, rows, temperature)
    with torch.no_grad():
        theirs = log_softmax(teacher, rows, temperature)
    tokens = torch.cat([torch.tensor(r["response_ids"]) for r in rows])
    distances = distance_of(torch.cat(ours), torch.cat(theirs), tokens)
    log_probs = torch.cat(chosen(ours, rows))
    ratios = torch.exp(log_probs - log_probs.detach())  # 1, with the gradient of a policy
    loss = (distances.detach() * ratios).mean() if "policy gradient" in name else distances.mean()
    if "rewards" in name:
        advantages = torch.cat([torch.tensor(r["advantages"], dtype=torch.float64) for r in rows])
        loss = 0.3 * loss - (advantages * ratios).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()])
    for metric, value in (("actor/loss", loss), ("distillation/loss", distances.mean()), ("actor/grad_norm", norm)):
        assert row[metric] == pytest.approx(value.item(), rel=3e-6), metric
