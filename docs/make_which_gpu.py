"""Write docs/which-gpu.md: the fewest GPUs for each size of model, and the planner's seconds of a step on them."""

from __future__ import annotations

from pathlib import Path

from verl.errors import ConfigError
from verl.planner import Cluster, Dataflow, Lengths, Workload, known_shape, search

PAGE = Path(__file__).with_name("which-gpu.md")
START, END = "<!-- table: written by docs/make_which_gpu.py, do not edit -->", "<!-- end of the table -->"
MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
GPUS = {"a100_sxm": "A100 80 GB", "h100_sxm": "H100 80 GB", "h200_sxm": "H200 141 GB", "b200_sxm": "B200 180 GB"}
COUNTS = (1, 2, 4, 8, 16, 32)
WORK = Workload(num_prompts=128, samples=8, prompt_mean=300, response=Lengths.of(mean=600, longest=2048))


def step_s(model: str, gpu: str, count: int) -> float | None:
    """Seconds of a GRPO step of `model` on `count` GPUs; None where it does not fit."""
    try:
        return search(Dataflow.ppo(known_shape(model)), Cluster.of(gpu, count), WORK)[0].step_s
    except ConfigError:
        return None


def cell(model: str, gpu: str) -> str:
    """The fewest GPUs, with the seconds of a step on them and on a full node."""
    times = {count: seconds for count in COUNTS if (seconds := step_s(model, gpu, count)) is not None}
    fewest = min(times)
    more = f"; 8: {times[8]:.0f} s" if fewest < 8 else ""
    return f"{fewest}: {times[fewest]:.0f} s{more}"


def table() -> str:
    """The table in Markdown."""
    lines = [f"| model | {' | '.join(GPUS.values())} |", "|---" * (len(GPUS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {model} | {' | '.join(cell(model, gpu) for gpu in GPUS)} |" for model in MODELS)])


def page() -> str:
    """The page with its present table."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
