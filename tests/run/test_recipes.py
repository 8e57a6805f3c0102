"""Recipes of examples/recipes: their losses on the batches of a run, written with loops, and that they learn."""

from pathlib import Path

import pytest

from tests.letters_task import write_reward
from verl.programs.ppo import PPO
from verl.registry import load_module

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
SPPO = (
    f"algorithm.adv_estimator={RECIPES}/sppo.py:win_rates",
    f"actor_rollout_ref.actor.policy_loss.loss_mode={RECIPES}/sppo.py:sppo",
    "actor_rollout_ref.actor.skip_zero_advantages=False",
)
GVPO = (f"algorithm.program={RECIPES}/gvpo.py:GVPO",)
LEARNING = (
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.total_training_steps=8",
    "actor_rollout_ref.actor.optim.lr=0.01",
)  # fmt: skip


@pytest.fixture
def groups(around):
    """Scores of the samples of each prompt, by step."""
    grouped = []

    def keep(original, self, result):
        scores = result.batch.batch["token_level_scores"].sum(dim=1).double().tolist()
        by_prompt = {}
        for uid, score in zip(result.batch.non_tensor_batch["uid"], scores, strict=True):
            by_prompt.setdefault(uid, []).append(score)
        grouped.append(list(by_prompt.values()))
        return original(self, result)

    around(PPO, "_step_result", keep)
    return grouped


def win_rate(scores, i):
    peers = [s for j, s in enumerate(scores) if j != i]
    return sum(1 / (1 + 2.718281828459045 ** (s - scores[i])) for s in peers) / len(peers)


def sppo_loss(groups):
    losses = [(win_rate(scores, i) - 0.5) ** 2 for scores in groups for i in range(len(scores))]
    return sum(losses) / len(losses)


def gvpo_loss(groups):
    losses = [(s - sum(scores) / len(scores)) ** 2 / 2 for scores in groups for s in scores]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("settings", "loss"), [(SPPO, sppo_loss), (GVPO, gvpo_loss)], ids=["sppo", "gvpo"])
def test_the_first_loss_matches_the_paper_and_rewards_rise(settings, loss, tiny_run, groups):
    """In the first step the policy is the old one: log-ratios are zero."""
    rows = tiny_run(*settings, *LEARNING).training_rows()
    assert rows[0]["actor/loss"] == pytest.approx(loss(groups[0]), rel=1e-5)
    assert rows[-1]["critic/score/mean"] > rows[0]["critic/score/mean"]


def test_prime_learns_process_rewards_from_outcomes(tiny_run, tmp_path):
    import math

    reward = write_reward(tmp_path, "return float(sum(c.isalpha() for c in solution_str) > len(solution_str) / 3)")
    run = tiny_run(f"algorithm.program={RECIPES}/prime.py:PRIME", reward, *LEARNING, "trainer.save_freq=8")
    rows = run.training_rows()
    assert rows[0]["process_reward/loss"] == pytest.approx(math.log(2), rel=1e-5)  # it starts as its reference
    assert rows[-1]["process_reward/loss"] < rows[0]["process_reward/loss"]
    assert rows[-1]["critic/score/mean"] > rows[0]["critic/score/mean"]
    assert (run.folder / "global_step_8" / "process_reward" / "huggingface" / "model.safetensors").exists()


def test_gvpo_does_not_depend_on_micro_batches(tiny_run):
    settings = (*GVPO, "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    micro = ("actor_rollout_ref.actor.use_dynamic_bsz=False", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    undivided, parts = tiny_run(*settings, folder="whole"), tiny_run(*settings, *micro, folder="parts")
    names = ("actor/loss", "actor/grad_norm", "actor/implicit_reward")
    for one, other in zip(undivided.training_rows(), parts.training_rows(), strict=True):
        assert [one[n] for n in names] == pytest.approx([other[n] for n in names], rel=1e-3, abs=1e-6)


def test_a_win_rate_is_half_of_a_group_without_difference():
    import torch

    recipe = load_module(str(RECIPES / "sppo.py"))
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    advantages, _ = recipe.win_rates(rewards, torch.ones(3, 2), index=["a", "a", "b"])
    assert advantages.tolist() == [[0.0, 0.0]] * 3


def test_a_users_program_reads_the_data_after_the_rewards(tiny_run, tmp_path):
    (file := tmp_path / "reader.py").write_text(
        "from verl.programs.ppo import PPO\n\n\nclass Reader(PPO):\n    def assign_credit(self, result, step):\n"
        "        self.rows = [dict(row) for row in result.batch.non_tensor_batch['extra_info']]\n"
        "        assert len(self.rows) == len(result.batch)\n        super().assign_credit(result, step)\n"
    )
    assert len(tiny_run(f"algorithm.program={file}:Reader").training_rows()) == 2
