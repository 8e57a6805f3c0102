"""Display of PPO runs: metrics of the console line, learning curves, and phases of the timed spans."""

from __future__ import annotations

from collections.abc import Mapping

from verl.tracking.console import StepMetrics
from verl.tracking.run_folder import Curves
from verl.tracking.timeline import SpanPhases

CONSOLE_METRICS: StepMetrics = {
    "critic/score/mean": ("reward", "{:.3f}"),
    "actor/pg_loss": ("loss", "{:.3g}"),
    "actor/ppo_kl": ("kl", "{:.1e}"),
    "response_length/mean": ("length", "{:.1f}"),
    "num_turns/mean": ("turns", "{:.1f}"),
    "tool_call_counts/mean": ("calls", "{:.1f}"),
    "actor/entropy": ("entropy", "{:.3f}"),
    "actor/kl_loss": ("kl_ref", "{:.2g}"),
    "actor/reward_kl_penalty": ("kl_in_reward", "{:.2g}"),
    "distillation/loss": ("teacher", "{:.3g}"),
    "actor/grad_norm": ("grad", "{:.2f}"),
    "critic/vf_explained_var": ("explained", "{:.2f}"),
}


def curves_of(scores: Mapping[str, str]) -> Curves:
    """`curves` of a program that samples; `scores` (metric -> label) are those of the samples of a step."""
    return {
        "mean reward": {**scores, "val/reward": "held-out, sampled", "val/greedy": "held-out, greedy"},
        "response length (tokens)": {"response_length/mean": ""},
        "turns of an episode": {"num_turns/mean": ""},
        "entropy (nats)": {"actor/entropy": ""},
        "distance to the teacher": {"distillation/loss": ""},
        "KL": {
            "actor/ppo_kl": "to the old policy",
            "actor/kl_loss": "to the reference",
            "actor/reward_kl_penalty": "to the reference, in the reward",
        },
        "age of the samples (weight versions)": {"training/off_policy/trajectory_staleness/mean": ""},
    }


def greedy_curves(curves: Curves) -> Curves:
    """The curves of a run whose validation is greedy: val/reward and val/greedy are one."""
    panels = {}
    for title, names in curves.items():
        panels[title] = {name: label for name, label in names.items() if name != "val/greedy"}
        if "val/reward" in names:
            panels[title]["val/reward"] = "held-out, greedy"
    return panels


SPAN_PHASES: SpanPhases = {
    "gen": ("rollout", "rollout"),
    "gen_max": ("rollout", "rollout"),
    "rollout_wait": ("rollout", None),  # for samples that are generated in parallel
    "reward": ("reward", None),  # for scores; the scorers report their own busy time
    "old_log_prob": ("training", "actor"),
    "update_actor": ("training", "actor"),
    "ref": ("training", "reference"),
    "teacher": ("training", "teacher"),
    "values": ("training", "critic"),
    "update_critic": ("training", "critic"),
    "adv": ("training", None),
    "update_weights": ("communication", None),
}
