"""Metrics of a step on numbers worked by hand."""

import numpy as np
import pytest
import torch

from verl.data_proto.batch_metrics import data_metrics, span_tokens
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.tracking.spans import span_metrics, throughput
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
    found = data_metrics(batch, max_prompt_length=3, max_response_length=4)
    assert found["critic/score/mean"] == 2.0  # the aborted row does not count
    assert (found["critic/score/max"], found["critic/score/min"]) == (3.0, 1.0)
    assert found["critic/rewards/mean"] == pytest.approx((0.0 + 1.0) / 2)
    assert found["critic/advantages/mean"] == pytest.approx(1.5)
    assert found["critic/returns/max"] == 7.0
    assert found["critic/values/mean"] == pytest.approx(3.5)
    values, returns = np.array([1, 2, 3, 4, 5, 6.0]), np.array([1, 3, 3, 5, 5, 7.0])
    assert found["critic/vf_explained_var"] == pytest.approx(1 - np.var(returns - values) / (np.var(returns) + 1e-5))
    assert (found["response_length/mean"], found["response_length/min"]) == (2.0, 0.0)
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["response_length_non_aborted/mean"] == 3.0
    assert found["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert (found["prompt_length/mean"], found["prompt_length/clip_ratio"]) == (2.0, pytest.approx(1 / 3))
    assert (found["num_turns/min"], found["num_turns/max"]) == (2.0, 4.0)
    assert all(isinstance(value, float) for value in found.values())


def test_times_of_episodes(batch):
    times = [{"generate_sequences": 1.0, "tool_calls": 4.0}, {"generate_sequences": 3.0, "compute_score": 0.5}, {}]
    batch.non_tensor_batch["episode_times"] = object_array(times)
    found = data_metrics(batch, max_prompt_length=3, max_response_length=4)
    name = "timing_s/agent_loop"
    assert [found[f"{name}/generate_sequences/{kind}"] for kind in ("min", "max", "mean")] == [
        0,
        3,
        pytest.approx(4 / 3),
    ]
    assert [found[f"{name}/tool_calls/{kind}"] for kind in ("min", "max", "mean")] == [0, 4, pytest.approx(4 / 3)]
    assert found[f"{name}/compute_score/max"] == 0.5
    slowest = ("generate_sequences", "tool_calls", "prompt_length", "response_length")
    assert [found[f"{name}/slowest/{kind}"] for kind in slowest] == [1, 4, 1, 2]


def test_columns_that_are_absent_leave_their_figures_out(batch):
    found = data_metrics(
        batch.select(["responses", "attention_mask", "response_mask"], []), max_prompt_length=3, max_response_length=4
    )
    assert not any(name.startswith("critic/") for name in found)
    assert "response_length/mean" in found


def test_limits_are_the_configured_ones(batch):
    found = data_metrics(batch, max_prompt_length=100, max_response_length=100)
    assert found["response_length/clip_ratio"] == found["prompt_length/clip_ratio"] == 0.0


def test_timing_and_throughput(batch):
    spans = {"gen": 3.0, "update_actor": 6.0, "reward": 1.0}
    found = span_metrics(spans, span_tokens(batch))
    assert found["timing_s/reward"] == 1.0
    assert found["timing_per_token_ms/gen"] == pytest.approx(3000 / 6)  # response tokens
    assert found["timing_per_token_ms/update_actor"] == pytest.approx(6000 / 12)  # all tokens
    assert "timing_per_token_ms/reward" not in found
    assert throughput(12, 2.0, num_devices=3) == {
        "perf/total_num_tokens": 12, "perf/time_per_step": 2.0, "perf/throughput": 2.0,
    }  # fmt: skip


def test_door(batch):
    found = compute_data_metrics(batch, use_critic=False)
    assert "critic/values/mean" not in found
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert "critic/vf_explained_var" in compute_data_metrics(batch)
    assert compute_timing_metrics(batch, {"gen": 3.0})["timing_s/gen"] == 3.0
    assert compute_throughout_metrics(batch, {"step": 4.0}, 1)["perf/throughput"] == 3.0
