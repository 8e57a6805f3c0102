"""Whole files: lengths, counts, order over epochs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.data.conversations.templates import chat, shown, tokenizer_of
from tests.data.rows import write
from verl.config.sections.data import CustomClassConfig, SFTDataConfig
from verl.data.conversations.dataset import ConversationLoader, load_conversations, training_batch
from verl.data.conversations.tokens import TrainingSequence
from verl.data.files import write_parquet
from verl.errors import DataError, FewRowsError
from verl.models.packing import num_computed, unpadded_rows

tokenizer = tokenizer_of("chatml")
TEXTS = [{"text": "x" * n} for n in (3, 9, 5)]  # with eos 4, 10 and 6 tokens


def load(path, tokenizer=tokenizer, *, max_samples=-1, seed=None, stops=None, keep_going=False, **settings):
    return load_conversations(
        path,
        tokenizer,
        SFTDataConfig(**settings),
        max_samples=max_samples,
        seed=seed,
        stop_token_ids=stops,
        keep_going=keep_going,
    )


def test_control_tokens_in_messages_are_counted(tmp_path):
    rows = [{"messages": chat("x", "y")}, {"messages": chat("x<|im_end|>", "y")}]
    path = write(tmp_path / "a.jsonl", rows)
    (summary,) = load(path).summaries
    assert summary.num_control == 1
    assert summary.sentences()[1] == (
        "Rows with control tokens in their messages: 1, the first '<|im_end|>' in "
        f"{path}, row 1 (counted from 0, line 2). The model reads them as such, not as text."
    )


def test_plain_text_that_trains_without_the_chat_template_is_counted(tmp_path):
    rows = [{"prompt": "x", "completion": "y"}, {"prompt": chat("x", "y")[:1], "completion": chat("x", "y")[1:]}]
    (summary,) = load(write(tmp_path / "a.jsonl", rows)).summaries
    assert summary.sentences()[1].startswith("Rows of plain text: 1. They train without the chat template")
    (summary,) = load(write(tmp_path / "b.jsonl", TEXTS)).summaries
    assert len(summary.sentences()) == 1


class TestLength:
    def test_too_long_is_an_error_by_default(self, tmp_path):
        path = write(tmp_path / "a.jsonl", TEXTS)
        with pytest.raises(
            DataError, match=r"a\.jsonl, row 1 .*: a sequence has 10 tokens, more than data.max_length=6\."
        ):
            load(path, max_length=6)
        assert len(load(path, max_length=10)) == 3
        assert len(load(path, max_length=None)) == 3

    @pytest.mark.parametrize(("side", "ids"), [("right", "xxxxxx"), ("left", "xxxxx<|im_end|>")])
    def test_cuts_act_on_their_side_and_are_counted(self, tmp_path, side, ids):
        dataset = load(write(tmp_path / "a.jsonl", TEXTS), max_length=6, truncation=side)
        (sequence,) = dataset[1]
        assert tokenizer.decode(sequence.input_ids) == ids
        assert sequence.loss_mask.tolist() == [False] + [True] * 5
        (summary,) = dataset.summaries
        assert (summary.num_truncated, summary.num_tokens_cut, summary.num_trained_cut) == (1, 4, 4)
        assert (summary.num_tokens, summary.num_trained) == (4 + 6 + 6, 3 + 5 + 5)
        assert (summary.longest, summary.num_endless) == (10, 0)
        assert "row 1 " in summary.longest_place
        assert summary.sentences()[1] == (
            f"Sequences longer than data.max_length=6, cut on the {side}: 1; tokens lost: 4, trained tokens among them: 4."
        )

    def test_rows_that_lose_all_trained_tokens_are_left_out_and_counted_apart(self, tmp_path):
        rows = [{"prompt": "x" * 8, "completion": "a"}, {"prompt": "y", "completion": "a"}]
        path = write(tmp_path / "a.jsonl", rows)
        dataset = load(path, max_length=6, truncation="right")
        assert [shown(tokenizer, s) for s in dataset[0]] == ["y[[a<|im_end|>]]"]
        (summary,) = dataset.summaries
        assert (len(dataset), summary.num_rows, summary.num_untrainable_rows, summary.num_truncated) == (1, 1, 1, 1)
        assert "no token that trains: 1; rows left out with them: 1." in summary.sentences()[2]
        with pytest.raises(DataError, match="None of the rows of .*keeps a token that trains within data.max_length=6"):
            load(path, max_samples=1, max_length=6, truncation="right")

    def test_a_trained_token_that_lost_its_context_does_not_train(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "abc"}])
        (sequence,) = load(path, max_length=3, truncation="left")[0]
        assert shown(tokenizer, sequence) == "b[[c<|im_end|>]]"

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(2, 14), st.sampled_from(["left", "right"]))
    @hypothesis_settings(max_examples=30, deadline=None)
    def test_counts_add_up(self, tmp_path_factory, lengths, limit, side):
        rows = [{"prompt": "p" * n, "completion": "c" * n} for n in lengths]
        path = write(tmp_path_factory.mktemp("rows") / "a.jsonl", rows)
        uncut = load(path, max_length=None)
        short = load(path, max_length=limit, truncation=side, keep_going=True)
        sequences = [s for i in range(len(short)) for s in short[i]]
        summary, before = short.summaries[0], uncut.summaries[0]
        assert all(len(s.input_ids) == len(s.loss_mask) <= limit and s.num_trained for s in sequences)
        assert summary.num_tokens == sum(len(s.input_ids) for s in sequences)
        assert (
            summary.num_trained == sum(s.num_trained for s in sequences) == before.num_trained - summary.num_trained_cut
        )
        assert summary.num_rows + summary.num_untrainable_rows == len(lengths) == before.num_rows
        assert summary.num_truncated == sum(2 * n + 1 > limit for n in lengths)


class TestSummary:
    def test_of_each_file(self, tmp_path):
        first = write(tmp_path / "a.jsonl", [{"messages": chat("q", "a")}, {"text": "abc"}, {"text": "abcd"}])
        second = tmp_path / "b.parquet"
        write_parquet(second, [{"prompt": "q", "completion": "a"}])
        dataset = load([first, second])
        one, two = dataset.summaries
        assert one.formats == {"text": 2, "messages": 1}
        assert [one.num_rows, two.num_rows, len(dataset)] == [3, 1, 4]
        assert one.sentences() == [
            f"{first}: format text (rows: 2), messages (rows: 1); rows that train: 3, as sequences: 3, tokens: 31, "
            f"trained tokens: 9, longest sequence: 22 ({first}, row 0 (counted from 0, line 1))."
        ]
        assert two.formats == {"prompt_completion": 1}
        assert dataset.place(3).startswith(f"{second}, row 0")

    def test_says_when_history_is_rewritten(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"messages": chat("q", "a", "r", "b")}])
        dataset = load(path, tokenizer_of("qwen3"))
        (summary,) = dataset.summaries
        assert (len(dataset), summary.num_rows, summary.num_sequences, summary.num_split) == (1, 1, 2, 1)
        assert "Rows that become several sequences: 1." in summary.sentences()[1]

    def test_says_when_nothing_ends_generation(self, tmp_path):
        other = tokenizer_of("llama3")
        path = write(tmp_path / "a.jsonl", [{"messages": chat("q", "a")}])
        assert load(path, other).summaries[0].num_endless == 0
        base = type(other).from_pretrained(_saved(other, tmp_path), eos_token="<|begin_of_text|>")
        (summary,) = load(path, base).summaries
        assert summary.num_endless == 1
        assert "which ends generation: 1." in summary.sentences()[1]
        eot = base.convert_tokens_to_ids("<|eot_id|>")
        assert load(path, base, stops=[eot]).summaries[0].num_endless == 0

    def test_check_describes_bad_rows_and_goes_through_the_rest(self, tmp_path):
        rows = [{"text": "abc"}, {"id": 1}, {"messages": [{"role": "user", "content": "q"}]}, {"text": "x" * 99}]
        path = write(tmp_path / "a.jsonl", rows + [{"id": 2}] * 30)
        dataset = load(path, max_length=20, keep_going=True)
        (summary,) = dataset.summaries
        assert (len(dataset), summary.num_problems, len(summary.problems)) == (1, 33, 5)
        for sentence, words in zip(
            summary.problems[:3], ("fits no format", "none of the row's tokens", "99"), strict=True
        ):
            assert words in sentence or "100 tokens" in sentence
            assert sentence.startswith(f"{path}, row ")
        assert (summary.num_tokens, summary.longest) == (4, 4)  # nothing of a bad row is counted
        assert summary.sentences()[-1] == "Rows that cannot be used: 33."
        with pytest.raises(DataError, match="row 1 .*fits no format"):
            load(path)


class TestCustomClass:
    CODE = """
import torch

class Numbers:
    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples=-1):
        self.length = config.max_length
        self.count = max_samples

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        exists = torch.arange(self.length) < item + 3
        return {"input_ids": torch.arange(self.length) + 10, "attention_mask": exists, "loss_mask": exists.float()}
"""

    def test_rows_match_the_class_without_padding(self, tmp_path):
        (tmp_path / "numbers.py").write_text(self.CODE)
        custom = CustomClassConfig(path=str(tmp_path / "numbers.py"), name="Numbers")
        dataset = load(["any.parquet"], custom_cls=custom, max_length=8, max_samples=3)
        assert [dataset[i][0].input_ids.tolist() for i in range(3)] == [
            [10, 11, 12],
            [10, 11, 12, 13],
            [10, 11, 12, 13, 14],
        ]
        assert dataset[0][0].loss_mask.tolist() == [False, True, True]
        assert dataset.summaries[0].formats == {"Numbers": 3}

    def test_items_without_a_mask_are_named(self, tmp_path):
        (tmp_path / "numbers.py").write_text(self.CODE.replace('"loss_mask"', '"mask"'))
        custom = CustomClassConfig(path=str(tmp_path / "numbers.py"), name="Numbers")
        with pytest.raises(DataError, match="row 0 of Numbers has no loss_mask or labels; give it both"):
            load(["any.parquet"], custom_cls=custom, max_length=8, max_samples=3)


def _saved(tokenizer, folder):
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


class TestOrder:
    def dataset(self, tmp_path, number=7):
        return load(write(tmp_path / "a.jsonl", [{"text": chr(97 + n) * 3} for n in range(number)]))

    def test_epochs_drop_their_incomplete_batch(self, tmp_path):
        loader = ConversationLoader(self.dataset(tmp_path), 3, seed=5)
        assert loader.num_steps_per_epoch == 2
        epochs = [[*loader.rows(2 * epoch + 1), *loader.rows(2 * epoch + 2)] for epoch in range(3)]
        assert all(len(set(rows)) == 6 for rows in epochs)
        assert epochs[0] != epochs[1] != epochs[2]

    def test_a_step_is_a_function_of_the_seed(self, tmp_path):
        dataset = self.dataset(tmp_path)
        one, other = (ConversationLoader(dataset, 3, seed=seed) for seed in (5, 6))
        resumed = ConversationLoader(dataset, 3, seed=5)
        assert resumed.rows(40) == one.rows(40)  # asked for first
        assert [one.rows(step) for step in (1, 2)] != [other.rows(step) for step in (1, 2)]
        assert ConversationLoader(dataset, 3, shuffle=False).rows(3) == [0, 1, 2]

    def test_a_batch_has_the_sequences_of_its_rows(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"messages": chat("q", "a", "r", "b")}, {"text": "abc"}])
        loader = ConversationLoader(load(path, tokenizer_of("qwen3")), 2, shuffle=False)
        batch = loader.batch(1)
        assert len(batch) == 3
        assert batch.batch["response_mask"].sum(1).tolist() == [
            s.num_trained for row in (0, 1) for s in loader.dataset[row]
        ]

    def test_columns_of_a_batch(self):
        """Prompts end and responses begin at the first trained token. Holes stay inputs, an untrained tail is left out."""
        one = TrainingSequence(np.arange(10, 17, dtype=np.int32), np.array([0, 0, 1, 0, 1, 1, 0], dtype=np.bool_))
        two = TrainingSequence(np.arange(20, 23, dtype=np.int32), np.array([0, 1, 1], dtype=np.bool_))
        columns = training_batch([one, two]).batch
        assert columns["prompts"].tolist() == [[10, 11], [0, 20]]
        assert columns["prompt_mask"].tolist() == [[True, True], [False, True]]
        assert columns["responses"].tolist() == [[12, 13, 14, 15], [21, 22, 0, 0]]
        assert columns["response_mask"].tolist() == [[True, False, True, True], [True, True, False, False]]
        assert columns["attention_mask"].sum(1).tolist() == [6, 3]

    @pytest.mark.parametrize(
        ("num_trained", "split", "computed"), [(30, 81, 81 + 3 * 31), (1200, 83, 3 * 83 + 3 * 1199)]
    )
    def test_a_long_common_start_is_the_prompt(self, num_trained, split, computed):
        """Three rows of four have one, two tokens shorter than their prompts."""
        starts = [[*range(100, 180), third, row, 7] for row, third in enumerate((1, 1, 1, 9))]
        starts[3][0] = 99
        rows = [np.array([*start, *range(num_trained)], dtype=np.int32) for start in starts]
        batch = training_batch([TrainingSequence(ids, np.arange(len(ids)) >= 83) for ids in rows]).batch
        assert batch["prompt_mask"].sum(1).tolist() == [split, split, split, 83]
        tokens = torch.cat([batch["prompts"], batch["responses"]], dim=1)[batch["attention_mask"]]
        assert tokens.tolist() == np.concatenate(rows).tolist()
        assert batch["response_mask"].sum(1).tolist() == [num_trained] * 4
        assert num_computed(unpadded_rows(batch)) == computed + 83 + num_trained - 1

    def test_batches_larger_than_the_data_are_refused(self, tmp_path):
        with pytest.raises(FewRowsError, match="data.train_batch_size=8 is more than the 7 rows that train"):
            ConversationLoader(self.dataset(tmp_path), 8)

    def test_some_rows_can_be_selected(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"text": chr(97 + n) * 3} for n in range(9)])
        files = [path, write(tmp_path / "b.jsonl", [{"text": "zzz"}])]

        def letters(**settings):
            dataset = load(files, **settings)
            return "".join(tokenizer.decode(dataset[i][0].input_ids[:1]) for i in range(len(dataset)))

        assert letters(max_samples=4) == "abcd"
        assert letters(max_samples=10) == letters() == "abcdefghiz"
        drawn = letters(max_samples=4, seed=42)
        assert len(set(drawn)) == 4
        assert drawn == letters(max_samples=4, seed=42) != "abcd"
