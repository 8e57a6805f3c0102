"""Two steps of each form of GRPO and RLOO equal TRL's on the same samples: loss, gradient norm, and the weights at the end.

What differs by design is taken out of both: TRL leaves the padding token's embedding without a gradient (trl_replay.py), and it
adds 1e-4 to the standard deviation of a group and this package adds 1e-6.
"""

from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from tests.learning.small_runs import (
    ACTOR,
    LENGTH,
    PROMPTS,
    REWARD,
    REWARDS_0_OR_1,
    ROLLOUT,
    STEPS,
    N,
    distance,
    small_run,
    weights_of,
)
from tests.letters_task import merge
from tests.run.trl_oracle import answer_of
from verl.config.presets import preset_settings

LR = 2e-3  # ratios leave the clip range in the second update
SEQUENCES, TOKENS, TWICE = (
    f"{ACTOR}.{s}" for s in ("loss_agg_mode=seq-mean-token-mean", "loss_agg_mode=token-mean", "ppo_epochs=2")
)
SUMS = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"
KL = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=low_var_kl")
KL_IN_REWARD = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.05")


class Case(NamedTuple):
    """Our overrides, and arguments of TRL's config. `by_std`: TRL gets our advantages as rewards, so that its constant beside
    the standard deviation does not act."""

    ours: tuple[str, ...]
    theirs: dict
    by_std: bool = False
    reward: str = REWARD


def grpo(*ours, loss_type="grpo", **more):
    std, reward = more.pop("by_std", False), more.pop("reward", REWARD)
    updates = {} if "steps_per_generation" in more else {"num_iterations": 2}
    mine = (*ours, f"{ACTOR}.clip_ratio_c=inf") if "delta" not in more else ours
    if not std:
        mine = (*mine, "algorithm.norm_adv_by_std_in_grpo=False")
    return Case(mine, {"loss_type": loss_type, "scale_rewards": "none", **updates, **more}, std, reward)


def preset(name, *ours, **more):
    """`grpo` with the keys of a preset, without the division by the standard deviation."""
    keys = [f"{key}={value}" for key, value in preset_settings(name).items() if "norm_adv" not in key]
    return grpo(*merge(keys, ours), **more)


CASES = {
    "grpo": grpo(SEQUENCES, TWICE),
    "grpo by standard deviation": grpo(SEQUENCES, TWICE, by_std=True),
    "grpo at temperature 0.7": grpo(SEQUENCES, TWICE, f"{ROLLOUT}.temperature=0.7", temperature=0.7),
    "grpo with k3": grpo(SEQUENCES, TWICE, *KL, beta=0.1, use_bias_correction_kl=False),
    "grpo with a lower bound": grpo(
        SEQUENCES, TWICE, f"{ACTOR}.clip_ratio_c=1.3", f"{ACTOR}.clip_ratio=0.1", delta=1.3, epsilon=0.1
    ),
    "dapo": preset("dapo", TWICE, loss_type="dapo", epsilon_high=0.28),
    "dapo, rewards 0 or 1": grpo(TOKENS, TWICE, loss_type="dapo", reward=REWARDS_0_OR_1),
    "dr_grpo": preset("dr_grpo", TWICE, loss_type="dr_grpo"),
    "bnpo, two mini-batches": grpo(
        TOKENS, f"{ACTOR}.ppo_mini_batch_size=2", loss_type="bnpo", steps_per_generation=2,
        per_device_train_batch_size=PROMPTS * N // 2,
    ),
    "gspo": preset("gspo", TWICE, importance_sampling_level="sequence", epsilon=0.0003, epsilon_high=0.0004),
    # with a clip that acts
    "cispo": preset("cispo", TWICE, f"{ACTOR}.clip_ratio_high=0.02", loss_type="cispo", epsilon_high=1.02),
    "sapo": preset("sapo", TWICE, loss_type="sapo"),
    "rloo": Case(("algorithm.adv_estimator=rloo", SUMS), {"beta": 0.0}),
    "rloo with KL in the reward": Case(("algorithm.adv_estimator=rloo", SUMS, *KL_IN_REWARD), {"beta": 0.05}),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_llama, tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("ours") for name in CASES}
    lr = f"{ACTOR}.optim.lr={LR}"
    return {n: small_run(tiny_llama, folders[n], (*case.ours, lr), case.reward) for n, case in CASES.items()}


@pytest.fixture(scope="module")
def theirs(runs, tiny_llama, tmp_path_factory):
    """(log, file of weights) of every case: one process for all, because its imports take longer than the steps."""
    folder, cases = tmp_path_factory.mktemp("trl"), {}
    for number, (name, case) in enumerate(CASES.items()):
        steps = [
            [
                {
                    "prompt_ids": row["prompt_ids"],
                    "response_ids": row["response_ids"],
                    "reward": row["advantages"][0] if case.by_std else row["score"],
                }
                for row in runs[name].samples_of(step)
            ]
            for step in range(1, STEPS + 1)
        ]
        is_rloo = "rloo" in name
        updates = case.theirs.get("num_iterations", 1) * case.theirs.get("steps_per_generation", 1)
        args = {
            "learning_rate": LR, "num_generations": N, "max_completion_length": LENGTH, "max_steps": STEPS * updates,
            **({"normalize_advantages": False} if is_rloo else {}), **case.theirs,
        }  # fmt: skip
        cases[name] = {
            "trainer": "RLOO" if is_rloo else "GRPO", "model": str(tiny_llama), "args": args, "steps": steps,
            "weights": str(folder / f"{number}.safetensors"),
        }  # fmt: skip
    logs = answer_of("../learning/trl_replay.py", {"cases": cases}, folder)
    return {name: (logs[name], cases[name]["weights"]) for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_steps_match_trl(name, runs, theirs, tiny_llama):
    run, (log, weights) = runs[name], theirs[name]
    updates = len(log) // STEPS
    for number, row in enumerate(run.training_rows()):
        entries = log[number * updates : (number + 1) * updates]
        loss, norm = (sum(entry[key] for entry in entries) / updates for key in ("loss", "grad_norm"))
        assert row["actor/grad_norm"] == pytest.approx(norm, rel=3e-6)
        if "rloo" not in name:  # TRL reports the loss of the sequences' ratios, with an equal gradient in one update
            assert row["actor/loss"] == pytest.approx(loss, rel=2e-5, abs=2e-8)
    if updates > 1 and name != "sapo":
        assert run.training_rows()[-1]["actor/pg_clipfrac"] > 0
    start = load_file(tiny_llama / "model.safetensors")
    assert distance(weights_of(run), load_file(weights), start) < 1e-4
