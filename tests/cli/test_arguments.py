"""Hydra's spellings, options among overrides, and the keys that --help shows."""

import pytest

from verl.cli.arguments import COMMON_KEYS, parse, with_model
from verl.config import PPO, RM, SCHEMAS, SFT
from verl.errors import ConfigError


def test_overrides_and_options_mix():
    arguments = parse(
        "train", "", ["a.b=1", "--config-name", "x", "+c.d=[1,2]", "~e.f"], {"--dry-run": {"action": "store_true"}}
    )
    assert arguments.overrides == ["a.b=1", "+c.d=[1,2]", "~e.f"]
    assert arguments.config_name == "x"
    assert not arguments.options.dry_run


@pytest.mark.parametrize("flag", ["--config-path", "--config-dir", "-cp", "-cd"])
def test_spellings_of_the_folder(flag, tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {total_epochs: 7}\n")
    arguments = parse("train", "", [flag, str(tmp_path), "--config-name=mine", "trainer.nnodes=1"])
    loaded = arguments.load()
    assert loaded.config.trainer.total_epochs == 7
    assert loaded.origins["trainer.total_epochs"] == f"file {tmp_path / 'mine.yaml'}"


def test_a_yaml_file_by_itself(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {total_epochs: 7}\n")
    assert parse("train", "", ["--config-path", str(file)]).load().config.trainer.total_epochs == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_generations", "8"], "key=value, and this one by actor_rollout_ref.rollout.n"),
        (["--learning-rate=1e-6"], "actor_rollout_ref.actor.optim.lr"),
        (["--multirun"], "one command for each"),
        (["-m", "data.seed=1,2"], "one command for each"),
        (["--cfg", "job"], "verl check"),
        (["--confg-name", "x"], "--confg-name.*'--config-name'"),
        (["--config-name"], "expected one argument.*verl train --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_do_nothing_here_say_what_to_do(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse("train", "about", arguments)


def test_a_yaml_file_among_the_overrides_is_named():
    with pytest.raises(ConfigError, match="a YAML file. Give it with --config-path run.yaml"):
        parse("train", "about", ["run.yaml"]).load()


def test_common_keys_exist_and_have_an_effect():
    for name, keys in COMMON_KEYS.items():
        assert [path for path in keys if SCHEMAS[name].leaves[path].inert] == []


def test_help_text(capsys):
    with pytest.raises(SystemExit):
        parse("train", "about it", ["-h"])
    said = capsys.readouterr().out
    assert "data.train_batch_size=16\n" in said
    assert "8 if the estimator compares the samples of a prompt\n" in said
    assert "trainer.default_local_dir=checkpoints/TASK-TIME-SETTINGS" in said
    assert "actor_rollout_ref.rollout" in said
    assert "grpo_smollm2" in said


@pytest.mark.parametrize(
    ("arguments", "face"),
    [(["--defaults", "release", "-h"], "command"), (["--defaults=release", "-h"], "command"), (["-h"], "release")],
)
def test_help_text_of_existing_releases_has_their_defaults(arguments, face, capsys):
    with pytest.raises(SystemExit):
        parse("train", "about it", arguments, defaults=face)
    said = capsys.readouterr().out
    assert "data.train_batch_size=1024\n" in said
    assert " if the estimator" not in said


@pytest.mark.parametrize(
    ("program", "key"), [(PPO, "actor_rollout_ref.model.path"), (SFT, "model.path"), (RM, "model.path")]
)
def test_a_command_without_a_model_is_told_to_name_one(program, key, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = parse("train", "", [], schema=program)
    with pytest.raises(ConfigError, match=rf"^Name a model: {key}=.*The shortest run: {program.command} ") as caught:
        with_model(arguments.load())
    shortest = str(caught.value).partition("The shortest run: ")[2].split()
    loaded = parse(shortest[1], "", shortest[2:], schema=program).load()
    assert with_model(loaded).settings[key].value == "Qwen/Qwen3-0.6B"
    (tmp_path / "models/deepseek-llm-7b-chat").mkdir(parents=True)  # of a script that relies on the default
    assert with_model(arguments.load())
