import pytest
import torch

from tests.data.rows import config, row, write
from verl.config.sections.data import CustomClassConfig
from verl.data.dataset import PromptRows, RLHFDataset, collate_fn, load_dataset
from verl.errors import ConfigError, DataError
from verl.models.tiny import make_tokenizer

tokenizer = make_tokenizer()


def test_a_row_has_what_scripts_expect(tmp_path):
    extra = {"index": 7, "tools_kwargs": {"calc": {}}, "interaction_kwargs": {"name": "x"}}
    path = write(tmp_path / "a.jsonl", [row(0, extra_info=extra, ability="math"), row(1, extra_info=...)])
    dataset = RLHFDataset(path, tokenizer, config())
    first, second = dataset[0], dataset[1]
    assert first["raw_prompt"] == [{"role": "user", "content": "question 0"}]
    assert (first["index"], first["tools_kwargs"], first["interaction_kwargs"]) == (7, {"calc": {}}, {"name": "x"})
    assert (second["index"], second["tools_kwargs"], second["interaction_kwargs"]) == (0, {}, {})
    assert first["ability"] == "math"
    assert first["dummy_tensor"].dtype == torch.uint8
    columns = collate_fn([first, second])
    assert columns["dummy_tensor"].shape == (2, 1)
    assert columns["raw_prompt"].shape == (2,)
    assert columns["raw_prompt"][1] == second["raw_prompt"]
    assert list(columns["ability"]) == ["math", None]


def test_a_plain_text_becomes_a_user_message(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0, prompt="What is 2?")])
    assert RLHFDataset(path, tokenizer, config())[0]["raw_prompt"] == [{"role": "user", "content": "What is 2?"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ...}, "no field 'prompt'; there are data_source"),
        ({"prompt": ..., "prompts": "x"}, "no field 'prompt'; did you mean 'prompts'"),
        ({"prompt": {"question": "x"}}, "field 'prompt' is a dict, not a text or a list of messages"),
        ({"prompt": []}, "empty list"),
        ({"prompt": ""}, "empty text"),
        ({"prompt": ["hello"]}, r"field 'prompt\[0\]' is a str"),
        ({"prompt": [{"content": "x"}]}, r"field 'prompt\[0\]' has no text 'role'"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "user"}]}, r"'prompt\[1\]' has no text 'content'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "images .content of a message. cannot be read",
        ),
        ({"data_source": ...}, "field 'data_source' must be a text"),
        ({"data_source": 3}, "field 'data_source' must be a text .* it is 3"),
        ({"reward_model": ...}, "field 'reward_model' is missing"),
        ({"reward_model": "rule"}, "field 'reward_model' is a str"),
        ({"reward_model": {"style": "rule"}}, "field 'reward_model.ground_truth' is missing"),
        ({"extra_info": [1]}, "field 'extra_info' is a list"),
        ({"images": ["a.png"]}, "images .field 'images'. cannot be read"),
    ],
)
def test_a_bad_row_names_file_row_and_field(tmp_path, change, words):
    path = write(tmp_path / "a.jsonl", [row(0), row(1), row(2, **change)])
    with pytest.raises(DataError, match=words) as error:
        load_dataset(path, tokenizer, config())
    assert f"{path}, row 2 (counted from 0, line 3): " in str(error.value)


def test_a_judged_row_needs_no_reference(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0, reward_model={"style": "model"}), row(1, images=[])])
    assert len(load_dataset(path, tokenizer, config())) == 2


def test_text_parts_are_joined_and_empty_fields_dropped(tmp_path):
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    path = write(tmp_path / "a.jsonl", [row(0, prompt=[message])])
    assert RLHFDataset(path, tokenizer, config())[0]["raw_prompt"] == [{"role": "user", "content": "ab"}]


def test_data_sources_and_other_keys(tmp_path):
    rows = [row(0, task="b", chat="hello"), row(1, task="a", chat="hi"), row(2, task="b", chat="ho")]
    loaded = load_dataset(write(tmp_path / "a.jsonl", rows), tokenizer, config(reward_fn_key="task", prompt_key="chat"))
    assert loaded.data_sources == ["a", "b"]
    assert loaded[1]["raw_prompt"] == [{"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match="'extra_info' is a dict"):
        load_dataset(
            write(tmp_path / "a.jsonl", rows), tokenizer, config(reward_fn_key="task", prompt_key="extra_info")
        )


class TestLengths:
    def path(self, tmp_path):
        return write(tmp_path / "a.jsonl", [row(0), row(1, prompt="x" * 100), row(2), row(3, prompt="y" * 90)])

    def test_filter_leaves_out_what_is_too_long(self, tmp_path, caplog):
        with caplog.at_level("INFO"):
            rows = load_dataset(self.path(tmp_path), tokenizer, config(filter_overlong_prompts=True))
        assert [rows[i]["extra_info"]["index"] for i in range(len(rows))] == [0, 2]
        assert "2 of 4 prompts are too long" in caplog.text
        assert "row 2" in rows.place(1)

    def test_nothing_left(self, tmp_path):
        with pytest.raises(DataError, match="All 4 prompts .*max_prompt_length=5"):
            load_dataset(self.path(tmp_path), tokenizer, config(filter_overlong_prompts=True, max_prompt_length=5))

    def test_error_mode_finds_it_before_the_run(self, tmp_path):
        with pytest.raises(DataError, match=r"row 1 \(.*: the prompt has 1\d\d tokens, more than .*=64"):
            load_dataset(self.path(tmp_path), tokenizer, config(truncation="error"))
        assert len(load_dataset(self.path(tmp_path), tokenizer, config(truncation="left"))) == 4


def test_max_samples(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(i) for i in range(20)])

    def numbers(**settings):
        rows = load_dataset(path, tokenizer, config(**settings), max_samples=5)
        return [rows[i]["extra_info"]["index"] for i in range(len(rows))]

    assert numbers() == [0, 1, 2, 3, 4]
    shuffled = numbers(shuffle=True, seed=3)
    assert len(set(shuffled)) == 5
    assert shuffled == numbers(shuffle=True, seed=3) != numbers(shuffle=True, seed=4)
    assert len(load_dataset(path, tokenizer, config(), max_samples=50)) == 20


class TestCustomClass:
    SOURCE = """
from verl.data.dataset import RLHFDataset
class Shouting(RLHFDataset):
    def _build_messages(self, example):
        return [{"role": "user", "content": example[self.prompt_key].upper()}]
class Bare:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.n = int(data_files)
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        messages = [{"role": "user", "content": str(i)}]
        return {"raw_prompt": messages, "data_source": "t", "reward_model": {"ground_truth": i}}
class Broken(Bare):
    def __getitem__(self, i):
        return {"input_ids": [1]}
function = len
"""

    def load(self, tmp_path, name, files):
        (tmp_path / "mine.py").write_text(self.SOURCE)
        custom = CustomClassConfig(path=str(tmp_path / "mine.py"), name=name)
        return load_dataset(files, tokenizer, config(custom_cls=custom, truncation="left"))

    def test_subclass_and_class_of_ones_own(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [row(0, prompt="quiet")])
        shouting = self.load(tmp_path, "Shouting", str(path))
        assert shouting[0]["raw_prompt"][0]["content"] == "QUIET"
        assert shouting.dataset.data_files == [str(path)]  # which subclasses iterate over
        rows = self.load(tmp_path, "Bare", "3")
        assert isinstance(rows, PromptRows)
        assert len(rows) == 3
        assert rows.data_sources == ["t"]
        assert rows.place(1) == "row 1 of Bare"

    def test_what_is_wrong_is_said(self, tmp_path):
        with pytest.raises(DataError, match="row 0 of Broken.*must return a dict with 'raw_prompt'"):
            self.load(tmp_path, "Broken", "3")
        with pytest.raises(DataError, match="Bare has no rows"):
            self.load(tmp_path, "Bare", "0")
        with pytest.raises(ConfigError, match="needs data.custom_cls.name; the file has .*Shouting"):
            self.load(tmp_path, None, "3")
        with pytest.raises(ConfigError, match="did you mean 'Bare'"):
            self.load(tmp_path, "Bart", "3")
        with pytest.raises(ConfigError, match="not a class"):
            self.load(tmp_path, "function", "3")
