"""Whole files of preferences: prompts token by token, cuts, counts, batches, and completions of other prompts."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.data.conversations.templates import FAMILIES, chat, shown, tokenizer_of
from tests.data.rows import write
from verl.config.sections.data import PreferenceDataConfig
from verl.data.conversations.dataset import ConversationLoader
from verl.data.preferences.dataset import load_preferences, partners_of, sequence_batch
from verl.errors import DataError

tokenizer = tokenizer_of("chatml")
END = "<|im_end|>"
PAIR = {"prompt": "pppp", "chosen": "ab", "rejected": "cdef"}


def load(path, tokenizer=tokenizer, *, paired=True, trains_prompts=False, keep_going=False, **settings):
    return load_preferences(
        path,
        tokenizer,
        PreferenceDataConfig(**settings),
        paired=paired,
        trains_prompts=trains_prompts,
        keep_going=keep_going,
    )


def texts(dataset, row=0):
    return [shown(tokenizer, sequence) for sequence in dataset[row]]


class TestTokens:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_both_completions_follow_the_prompt_of_the_sampler(self, tmp_path, family):
        tokenizer = tokenizer_of(family)
        row = {"prompt": chat("q"), "chosen": chat("", "good")[1:], "rejected": chat("", "bad one")[1:]}
        path = write(tmp_path / "a.jsonl", [row])
        if family == "r1":  # its generation prompt opens a thought that the answer does not have
            with pytest.raises(DataError, match="do not follow the prompt that the sampler would be given"):
                load(path, tokenizer)
            return
        dataset = load(path, tokenizer)
        rendered = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for sequence, answer in zip(dataset[0], (row["chosen"], row["rejected"]), strict=True):
            with_answer = tokenizer.apply_chat_template(row["prompt"] + answer, return_dict=False)
            assert sequence.input_ids.tolist() == with_answer[: len(sequence.input_ids)]
            assert tokenizer.decode(sequence.input_ids[-1:]) == tokenizer.eos_token  # no line end of the template
            assert sequence.loss_mask.tolist() == [n >= len(rendered) for n in range(len(sequence.input_ids))]

    def test_a_text_ends_with_the_end_of_sequence(self, tmp_path):
        assert texts(load(write(tmp_path / "a.jsonl", [PAIR]))) == [f"pppp[[ab{END}]]", f"pppp[[cdef{END}]]"]

    def test_labels_and_margins_are_columns(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{**PAIR, "margin": 1.5}, PAIR])
        batch = load(path).batch([1, 0]).batch
        assert batch["ordinal"].tolist() == [1, 1, 0, 0]
        assert batch["sample_index"].tolist() == [0, 1, 0, 1]
        assert batch["chosen"].tolist() == [True, False, True, False]
        assert batch["margin"].tolist() == [0.0, 0.0, 1.5, 1.5]

    def test_trained_prompts_keep_the_completion_apart(self, tmp_path):
        dataset = load(write(tmp_path / "a.jsonl", [PAIR]), trains_prompts=True)
        assert texts(dataset) == [f"p[[pppab{END}]]", f"pppp[[cdef{END}]]"]
        batch = dataset.batch([0]).batch
        for row, completion in enumerate((f"ab{END}", f"cdef{END}")):
            assert tokenizer.decode(batch["responses"][row][batch["completion_mask"][row]]) == completion
        assert [s.num_prompt_tokens for s in dataset[0]] == [4, 4]


class TestLength:
    def test_too_long_is_an_error_by_default(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [PAIR])
        with pytest.raises(
            DataError, match=r"a\.jsonl, row 0 .*: a sequence has 9 tokens, more than data.max_length=8"
        ):
            load(path, max_length=8)

    def test_the_right_cut_takes_from_the_completions(self, tmp_path):
        dataset = load(write(tmp_path / "a.jsonl", [PAIR]), max_length=7, truncation="right")
        assert texts(dataset) == [f"pppp[[ab{END}]]", "pppp[[cde]]"]
        (summary,) = dataset.summaries
        assert (summary.num_truncated, summary.num_completions_cut, summary.num_trained_cut) == (1, 1, 2)
        assert summary.sentences()[1] == "Completions of which data.max_length=7 leaves only a part: 1."

    def test_the_left_cut_keeps_one_prompt(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [PAIR])
        assert texts(load(path, max_length=7, truncation="left")) == [f"pp[[ab{END}]]", f"pp[[cdef{END}]]"]
        dataset = load(path, max_length=4, truncation="left")
        assert texts(dataset) == [f"p[[ab{END}]]", "p[[cde]]"]
        assert dataset.summaries[0].num_completions_cut == 1

    def test_a_prompt_that_fills_the_limit_leaves_no_row(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [PAIR, {"prompt": "p", "chosen": "a", "rejected": "b"}])
        dataset = load(path, max_length=4, truncation="right")
        assert texts(dataset) == [f"p[[a{END}]]", f"p[[b{END}]]"]
        (summary,) = dataset.summaries
        assert (summary.num_rows, summary.num_untrainable_rows, summary.num_untrainable_sequences) == (1, 1, 2)

    def test_completions_that_become_equal_are_refused(self, tmp_path):
        rows = [PAIR, {"prompt": "p", "chosen": "same start a", "rejected": "same start b"}]
        path = write(tmp_path / "a.jsonl", rows)
        sentence = (
            r"a\.jsonl, row 1 .*have the same tokens within data.max_length=10, so that there is nothing to prefer"
        )
        with pytest.raises(DataError, match=sentence):
            load(path, max_length=10, truncation="right")
        (summary,) = load(path, max_length=10, truncation="right", keep_going=True).summaries
        assert (summary.num_rows, summary.num_problems) == (1, 1)

    @given(
        st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
        st.integers(2, 16),
        st.sampled_from(["left", "right"]),
    )
    @hypothesis_settings(max_examples=30, deadline=None)
    def test_pairs_keep_one_prompt_and_counts_add_up(self, tmp_path_factory, lengths, limit, side):
        rows = [{"prompt": "p" * n, "chosen": "c" * a, "rejected": "r" * b + "x"} for n, a, b in lengths]
        path = write(tmp_path_factory.mktemp("rows") / "a.jsonl", rows)
        dataset = load(path, max_length=limit, truncation=side, keep_going=True)
        (summary,) = dataset.summaries
        for row in range(len(dataset)):
            chosen, rejected = dataset[row]
            assert max(len(chosen.input_ids), len(rejected.input_ids)) <= limit
            prompts = [s.input_ids[: s.num_prompt_tokens].tolist() for s in (chosen, rejected)]
            assert prompts[0] == prompts[1]
            assert chosen.input_ids.tolist() != rejected.input_ids.tolist()
        total = sum(2 * n + a + b + 3 for n, a, b in lengths)
        if not summary.num_problems and not summary.num_untrainable_rows:
            assert summary.num_tokens + summary.num_tokens_cut == total
        assert summary.num_rows + summary.num_problems + summary.num_untrainable_rows == len(rows)


class TestSingleCompletions:
    ROWS = [{"prompt": f"{n}", "completion": "ab"[n % 2] * (n + 1), "label": n % 2 == 0} for n in range(5)]

    def test_labels_are_refused_where_pairs_are_needed(self, tmp_path):
        with pytest.raises(
            DataError, match="row 0 .*: the row is a labelled completion, and this training needs pairs"
        ):
            load(write(tmp_path / "a.jsonl", self.ROWS))

    def test_a_pair_becomes_two_rows(self, tmp_path):
        dataset = load(write(tmp_path / "a.jsonl", [PAIR, self.ROWS[1]]), paired=False)
        assert [texts(dataset, row) for row in range(3)] == [
            [f"pppp[[ab{END}]]"],
            [f"pppp[[cdef{END}]]"],
            [f"1[[bb{END}]]"],
        ]
        assert dataset.batch(range(3)).batch["chosen"].tolist() == [True, False, False]

    def test_mismatched_completions_are_of_another_prompt(self, tmp_path):
        dataset = load(write(tmp_path / "a.jsonl", self.ROWS), paired=False)
        partners = partners_of(dataset.prompts(), 4, seed=0, shuffle=False)
        assert partners == [4, 0, 1, 2, 3]  # a single row is no batch
        # the two rows of a pair have one prompt; a batch may have no other one
        assert partners_of([*"aabbcc"], 4, seed=0, shuffle=False) == [3, 3, 1, 1, 3, 3]
        assert partners_of([*"aaa"], 2, seed=0, shuffle=False) == [2, 0, 1]
        sequences = dataset.mismatched([0, 3], partners, max_length=5)
        assert [shown(tokenizer, s) for s in sequences] == ["0[[aaaa]]", f"3[[aaa{END}]]"]
        assert sequence_batch(sequences).batch["ordinal"].tolist() == [0, 1]

    @given(st.integers(2, 40), st.integers(2, 9), st.integers(0, 3), st.booleans())
    def test_partners_rotate_the_batches_of_the_first_epoch(self, num_rows, size, seed, shuffle):
        from verl.data.order import PromptOrder

        partners = partners_of(range(num_rows), size, seed=seed, shuffle=shuffle)
        assert sorted(partners) == list(range(num_rows))
        assert all(partner != row for row, partner in enumerate(partners))
        if size <= num_rows:
            order = PromptOrder(num_rows, seed, shuffle, size)
            first = [order.row(n)[1] for n in range(size)]
            if num_rows % size != 1 or num_rows > size + 1:
                assert [partners[row] for row in first] == [first[-1], *first[:-1]]


def test_the_loader_keeps_pairs_together(tmp_path):
    rows = [{"prompt": f"{n}", "chosen": "a" * n, "rejected": "b"} for n in range(1, 8)]
    loader = ConversationLoader(load(write(tmp_path / "a.jsonl", rows)), 3, seed=5)
    for step in (1, 2, 3):
        batch = loader.batch(step).batch
        assert batch["ordinal"].tolist() == [row for row in loader.rows(step) for _ in range(2)]
        assert torch.equal(batch["prompts"][0::2], batch["prompts"][1::2])


def test_digests_name_tokens_and_completion(tmp_path):
    dataset = load(write(tmp_path / "a.jsonl", [PAIR, PAIR, {**PAIR, "prompt": "ppp"}]))
    digests = [sequence.digest(None) for row in range(3) for sequence in dataset[row]]
    assert digests[:2] == digests[2:4]
    assert len(set(digests)) == 4
    moved = load(write(tmp_path / "b.jsonl", [{"prompt": "ppppa", "chosen": "b", "rejected": "c"}]))
    assert moved[0][0].input_ids.tolist() == dataset[0][0].input_ids.tolist()
    assert moved[0][0].digest(None) != digests[0]
