"""Trackers: one suite for all that can run here, fakes for the rest, and the guard against failures and hangs."""

import json
import logging
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from tests.json_lines import read_lines
from verl.config import PPO
from verl.errors import ConfigError, MissingExtraError
from verl.tracking.sinks.api import SINKS, Guard, RunInfo, make_sink, supported

METRICS = [{"critic/score/mean": 0.25 * step, "val-core/a/acc/mean@4": float(step)} for step in range(3)]
ROWS = [{"prompt": "1+1|", "response": "2\n", "score": 1.0}, {"prompt": "1+2", "response": "4", "score": 0.0}]


@pytest.fixture
def info(tmp_path):
    return RunInfo(
        tmp_path, "project", "experiment", {"trainer": {"save_freq": 5}, "data": {"train_files": ["a", "b"]}}
    )


class Recorder(types.ModuleType):
    """Stands for a tracker's package: every function notes its call; objects it returns note theirs too."""

    def __init__(self, name):
        super().__init__(name)
        self.calls, self.results = [], {"search_runs": []}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self.results.get(name, self)

        return call


@pytest.fixture
def fake(monkeypatch):
    def install(name):
        module = Recorder(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def check_file(info, fake):
    rows = read_lines(info.root / "project" / "experiment.jsonl")
    assert rows == [{"step": i, "data": METRICS[i]} for i in range(3)]


def check_tensorboard(info, fake):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(info.root / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert [e.value for e in events.Scalars("reward/mean")] == [0.0, 0.25, 0.5]
    assert "val/generations/text_summary" in events.Tags()["tensors"]


def check_wandb(info, fake):
    run = next((info.root / "wandb").glob("offline-run-*"))
    assert run.name.endswith((info.root / "wandb_run_id").read_text())
    assert next(run.glob("*.wandb")).stat().st_size > 0


def check_mlflow(info, fake):
    calls = fake.calls
    run_id = (info.root / "mlflow_run_id").read_text()
    assert [c[0] for c in calls][:3] == ["set_experiment", "search_runs", "start_run"]
    assert run_id in calls[1][2]["filter_string"]
    assert run_id in calls[2][2]["tags"].values()
    assert calls[3] == ("log_params", ({"trainer.save_freq": "5", "data.train_files": '["a", "b"]'},), {})
    assert ("log_metrics", ({"critic/score/mean": 0.5, "val-core/a/acc/mean_at_4": 2.0},), {"step": 2}) in calls
    assert calls[-1][0] == "end_run"


def check_swanlab(info, fake):
    arguments = fake.calls[0][2]
    assert arguments["mode"] == "offline"
    assert arguments["id"] == (info.root / "swanlab_run_id").read_text()
    assert arguments["resume"] == "allow"
    assert ("log", (METRICS[1],), {"step": 1}) in fake.calls
    assert fake.calls[-1][0] == "finish"


def check_trackio(info, fake):
    arguments = fake.calls[0][2]
    assert arguments["project"] == "project"
    assert arguments["resume"] == "allow"
    assert arguments["name"] == f"experiment-{(info.root / 'trackio_run_id').read_text()}"
    assert ("log", (METRICS[1],), {"step": 1}) in fake.calls
    cells = {"columns": ["prompt", "response", "score"], "data": [["1+1|", "2\n", 1.0], ["1+2", "4", 0.0]]}
    assert ("Table", (), cells) in fake.calls
    assert fake.calls[-1][0] == "finish"


# tracker -> (package that it needs, "fake" for a Recorder in its place, None for none; check of what it wrote)
CONTRACT = {
    "console": (None, lambda info, fake: None),
    "file": (None, check_file),
    "tensorboard": ("tensorboard", check_tensorboard),
    "wandb": ("wandb", check_wandb),
    "mlflow": ("fake", check_mlflow),
    "swanlab": ("fake", check_swanlab),
    "trackio": ("fake", check_trackio),
}


def test_mlflow_continues_the_run_of_its_folder(info, fake):
    module = fake("mlflow")
    module.results["search_runs"] = [types.SimpleNamespace(info=types.SimpleNamespace(run_id="first"))]
    Guard("mlflow", make_sink("mlflow", info)).close()
    assert ("start_run", (), {"run_id": "first"}) in module.calls
    assert "log_params" not in [call[0] for call in module.calls], "MLflow refuses another value of a parameter"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_run_folder_has_one_id_for_each_tracker(name, info, tmp_path):
    def run_id(root):
        root.mkdir(exist_ok=True)
        sink = object.__new__(SINKS.get(name))
        sink.info = RunInfo(root, info.project, info.experiment)
        return sink.run_id()

    assert run_id(tmp_path / "a") == run_id(tmp_path / "a") != run_id(tmp_path / "b")


def test_every_tracker_is_in_the_contract():
    assert set(CONTRACT) == set(supported()), "give the tracker a row of CONTRACT"


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name, info, fake, monkeypatch):
    package, check = CONTRACT[name]
    for variable in (
        "VERL_FILE_LOGGER_PATH",
        "VERL_FILE_LOGGER_ROOT",
        "TENSORBOARD_DIR",
        "SWANLAB_API_KEY",
        "SWANLAB_MODE",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    module = None
    if package == "fake":
        module = fake(name)
    elif package is not None:
        pytest.importorskip(package)
    sink = make_sink(name, info)
    assert not list(info.root.iterdir()), "a constructor touches nothing"
    guard = Guard(name, sink)
    for step, metrics in enumerate(METRICS):
        if step == 1:
            guard.table("val/generations", ROWS, step)
        guard.log(metrics, step)
    guard.close()
    assert not guard.disabled
    check(info, module)


@pytest.mark.parametrize("name", [name for name in CONTRACT if SINKS.declared(name).package])
def test_missing_package_is_said_at_once(name, info, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=f"tracker '{name}'.*pip install"):
        make_sink(name, info)


@pytest.mark.parametrize("name", ["clearml", "vemlp_wandb", "rl_insight"])
def test_tracker_that_is_not_there_yet(name, info):
    with pytest.raises(ConfigError, match=f"{name}.*not supported yet.*console, file, tensorboard, wandb"):
        make_sink(name, info)


def test_the_key_and_the_page_list_every_tracker():
    meaning = PPO.leaves["trainer.logger"].key.meaning
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text("utf-8")
    assert not [name for name in supported() if name not in meaning or f"{name}]`" not in page and name != "console"]


def test_unknown_tracker_names_the_nearest(info):
    with pytest.raises(ConfigError, match="'wandb'"):
        make_sink("wandbb", info)


def test_file_path_of_the_user(info, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "own" / "rows.jsonl"))
    guard = Guard("file", make_sink("file", info))
    guard.log({"x": float("nan")}, 7)
    guard.close()
    assert json.loads((tmp_path / "own" / "rows.jsonl").read_text()) == {"step": 7, "data": {"x": None}}


def test_tensorboard_shows_a_repeated_step_once(info):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((1, 1.0), (2, 9.0)):  # the second run continues after step 1
        guard = Guard("tensorboard", make_sink("tensorboard", info))
        for step in range(first, 4):
            guard.log({"x": value}, step)
        guard.close()
        time.sleep(1.1)  # event files are named by the second
    events = EventAccumulator(str(info.root / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [(1, 1.0), (2, 9.0), (3, 9.0)]


@pytest.mark.parametrize(
    ("environment", "login", "answers", "mode", "said"),
    [
        ({"WANDB_MODE": "disabled"}, False, False, "disabled", None),
        ({}, False, True, "offline", "no API key"),
        ({"WANDB_API_KEY": "k"}, False, False, "offline", "api.wandb.ai cannot be reached"),
        ({"WANDB_API_KEY": "k", "WANDB_BASE_URL": "http://own.host:8080"}, False, False, "offline", "own.host"),
        ({"WANDB_API_KEY": "k"}, False, True, "online", None),
        ({}, True, True, "online", None),
    ],
)
def test_wandb_goes_offline_by_itself(monkeypatch, caplog, environment, login, answers, mode, said):
    from verl.tracking.sinks import wandb

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb, "_has_login", lambda host: login)
    monkeypatch.setattr(wandb, "_answers", lambda host, port: answers)
    assert wandb._mode() == mode
    assert (said in caplog.text) if said else not caplog.text


class Failing:
    """A tracker that misbehaves in the call `where`."""

    def __init__(self, where, how):
        self.where, self.how, self.logged = where, how, []

    def _maybe(self, name):
        if name == self.where:
            self.how()

    def start(self):
        self._maybe("start")

    def log(self, metrics, step):
        self._maybe("log")
        self.logged.append(step)

    def table(self, name, rows, step):
        self._maybe("table")

    def close(self):
        self._maybe("close")


def explode():
    raise RuntimeError("server on fire")


@pytest.mark.parametrize("where", ["start", "log", "table", "close"])
@pytest.mark.parametrize("how", [explode, sys.exit])
def test_failure_disables_once_and_says_which_and_why(where, how, caplog):
    guard = Guard("wandb", Failing(where, how))
    for step in range(50):
        guard.table("t", ROWS, step)
        guard.log({"x": 1.0}, step)
    guard.close()
    assert guard.disabled
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'wandb'" in warnings[0]
    assert ("server on fire" if how is explode else "SystemExit") in warnings[0]


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_hang_never_holds_the_run(where, caplog):
    released, ends = threading.Event(), []
    guard = Guard("mlflow", Failing(where, lambda: ends.append(released.wait(60))), max_waiting=20, close_timeout_s=0.2)
    for step in range(100 if where != "close" else 5):
        guard.log({"x": 1.0}, step)
    guard.close()
    assert ends == []
    released.set()
    assert guard.disabled
    assert caplog.text.count("disabled for the rest of the run") == 1


def test_everything_arrives_in_order():
    sink = Failing("never", explode)
    guard = Guard("file", sink)
    for step in range(500):
        guard.log({}, step)
    guard.close()
    assert sink.logged == list(range(500))
