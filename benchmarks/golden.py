"""Runs whose metrics and weights a refactoring must not change, recorded before it and compared after it.

    python benchmarks/golden.py record work/golden     # before: every run, its metrics and the digests of its checkpoint
    python benchmarks/golden.py compare work/golden    # after: the same runs again; exit code 1 if anything differs

Each run trains a tiny random model for six steps. Metrics of time, memory and throughput are left out; everything else is
compared to the last digit, and so are the files of the last checkpoint. A recording holds on the machine that made it, since
processors differ in the order of their sums; the file names the processor and the versions.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "chaos")])

from chaos_compare import checkpoint_digests
from chaos_task import RUNTIMES, Runtime, Task, make_task
from report import machine, versions

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
LIMIT_S = 600.0
_CRITIC = ("algorithm.adv_estimator=gae", "critic.optim.lr=0.002", "critic.fsdp.dtype=float32")
_LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=True")
_BF16 = ("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",)  # the last value of a key counts
RUNS: Mapping[str, Runtime] = {
    "grpo": Runtime((), ()),
    "grpo_bfloat16": Runtime(_BF16, ()),
    "ppo": Runtime((*_CRITIC, "critic.model.path={model}"), ()),
    "lora": Runtime(_LORA, ()),
    **{name: RUNTIMES[name] for name in ("async", "torchrun", "ray")},
    **{name: runtime for name, runtime in RUNTIMES.items() if name.startswith("four-")},
}
_NAMES_A_FOLDER = "adapter_config.json"  # of the model under the adapters
_NOT_OF_THE_WORK = ("timing", "perf/", "memory", "switch_peak", "sync_s", "seconds", "time", "tokens_per", "last_group")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folder", type=Path, help="where the recording lies")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="verl-golden-") as scratch:
        task = make_task(Path(scratch), steps=STEPS)
        for name in arguments.runs:
            current, path = train(task, name), arguments.folder / f"{name}.json"
            if arguments.action == "record":
                facts = {"machine": machine(), "versions": versions("torch", "transformers")}
                path.write_text(json.dumps({**facts, **current}, indent=1) + "\n")
                print(f"{name}: recorded")
            else:
                wrong = differences(json.loads(path.read_text()), current)
                failed |= bool(wrong)
                print(f"{name}: {'; '.join(wrong[:5]) or 'equal'}")
    return int(failed)


def train(task: Task, name: str) -> dict[str, Any]:
    """Metrics by step and checkpoint digests of one run."""
    run, folder = RUNS[name], task.folder / name
    keys = [key.replace("{model}", str(task.model)) for key in run.keys]
    command = [sys.executable, *run.launcher, "-m", "verl.trainer.main_ppo", *task.keys, *keys]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command.append(f"trainer.default_local_dir={folder}")
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"The run {name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    digests = checkpoint_digests(folder / f"global_step_{STEPS}")
    return {
        "metrics": {str(row["step"]): of_the_work(row) for row in rows},
        "checkpoint": {f: d for f, d in digests.items() if not f.endswith(_NAMES_A_FOLDER)},
    }


def of_the_work(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that equal work makes equal."""
    return {k: v for k, v in row.items() if not any(part in k for part in _NOT_OF_THE_WORK)}


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Differences of a run from its recording. New metrics are no difference; lost metrics are."""
    wrong = []
    for step, metrics in recorded["metrics"].items():
        now = current["metrics"].get(step, {})
        changed = [k for k, v in metrics.items() if now.get(k) != v]
        wrong += [f"step {step}: {k} is {now.get(k)}, was {metrics[k]}" for k in changed]
    files = recorded["checkpoint"].keys() | current["checkpoint"].keys()
    changed = sorted(f for f in files if recorded["checkpoint"].get(f) != current["checkpoint"].get(f))
    return wrong + [f"the checkpoint's {f} differs" for f in changed]


if __name__ == "__main__":
    raise SystemExit(main())
