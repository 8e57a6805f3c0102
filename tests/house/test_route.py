"""The route of one GRPO step, as docs/architecture.md lists it.

One local step is taken under a profile function. The controller's side is the code of the packages run, programs, runtime and
data outside of calls on a rank: on Ray, the code that the driver executes. A rank's side begins in RankWorkers.call and
RankWeightSync.sync. Libraries (data_proto, parallel, tracking, checkpoint, algorithms, config) are not listed.
"""

import re
import sys

import pytest

from tests.forked import fork
from tests.house.source import ROOT
from tests.run import conftest as runs
from verl.cli.main import main
from verl.config import load_config
from verl.data_proto.extras import BatchExtras
from verl.data_proto.proto import DataProto
from verl.engines.base import TrainedEngine
from verl.engines.micro_batches import BatchPlan
from verl.models.optim import MasterOptimizer
from verl.models.packing import PackedBatch, PackedRow
from verl.roles.model import ModelRole
from verl.run.host import train
from verl.run.loop import Loop
from verl.runtime.rank_workers import RankWorkers
from verl.runtime.weight_sync import RankWeightSync

tiny_task, tiny_overrides = runs.tiny_task, runs.tiny_overrides
MOST_HOPS = 6
CONTROLLER = tuple(f"verl/{package}/" for package in ("run", "programs", "runtime", "data"))
LONGEST = 13
MOST_FRAMES = 20


def section(title):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.split(r"\n###? ", page.split(f"# {title}\n", 1)[1], maxsplit=1)[0]


def listed():
    """Files of the table "One GRPO step", in order."""
    return re.findall(r"^\| \d+ \| `([^`]+)`", section("One GRPO step"), re.M)


def hops_of(frame):
    """(function, file) of the code between a program and `frame`, which ends the list."""
    hops = []
    while not (file := frame.f_code.co_filename.removeprefix(f"{ROOT}/")).startswith("verl/programs/"):
        hops.append((f"{type(frame.f_locals['self']).__name__}.{frame.f_code.co_name}", file))
        frame = frame.f_back
    return hops[::-1]


@pytest.fixture
def executed(tiny_overrides, tmp_path, monkeypatch):
    """(files of the controller's side that the second step of a run executes, hops of its call of ModelRole.update)."""
    files, hops, step = set(), [], Loop._step
    rank_side = {RankWorkers.call.__code__, RankWeightSync.sync.__code__}
    depth = 0

    def profile(frame, event, argument):
        nonlocal depth
        depth += (frame.f_code in rank_side) * {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and not depth:
            files.add(frame.f_code.co_filename)
        if event == "call" and frame.f_code is ModelRole.update.__code__:
            hops[:] = hops_of(frame)

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
    names = {file.removeprefix(f"{ROOT}/") for file in files if file.startswith(f"{ROOT}/")}
    return {name for name in names if name.startswith(CONTROLLER)}, hops


def test_the_page_lists_every_file_of_the_route(executed):
    """And every hop of a call on a role."""
    executed_files, hops = executed
    assert executed_files == set(listed()), "add or remove the file in docs/architecture.md"
    assert len(listed()) == len(executed_files) <= LONGEST
    assert hops == re.findall(r"^\| \d+ \| `([^`]+)` in `([^`]+)`", section("A call on a role"), re.M)
    assert len(hops) <= MOST_HOPS


def record_frames(settings, file):
    """In a fork: `verl train`, whose supervisor forks again; `file` gets the frames from the command to an optimizer step."""
    step = MasterOptimizer.step

    def recorded(self, *arguments):
        frames, frame = [], sys._getframe(1)
        while frame.f_code is not record_frames.__code__:
            frames.append(f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')} {frame.f_code.co_name}")
            frame = frame.f_back
        file.write_text("\n".join(reversed(frames)))
        return step(self, *arguments)

    MasterOptimizer.step = recorded
    sys.argv = ["verl", "train", *settings]
    sys.exit(main())


def test_few_frames_lie_between_the_command_and_the_optimizer(tiny_overrides, tmp_path):
    settings = runs.merge(
        tiny_overrides, ("trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}")
    )
    process = fork(record_frames, settings, tmp_path / "frames")
    process.join(300)
    assert process.exitcode == 0
    frames = (tmp_path / "frames").read_text().splitlines()
    assert len(frames) <= MOST_FRAMES
    rows = re.findall(r"^\| \d+ \| `([^`]+)` in `([^`]+)`", section("Frames"), re.M)
    named = [f"{file} {name.rpartition('.')[2]}" for name, file in rows]
    assert [frame for frame in frames if "<" not in frame] == named  # a comprehension is a frame in some versions


# the forms in which an engine passes its batch, and the calls at which another owner continues
FORMS = (DataProto, BatchExtras, BatchPlan, PackedRow, PackedBatch)
DOORS = ("_outputs", "__call__", "backward", "step")
MOST_STAYS = 15


def is_form(value, depth=2):
    if isinstance(value, (list, tuple)) and value and depth:
        return is_form(value[0], depth - 1)
    return isinstance(value, FORMS)


@pytest.fixture
def stays(tiny_overrides, tmp_path, monkeypatch):
    """Files in the order in which the first optimizer step enters them with its batch: each function counts at its first call,
    and neighbours in one file are one stay. Methods of the forms count where they are called."""
    files, visited, train_batch = [], set(), TrainedEngine.train_batch
    depth = 0

    def profile(frame, event, argument):
        nonlocal depth
        code = frame.f_code
        if depth or code.co_name in DOORS:
            depth += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and code not in visited and code.co_filename.startswith(f"{ROOT}/verl/"):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals[name] for name in names]
            if any(map(is_form, values)) and not (names[0] == "self" and is_form(values[0])):
                visited.add(code)
                files.extend([code.co_filename] if files[-1:] != [code.co_filename] else [])

    def recorded(self, *arguments, **more):
        if files:
            return train_batch(self, *arguments, **more)
        sys.setprofile(profile)
        try:
            return train_batch(self, *arguments, **more)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(TrainedEngine, "train_batch", recorded)
    step = ("trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}")
    train(load_config(runs.merge(tiny_overrides, step)))
    return [file.removeprefix(f"{ROOT}/verl/") for file in files]


def test_a_batch_enters_few_files_on_its_way_to_the_forward(stays):
    assert stays[0] == stays[-1] == "engines/base.py", "from train_batch to the backward"
    assert len(stays) <= MOST_STAYS, stays
