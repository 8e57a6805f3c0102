"""Every update of PPO and its relatives equals the formulas in float64: metrics, advantages and weights of actor and critic."""

import pytest
import torch
from safetensors.torch import load_file

from tests.learning.by_hand import Settings, Trainer
from tests.learning.small_runs import ACTOR, ROLLOUT, distance, small_run, weights_of

KEYS = {
    "gamma": ("algorithm.gamma",),
    "lam": ("algorithm.lam",),
    "temperature": (f"{ROLLOUT}.temperature",),
    "lr": (f"{ACTOR}.optim.lr",),
    "critic_lr": ("critic.optim.lr",),
    "epochs": (f"{ACTOR}.ppo_epochs", "critic.ppo_epochs"),
    "mini": (f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
    "modes": (f"{ACTOR}.loss_agg_mode", "critic.loss_agg_mode"),
    "clips": tuple(f"{ACTOR}.clip_ratio_{part}" for part in ("low", "high", "c")),
    "value_clip": ("critic.cliprange_value",),
    "norms": (f"{ACTOR}.optim.clip_grad", "critic.optim.clip_grad"),
    "kl_in_reward": ("algorithm.kl_ctrl.kl_coef",),
    "kl_loss": (f"{ACTOR}.kl_loss_coef",),
    "entropy": (f"{ACTOR}.entropy_coeff",),
}
CASES = {
    "gae": Settings(
        "gae", gamma=0.99, lam=0.95, value_clip=0.02, norms=0.5, kl_in_reward=0.05, kl_loss=0.02, entropy=0.01
    ),
    "gae by sequences": Settings(
        "gae", epochs=(2, 3), mini=(2, 4), modes=("seq-mean-token-mean", "seq-mean-token-sum"), clips=(0.1, 0.28, 1.5),
        value_clip=0.02,
    ),
    "reinforce++": Settings("reinforce_plus_plus", gamma=0.9, kl_in_reward=0.05, temperature=0.8),
    "reinforce++ with a baseline": Settings("reinforce_plus_plus_baseline"),
    "opo": Settings("opo"),
    "rloo": Settings("rloo"),
    "grpo with entropy and k3": Settings("grpo", entropy=0.02, kl_loss=0.1),
}  # fmt: skip


def overrides_of(settings):
    changes = [f"algorithm.adv_estimator={settings.estimator}", f"{ACTOR}.fsdp_config.dtype=float64"]
    changes += [
        f"algorithm.use_kl_in_reward={settings.kl_in_reward > 0}",
        f"{ACTOR}.use_kl_loss={settings.kl_loss > 0}",
    ]
    for name, keys in KEYS.items():
        value = getattr(settings, name)
        values = value if isinstance(value, tuple) else (value,) * len(keys)
        changes += [f"{key}={v}" for key, v in zip(keys, values, strict=True)]
    if settings.estimator != "gae":
        changes = [change for change in changes if not change.startswith(("critic.", "algorithm.lam"))]
    else:
        changes += ["critic.optim.weight_decay=0.0"]
    return [c for c in changes if settings.kl_in_reward or "kl_ctrl" not in c]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_updates_follow_the_formulas(name, tiny_llama, tmp_path):
    settings = CASES[name]
    run, trainer = small_run(tiny_llama, tmp_path, overrides_of(settings)), Trainer(str(tiny_llama), settings)
    for row in run.training_rows():
        samples = run.samples_of(row["step"])
        metrics, advantages = trainer.step(samples)
        # columns of log-probs are float32, with a spacing of 5e-7; sums of their differences are divided by the deviation
        spacing = 3e-6 if settings.kl_in_reward else 1e-6
        for sample, ours in zip(samples, advantages, strict=True):
            stored = torch.tensor(sample["advantages"], dtype=torch.float64)
            torch.testing.assert_close(stored, ours, rtol=1e-5, atol=spacing)
        for metric, value in metrics.items():
            assert row[metric] == pytest.approx(value, rel=1e-5, abs=1e-7), f"{metric} of step {row['step']}"
    start = load_file(tiny_llama / "model.safetensors")
    for role, model in (("actor", trainer.actor), ("critic", trainer.critic)):
        if model is not None:
            named = dict(model.named_parameters())
            assert distance(weights_of(run, role), {n: p.detach() for n, p in named.items()}, start) < 3e-5, role
