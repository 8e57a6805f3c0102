"""Token ids and masks from outside: one reader, and every place that takes them."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import write
from tests.data.token_rows import NUM_EMBEDDINGS, cases, tokenizer
from verl.agents.episode import Episode, EpisodeError, EpisodeTask
from verl.config.roots.reward_model import RMDataConfig
from verl.config.sections.data import CustomClassConfig, PreferenceDataConfig, SFTDataConfig
from verl.data.conversations.dataset import load_conversations, read_into
from verl.data.preferences.dataset import load_preferences
from verl.data.preferences.scored import StepDataset
from verl.data.prompts import encode_text
from verl.data_proto.token_ids import label_mask, token_ids, token_mask
from verl.errors import DataError

BAD_IDS = [9999, -5, 264, 2**31, 2**63, 10**30, None, 65.7, 65.0, "65", [65], True, float("nan"), np.float32(3)]
BAD_MASKS = [2, 0.5, -1, float("nan"), None, "0", "1", [1], 10**400]


def sft(rows, folder):
    return load_conversations(write(folder / "a.jsonl", rows), tokenizer(), SFTDataConfig())


def row_of_sft(ids, mask, folder):
    sft([{"input_ids": [65, 66], "loss_mask": [0, 1]}, {"input_ids": ids, "loss_mask": mask}], folder)


def row_of_labels(ids, mask, folder):
    labels = [token if m == 1 else -100 if m == 0 else m for token, m in zip(ids, mask, strict=False)]
    sft([{"input_ids": ids, "labels": labels}], folder)


def padded_row(ids, mask, folder):
    more = [*mask, 1] if isinstance(mask, list) and len(mask) == len(ids) else mask
    sft([{"input_ids": [*ids, 67], "loss_mask": [0, 1, 1], "attention_mask": more}], folder)


def class_of_a_user(ids, mask, folder):
    dataset = dict(enumerate([{"input_ids": ids, "loss_mask": mask}]))
    code = "class Rows:\n    rows = None\n    def __init__(self, **k): pass\n    def __len__(self): return 1\n"
    (folder / "rows_of_a_user.py").write_text(code + "    def __getitem__(self, i): return type(self).rows[i]\n")
    from verl.registry import load_object

    path = str(folder / "rows_of_a_user.py")
    load_object(f"{path}:Rows").rows = dataset
    settings = SFTDataConfig(custom_cls=CustomClassConfig(path=path, name="Rows"))
    load_conversations(["none"], tokenizer(), settings)


def agent(ids, mask, folder):
    task = EpisodeTask(0, 0, 1, "train", (65,), {}, 60, 20, vocab_size=NUM_EMBEDDINGS)
    Episode(task, None).trajectory([65], ids, [0 if m == 1 else m for m in mask], "stop")


def prompt_of_an_agent(ids, mask, folder):
    task = EpisodeTask(0, 0, 1, "train", (65,), {}, 60, 20, vocab_size=NUM_EMBEDDINGS)
    Episode(task, None).trajectory(ids, [65, 66], [0 if m == 1 else m for m in mask], "stop")


def steps_of_a_reward_model(ids, mask, folder):
    row = {"prompt": "q", "completions": ["x"] * len(mask), "labels": mask}
    path = write(folder / "a.jsonl", [row])
    read_into(StepDataset("\n"), path, tokenizer(), RMDataConfig())


PLACES = [row_of_sft, row_of_labels, padded_row, class_of_a_user, agent, prompt_of_an_agent]


@pytest.mark.parametrize("place", [*PLACES, steps_of_a_reward_model])
def test_what_is_right_is_taken(place, tmp_path):
    place([65, 66], [0, 1], tmp_path)


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_ids_that_are_none_are_refused_everywhere(place, bad, tmp_path):
    if place not in (class_of_a_user, agent, prompt_of_an_agent) and isinstance(bad, np.floating):
        pytest.skip("not a value of a file")
    with pytest.raises(
        (DataError, EpisodeError), match=r"_ids\[1\]' is .*; a token id is a whole number from 0 to 263"
    ):
        place([65, bad], [0, 1], tmp_path)


@pytest.mark.parametrize("bad", BAD_MASKS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("place", [*PLACES, steps_of_a_reward_model])
def test_masks_of_other_values_are_refused_everywhere(place, bad, tmp_path):
    with pytest.raises((DataError, EpisodeError), match=r"\[1\]' is .*(write 0 or 1|labels differ)"):
        place([65, 66], [0, bad], tmp_path)


@pytest.mark.parametrize("mask", [[1], [0, 1, 1, 1], "01", 1])
@pytest.mark.parametrize("place", [row_of_sft, padded_row, class_of_a_user])
def test_masks_of_other_lengths_are_refused(place, mask, tmp_path):
    with pytest.raises(DataError, match=r"row \d.*mask' (has \d entries for [23] tokens|must be a list)"):
        place([65, 66], mask, tmp_path)


def test_a_wrong_row_names_file_and_row(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl, row 1 \(counted from 0, line 2\): field 'input_ids\[1\]' is 9999;"):
        row_of_sft([65, 9999], [0, 1], tmp_path)


@given(st.lists(st.one_of(st.integers(), st.booleans(), st.floats(), st.text(), st.none(), st.integers(0, 263))))
def test_only_whole_numbers_in_range_are_ids(values):
    right = all(type(value) is int and 0 <= value < NUM_EMBEDDINGS for value in values)
    try:
        assert token_ids(values, "f", NUM_EMBEDDINGS).tolist() == values
        assert right
    except DataError:
        assert not right


@given(st.lists(st.one_of(st.integers(), st.booleans(), st.floats(), st.text(), st.none(), st.integers(0, 1))))
def test_only_0_and_1_are_marks(values):
    right = all(isinstance(value, int | float) and value in (0, 1) for value in values)
    try:
        assert token_mask(values, "f", len(values)).tolist() == values
        assert right
    except DataError:
        assert not right


def test_arrays_and_tensors_are_lists():
    for values in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2), [np.int64(1), 2]):
        assert token_ids(values, "f").tolist() == [1, 2]
    for values in (np.array([0.0, 1.0]), torch.tensor([False, True]), np.array([0, 1], dtype=np.uint8)):
        assert token_mask(values, "f", 2).tolist() == [False, True]
    assert label_mask(torch.tensor([-100, 2]), "f", np.array([1, 2])).tolist() == [False, True]
    for values in (np.array([1.0, 2.0]), np.array([[1, 2]]), torch.tensor([True]), np.array(3), {1: 2}, b"ab", None):
        with pytest.raises(DataError, match="field 'f"):
            token_ids(values, "f")


def test_texts_of_tokens_without_an_embedding_are_refused(tmp_path):
    """A row of any program goes through encode_text."""
    small = tokenizer()
    small.num_embeddings = 258  # <|im_end|> is 258
    with pytest.raises(DataError, match=r"here: the text has the token '<\|im_end\|>' of id 258, .* 258 embeddings"):
        encode_text(small, "a<|im_end|>", "here")
    assert encode_text(small, "a<|im_start|>", "here")[-1] == 257
    pair = write(tmp_path / "p.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": "no"}])
    with pytest.raises(DataError, match=r"p\.jsonl, row 0.* of id 258"):
        load_preferences(pair, small, PreferenceDataConfig())
    with pytest.raises(DataError, match=r"t\.jsonl, row 0.* of id 258"):
        load_conversations(write(tmp_path / "t.jsonl", [{"text": "a"}]), small, SFTDataConfig())


def test_mutated_rows(tmp_path):
    outcomes = Counter(cases(random.Random(0), 500, tmp_path))
    refused = sum(count for (_, what), count in outcomes.items() if what == "refused")
    assert 200 < refused < 400, json.dumps({str(k): v for k, v in outcomes.items()})


def test_a_row_with_lengths_is_that_many_sequences(tmp_path):
    """Blocks as TRL packs them: no sequence sees another, and one without a trained token is left out."""
    row = {
        "input_ids": [65, 66, 67, 70, 71, 80, 81],
        "labels": [65, 66, 67, 70, -100, -100, 81],
        "seq_lengths": [3, 2, 2],
    }
    (sequences,) = sft([row], tmp_path)
    assert [s.input_ids.tolist() for s in sequences] == [[65, 66, 67], [80, 81]]
    assert [s.loss_mask.tolist() for s in sequences] == [[False, True, True], [False, True]]


@pytest.mark.parametrize("lengths", [[3], [5, -1], [2.0, 2.0], ["4"], [[2], [1, 1]], [True, 3], 4.5, [4, 0]])
def test_lengths_that_do_not_fit_are_named(tmp_path, lengths):
    row = {"input_ids": [65, 66, 67, 70], "labels": [65, 66, 67, 70], "seq_lengths": lengths}
    with pytest.raises(DataError, match="row 0 .*seq_lengths must be whole numbers above 0"):
        sft([row], tmp_path)
