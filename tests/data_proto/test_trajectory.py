"""Trajectories: masks and lengths with environment tokens, and the way to columns and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data_proto.columns import COLUMNS
from verl.data_proto.samples import Completion
from verl.data_proto.trajectory import Segment, Trajectory, response_lengths, to_columns, trajectory_of


def conversation():
    """Two turns of the policy, with a tool's answer between them."""
    trajectory = Trajectory(7, 1, (1, 2, 3)).extended(Completion(7, 1, [10, 11], [-0.5, -1.0], "stop", 4))
    trajectory = trajectory.answered((20, 21, 22), 4)
    assert trajectory.status == "open"
    return trajectory.extended(Completion(7, 1, [12], [-2.0], "length", 5))


def test_environment_tokens_are_context_and_never_trained():
    row = conversation().to_row()
    assert row.prompt_ids.tolist() == [1, 2, 3]
    assert row.response_ids.tolist() == [10, 11, 20, 21, 22, 12] == conversation().response_ids
    assert row.response_mask.tolist() == [True, True, False, False, False, True]
    assert row.log_probs.tolist() == [-0.5, -1.0, 0, 0, 0, -2.0]
    assert row.weight_versions.tolist() == [4, 4, 4, 4, 4, 5]
    assert conversation().num_response_tokens == 6
    assert (conversation().oldest_version, conversation().status) == (4, "length")
    assert conversation().can_resume(7)
    assert not conversation().can_resume(6)


def test_columns_have_the_widths_of_the_config():
    empty = Trajectory(8, 0, (5,), [Segment(np.array([9], dtype=np.int32), np.array([-0.25]), 4)], "stop")
    columns = to_columns([conversation(), empty], pad_token_id=99, prompt_width=4, response_width=7)
    assert columns["prompts"].tolist() == [[99, 1, 2, 3], [99, 99, 99, 5]]
    assert columns["responses"].tolist() == [[10, 11, 20, 21, 22, 12, 99], [9, 99, 99, 99, 99, 99, 99]]
    assert columns["response_mask"][0].tolist() == [True, True, False, False, False, True, False]
    assert columns["attention_mask"][0].tolist() == [False, *[True] * 9, False]
    assert columns["rollout_log_probs"].dtype == torch.float32
    assert (columns["sample_index"].tolist(), columns["weight_version"].tolist()) == ([1, 0], [4, 4])
    assert response_lengths(columns).tolist() == [6, 1]
    for name, values in columns.items():
        assert str(values.dtype) == f"torch.{COLUMNS[name].dtype}", name


def test_a_response_longer_than_its_columns_is_an_error():
    with pytest.raises((ValueError, RuntimeError)):
        to_columns([conversation()], pad_token_id=0, prompt_width=4, response_width=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 3)), min_size=1, max_size=5), st.booleans())
def test_columns_give_the_trajectory_back(parts, wide):
    dtype = np.float64 if wide else np.float32
    trajectory = Trajectory(3, 2, (1, 2), status="stop")
    for number, (length, sampled, version) in enumerate([*parts, (1, True, 1)]):
        tokens = np.arange(length, dtype=np.int32) + 10 * number
        log_probs = -np.arange(length).astype(dtype) / 3 if sampled else None
        trajectory.segments.append(Segment(tokens, log_probs, version, "policy" if sampled else "environment"))
    columns = to_columns(
        [trajectory], pad_token_id=0, prompt_width=3, response_width=30, dtype=torch.float64 if wide else torch.float32
    )
    back = trajectory_of(columns, 0, ordinal=3, status="stop", prompt_ids=(1, 2))
    assert (back.ordinal, back.sample, back.status) == (3, 2, "stop")
    assert all((segment.log_probs is None) == (segment.source == "environment") for segment in back.segments)
    assert len(back.segments) <= len(trajectory.segments), "neighbours of one source and version are one segment"
    for ours, theirs in zip(back.to_row(), trajectory.to_row(), strict=True):
        assert np.array_equal(ours, theirs)
