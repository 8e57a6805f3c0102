"""Values of tokens from an update in the rows of a batch."""

import pytest
import torch

from verl.data_proto.proto import DataProto
from verl.data_proto.token_values import add_observed, add_token_columns, token_keys


def batch_of(ordinals, samples, width=3):
    count = len(ordinals)
    return DataProto.from_dict(
        {
            "ordinal": torch.tensor(ordinals),
            "sample_index": torch.tensor(samples),
            "responses": torch.zeros(count, width, dtype=torch.int64),
        }
    )


def test_values_find_their_rows_again():
    """Rows in another order, some of them not computed, one there twice."""
    batch = batch_of([4, 7, 4, 9], [0, 0, 1, 0])
    part = batch_of([4, 4], [1, 0])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    keys = token_keys(part, mask)
    add_token_columns(batch, keys, {"train_log_probs": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    nan = float("nan")
    expected = torch.tensor([[nan, 3.0, 4.0], [nan] * 3, [1.0, 2.0, nan], [nan] * 3])
    assert torch.equal(batch.batch["train_log_probs"].nan_to_num(-9), expected.nan_to_num(-9))


def test_a_batch_without_numbers_gets_none():
    batch = DataProto.from_dict({"responses": torch.zeros(2, 3, dtype=torch.int64)})
    assert token_keys(batch, torch.ones(2, 3, dtype=torch.bool)) == []
    add_token_columns(batch, [], {"train_log_probs": torch.zeros(0)})
    assert "train_log_probs" not in batch.batch.keys()


@pytest.mark.parametrize("entropy", [False, True])
def test_what_a_policy_observes(entropy):
    batch = batch_of([0, 1], [0, 0])
    mask = torch.tensor([[True, False, False], [True, True, False]])
    values = torch.arange(3.0)
    add_observed(batch, [values, values, *token_keys(batch, mask), *([values + 1] if entropy else [])])
    assert batch.batch["train_log_probs"][mask].tolist() == [0.0, 1.0, 2.0]
    assert ("entropys" in batch.batch.keys()) == entropy
    add_observed(batch, [values, values])  # nothing to place
