"""The page as a process: it serves while its parent lives, and the commands that start it."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.forked import fork
from tests.json_lines import read_lines
from tests.letters_task import REWARD, write_task
from tests.page.folders import make_run
from tests.processes import is_alive, wait_until

pytest.importorskip("starlette", reason="the extra `page` is not installed")
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")

import httpx

from verl.cli.main import main
from verl.cli.page import page_of
from verl.config import load_config
from verl.page import launch
from verl.parallel import child_processes
from verl.tracking import run_folder

_PARENT = """
import sys, time
from pathlib import Path
from verl.page.launch import start_page
page = start_page(Path(sys.argv[1]), "127.0.0.1", 0)
print(page.address, page.process.pid, flush=True)
time.sleep(120)
"""
_DEADLINE_S = 60.0


def test_the_page_lives_as_long_as_its_parent(tmp_path):
    folder = make_run(tmp_path / "run")
    environment = {**os.environ, "VERL_PAGE_CACHE": str(tmp_path / "cache")}
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        address, pid = parent.stdout.readline().split()
        base, _, token = address.partition("/?token=")
        answer = httpx.get(f"{base}/run/run", headers={"Authorization": f"Bearer {token}"}, timeout=_DEADLINE_S)
        assert answer.status_code == 200
        assert "step <b>3</b> of 10" in answer.text
        assert token not in " ".join(open(f"/proc/{pid}/cmdline").read().split("\0"))
        lines = []
        with httpx.stream(
            "GET", f"{base}/live", headers={"Authorization": f"Bearer {token}"}, timeout=_DEADLINE_S
        ) as live:
            events = live.iter_lines()
            from tests.page.folders import add_step

            states = list(iter(events.__next__, ": watching"))  # from here on changes count
            assert 'data: {"run":"run","step":3,"live":false}' in states
            add_step(folder, 4)
            for line in events:
                lines.append(line)
                if line.startswith("data: {"):
                    break
        assert lines[-1] == 'data: {"run":"run","step":4,"live":false}'
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(_DEADLINE_S)
    assert wait_until(lambda: not is_alive(pid), _DEADLINE_S), "the page lives"


def config(folder, *overrides):
    return load_config([f"trainer.default_local_dir={folder}", *overrides], check=False)


class TestOfARun:
    @pytest.fixture(autouse=True)
    def as_for_users(self, monkeypatch):
        monkeypatch.delenv("VERL_PAGE")

    def test_auto_starts_it_for_a_separate_process(self, tmp_path, capsys):
        """Its address is for the header of the run; a failed start has none."""
        with page_of(config(tmp_path / "run"), whole_process=True):
            assert run_folder.address_of_page.startswith("http://127.0.0.1:")
        assert run_folder.address_of_page == ""
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("overrides", [[], ["trainer.page.enable=False"]])
    def test_other_runs_have_none(self, tmp_path, overrides):
        with page_of(config(tmp_path / "run", *overrides), whole_process=bool(overrides)):
            assert run_folder.address_of_page == ""

    def test_other_ranks_have_none(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        with page_of(config(tmp_path / "run", "trainer.page.enable=True"), whole_process=True):
            assert run_folder.address_of_page == ""

    def test_without_the_extra(self, tmp_path, monkeypatch):
        from verl.errors import MissingExtraError

        monkeypatch.setattr(launch, "missing_package", lambda: "starlette")
        with page_of(config(tmp_path / "run"), whole_process=True):
            assert run_folder.address_of_page == ""
        with (
            pytest.raises(MissingExtraError, match=r"pip install '"),
            page_of(config(tmp_path / "run", "trainer.page.enable=True"), whole_process=True),
        ):
            pass


@pytest.mark.slow
def test_killing_the_page_changes_nothing(tiny_llama, tmp_path):
    slow = f"    time.sleep(0.1 * pathlib.Path({str(tmp_path / 'slow')!r}).exists())\n    text ="
    task = write_task(tmp_path, reward="import pathlib, time\n" + REWARD.replace("    text =", slow))
    rows = [trained(tiny_llama, task, tmp_path / name, kill=name == "killed") for name in ("left", "killed")]
    assert len(rows[0]) == len(rows[1]) == NUM_STEPS
    for unwatched, killed in zip(*rows, strict=True):
        same = [name for name in unwatched if not name.startswith(MEASURED_S)]
        assert {name: killed[name] for name in same} == {name: unwatched[name] for name in same}
        assert unwatched["actor/grad_norm"] > 0


NUM_STEPS = 12
MEASURED_S = ("time", "timing", "perf/", "rollout/seconds", "rollout/busy_s", "rollout/idle_s", "rollout/last_group/")


def trained(model, task, folder, *, kill):
    """The rows of metrics of a run in a separate process. Its page server gets requests; `kill` ends it after a step. While
    the task has the file `slow`, steps last long enough for that."""
    command = [
        sys.executable, "-m", "verl", "train", "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}",
        f"data.train_files={task}/train.jsonl", "data.val_files=[]", "data.train_batch_size=4", "data.max_prompt_length=64",
        "data.max_response_length=6", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32", f"reward.custom_reward_function.path={task}/reward.py",
        f"trainer.total_training_steps={NUM_STEPS}", "trainer.page.enable=True", f"trainer.default_local_dir={folder}",
        "trainer.logger=[file]",
    ]  # fmt: skip
    said = folder.with_suffix(".log")
    environment = {**os.environ, "VERL_PAGE_CACHE": f"{folder}-cache"}
    (task / "slow").touch()
    with said.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
        try:
            metrics = folder / "metrics.jsonl"
            took_step = wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n"), _DEADLINE_S)
            assert took_step, said.read_text()[-2000:]
            base, _, token = re.search(r"page: (\S+)", said.read_text()).group(1).partition("/?token=")
            key = {"Authorization": f"Bearer {token}"}
            with httpx.stream("GET", f"{base}/live", headers=key, timeout=_DEADLINE_S):
                assert httpx.get(f"{base}/run/{folder.name}", headers=key, timeout=_DEADLINE_S).status_code == 200
                if kill:
                    (page,) = [
                        p for p in psutil.Process(process.pid).children(recursive=True) if "verl.page" in p.cmdline()
                    ]
                    page.kill()
                    assert metrics.read_text().count("\n") < NUM_STEPS, "the run had ended before the kill"
            (task / "slow").unlink()
            assert process.wait(_DEADLINE_S) == 0, said.read_text()[-2000:]
        finally:
            process.kill()
    return read_lines(metrics)


def spare_one_descendant():
    page_process = subprocess.Popen(["sleep", "60"])
    ended = subprocess.Popen(["sleep", "60"])
    try:
        child_processes.spare(page_process.pid)
        child_processes.end_descendants()
        assert ended.wait(_DEADLINE_S) == -signal.SIGKILL
        assert page_process.poll() is None
    finally:
        page_process.kill()
        page_process.wait()


def test_the_supervisor_spares_the_page():
    """In another process: the descendants of this one include the server that later tests fork."""
    process = fork(spare_one_descendant)
    process.join(2 * _DEADLINE_S)
    assert process.exitcode == 0


def test_view_refuses_another_folder(tmp_path, capsys):
    assert main(["view", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_view_names_a_port_that_is_taken(tmp_path, capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(make_run(tmp_path / "run")), "--port", str(port)]) == 2
    assert "Choose another port" in capsys.readouterr().err
