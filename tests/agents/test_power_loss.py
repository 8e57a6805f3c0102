"""A loss of power loses all unsynced writes: an agent run with samples ahead of training resumes with equal bits."""

import os
import shutil

import pytest

from tests.agents.test_runs import ENDS, ROLLOUT
from tests.agents.test_ways import digest
from verl.tracking.ledger.file import NAME as LEDGER

AHEAD = (ENDS, f"{ROLLOUT}.prefetch_num=1", "trainer.save_freq=1", "trainer.total_training_steps=4")


class Disk:
    """The run folder `root` as a disk holds it. While a run uses it, `images` gets a copy at every `every`-th fsync after the
    first checkpoint: each file as long as it was when it was synced last, and no file of episodes/ whose name was not synced.
    The ledger is left out: SQLite syncs it, and a checkpoint has its part of it."""

    def __init__(self, root, every, monkeypatch):
        self.root, self.every, self.images = root, every, []
        self.sizes, self.names, self.count = {}, set(), 0
        self.fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.synced)

    def synced(self, descriptor):
        self.fsync(descriptor)
        status = os.fstat(descriptor)
        self.sizes[status.st_ino] = status.st_size
        if (self.root / "episodes").exists() and status.st_ino == (self.root / "episodes").stat().st_ino:
            self.names = set(os.listdir(self.root / "episodes"))
        if not (self.root / "global_step_1").exists():
            return
        self.count += 1
        if self.count % self.every == 0:
            self.images.append(self.image())

    def image(self):
        target = self.root.with_name(f"after_{self.count}_syncs")
        leave_out = shutil.ignore_patterns(f"{LEDGER}*", "logs", "heartbeat.json", ".*")
        shutil.copytree(
            self.root, target, ignore=lambda at, names: leave_out(at, names) if at == str(self.root) else ()
        )
        for file in [path for path in target.rglob("*") if path.is_file()]:
            source = self.root / file.relative_to(target)
            if file.parent.name == "episodes" and file.name not in self.names:
                file.unlink()
            else:
                os.truncate(file, min(file.stat().st_size, self.sizes.get(source.stat().st_ino, 0)))
        return target


@pytest.mark.parametrize("num_instants", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_ahead_of_training_outlives_a_loss_of_power(agent_run, tmp_path, monkeypatch, num_instants, caplog):
    disk = Disk(tmp_path / "whole", 20 if num_instants == 1 else 4, monkeypatch)
    unbroken = agent_run(*AHEAD, folder="whole")
    monkeypatch.undo()
    expected = {f.name: f.read_bytes() for f in (unbroken.folder / "global_step_4").glob("actor/**/*.safetensors")}
    assert len(expected) == 2
    assert len(disk.images) >= num_instants
    for image in disk.images[:: len(disk.images) // num_instants][:num_instants]:
        caplog.clear()
        cut = agent_run(*AHEAD, folder=image.name)
        assert "no record of the episode" not in caplog.text
        weights = {f.name: f.read_bytes() for f in (cut.folder / "global_step_4").glob("actor/**/*.safetensors")}
        assert weights == expected, image.name
        assert digest(cut) == digest(unbroken)
