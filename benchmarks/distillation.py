"""Students that learn from a GRPO-trained policy without rewards: their share of its gain in held-out reward.

    make train                              # the teacher: work/runs/grpo_smollm2
    python benchmarks/distillation.py       # one student per row of STUDENTS, 20 steps each

Every student starts from the teacher's start and samples the prompts of other seeds. Rewards are computed only for the
report. The GRPO run's own validations are the teacher's row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from peer_env import ROOT

LOSS = "distillation.distillation_loss"
_NO_JSD = f"{LOSS}.jsd_beta=0.5"  # the default: a key that acts only on jsd is refused with other losses
STUDENTS = {
    "reverse KL, top 32": [],
    "forward KL, top 32": [f"{LOSS}.loss_mode=forward_kl_topk", _NO_JSD],
    "JSD 0.5, top 32": [f"{LOSS}.jsd_beta=0.5"],
    "k1, policy gradient": [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True", _NO_JSD],
    "reverse KL, bfloat16 dithered": ["actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"],
    "reverse KL, bfloat16 nearest": [
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        "actor_rollout_ref.actor.fsdp_config.master_rounding=nearest",
    ],
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--teacher", type=Path, default=ROOT / "work/runs/grpo_smollm2", help="run folder of the GRPO run")
    add("--students", nargs="*", default=list(STUDENTS), choices=list(STUDENTS), help="default: all")
    add("--folder", type=Path, default=ROOT / "work/runs/distillation", help="where the students' run folders go")
    add("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of every student")
    add("--limit-s", type=float, default=1800.0, help="longest that one student may take")
    return parser.parse_args(argv)


def validations(folder: Path) -> list[dict[str, Any]]:
    """The validations of a run, in order."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "val/reward" in row]


def num_samples(folder: Path) -> int:
    """Samples that a run has trained on."""
    return sum(len(file.read_text().splitlines()) for file in (folder / "samples" / "train").glob("*.jsonl"))


def train_student(name: str, options: argparse.Namespace) -> Path:
    """The run folder of a student, trained by `verl train`."""
    folder = options.folder / name.replace(",", "").replace(" ", "_")
    checkpoint = max(options.teacher.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    command = [
        sys.executable, "-m", "verl", "train", "--config-name", "distill_smollm2",
        f"distillation.teacher_models.teacher_model.model_path={checkpoint / 'actor/huggingface'}",
        f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable", "trainer.save_freq=-1", "trainer.logger=[file]",
        *STUDENTS[name], *options.ours,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, timeout=options.limit_s)
    return folder


def main() -> None:
    options = parse()
    of_teacher = validations(options.teacher)
    start, end = of_teacher[0]["val/reward"], of_teacher[-1]["val/reward"]
    print(f"{'student':32} {'samples':>8} {'held-out reward':>20} {'share of the gain':>18} {'greedy':>8}")
    print(f"{'the teacher (GRPO)':32} {num_samples(options.teacher):8} {start:9.3f} -> {end:7.3f} {'1.00':>18}")
    for name in options.students:
        folder = train_student(name, options)
        before, after = validations(folder)[0], validations(folder)[-1]
        share = (after["val/reward"] - before["val/reward"]) / (end - start)
        gain = f"{before['val/reward']:9.3f} -> {after['val/reward']:7.3f}"
        greedy = after.get("val/greedy", float("nan"))
        print(f"{name:32} {num_samples(folder):8} {gain:>20} {share:18.2f} {greedy:8.3f}", flush=True)


if __name__ == "__main__":
    main()
