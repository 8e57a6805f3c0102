"""Uploads against a local double of the Hub's HTTP interface: files, card, and failures that lose no run."""

import json
import re

import pytest
import yaml

from tests.checkpoint.hub_double import serving
from tests.letters_task import overrides, write_task
from tests.run.conftest import train_run
from verl.checkpoint.export import create_repository, model_card, push
from verl.cli.main import main
from verl.errors import ConfigError, UnreachableError
from verl.manifest import MANIFEST

RUN = (
    "trainer.save_freq=1", "trainer.total_training_steps=1", "trainer.val_before_train=True",
    "trainer.test_freq=1", "trainer.push_to_hub=True", "trainer.hub_model_id=me/letters",
)  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    with serving(monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_llama):
    """(the folder of a run of one step that uploads its model, the Hub)."""
    task = write_task(tmp_path_factory.mktemp("task"))
    with pytest.MonkeyPatch.context() as monkeypatch, serving(monkeypatch) as hub:
        return train_run(tmp_path_factory.mktemp("runs") / "letters", overrides(tiny_llama, task), RUN).folder, hub


def test_a_run_uploads_its_model_with_a_card(run, tiny_llama):
    folder, hub = run
    files = hub.repositories["me/letters"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert hub.private == {"me/letters": True}
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    assert len(hub.large) == 1  # the weights, outside of git
    assert not list(folder.glob(".pushed-*"))
    _, head, card = files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["verl", "train", "grpo"]}
    assert f"{tiny_llama.name} trained with" in card
    assert re.search(r"- `data.train_files`: \[?train.jsonl", card)
    assert "verl train " in card
    assert "trainer.total_training_steps=1" in card
    summary = json.loads((folder / "summary.json").read_text())
    for number in (value for name, value in summary.items() if name.endswith(("_before", "_after"))):
        assert number is None or f"| {number:.4g} " in card
    assert f"torch {summary['versions']['torch']}" in card
    assert str(tiny_llama.parent) not in card


def test_a_card_has_the_keys_that_the_user_chose(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "data:\n  train_batch_size: 16  # config grpo_smollm2\n  gen_batch_size: 16  # follows data.train_batch_size\n"
        "  shuffle: true\ntrainer:\n  logger: [file]  # command line\n  save_freq: 5  # file job.yaml\n"
    )
    command = "verl train data.train_batch_size=16 'trainer.logger=[file]' trainer.save_freq=5\n"
    assert command in model_card(tmp_path / "global_step_3")


def test_export_uploads_when_asked(run, hub, tmp_path, capsys):
    folder, _ = run
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert hub.paths == []
    assert main(["export", str(folder), str(tmp_path / "pushed"), "--push", "me/other", "--public"]) == 0
    assert f"uploaded to {hub.url}/me/other" in capsys.readouterr().out
    assert hub.private == {"me/other": False}
    sent = hub.repositories["me/other"]
    assert sent == {f.name: f.read_bytes() for f in (tmp_path / "pushed").iterdir() if f.name != MANIFEST}


def test_a_failed_upload_loses_no_run(run, hub, tmp_path, tiny_llama, caplog):
    hub.fails["/commit/main"] = 403
    task = write_task(tmp_path)
    folder = train_run(tmp_path / "run", overrides(tiny_llama, task), RUN).folder
    assert (folder / "summary.json").exists()
    assert "refused the upload to me/letters with status 403: no /commit/main today. Log in with" in caplog.text
    assert f"To upload again: verl export {folder}/global_step_1 FOLDER --push me/letters" in caplog.text


def test_a_refused_token_is_noticed_before_training(hub, tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UnreachableError, match="status 401: Invalid username or password. Log in with `hf auth login`"):
        train_run(tmp_path / "run", overrides(tiny_llama, write_task(tmp_path)), RUN)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_sentences_of_failures(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    hub.fails["/create"] = 500
    with pytest.raises(UnreachableError, match="with status 500: no /create today. Upload again later"):
        create_repository("me/model", private=True)
    with pytest.raises(ConfigError, match="'?me//model'? is no name of a repository"):
        push(tmp_path, "me//model", private=True)
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(UnreachableError, match="The upload to me/model failed: .*Check the network and HF_ENDPOINT"):
        create_repository("me/model", private=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        create_repository("me/model", private=True)
