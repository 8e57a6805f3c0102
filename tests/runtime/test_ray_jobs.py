"""Jobs of a Ray cluster: `examples/clusters/ray_job.sh` sends the folder of a user; the job API watches and stops them."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.commands import ran
from tests.letters_task import overrides, write_reward, write_task
from tests.processes import wait_until
from tests.run.conftest import Run
from tests.runtime.ranks import ROOT, environment, still_there
from verl.parallel.collectives import free_port

pytestmark = pytest.mark.slow
pytest.importorskip("ray.dashboard.modules.job.sdk", reason="needs the extra ray")

BIN = Path(sys.executable).parent
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "ray-client-server-port")
# ports of workers are chosen by the system: another cluster may have the ports of the default
HEAD = (
    "start --head --block --num-cpus=3 --min-worker-port=0 --max-worker-port=0 --object-store-memory=100000000".split()
)


@pytest.fixture(scope="module")
def jobs():
    """The job API of a cluster on this machine, whose processes have all ended afterwards."""
    from ray.job_submission import JobSubmissionClient

    place = tempfile.mkdtemp(prefix="ray")  # a folder of pytest is too long for the names of Ray's sockets
    ports = {name: free_port() for name in PORTS}
    options = [f"--{name}={port}" for name, port in ports.items()]
    settings = environment(RAY_AUTH_MODE="disabled", PATH=f"{BIN}:{os.environ['PATH']}", PYTHONPATH=ROOT)
    with open(f"{place}/head.txt", "w") as log:
        head = subprocess.Popen(
            [BIN / "ray", *HEAD, *options, f"--temp-dir={place}", "--disable-usage-stats"],
            cwd=place, env=settings, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    client = None

    def answers():
        nonlocal client
        try:
            client = JobSubmissionClient(f"http://127.0.0.1:{ports['dashboard-port']}")
        except (ConnectionError, RuntimeError):
            return False
        return True

    try:
        assert wait_until(lambda: head.poll() is not None or answers()), Path(place, "head.txt").read_text()
        assert head.poll() is None, Path(place, "head.txt").read_text()
        yield client
    finally:
        processes = processes_of(place)
        head.terminate()
        wait_until(lambda: head.poll() is not None, 30)
        for process in still_there(processes, grace_s=10):
            process.kill()
        head.wait()
        shutil.rmtree(place)


def processes_of(mark):
    """Those with `mark` in the command line, or in the environment: agents of Ray have it only there."""

    def has_it(process):
        try:
            return any(mark in word for word in (*process.cmdline(), *process.environ().values()))
        except psutil.Error:
            return False

    return list(filter(has_it, psutil.process_iter()))


@pytest.fixture
def folder(tmp_path):
    """The folder of a user that travels to the cluster: data and reward function."""
    (tmp_path / "work").mkdir()
    return write_task(tmp_path / "work")


def submit(jobs, model, folder, *changes):
    """(name of the job that `ray_job.sh` has sent, its run) on two devices of the cluster."""
    run = Run(folder.parent / "run")
    settings = overrides(
        model, ".", "data.val_files=[]", "reward.debug=False", f"trainer.default_local_dir={run.folder}", *changes
    )
    done = ran(
        "bash", ROOT / "examples/clusters/ray_job.sh", *settings, cwd=folder,
        env=environment(
            RAY_API_SERVER_ADDRESS=jobs.get_address(), RAY_AUTH_MODE="disabled", PATH=f"{BIN}:{os.environ['PATH']}",
            NNODES=1, GPUS=2,
        ),
    )  # fmt: skip
    return re.search(r"raysubmit_\w+", done.stdout)[0], run


def is_over(jobs, job):
    time.sleep(0.2)  # between two questions to a busy machine
    return jobs.get_job_status(job).is_terminal()


def ended(jobs, job):
    """(state, log) of a job that has ended and left no process."""
    from ray.util.state import list_actors

    assert wait_until(lambda: is_over(jobs, job), 240), jobs.get_job_logs(job)
    alive = [("state", "=", "ALIVE")]
    assert wait_until(lambda: not processes_of(job) and not list_actors(jobs.get_address(), filters=alive), 60)
    return str(jobs.get_job_status(job)), jobs.get_job_logs(job)


def test_a_job_trains_on_the_cluster(jobs, tiny_llama, folder):
    job, run = submit(jobs, tiny_llama, folder, "trainer.save_freq=2")
    state, log = ended(jobs, job)
    assert state == "SUCCEEDED", log
    assert [row["step"] for row in run.rows] == [1, 2]
    assert (run.folder / "global_step_2" / "manifest.json").exists()


def test_the_log_of_a_job_that_fails_has_our_sentence(jobs, tiny_llama, folder):
    job, _ = submit(jobs, tiny_llama, folder, "data.train_files=trian.jsonl")
    state, log = ended(jobs, job)
    assert state == "FAILED", log
    sentence = r"The data file trian.jsonl does not exist .*; did you mean 'train.jsonl'"
    assert re.search(sentence, log.splitlines()[-1]), log


def test_a_job_that_is_stopped_saves_its_step(jobs, tiny_llama, folder):
    """Its phase takes longer than Ray's 3 s between SIGTERM and SIGKILL, which runtime_env.yaml raises."""
    scoring = folder / "scoring"
    write_reward(
        folder, f"import pathlib, time\npathlib.Path('{scoring}').touch()\ntime.sleep(0.5)\nreturn len(solution_str)"
    )
    job, run = submit(jobs, tiny_llama, folder, "trainer.total_training_steps=1000", "trainer.total_epochs=1000")

    def comes(file):
        wait_until(lambda: file.exists() or is_over(jobs, job), 240)
        assert file.exists(), jobs.get_job_logs(job)

    comes(run.folder / "metrics.jsonl")
    scoring.unlink()
    comes(scoring)
    jobs.stop_job(job)
    state, log = ended(jobs, job)
    assert state == "STOPPED", log
    assert "Stopped on request after step" in log
    assert (run.folder / f"global_step_{run.rows[-1]['step']}" / "manifest.json").exists()
