"""The packed layout: the tokens that are computed, their places and their positions."""

import pytest
import torch

from tests.models.reference import make_columns
from verl.errors import DataError
from verl.models.packed import PackedSegment as Segment
from verl.models.packing import Reads, pack_rows


def test_a_shared_prompt_lies_once_before_its_responses():
    packed = pack_rows(make_columns([[1, 2, 3], [1, 2, 3]], [[10, 11, 12], [20, 21]]))
    assert packed.input_ids.tolist() == [[1, 2, 3, 10, 11, 20]]  # last response tokens predict nothing
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert packed.layout.segments == (Segment(0, 3), Segment(3, 2, 0, 3), Segment(5, 1, 0, 3))
    assert packed.hidden_index.tolist() == [2, 3, 4, 2, 5]
    assert packed.targets.tolist() == [10, 11, 12, 20, 21]


def test_rows_of_a_prompt_meet_wherever_they_are():
    packed = pack_rows(make_columns([[1, 2], [7], [1, 2]], [[10, 11], [30, 31], [20, 21]]))
    assert packed.input_ids.tolist() == [[1, 2, 10, 20, 7, 30]]
    assert packed.row.tolist() == [0, 0, 2, 2, 1, 1]
    assert packed.scatter(torch.arange(1.0, 7.0)).tolist() == [[1, 2], [5, 6], [3, 4]]


def test_without_sharing_every_row_is_one_causal_segment():
    packed = pack_rows(make_columns([[1, 2], [1, 2]], [[10, 11], [20]]), share_prompts=False)
    assert packed.input_ids.tolist() == [[1, 2, 10, 1, 2]]
    assert packed.layout.segments == (Segment(0, 3), Segment(3, 2))


def test_prompts_that_differ_only_in_padding_are_the_same_prompt():
    columns = make_columns([[0, 5], [5]], [[9], [9]])  # token 0 is a real token here, padding there
    packed = pack_rows(columns)
    assert packed.input_ids.tolist() == [[0, 5, 5]]
    wider = make_columns([[5], [5]], [[9], [9]], pad_prompt=3)
    assert pack_rows(wider).input_ids.tolist() == [[5]]


def test_tokens_after_the_last_trained_one_are_not_computed():
    columns = make_columns([[1]], [[10, 11, 12, 13]])
    columns["response_mask"] = torch.tensor([[True, False, True, False]])
    packed = pack_rows(columns)
    assert packed.input_ids.tolist() == [[1, 10, 11]]
    assert packed.targets.tolist() == [10, 12]
    assert packed.hidden_index.tolist() == [0, 2]
    assert packed.column.tolist() == [0, 2]


def test_a_row_that_trains_on_its_very_first_token_is_refused():
    columns = make_columns([[1], [2]], [[3], [4]])
    columns["prompt_mask"][1] = False
    with pytest.raises(DataError, match="Row 1"):
        pack_rows(columns)
    columns["response_mask"][1] = False  # then nothing of it is asked for
    assert pack_rows(columns).num_tokens == 1


def test_rows_without_a_prompt_are_apart():
    columns = make_columns([[], [1], []], [[10, 11, 12], [20, 21], [10, 11]])
    columns["response_mask"][:, 0] = torch.tensor([False, True, False])
    packed = pack_rows(columns)
    assert packed.input_ids.tolist() == [[10, 11, 1, 20, 10]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 0]]
    assert packed.layout.segments == (Segment(0, 2), Segment(2, 2), Segment(4, 1))
    assert packed.targets.tolist() == [11, 12, 20, 21, 11]
    assert packed.hidden_index.tolist() == [0, 1, 2, 3, 4]


def test_all_rows_may_be_without_a_prompt():
    columns = make_columns([[], []], [[10, 11], [20, 21]])
    columns["response_mask"][:, 0] = False
    assert pack_rows(columns).input_ids.tolist() == [[10, 20]]


def test_the_last_trained_token_is_an_input_where_it_is_read():
    columns = make_columns([[1, 2], [1, 2], [3]], [[10, 11, 12], [20], [30, 31]])
    columns["response_mask"][0, 2] = False
    packed = pack_rows(columns, reads=Reads(predictions=False, last_token=True))
    assert packed.input_ids.tolist() == [[1, 2, 10, 11, 20, 3, 30, 31]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert packed.layout.segments == (Segment(0, 2), Segment(2, 2, 0, 2), Segment(4, 1, 0, 2), Segment(5, 3))
    assert packed.hidden_index.tolist() == [3, 4, 7]
    assert packed.scatter_rows(torch.tensor([0.5, 1.5, 2.5])).tolist() == [0.5, 1.5, 2.5]


def test_predictions_and_last_tokens_are_read_in_one_pass():
    columns = make_columns([[1], [5], [2]], [[10, 11], [50], [20, 21]])
    columns["response_mask"][1] = False  # not computed
    packed = pack_rows(columns, reads=Reads(last_token=True))
    assert packed.input_ids.tolist() == [[1, 10, 11, 2, 20, 21]]
    assert packed.hidden_index.tolist() == [0, 1, 3, 4, 2, 5]
    assert packed.targets.tolist() == [10, 11, 20, 21, 0, 0]
    values = torch.arange(1.0, 7.0)
    assert packed.scatter(values).tolist() == [[1, 2], [0, 0], [3, 4]]
    assert packed.scatter_rows(values).tolist() == [5, 0, 6]


def test_a_single_token_can_be_scored():
    packed = pack_rows(make_columns([[]], [[7]]), reads=Reads(predictions=False, last_token=True))
    assert packed.input_ids.tolist() == [[7]]
    assert packed.hidden_index.tolist() == [0]


def test_an_empty_response_column():
    columns = {"prompts": torch.ones(2, 3, dtype=torch.int64), "prompt_mask": torch.ones(2, 3).bool()}
    columns |= {"responses": torch.empty(2, 0, dtype=torch.int64), "response_mask": torch.empty(2, 0).bool()}
    assert pack_rows(columns).num_tokens == 0


def test_a_response_inside_its_prompt_is_read_there():
    columns = make_columns([[1, 2, 3], [1, 2, 3]], [[2, 3], [20, 21]])
    packed = pack_rows({**columns, "response_is_inside": torch.tensor([True, False])})
    assert packed.input_ids.tolist() == [[1, 2, 3, 20]]
    assert packed.hidden_index.tolist() == [0, 1, 2, 3]
    assert packed.targets.tolist() == [2, 3, 20, 21]
    assert packed.scatter(torch.arange(1.0, 5.0)).tolist() == [[1, 2], [3, 4]]
