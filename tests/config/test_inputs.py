"""Config values and YAML files that are out of range, too deep, too many or no text: a sentence, before any work."""

import os
import random

import pytest

from tests.config.helpers import ACTOR, load, refused
from tests.config.inputs import DOCUMENTS, cases, read
from verl.config import PPO


def test_random_values_and_files(tmp_path):
    outcomes = list(cases(random.Random(0), 30, tmp_path))
    assert {what for _, what in outcomes} == {"accepted", "refused"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ACTOR}.optim.lr=1e400", "optim.lr=inf must be finite and fit in 64 bits"),
        (f"{ACTOR}.optim.lr=nan", "optim.lr=nan must be finite"),
        (f"{ACTOR}.optim.betas=[0.9,inf]", "must be finite"),
        (f"{ACTOR}.entropy_coeff=inf", "entropy_coeff=inf must be finite"),
        (f"{ACTOR}.optim.lr={10**350}", "must be a number"),
        ("trainer.total_epochs=1e400", "a whole number"),
        (f"trainer.total_epochs={'9' * 5000}", "a whole number"),
        ("trainer.total_epochs=1e30", "must be finite and fit in 64 bits"),
        (f"data.seed={2**63}", "must be finite and fit in 64 bits"),
        (f"data.apply_chat_template_kwargs={'{a:' * 5000}1{'}' * 5000}", "nested more than 50 deep"),
        (f"trainer.logger={'[' * 5000}{']' * 5000}", "nested more than 50 deep"),
        ("trainer.experiment_name=a\0b", "a NUL or half a character"),
        ("trainer.experiment_name=\ud800", r"half a character: \ud800"),
        ("data.apply_chat_template_kwargs.x=\ud800", "half a character"),
        (
            "trainer.experiment_name=${trainer.project_name} trainer.project_name=${trainer.experiment_name}",
            "cannot be resolved",
        ),
        ("trainer.experiment_name=${", "cannot be resolved"),
        ("data.seed=${oc.env:HOME}", "must be a whole number or null, got"),
        ("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=0", "must be between 1 and"),
        ("actor_rollout_ref.nccl_timeout=0", "must be between 1 and"),
    ],
)
def test_values_out_of_range(override, words):
    assert words in refused(override)


def test_infinity_where_it_has_a_meaning():
    assert load(f"{ACTOR}.optim.clip_grad=inf", f"{ACTOR}.clip_ratio_high=inf")


def test_the_largest_numbers_that_are_allowed():
    assert load(f"data.seed={2**62}").config.data.seed == 2**62
    assert load(f"{ACTOR}.optim.lr=10").config.actor_rollout_ref.actor.optim.lr == 10


REFUSED = {
    "deep list": "nested more than 50 deep",
    "deep mapping": "nested more than 50 deep",
    "deep block": "nested more than 50 deep",
    "bomb": "more than 100,000 values",
    "bomb of merges": "more than 100,000 values",
    "anchor in itself": "cannot be read",
    "tag of Python": "cannot be read",
    "tag of a number": "cannot be read",
    "twice": "cannot be read",
    "long number": "cannot be read",
    "huge number": "lr=inf must be finite",
    "half character": "run.yaml",
    "NUL in a value": r"a NUL or half a character: a\x00b",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(DOCUMENTS[name])
    answer = read(PPO, [], file)
    assert name not in REFUSED or REFUSED[name] in answer


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "pipe.yaml is a pipe. Name a YAML file" in refused(config_path=str(tmp_path / "pipe.yaml"))
    assert "folder.yaml is a folder" in refused(config_path=str(tmp_path / "folder.yaml"))
    (tmp_path / "large.yaml").write_text("# " + "x" * 10_000_000)
    assert "has more than 10,000,000 bytes" in refused(config_path=str(tmp_path / "large.yaml"))
