"""Train, and put curves for the guides of algorithms into docs/images: python docs/make_curves.py NAME ...

`presets`, `ppo`, `lora` and `preferences` train a tiny random model, some seconds a curve. `grpo` and `critic` show the runs of
SmolLM2 that the guides start, from their run folders.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57")
WIDTH, HEIGHT, GAP, TOP = 210, 110, 42, 26  # pixels of a panel
Curves = Mapping[str, Sequence[float]]  # label -> a value for each step


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each training step of a run."""
    listed = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in listed if row["step"] > 0]


def picture(panels: Mapping[str, Curves]) -> str:
    """An SVG with a panel for each title of `panels`."""
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    columns = min(len(panels), 4)
    num_rows = -(-len(panels) // columns)
    width, height = columns * (WIDTH + GAP) + GAP, num_rows * (HEIGHT + GAP + TOP) + TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, curves) in enumerate(panels.items()):
        x = GAP + number % columns * (WIDTH + GAP)
        parts += panel(x, TOP + number // columns * (HEIGHT + GAP + TOP) + 6, title, curves, labels)
    if len(labels) > 1:
        names = "".join(
            f'<tspan fill="{color}" dx="14">{label}</tspan>' for label, color in zip(labels, COLORS, strict=False)
        )
        parts.append(f'<text x="{GAP}" y="{height - 8}">{names}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(x: int, y: int, title: str, curves: Curves, labels: list[str]) -> Iterator[str]:
    values = [value for curve in curves.values() for value in curve]
    low, high = (round(value, 6) for value in (min(0.0, *values), max(0.0, *values)))
    num_steps = max(map(len, curves.values()))
    yield f'<text x="{x}" y="{y - 6}" font-weight="bold" fill="#222222">{title}</text>'
    yield f'<path d="M{x},{y} v{HEIGHT} h{WIDTH}" fill="none" stroke="#888888"/>'
    ticks = (x - 4, y + 9, high), (x - 4, y + HEIGHT, low)
    yield from (f'<text x="{a}" y="{b}" text-anchor="end" fill="#666666">{value:.3g}</text>' for a, b, value in ticks)
    yield f'<text x="{x + WIDTH}" y="{y + HEIGHT + 14}" text-anchor="end" fill="#666666">step {num_steps}</text>'
    for label, curve in curves.items():
        places = " ".join(
            f"{x + WIDTH * i / max(num_steps - 1, 1):.1f},{y + HEIGHT * (high - value) / ((high - low) or 1):.1f}"
            for i, value in enumerate(curve)
        )
        color = COLORS[labels.index(label)]
        yield f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>'


def letters(completions: Sequence[str], **columns: object) -> list[float]:
    """The share of letters in each completion."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def tiny_run(name: str, algorithm: str, steps: int, lr: float, **keys: object) -> list[dict[str, Any]]:
    """The steps of a run of a tiny random model that learns to write letters."""
    import verl
    from verl.models.tiny import make_tiny_model

    folder = ROOT / "outputs" / "curves"
    model = make_tiny_model(folder / "model")
    prompts = [{"prompt": f"Write {n}."} for n in range(64)]
    run = verl.train(
        model, prompts, letters, algorithm=algorithm, output_dir=folder / name,
        config={"data": {"train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 16}, **keys},
        actor_rollout_ref={
            "actor": {"optim": {"lr": lr}, "fsdp_config": {"dtype": "float32"}},
            "rollout": {"n": 8},
        },
        trainer={"total_training_steps": steps, "total_epochs": steps, "resume_mode": "disable", "logger": ["file"]},
    )  # fmt: skip
    return rows(run.folder)


def presets() -> dict[str, Curves]:
    from verl.config.presets import PRESETS

    steps = {name: tiny_run(f"preset-{name}", name, 20, 1e-3) for name in PRESETS}
    return {name: {"mean reward": [row["critic/score/mean"] for row in listed]} for name, listed in steps.items()}


def compared(metrics: Mapping[str, str], runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Curves]:
    """A panel for each metric (metric -> title), with a curve for each run that has it."""
    return {
        title: {
            label: [on_scale(metric, row[metric]) for row in listed if metric in row] for label, listed in runs.items()
        }
        for metric, title in metrics.items()
    }


def on_scale(metric: str, value: float) -> float:
    """`value` of a scale on which a run that fails leaves a healthy one visible."""
    if metric == "critic/vf_explained_var":
        return max(value, -1.0)
    return math.log10(value) if metric in ("critic/vf_loss", "critic/grad_norm") else value


CRITIC = {
    "critic/score/mean": "mean reward", "critic/vf_explained_var": "explained variance (-1: or less)",
    "critic/vf_loss": "value loss, log10",
}  # fmt: skip
POLICY = {
    "critic/score/mean": "mean reward", "response/distinct_ratio": "share of different responses",
    "actor/entropy": "entropy, nats", "actor/grad_norm": "gradient norm",
}  # fmt: skip


def ppo() -> dict[str, Curves]:
    rates = {"critic.optim.lr=1e-3": 1e-3, "critic.optim.lr=1": 1.0}
    return compared(
        {**CRITIC, "critic/grad_norm": "critic's gradient norm, log10"},
        {label: tiny_run(f"ppo-{lr}", "ppo", 20, 1e-3, **{"critic.optim.lr": lr}) for label, lr in rates.items()},
    )


def lora() -> dict[str, Curves]:
    adapters = {"actor_rollout_ref.model.lora_rank": 16}
    cases: tuple[tuple[str, float, dict[str, object]], ...] = (
        ("all weights, lr=1e-3", 1e-3, {}), ("adapters, lr=1e-3", 1e-3, adapters), ("adapters, lr=1e-2", 1e-2, adapters)
    )  # fmt: skip
    runs = {label: tiny_run(f"lora-{n}", "grpo", 20, lr, **keys) for n, (label, lr, keys) in enumerate(cases)}
    return compared({"critic/score/mean": "mean reward", "actor/grad_norm": "gradient norm"}, runs)


def preferences() -> dict[str, Curves]:
    """DPO of the tiny model on pairs of an even and an odd number, with held-out pairs of other numbers."""
    import verl
    from verl.models.tiny import make_tiny_model

    folder, runs = ROOT / "outputs" / "curves", {}
    pairs = [{"prompt": f"Double {n}.", "chosen": f" {2 * n}", "rejected": f" {2 * n + 1}"} for n in range(10, 74)]
    for lr in (1e-3, 1e-1):
        run = verl.dpo(
            make_tiny_model(folder / "model"), pairs[:48], eval_data=pairs[48:], output_dir=folder / f"dpo-{lr}",
            config={"data": {"train_batch_size": 16}, "optim": {"lr": lr}, "engine": {"dtype": "float32"}},
            trainer={
                "total_training_steps": 24, "total_epochs": 8, "test_freq": 1, "resume_mode": "disable", "logger": ["file"]
            },
        )  # fmt: skip
        runs[f"optim.lr={lr:g}"] = rows(run.folder)
    metrics = {
        "train/loss": "loss", "val/rewards/accuracies": "held-out accuracy", "train/rewards/margins": "margin of the rewards",
        "train/logps/chosen": "log-prob of chosen",
    }  # fmt: skip
    return compared(metrics, runs)


def grpo() -> dict[str, Curves]:
    names = {"lr=1e-5": "healthy", "lr=1e-3": "sick"}  # label -> run folder
    return compared(POLICY, {label: rows(ROOT / "work" / "runs" / name) for label, name in names.items()})


def critic() -> dict[str, Curves]:
    return compared(
        {**CRITIC, "critic/vpred_mean": "mean of the values"}, {"ppo_smollm2": rows(ROOT / "work" / "runs" / "critic")}
    )


PICTURES = (presets, ppo, lora, preferences, grpo, critic)

if __name__ == "__main__":
    for name in sys.argv[1:]:
        panels = {make.__name__: make for make in PICTURES}[name]()
        (ROOT / "docs" / "images" / f"curves-{name}.svg").write_text(picture(panels), encoding="utf-8")
