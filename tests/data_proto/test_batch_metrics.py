"""Metrics of a step on numbers worked by hand."""

import numpy as np
import pytest
import torch

from verl.algorithms.kl import AdaptiveKLController, apply_kl_penalty
from verl.data_proto.batch_metrics import data_metrics, span_tokens, variety_metrics
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import metric_values
from verl.data_proto.proto import DataProto
from verl.programs.ppo_async import age_metrics
from verl.tracking.timeline import span_metrics, throughput
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics


@pytest.fixture
def batch():
    """Three rows: two response tokens, all four, and none (aborted); prompts of 1, 3 and 2 tokens."""
    attention = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]])
    mask = attention[:, 3:]
    scores = torch.tensor([[0.0, 1.0, 0, 0], [0, 0, 0, 3.0], [0, 0, 0, 0]])
    values = torch.tensor([[1.0, 2.0, 9, 9], [3.0, 4.0, 5.0, 6.0], [9, 9, 9, 9]])
    return DataProto.from_dict(
        {
            "prompts": torch.zeros(3, 3, dtype=torch.long),
            "responses": torch.zeros(3, 4, dtype=torch.long),
            "attention_mask": attention,
            "response_mask": mask,
            "token_level_scores": scores,
            "token_level_rewards": scores - 0.5 * mask,
            "advantages": values - 2,
            "returns": values + torch.tensor([0.0, 1.0, 0.0, 1.0]),
            "values": values,
        },
        {"__num_turns__": np.array([2, 4, 2], dtype=np.int64)},
    )


def test_values_by_hand(batch):
    metrics = data_metrics(batch, max_prompt_length=3, max_response_length=4)
    assert metrics["critic/score/mean"] == 2.0  # the aborted row does not count
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (3.0, 1.0)
    assert metrics["critic/rewards/mean"] == pytest.approx((0.0 + 1.0) / 2)
    assert metrics["critic/advantages/mean"] == pytest.approx(1.5)
    assert metrics["critic/returns/max"] == 7.0
    assert metrics["critic/values/mean"] == pytest.approx(3.5)
    values, returns = np.array([1, 2, 3, 4, 5, 6.0]), np.array([1, 3, 3, 5, 5, 7.0])
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - np.var(returns - values) / (np.var(returns) + 1e-5))
    assert (metrics["response_length/mean"], metrics["response_length/min"]) == (2.0, 0.0)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 3.0
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert (metrics["prompt_length/mean"], metrics["prompt_length/clip_ratio"]) == (2.0, pytest.approx(1 / 3))
    assert (metrics["num_turns/min"], metrics["num_turns/max"]) == (2.0, 4.0)
    assert all(isinstance(value, float) for value in metrics.values())


def with_placeholders(batch, tokens):
    """The batch and as many rows of failed episodes: a response of `tokens` tokens that do not train, and a default score."""
    both = DataProto.concat([batch, batch])
    num_rows, columns, objects = len(batch), both.batch, both.non_tensor_batch
    columns["response_mask"][num_rows:] = 0
    columns["attention_mask"][num_rows:, 3:] = torch.arange(4) < tokens
    for name in ("token_level_scores", "token_level_rewards"):
        columns[name][num_rows:] = 9.0
    columns["is_scored"] = torch.arange(2 * num_rows) < num_rows
    objects["episode_error"] = object_array([None] * num_rows + ["broke"] * num_rows)
    for name, value in {"__num_turns__": 99, "tool_call_counts": 99, "reward_parts": {"form": 9.0}}.items():
        objects[name][num_rows:] = value if not isinstance(value, dict) else object_array([value] * num_rows)
    return both


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_without_a_response_change_no_metric_but_those_that_count_them(batch, tokens):
    """All metrics over rows: metrics of the step, of the KL term with its controller, and of the age of samples."""
    batch.non_tensor_batch["tool_call_counts"] = np.array([1, 2, 0], dtype=object)
    batch.non_tensor_batch["reward_parts"] = object_array([{"form": 1.0}, {"form": 0.5}, {"form": 0.5}])
    batch.batch["weight_version"] = torch.tensor([3, 4, 4])
    batch.batch["token_weight_version"] = torch.tensor([[3, 5, 0, 0], [4, 4, 4, 4], [4, 0, 0, 0]])
    batch.batch["response_mask"] = batch.batch["response_mask"].clone()

    def metrics(rows):
        metrics = data_metrics(rows, max_prompt_length=3, max_response_length=4)
        columns, controller = rows.batch, AdaptiveKLController(0.1, 0.05, 100)
        mask = columns["response_mask"].bool()
        _, kl = apply_kl_penalty(
            columns["token_level_scores"], columns["values"], columns["values"] * 0, mask, beta=0.1
        )
        controller.update(float(kl), n_steps=int(mask.any(-1).sum()))
        metrics |= {"actor/reward_kl_penalty": float(kl), "controller": controller.value}
        return metrics | metric_values(age_metrics(rows, version=6))

    expected, all_metrics = metrics(batch), metrics(with_placeholders(batch, tokens))
    assert all_metrics.pop("response/aborted_ratio") == pytest.approx((1 + 3) / 6)
    assert expected.pop("response/aborted_ratio") == pytest.approx(1 / 3)
    assert all_metrics == pytest.approx(expected)
    assert expected["reward/form/mean"] == 0.75  # the row without a response has no score


@pytest.mark.parametrize("num_prompts", [3, 4])
def test_different_responses_are_counted_without_their_padding(num_prompts):
    """Ten rows: five times [1, 2], twice [1], twice [3], and one without a response, under prompts of one token."""
    responses = torch.tensor(
        [[1, 2, 0], [1, 2, 7]] * 2 + [[1, 2, 0], [1, 0, 0], [1, 2, 2], [3, 0, 0], [3, 1, 0], [1, 2, 0]]
    )
    lengths = torch.tensor([2] * 5 + [1] * 4 + [0])
    prompts = torch.arange(10)[:, None] % num_prompts * torch.tensor([[0, 1]])
    attention = torch.cat([torch.tensor([[False, True]] * 10), torch.arange(3) < lengths[:, None]], dim=1)
    columns = {"prompts": prompts, "responses": responses, "attention_mask": attention}
    metrics = variety_metrics(DataProto.from_dict(columns))
    assert metrics.pop("response/distinct_ratio") == pytest.approx(3 / 9)
    assert metrics == ({"response/most_frequent_ratio": pytest.approx(5 / 9)} if num_prompts == 4 else {})


def test_half_of_the_episodes_fail():
    """Eight responses of 29.4 tokens on average and eight placeholders of one token."""
    lengths = [29, 30, 29, 30, 29, 30, 29, 29] + [1] * 8
    width = torch.arange(32)[None] < torch.tensor(lengths)[:, None]
    attention = torch.cat([torch.ones(16, 2, dtype=torch.bool), width], dim=1)
    mask = width & (torch.arange(16) < 8)[:, None]
    errors = object_array([None] * 8 + ["broke"] * 8)
    batch = DataProto.from_dict(
        {"responses": torch.zeros(16, 32, dtype=torch.long), "attention_mask": attention, "response_mask": mask},
        {"episode_error": errors},
    )
    metrics = data_metrics(batch, max_prompt_length=2, max_response_length=32)
    assert metrics["response/aborted_ratio"] == 0.5
    assert metrics["response_length_non_aborted/mean"] == metrics["response_length/mean"] == 29.375
    old = torch.full((16, 32), 0.5314)
    assert float(apply_kl_penalty(old * 0, old, old * 0, mask, beta=0.1)[1]) == pytest.approx(0.5314)


@pytest.mark.parametrize(("reason", "expected"), [("stop", 0.0), ("length", 1 / 3)])
def test_a_response_that_ends_by_itself_at_the_limit_is_not_cut(batch, reason, expected):
    """Once, clip_ratio was 1.0 if every response ended with EOS as its last token."""
    batch.non_tensor_batch["finish_reason"] = np.array(["stop", reason, "abort"], dtype=object)
    metrics = data_metrics(batch, max_prompt_length=3, max_response_length=4)
    assert metrics["response_length/clip_ratio"] == pytest.approx(expected)
    assert metrics["response_length_non_aborted/clip_ratio"] == pytest.approx(expected * 1.5)


def test_times_of_episodes(batch):
    times = [{"generate_sequences": 1.0, "tool_calls": 4.0}, {"generate_sequences": 3.0, "compute_score": 0.5}, {}]
    batch.non_tensor_batch["episode_times"] = object_array(times)
    metrics = data_metrics(batch, max_prompt_length=3, max_response_length=4)
    name = "timing_s/agent_loop"
    assert [metrics[f"{name}/generate_sequences/{kind}"] for kind in ("min", "max", "mean")] == [
        0,
        3,
        pytest.approx(4 / 3),
    ]
    assert [metrics[f"{name}/tool_calls/{kind}"] for kind in ("min", "max", "mean")] == [0, 4, pytest.approx(4 / 3)]
    assert metrics[f"{name}/compute_score/max"] == 0.5
    slowest = ("generate_sequences", "tool_calls", "prompt_length", "response_length")
    assert [metrics[f"{name}/slowest/{kind}"] for kind in slowest] == [1, 4, 1, 2]


def test_columns_that_are_absent_leave_their_figures_out(batch):
    metrics = data_metrics(
        batch.select(["responses", "attention_mask", "response_mask"], []), max_prompt_length=3, max_response_length=4
    )
    assert not any(name.startswith("critic/") for name in metrics)
    assert "response_length/mean" in metrics


def test_limits_are_the_configured_ones(batch):
    metrics = data_metrics(batch, max_prompt_length=100, max_response_length=100)
    assert metrics["response_length/clip_ratio"] == metrics["prompt_length/clip_ratio"] == 0.0


def test_timing_and_throughput(batch):
    spans = {"gen": 3.0, "update_actor": 6.0, "reward": 1.0}
    metrics = span_metrics(spans, span_tokens(batch))
    assert metrics["timing_s/reward"] == 1.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(3000 / 6)  # response tokens
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(6000 / 12)  # all tokens
    assert "timing_per_token_ms/reward" not in metrics
    assert throughput(12, 2.0, num_devices=3) == {
        "perf/total_num_tokens": 12, "perf/time_per_step": 2.0, "perf/throughput": 2.0,
    }  # fmt: skip


def test_door(batch):
    metrics = compute_data_metrics(batch, use_critic=False)
    assert "critic/values/mean" not in metrics
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert "critic/vf_explained_var" in compute_data_metrics(batch)
    assert compute_timing_metrics(batch, {"gen": 3.0})["timing_s/gen"] == 3.0
    assert compute_throughout_metrics(batch, {"step": 4.0}, 1)["perf/throughput"] == 3.0
