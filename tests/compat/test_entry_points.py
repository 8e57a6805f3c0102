"""The commands of existing scripts: main_eval, main_generation, main_generation_server, main_ppo_sync, and the asynchronous
mains."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.json_lines import read_lines, write_lines
from verl.compat.commands import Arguments, fully_async, one_step_off
from verl.compat.generation import main_eval, main_generation, score_file, translate
from verl.config import load_config
from verl.errors import ConfigError, DataError

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str == "bad":
        raise KeyError(solution_str)
    return float(solution_str == ground_truth)
"""
ROWS = [
    {"data_source": "a", "responses": ["1", "2"], "reward_model": {"style": "rule", "ground_truth": "1"}},
    {"data_source": "a", "responses": ["3", "3"], "reward_model": {"style": "rule", "ground_truth": "3"}},
    {"data_source": "b", "responses": ["x", "bad"], "reward_model": {"style": "rule", "ground_truth": "y"}},
]


@pytest.fixture
def answers(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "answers.parquet")
    (tmp_path / "score.py").write_text(SCORER)
    return tmp_path


class TestArguments:
    def test_keys_and_flags(self):
        arguments = Arguments(
            ["--config-name=x", "a.b=1", "+c='two words'", "--config-path", "dir", "++d=[1,2]", "~e", "-cn", "y"]
        )
        assert arguments.texts == {"a.b": "1", "c": "'two words'", "d": "[1,2]"}
        assert (arguments.value("a.b"), arguments.value("d"), arguments.value("x", 5)) == (1, [1, 2], 5)
        assert (arguments.flag("--config-path"), arguments.flag("--config-name"), arguments.flag("-cn")) == (
            "dir",
            "x",
            "y",
        )
        arguments.rename("a.", "z.")
        arguments.drop_config_flags(["y"])
        assert arguments.flag("--config-path") == "dir"
        arguments.drop_config_flags(["x"])
        assert arguments.argv() == ["~e", "c='two words'", "d=[1,2]", "z.b=1"]


class TestEvaluation:
    def test_the_mean_of_the_means_of_rows(self, answers, capsys, caplog):
        """Source a: rows of 1/2 and 1; source b: 0, one of them the default of a scorer that failed."""
        files = [f"data.path={answers}/answers.parquet", f"custom_reward_function.path={answers}/score.py"]
        code = main_eval([*files, "reward.default_score=0"])
        assert code == 0
        assert capsys.readouterr().out == "{'test_score/a': 0.75, 'test_score/b': 0.0}\n"
        assert "The scorer failed for 1 of 6 responses" in caplog.text

    def test_a_function_whose_parameters_have_other_names(self, answers, capsys):
        (answers / "other.py").write_text(
            "def compute_score(source, response, answer):\n    return float(response == answer)\n"
        )
        files = [f"data.path={answers}/answers.parquet", f"custom_reward_function.path={answers}/other.py"]
        assert main_eval(files) == 0
        assert capsys.readouterr().out == "{'test_score/a': 0.75, 'test_score/b': 0.0}\n"

    def test_columns_of_other_names_and_built_in_scorers(self, tmp_path):
        rows = [{"src": "openai/gsm8k", "out": f"#### {i}", "rm": {"ground_truth": "4"}} for i in (4, 5)]
        write_lines(tmp_path / "rows.jsonl", rows)
        data = {
            "path": f"{tmp_path}/rows.jsonl", "response_key": "out", "data_source_key": "src", "reward_model_key": "rm",
        }  # fmt: skip
        assert score_file(data) == {"test_score/openai/gsm8k": 0.5}

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["data.response_key=response"], "there is no field 'response'; did you mean 'responses'?"),
            (["data.respons_key=x"], "no key 'data.respons_key'; did you mean 'data.response_key' or"),
            (["data.reward_model_key=data_source"], "a row needs at least one response"),
        ],
    )
    def test_what_is_wrong_is_said(self, answers, arguments, said, capsys):
        code = main_eval([f"data.path={answers}/answers.parquet", *arguments])
        assert code in (ConfigError.exit_code, DataError.exit_code)
        assert said in capsys.readouterr().err

    def test_without_a_file_it_validates_a_model(self, tiny_tree, tiny_files, capsys):
        tree = tiny_tree
        code = main_eval(
            [
                f"actor_rollout_ref.model.path={tree['actor_rollout_ref']['model']['path']}",
                f"data.val_files={tree['data']['val_files']}",
                f"custom_reward_function.path={tiny_files}/score.py",
                f"trainer.default_local_dir={tree['trainer']['default_local_dir']}",
                "actor_rollout_ref.rollout.response_length=4",
                "reward.debug=True",
            ]
        )
        assert code == 0
        assert "val/reward" in json.loads(open(f"{tree['trainer']['default_local_dir']}/eval/eval.json").read())


class TestGeneration:
    @pytest.fixture
    def prompts(self, tmp_path):
        """Rows with a prompt and columns that training does not know, and no reference answers."""
        rows = [
            {"prompt": [{"role": "user", "content": f"say {i}"}], "level": i, "data_source": None} for i in range(3)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
        return f"{tmp_path}/prompts.parquet"

    def test_rows_come_back_with_responses(self, prompts, tiny_llama, tmp_path):
        output = tmp_path / "out" / "answers.parquet"
        arguments = [
            f"data.path={prompts}", "data.prompt_key=prompt", "data.n_samples=2", f"data.output_path={output}",
            f"model.path={tiny_llama}", "rollout.temperature=1.0", "rollout.prompt_length=64", "rollout.response_length=5",
            "data.batch_size=2", "trainer.n_gpus_per_node=1",
        ]  # fmt: skip
        assert main_generation(arguments) == 0
        rows = pyarrow.parquet.read_table(output).to_pylist()
        assert [row["level"] for row in rows] == [0, 1, 2]
        assert [set(row) for row in rows] == [{"prompt", "level", "data_source", "responses"}] * 3
        assert [len(row["responses"]) for row in rows] == [2, 2, 2]
        assert len({text for row in rows for text in row["responses"]}) > 1
        assert rows[0]["prompt"] == [{"content": "say 0", "role": "user"}]

    def test_what_it_wrote_can_be_scored(self, prompts, tiny_llama, tmp_path, answers):
        output = f"{tmp_path}/scored.parquet"
        rows = [
            {"prompt": "one", "data_source": "a", "reward_model": {"style": "rule", "ground_truth": "one"}},
            {"prompt": "two", "data_source": "b", "reward_model": {"style": "rule", "ground_truth": "two"}},
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        # the newer form: keys of the training tree
        assert (
            main_generation(
                [
                    f"data.train_files=['{tmp_path}/rows.parquet']",
                    f"+data.output_path={output}",
                    f"actor_rollout_ref.model.path={tiny_llama}",
                    "actor_rollout_ref.rollout.n=1",
                    "actor_rollout_ref.rollout.temperature=0",
                    "actor_rollout_ref.rollout.response_length=3",
                    "data.max_prompt_length=64",
                ]  # fmt: skip
            )
            == 0
        )
        written = pyarrow.parquet.read_table(output).to_pylist()
        for row in written:
            row["reward_model"]["ground_truth"] = row["responses"][0] if row["data_source"] == "a" else "never"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), output)
        data = {
            "path": output, "response_key": "responses", "data_source_key": "data_source",
            "reward_model_key": "reward_model",
        }  # fmt: skip
        scores = score_file(data, [f"custom_reward_function.path={answers}/score.py"])
        assert scores == {"test_score/a": 1.0, "test_score/b": 0.0}

    def test_defaults_of_the_older_form(self):
        loaded = load_config(
            translate(["data.path=x", "data.output_path=o.parquet", "model.path=m"])[2:], check=False
        ).config
        rollout = loaded.actor_rollout_ref.rollout
        assert (rollout.n, rollout.temperature, rollout.top_k, rollout.top_p) == (5, 1.0, 50, 0.7)
        assert (rollout.prompt_length, rollout.response_length) == (1536, 512)
        assert (loaded.actor_rollout_ref.model.path, loaded.data.val_files) == ("m", "x")

    def test_what_cannot_be(self, capsys):
        assert main_generation(["data.path=x", "data.output_path=o.json"]) == 2
        assert "must end in .parquet" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"data.n_samples=1"):
            translate(["data.path=x", "data.output_path=o.parquet", "rollout.temperature=0"])
        assert translate(["data.path=x", "data.output_path=o.parquet", "rollout.temperature=0", "data.n_samples=1"])

    def test_a_scorer_of_ones_own_stays(self):
        arguments = ["data.path=x", "data.output_path=o.parquet", "reward.custom_reward_function.path=s.py"]
        assert not [argument for argument in translate(arguments) if "verl.compat" in argument]


class TestAsynchronous:
    COMMON = ("actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.actor.ppo_mini_batch_size=2")

    def config(self, argv):
        return load_config(argv, check=False).config

    def test_the_steps_between_two_weight_updates(self):
        """4 groups of 2 x 2 prompts between two updates, 100 prompts in all: 6 steps of 16."""
        config = self.config(
            fully_async(
                [
                    *self.COMMON,
                    "data.train_batch_size=0",
                    "data.gen_batch_size=1",
                    "rollout.total_rollout_steps=100",
                    "rollout.nnodes=1",
                    "rollout.n_gpus_per_node=2",
                    "rollout.n=4",
                    "async_training.staleness_threshold=0.5",
                    "async_training.trigger_parameter_sync_step=4",
                    "async_training.require_batches=2",
                    "async_training.partial_rollout=True",
                    "trainer.nnodes=1",
                    "trainer.n_gpus_per_node=2",
                ]  # fmt: skip
            )
        )
        rollout = config.actor_rollout_ref.rollout
        assert (config.data.train_batch_size, config.trainer.total_training_steps) == (16, 6)
        assert (rollout.prefetch_num, rollout.partial_rollout, rollout.n) == (1, True, 4)
        assert (rollout.nnodes, rollout.n_gpus_per_node) == (1, 2)
        assert config.actor_rollout_ref.hybrid_engine is True
        assert config.algorithm.rollout_correction.rollout_is == "token"

    def test_without_staleness_nothing_is_made_ahead(self):
        config = self.config(fully_async([*self.COMMON, "async_training.staleness_threshold=0"]))
        assert config.actor_rollout_ref.rollout.prefetch_num == 0
        assert self.config(fully_async([*self.COMMON])).actor_rollout_ref.rollout.prefetch_num == 1
        wide = fully_async([*self.COMMON, "async_training.staleness_threshold=1.5"])
        assert self.config(wide).actor_rollout_ref.rollout.prefetch_num == 2

    def test_its_own_config_name(self):
        flags = ["--config-path=config", "--config-name=fully_async_ppo_trainer.yaml"]
        assert not [argument for argument in fully_async([*flags, *self.COMMON]) if argument.startswith("--")]

    def test_what_has_no_meaning_is_said(self, caplog):
        arguments = fully_async(
            [
                *self.COMMON,
                "async_training.concurrent_samples_per_replica=16",
                "async_training.use_trainer_do_validate=False",
            ]
        )
        assert "concurrent_samples_per_replica=16" in caplog.text
        assert not [argument for argument in arguments if argument.startswith("async_training.")]
        with pytest.raises(ConfigError, match="role of a device is fixed"):
            fully_async(["async_training.use_dynamic_resource_scheduling=True"])
        with pytest.raises(ConfigError, match="staleness_threshold=-1"):
            fully_async(["async_training.staleness_threshold=-1"])

    def test_one_step_off(self):
        config = self.config(one_step_off([*self.COMMON, "rollout.nnodes=1", "rollout.n_gpus_per_node=3"]))
        rollout = config.actor_rollout_ref.rollout
        assert (rollout.prefetch_num, rollout.nnodes, rollout.n_gpus_per_node) == (1, 1, 3)

    def test_a_run_of_each(self, tiny_tree, tmp_path, monkeypatch):
        """On one device with the rollout: two steps, samples of the second made under older weights."""
        from verl.compat import commands
        from verl.run.host import train

        monkeypatch.setattr(commands, "_train", lambda argv: train(load_config(argv)))
        tree = tiny_tree
        common = [
            *self.COMMON, "algorithm.adv_estimator=grpo", "rollout.nnodes=0",
            f"actor_rollout_ref.model.path={tree['actor_rollout_ref']['model']['path']}",
            f"data.train_files={tree['data']['train_files']}", "data.val_files=[]",
            "data.max_prompt_length=64", "data.max_response_length=4",
            "actor_rollout_ref.rollout.n=2", f"custom_reward_function.path={tree['custom_reward_function']['path']}",
            "reward.debug=True", "trainer.logger=[file]", "trainer.val_before_train=False",
        ]  # fmt: skip
        mains = {
            "fully": (
                commands.main_fully_async,
                ["async_training.trigger_parameter_sync_step=1", "rollout.total_rollout_steps=4"],
            ),
            "one": (commands.main_one_step_off, ["data.train_batch_size=2", "trainer.total_training_steps=2"]),
        }  # fmt: skip
        for name, (main, changes) in mains.items():
            assert main([*common, *changes, f"trainer.default_local_dir={tmp_path}/{name}"]) == 0
            rows = read_lines(tmp_path / name / "metrics.jsonl")
            stale = [row["training/off_policy/trajectory_staleness/max"] for row in rows if row["step"] > 0]
            assert stale == [0, 1]
