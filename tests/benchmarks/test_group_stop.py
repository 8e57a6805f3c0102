"""SIGTERM for the process group of a run, as `timeout`, SLURM and terminals send it, or for each of its processes (systemd).

    pytest -m slow tests/benchmarks/test_group_stop.py

The signal comes at a random moment of a step. The run saves after the last step that it wrote down, ends within 30 s, and
leaves no process behind.
"""

import contextlib
import os
import random
import signal
import time
from dataclasses import replace

import psutil
import pytest
from chaos_run import LIMIT_S, Victim
from chaos_task import make_task

from verl.checkpoint.store import CheckpointStore
from verl.tracking.files import read_json_rows


def terminate_each(run, rng):
    """Ray's agents overwrite the environment that identifies processes of a run."""
    first = psutil.Process(run.process.pid)
    processes = list({first, *first.children(recursive=True), *run.left_over()})
    rng.shuffle(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True], ids=["group", "each"])
@pytest.mark.parametrize("kind", ["local", "torchrun", "ray"])
def test_a_run_saves_and_ends_when_it_is_asked_to(kind, each, tmp_path):
    rng, task = random.Random(1), make_task(tmp_path, steps=100_000)
    task = replace(task, keys=tuple(key for key in task.keys if not key.startswith("trainer.save_freq=")))
    run = Victim(task, kind, "run")
    try:
        assert run.until(lambda: run.has_begun(2), "no step was taken"), run.last_words()
        time.sleep(rng.random() * 0.5)  # about a step
        until = time.monotonic() + LIMIT_S
        if each:
            terminate_each(run, rng)
        else:
            os.killpg(run.process.pid, signal.SIGTERM)
        while run.process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert run.process.poll() is not None
        assert run.left_in_the_end() == []
    finally:
        run.end()
    (*_, last) = read_json_rows(run.folder / "metrics.jsonl")
    assert CheckpointStore(run.folder).find().name == f"global_step_{last['step']}"
