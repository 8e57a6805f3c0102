"""Metrics of a step follow from its stored samples, by the standard library only."""

import math
import statistics

import pytest

from tests.learning.small_runs import LENGTH, REWARDS_0_OR_1, small_run


def of_values(name, values):
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def expected_metrics(rows, step_s):
    """name -> value."""
    scores = [row["score"] for row in rows]
    lengths, prompts = ([len(row[key]) for row in rows] for key in ("response_ids", "prompt_ids"))
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault(row["uid"], []).append(row["score"])
    advantages = []
    for row in rows:
        group = by_prompt[row["uid"]]
        advantages.append((row["score"] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6))
    assert [row["advantages"][0] for row in rows] == pytest.approx(advantages, rel=1e-5, abs=1e-6)
    tokens = [a for a, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    trained = [row for row, a in zip(rows, advantages, strict=True) if a]
    pairs = [
        (math.exp(sampled), math.exp(trainer))
        for row in trained
        for sampled, trainer in zip(row["log_probs"], row["train_log_probs"], strict=True)
    ]
    gaps = [abs(a - b) for a, b in pairs]
    num_tokens = sum(lengths) + sum(prompts)
    return {
        **of_values("critic/score", scores), **of_values("response_length", lengths), **of_values("prompt_length", prompts),
        **of_values("critic/advantages", tokens),
        "response_length/clip_ratio": statistics.fmean(length == LENGTH for length in lengths),
        "perf/total_num_tokens": num_tokens, "perf/throughput": num_tokens / step_s, "perf/time_per_step": step_s,
        "actor/skipped_row_ratio": 1 - len(trained) / len(rows),
        "actor/pg_loss": -statistics.fmean(tokens),
        "training/rollout_probs_diff_mean": statistics.fmean(gaps), "training/rollout_probs_diff_max": max(gaps),
        "training/rollout_actor_probs_pearson_corr": statistics.correlation(*zip(*pairs, strict=True)),
    }  # fmt: skip


@pytest.mark.slow
def test_metrics_follow_from_the_samples(tiny_llama, tmp_path):
    run = small_run(tiny_llama, tmp_path, ["actor_rollout_ref.actor.use_dynamic_bsz=True"], REWARDS_0_OR_1)
    for row in run.training_rows():
        expected = expected_metrics(run.samples_of(row["step"]), row["timing_s/step"])
        assert len(expected) >= 20
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-7), f"{name} of step {row['step']}"
