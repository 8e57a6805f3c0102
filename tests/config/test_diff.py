"""Diff between the config of a resumed run and the saved one."""

import re

import pytest

from tests.config.helpers import ACTOR, GRPO, load
from verl.config.diff import changed_keys

ROUNDING = f"{ACTOR}.fsdp_config.master_rounding"


@pytest.fixture
def folder(tmp_path):
    load(*GRPO, f"{ACTOR}.optim.lr=1e-5").write(tmp_path)
    return tmp_path


def test_only_changed_keys_are_named(folder):
    assert changed_keys(load(*GRPO, f"{ACTOR}.optim.lr=1e-5"), folder) == []
    assert changed_keys(load(*GRPO, f"{ACTOR}.optim.lr=2e-5"), folder) == [f"{ACTOR}.optim.lr: 1.0e-05 -> 2.0e-05"]
    assert changed_keys(load(*GRPO), folder / "elsewhere") == []


def test_an_equal_file_is_not_loaded(folder, monkeypatch):
    monkeypatch.setattr("verl.config.diff.load_config", None)
    assert changed_keys(load(*GRPO, f"{ACTOR}.optim.lr=1e-5"), folder) == []


def test_a_run_of_a_version_without_dithering_rounded_to_nearest(folder):
    file = folder / "config.yaml"
    saved = file.read_text()
    file.write_text(re.sub(r"\n +master_rounding: .*", "", saved))
    assert file.read_text() != saved
    now = load(*GRPO, f"{ACTOR}.optim.lr=1e-5")
    assert changed_keys(now, folder) == [f'{ROUNDING}: "nearest" -> "dithered"']
    assert changed_keys(load(*GRPO, f"{ACTOR}.optim.lr=1e-5", f"{ROUNDING}=nearest"), folder) == []
