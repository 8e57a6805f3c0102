"""The route of one GRPO step, as docs/architecture.md lists it.

One local step is taken under a profile function. The controller's side is the code of the packages run, programs, runtime and
data outside of calls on a rank: on Ray, the code that the driver executes. A rank's side begins in RankWorkers.call and
RankWeightSync.sync. Libraries (data_proto, parallel, tracking, checkpoint, algorithms, config) are not listed.
"""

import re
import sys

import pytest

from tests.house.source import ROOT
from tests.run import conftest as runs
from verl.config import load_config
from verl.run.host import train
from verl.run.loop import Loop
from verl.runtime.rank_workers import RankWorkers
from verl.runtime.weight_sync import RankWeightSync

tiny_task, tiny_overrides = runs.tiny_task, runs.tiny_overrides
CONTROLLER = tuple(f"verl/{package}/" for package in ("run", "programs", "runtime", "data"))
LONGEST = 13


def listed():
    """Files of the table "One GRPO step", in order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## One GRPO step", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| \d+ \| `([^`]+)`", section, re.M)


@pytest.fixture
def executed(tiny_overrides, tmp_path, monkeypatch):
    """Files of the controller's side that the second step of a run executes."""
    found, step = set(), Loop._step
    rank_side = {RankWorkers.call.__code__, RankWeightSync.sync.__code__}
    depth = 0

    def profile(frame, event, argument):
        nonlocal depth
        depth += (frame.f_code in rank_side) * {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and not depth:
            found.add(frame.f_code.co_filename)

    def recorded(self, number):
        if number != 2:
            return step(self, number)
        sys.setprofile(profile)
        try:
            return step(self, number)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Loop, "_step", recorded)
    train(load_config(runs.merge(tiny_overrides, (f"trainer.default_local_dir={tmp_path / 'run'}",))))
    names = {file.removeprefix(f"{ROOT}/") for file in found if file.startswith(f"{ROOT}/")}
    return {name for name in names if name.startswith(CONTROLLER)}


def test_the_page_lists_every_file_of_the_route(executed):
    assert executed == set(listed())
    assert len(listed()) == len(executed) <= LONGEST
