"""Readable rows of batches of given texts."""

import numpy as np

from verl.data_proto.sample_rows import from_first_trained
from verl.models.tiny import make_tokenizer


def test_the_response_of_a_given_text_begins_where_it_trains():
    """Rows of a batch that begin alike are split at their first difference: "How many" here, for a question and its answer."""
    tokenizer = make_tokenizer()
    text = np.asarray(tokenizer("How many a? Two.")["input_ids"])
    trains = np.arange(len(text) - 8) >= len(" a? ")
    row = {"prompt": "How many", "response": " a? Two.", "prompt_ids": text[:8], "response_ids": text[8:],
           "train_log_probs": np.arange(8.0), "response_mask": trains}  # fmt: skip
    untrained = {**row, "response_mask": np.zeros(8, dtype=bool)}
    plain = {name: value for name, value in row.items() if name != "response_mask"}
    split, *same = from_first_trained([dict(row), dict(untrained), dict(plain)], tokenizer)
    assert (split["prompt"], split["response"]) == ("How many a? ", "Two.")
    assert split["train_log_probs"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert tokenizer.decode([*split["prompt_ids"], *split["response_ids"]]) == "How many a? Two."
    assert "response_mask" not in split  # of tokens that all train
    assert [(one["prompt"], len(one["response_ids"])) for one in same] == [("How many", 8)] * 2
