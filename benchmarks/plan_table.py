"""Table of recommended plans for GRPO, for docs/planner.md: `python benchmarks/plan_table.py`.

512 prompts x 8 samples (671B: 128 x 16), prompts of 300 tokens, responses of 1000 on average and 4096 at most, a reference
policy. Smaller models with FSDP, larger ones with Megatron's layouts. H100, synchronous.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.planner import Cluster, Dataflow, Lengths, Rules, RunPlan, Space, Workload, known_shape, search

FSDP = Space(zero=(3,), pipelines=(1,), replica_in_node=True)
MEGATRON = Space(zero=(1,), contexts=(1,), same_sizes=True, replica_in_node=True)
# model, numbers of devices, choices
ROWS = (
    ("Qwen2.5-0.5B", (1, 8), FSDP),
    ("Qwen2.5-1.5B", (1, 8), FSDP),
    ("Qwen2.5-3B", (2, 8), FSDP),
    ("Qwen2.5-7B", (4, 8, 16, 32), FSDP),
    ("Qwen2.5-14B", (8, 16, 32), FSDP),
    ("Qwen2.5-32B", (16, 32, 64), FSDP),
    ("Qwen2.5-72B", (32, 64, 128), MEGATRON),
    ("Qwen3-30B-A3B", (16, 32), MEGATRON),
    ("Qwen3-235B-A22B", (64, 128, 256), MEGATRON),
    ("DeepSeek-V3", (256, 512), MEGATRON),
)


def row(name: str, devices: int, space: Space) -> str:
    """One line of the table, in Markdown."""
    shape = known_shape(name)
    prompts, samples = (128, 16) if name == "DeepSeek-V3" else (512, 8)
    work = Workload(prompts, samples, 300, Lengths.of(1000, 4096), prompt_longest=512, shares_prompts=True)
    plan = search(Dataflow.ppo(shape, None, shape), Cluster.of("h100_sxm", devices), work, Rules(space=space))[0]
    actor = plan.option("actor")
    assert actor.layout is not None
    assert actor.rollout is not None
    cells = [name, str(devices), plan.placement(), actor.layout.text(), actor.rollout.text(), f"{peak(plan):.0f}"]
    cells += [f"{actor.times[kind].seconds:.0f}" for kind in ("generate", "train")] + [f"{plan.step_s:.0f}"]
    return f"| {' | '.join(cells)} |"


def peak(plan: RunPlan) -> float:
    """GB of the fullest device."""
    return max(sum(o.resident for o in chosen) + max(o.peak for o in chosen) for chosen in plan.options) / 1e9


def main() -> None:
    print("| model | H100 | placement | training of the actor | rollout | GB | generation s | update s | step s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, sizes, space in ROWS:
        for devices in sizes:
            began = time.perf_counter()
            print(row(name, devices, space), flush=True)
            print(f"{name} on {devices}: searched in {time.perf_counter() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
