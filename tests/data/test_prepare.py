import io
import itertools
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from tests.commands import ran
from tests.data.rows import config
from verl.config import PPO, PREFERENCE, SCHEMAS, load_config
from verl.data import prepare
from verl.data.dataset import load_dataset
from verl.data.files import read_rows
from verl.data.tasks import char_count, gsm8k, reasoning_gym, sentiment, split
from verl.errors import DataError
from verl.models.tiny import make_tokenizer
from verl.programs.preference import PreferenceOptimization
from verl.rewards.scorers.route import default_compute_score

FIXTURE = Path(__file__).parent / "gsm8k"
# folder with the whole GSM8K, for the test that reads all of it
GSM8K = Path(os.environ.get("VERL_GSM8K_DIR", "../shared/data/gsm8k"))


def read(folder, split):
    rows = read_rows(folder / f"{split}.parquet")
    return [rows[i] for i in range(len(rows))]


class TestGSM8K:
    def test_rows_are_in_the_schema(self, tmp_path, capsys):
        assert prepare.main(["gsm8k", "--source", str(FIXTURE), "--output", str(tmp_path)]) == 0
        assert f"{tmp_path / 'train.parquet'}: 3 rows" in capsys.readouterr().out
        rows = read(tmp_path, "train")
        assert rows[1] == {
            "data_source": "openai/gsm8k",
            "prompt": [
                {
                    "role": "user",
                    "content": "A boat costs $1,200 and a sail $34. What do both cost? "
                    'Let\'s think step by step and output the final answer after "####".',
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1234"},
            "extra_info": {
                "split": "train",
                "index": 1,
                "answer": "1200+34=<<1200+34=1234>>1234 dollars.\n#### 1,234",
                "question": "A boat costs $1,200 and a sail $34. What do both cost?",
            },
        }
        assert [r["reward_model"]["ground_truth"] for r in read(tmp_path, "test")] == ["-3", "2.5"]
        loaded = load_dataset(str(tmp_path / "test.parquet"), make_tokenizer(), config(max_prompt_length=400))
        assert loaded.data_sources == ["openai/gsm8k"]

    @pytest.mark.parametrize(
        ("problem", "words"),
        [
            ({"question": "q"}, "row 0 .*field 'answer' must be a text"),
            ({"question": "q", "answer": "just 4"}, "row 0 .*no final line '#### number'"),
        ],
    )
    def test_bad_problems_are_named(self, tmp_path, problem, words):
        (tmp_path / "train.jsonl").write_text(json.dumps(problem))
        with pytest.raises(DataError, match=words):
            gsm8k.prepare(tmp_path, tmp_path / "out")

    @pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason="the GSM8K files are not here (VERL_GSM8K_DIR)")
    def test_the_whole_data_set(self, tmp_path):
        gsm8k.prepare(GSM8K, tmp_path)
        train, test = read(tmp_path, "train"), read(tmp_path, "test")
        assert (len(train), len(test)) == (7473, 1319)
        for row in train + test:
            float(row["reward_model"]["ground_truth"])


class TestReasoningGym:
    @pytest.fixture(scope="class")
    def mixture(self, tmp_path_factory):
        pytest.importorskip("reasoning_gym")
        folder = tmp_path_factory.mktemp("mixture")
        said = reasoning_gym.prepare(
            folder, reasoning_gym.DEFAULT_TASKS, num_train=300, num_test=90, seed=3, style="short"
        )
        return folder, said

    def test_counts_and_report(self, mixture):
        folder, said = mixture
        train, test = read(folder, "train"), read(folder, "test")
        assert (len(train), len(test)) == (300, 90)
        assert any("products: 100 distinct questions" in s for s in said)
        per_task = {}
        for row in test:
            per_task[row["data_source"]] = per_task.get(row["data_source"], 0) + 1
        assert set(per_task) == {f"reasoning_gym/{name}" for name in reasoning_gym.DEFAULT_TASKS}
        assert min(per_task.values()) >= 20

    def test_no_tested_problem_trains_in_any_wording(self, mixture):
        folder, _ = mixture
        train, test = ([r["extra_info"] for r in read(folder, s)] for s in ("train", "test"))
        for key in (lambda e: e["question"], lambda e: json.loads(e["metadata"]).get("expression", e["question"])):
            assert {key(e) for e in train}.isdisjoint({key(e) for e in test})
        questions = [e["question"] for e in [*train, *test]]
        assert len(set(questions)) == len(questions)

    def test_rows_carry_what_a_scorer_needs(self, mixture):
        import reasoning_gym as library

        folder, _ = mixture
        for number, row in enumerate(read(folder, "test")[:20]):
            extra = row["extra_info"]
            assert extra["index"] == number
            assert extra["split"] == "test"
            assert row["prompt"][0]["content"] == (
                extra["question"] + "\nGive only the final answer as a number and nothing else."
            )
            item = {key: extra[key] for key in ("question", "answer")}
            item["metadata"] = json.loads(extra["metadata"])
            score = library.get_score_answer_fn(extra["task"])
            assert score(row["reward_model"]["ground_truth"], item) == 1.0

    def test_the_files_are_a_function_of_the_arguments(self, mixture, tmp_path):
        folder, _ = mixture
        for seed in (3, 4):
            reasoning_gym.prepare(
                tmp_path / str(seed), reasoning_gym.DEFAULT_TASKS, num_train=300, num_test=90, seed=seed, style="short"
            )
        assert read(tmp_path / "3", "train") == read(folder, "train")
        assert read(tmp_path / "4", "test") != read(folder, "test")

    def test_command_line_with_own_tasks(self, tmp_path, capsys):
        pytest.importorskip("reasoning_gym")
        argv = ["reasoning_gym", "--output", str(tmp_path), "--train", "20", "--test", "5", "--prompt", "plain"]
        settings = '{"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 3}'
        assert prepare.main([*argv, "--tasks", "leg_counting", f"gcd:{settings}"]) == 0
        out = capsys.readouterr().out
        assert "gcd: 9 distinct questions, all that its settings give" in out
        rows = read(tmp_path, "train")
        assert len(rows) == 20
        assert all(r["prompt"][0]["content"] == r["extra_info"]["question"] for r in rows)

    @pytest.mark.parametrize(
        ("task", "words"),
        [
            ("leg_countin", "no task 'leg_countin'; did you mean 'leg_counting'"),
            ("gcd:{", "not valid JSON"),
            ("gcd:[1]", "must be a JSON object"),
            ('gcd:{"min_numbers": -1}', "do not fit the task gcd: .*at least 2"),
            ('gcd:{"nope": 1}', "do not fit the task gcd: .*nope"),
        ],
    )
    def test_bad_tasks(self, tmp_path, task, words):
        pytest.importorskip("reasoning_gym")
        with pytest.raises(DataError, match=words):
            prepare.main(["reasoning_gym", "--output", str(tmp_path), "--tasks", task])

    def test_too_few_questions_for_both_parts(self, tmp_path, monkeypatch):
        item = {"question": "1 + 1?", "answer": "2", "metadata": {}}
        only = reasoning_gym.Task("one", itertools.repeat(item), [])
        monkeypatch.setattr(reasoning_gym.Task, "open", lambda *_: only)
        with pytest.raises(DataError, match=r"No question is left for test.parquet"):
            reasoning_gym.prepare(tmp_path, {"one": {}}, num_train=5, num_test=5, seed=1, style="plain")
        assert only.exhausted


def test_as_a_program_errors_are_sentences(tmp_path):
    argv = [sys.executable, "-m", "verl.data.prepare", "gsm8k", "--source", str(tmp_path), "--output", str(tmp_path)]
    done = ran(*argv, code=DataError.exit_code)
    assert done.stderr.startswith("The data file")
    assert "Traceback" not in done.stderr


class TestCharCount:
    def test_one_row_serves_both_programs(self, tmp_path, capsys):
        arguments = ["char_count", "--output", str(tmp_path), "--train", "30", "--test", "10", "--max-length", "6"]
        assert prepare.main(arguments) == 0
        assert f"{tmp_path / 'train.parquet'}: 30 rows" in capsys.readouterr().out
        train, test = read(tmp_path, "train"), read(tmp_path, "test")
        assert len({row["prompt"][0]["content"] for row in train + test}) == 40
        for row in train + test:
            words = row["prompt"][0]["content"].rstrip("?").split()
            letter, word = words[2], words[-1].split("-")
            assert 5 <= len(word) <= 6
            assert row["reward_model"]["ground_truth"] == str(word.count(letter))
            question, answer = row["messages"]
            assert question == row["prompt"][0]
            assert default_compute_score("char_count", answer["content"], row["reward_model"]["ground_truth"]) == 1.0
        assert load_dataset(str(tmp_path / "test.parquet"), make_tokenizer(), config()).data_sources == ["char_count"]

    def test_the_worked_answer_compares_every_letter(self):
        assert char_count.question_of("n", "nine") == "How many n are there in the word n-i-n-e?"
        answer = char_count.worked_answer("n", "nine")
        assert answer == "n = n.\ni != n.\nn = n.\ne != n.\n\\boxed{2} n in n-i-n-e."

    def test_a_seed_decides_every_row(self, tmp_path):
        settings = {"num_train": 20, "num_test": 5, "min_length": 3, "max_length": 9}
        for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
            char_count.prepare(tmp_path / folder, seed=seed, **settings)
        assert read(tmp_path / "a", "train") == read(tmp_path / "b", "train") != read(tmp_path / "c", "train")

    def test_lengths_that_cannot_give_the_rows_are_refused(self, tmp_path):
        with pytest.raises(DataError, match="Words of 1 to 1 letters give 26 questions, fewer than the 40 rows"):
            char_count.prepare(tmp_path, num_train=30, num_test=10, min_length=1, max_length=1, seed=1)
        with pytest.raises(DataError, match="Word lengths from 5 to 3 are not a range"):
            char_count.prepare(tmp_path, num_train=3, num_test=1, min_length=5, max_length=3, seed=1)


class TestSentiment:
    @pytest.fixture
    def archive(self, tmp_path):
        """An archive with the files of the package's, and sentences rated by the number of times they say good."""
        inner = io.BytesIO()
        with tarfile.open(fileobj=inner, mode="w:gz") as tar:
            lines = [f"{i}\t{i % 5 - 2}\t{'good ' * (i % 5)}&amp; no. {i}" for i in range(60)]
            files = {
                f"{kind}_GroundTruth.txt": "\n".join([*lines, "61\t1.0\t" + "x" * 500]) for kind in sentiment.KINDS
            }
            for name, text in {**files, sentiment.WORDS: "good\t1.9\t0.5\nbad\t-2.1\t0.5"}.items():
                add(tar, f"hutto_ICWSM_2014/{name}", text.encode())
        file = tmp_path / "source.tar.gz"
        with tarfile.open(file, "w:gz") as tar:
            add(tar, "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
        return file

    def test_pairs_follow_the_ratings_and_share_no_sentence(self, archive, tmp_path):
        said = sentiment.prepare(archive, tmp_path, num_train=100, num_test=20, seed=1)
        assert "the sum of word ratings orders 1.000 of the test pairs as people did" in said
        train, test = read(tmp_path, "train"), read(tmp_path, "test")
        assert (len(train), len(test)) == (100, 20)
        for row in train + test:
            assert row["chosen"].count("good") - row["rejected"].count("good") == row["margin"] >= sentiment.MIN_MARGIN
            assert "& no." in row["chosen"]
        texts = [
            {(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")} for rows in (train, test)
        ]
        assert not texts[0] & texts[1]
        again = sentiment.prepare(archive, tmp_path / "again", num_train=100, num_test=20, seed=1)
        assert read(tmp_path / "again", "train") == train
        assert len(again) == 3

    def test_another_file_is_named(self, archive, tmp_path):
        archive.write_bytes(b"not an archive")
        with pytest.raises(DataError, match="is not the source archive of vaderSentiment 3.3.2.*pip download"):
            sentiment.prepare(archive, tmp_path, num_train=1, num_test=1, seed=1)

    @pytest.mark.parametrize(
        ("name", "schema", "file"),
        [
            ("rm_smollm2", "rm", "sentiment/train"), ("dpo_smollm2", "preference", "sentiment/train"),
            ("sft_shapes", "sft", "shapes/sft_train"), ("grpo_shapes", "ppo", "shapes/grpo_train"),
        ],
    )  # fmt: skip
    def test_the_main_jobs_read_these_rows(self, name, schema, file):
        config = load_config([], schema=SCHEMAS.get(schema, PPO), config_name=name).config
        assert config.data.train_files == f"work/data/{file}.parquet"


class TestSplit:
    ROWS = [
        {"prompt": f"Q{i // 3}", "chosen": f"yes {i}", "rejected": f"no {i}", "subset": "helpful"} for i in range(30)
    ]

    def write(self, folder, rows):
        (folder / "rows.json").write_text(json.dumps(rows))
        return ["split", "--source", str(folder / "rows.json"), "--output", str(folder / "out")]

    def test_no_prompt_is_in_both_files(self, tmp_path, capsys):
        assert prepare.main([*self.write(tmp_path, self.ROWS), "--test-share", "0.25"]) == 0
        assert f"{tmp_path / 'out' / 'test.parquet'}: 9 rows" in capsys.readouterr().out
        train, test = (read(tmp_path / "out", name) for name in ("train", "test"))
        assert sorted(train + test, key=lambda row: int(row["chosen"][4:])) == self.ROWS
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}

    def test_texts_become_messages_that_train(self, tmp_path, tiny_llama):
        talk = "Hi.\n\nAssistant: Yes?\n\nHuman:  And\n\nnow?"
        prepare.main([*self.write(tmp_path, [{**row, "prompt": row["prompt"] + talk} for row in self.ROWS]), "--chat"])
        row = read(tmp_path / "out", "test")[0]
        assert [m["role"] for m in row["prompt"]] == ["user", "assistant", "user"]
        assert row["prompt"][2]["content"] == "And\n\nnow?"
        assert row["chosen"][0]["role"] == "assistant"
        files = [
            f"data.{split}_files={tmp_path}/out/{name}.parquet" for split, name in (("train", "train"), ("val", "test"))
        ]
        loaded = load_config([f"model.path={tiny_llama}", "data.train_batch_size=8", *files], schema=PREFERENCE)
        assert len(PreferenceOptimization.load_data(loaded.config).train.dataset) == 24

    def test_whole_conversations_of_texts(self):
        row = split.as_chat({"chosen": "\n\nHuman: a\n\nAssistant: b"}, "prompt")
        assert row["chosen"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def test_rows_that_cannot_be_divided(self, tmp_path):
        with pytest.raises(
            DataError, match="row 1 .*has no field 'prompt', by which rows are divided; name it by --key"
        ):
            prepare.main(self.write(tmp_path, [self.ROWS[0], {"chosen": "a"}]))
        with pytest.raises(DataError, match="have one prompt, so that none can be held out"):
            prepare.main(self.write(tmp_path, self.ROWS[:3]))
        with pytest.raises(SystemExit):
            prepare.main([*self.write(tmp_path, self.ROWS), "--test-share", "1"])


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
