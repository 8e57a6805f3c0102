"""Several processes with a gloo group between them, for tests: started, given a deadline, and gone afterwards."""

import fcntl
import importlib
import json
import os
import re
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import fork


def run_ranks(checks: str, num_ranks: int, folder: Path, timeout_s: float = 150.0, names: str = "") -> None:
    """Run every `check_*` function of the module `checks` with `num_ranks` among its attribute `ranks`, on all ranks, if
    its name has the pattern `names`. Rank 0 writes its results. A check that raises fails the caller with its traceback."""
    store = tempfile.mktemp(dir=folder)
    processes = [
        fork(_rank, checks, rank, num_ranks, store, str(folder), names, daemon=True) for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    errors = [p.read_text() for p in sorted(folder.glob(f"error-{num_ranks}-*"))]
    assert not errors, "\n".join(errors)
    assert all(p.exitcode == 0 for p in processes), f"exit codes {[p.exitcode for p in processes]}"
    assert results_file(folder, num_ranks, names).exists()


def results_file(folder: Path, num_ranks: int, names: str) -> Path:
    return folder / f"results-{num_ranks}{names}.json"


def _rank(checks: str, rank: int, num_ranks: int, store: str, folder: str, names: str) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    results: dict[str, dict] = {}
    module = importlib.import_module(checks)
    current = ""
    try:
        for current, function in list(vars(module).items()):  # a warning adds a name
            takes_part = current.startswith("check_") and re.search(names, current)
            if takes_part and num_ranks in getattr(function, "ranks", ()):
                results[current] = function(Path(folder))
        if rank == 0:
            results_file(Path(folder), num_ranks, names).write_text(json.dumps(results))
    except BaseException:
        (Path(folder) / f"error-{num_ranks}-{rank}").write_text(f"rank {rank}, {current}:\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()


def results_once(
    checks: str, num_ranks: int, tmp_path_factory: Any, worker_id: str, timeout_s: float = 150.0, names: str = ""
) -> dict[str, Any]:
    """The results of `run_ranks` for the checks. They run once for all test processes, in one folder for all `num_ranks`."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / checks
    folder.mkdir(exist_ok=True)
    done = results_file(folder, num_ranks, names)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            run_ranks(checks, num_ranks, folder, timeout_s, names)
    results: dict[str, Any] = json.loads(done.read_text())
    return results
