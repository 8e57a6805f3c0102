"""Whole runs of `verl train`: their data and reward files, their metrics, the seconds of their steps."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import string
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 2  # steps that do not count
REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.5):
    time.sleep(seconds)
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""
_RUN_LIMIT_S = 1800.0

Row = dict[str, Any]  # a line of metrics.jsonl


def write_prompts(file: Path, texts: Sequence[str]) -> None:
    """A data file of `verl train` with a row for each text."""
    rows = [
        {"data_source": "letters", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"style": "rule", "ground_truth": "letters"}}
        for text in texts
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(run: Path, changes: Sequence[str], *, threads: int | None = None) -> list[Row]:
    """Run `verl train` in the new folder `run`; returns its metrics of every step. `threads`: threads of each process (None:
    as the environment says)."""
    command = [sys.executable, "-m", "verl", "train", *changes, f"trainer.default_local_dir={run}"]
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=_RUN_LIMIT_S)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_seconds(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds between the rows of two steps that follow one another, after the warm-up."""
    times = [row["time"] for row in rows if row["step"] >= WARM_UP]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True)
class Side:
    name: str
    devices: int = 1
    changes: tuple[str, ...] = ()


def by_tokens(max_tokens: int) -> tuple[str, ...]:
    """Micro-batches of at most so many tokens for every role."""
    keys = {
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max_tokens,
        "critic.ppo_max_token_len_per_gpu": max_tokens,
    }
    return assigned(keys)


def make_model(folder: Path) -> Path:
    """Large enough that a step is arithmetic: products of 256 x 1024 weights."""
    from verl.models.tiny import make_tiny_model

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    return make_tiny_model(folder / "model", initializer_range=0.02, **sizes)


def overrides(model: Path, folder: Path, lengths: Sequence[Sequence[int]], response_tokens: int) -> tuple[str, ...]:
    """Keys of a PPO run with prompts of `lengths` [step][prompt] tokens in this order; writes its files into `folder`."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    (folder / "template.jinja").write_text("{{ messages[0]['content'] }}")  # so that a letter is a token
    write_prompts(folder / "train.jsonl", texts_of([length for step in lengths for length in step]))
    group = "actor_rollout_ref"
    keys = {
        "algorithm.adv_estimator": "gae",
        f"{group}.model.path": model,
        f"{group}.model.custom_chat_template": folder / "template.jinja",
        f"{group}.model.enable_gradient_checkpointing": False,
        "critic.model.enable_gradient_checkpointing": False,
        f"{group}.actor.fsdp_config.dtype": "float32",
        f"{group}.actor.ppo_mini_batch_size": len(lengths[0]),
        f"{group}.actor.use_kl_loss": True,
        f"{group}.rollout.ignore_eos": True,
        "data.train_files": folder / "train.jsonl",
        "data.val_files": "[]",
        "data.shuffle": False,
        "data.train_batch_size": len(lengths[0]),
        "data.max_prompt_length": max(max(step) for step in lengths),
        "data.max_response_length": response_tokens,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.reward_kwargs.seconds": 0,
        "reward.num_workers": 1,
        "trainer.device": "cpu",
        "trainer.page.enable": False,  # an additional process next to the measured processes
        "trainer.logger": "[file]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": len(lengths),
    }
    return assigned(keys)


def texts_of(lengths: Sequence[int]) -> list[str]:
    """A text of each length, each with different letters, since samples of equal prompts would share their computation."""
    return ["".join(random.Random(i).choices(string.ascii_lowercase, k=length)) for i, length in enumerate(lengths)]


def device_keys(side: Side) -> tuple[str, ...]:
    """Keys for the devices of `side`: processes of Ray, one thread each."""
    if side.devices == 1:
        return ()
    return f"trainer.n_gpus_per_node={side.devices}", f"ray_kwargs.ray_init.num_cpus={side.devices}"


def measure(
    sides: Sequence[Side], common: Sequence[str], rounds: int, folder: Path, make: Callable[..., list[Row]]
) -> dict[str, list[list[Row]]]:
    """The metrics of every run of every side, the first of which is the baseline. `make` runs one, as `train` does."""
    metrics: dict[str, list[list[Row]]] = {side.name: [] for side in sides}
    baseline: list[Row] = []
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            run = folder / f"{number}-{side.name.replace(' ', '-').replace(',', '')}"
            rows = make(run, [*common, *side.changes, *device_keys(side)], threads=1)
            baseline = baseline or rows
            if unlike := difference(baseline, rows):
                raise SystemExit(f"{side.name} did not do the work of {sides[0].name}: {unlike}")
            metrics[side.name].append(rows)
            seconds = statistics.median(step_seconds(rows))
            print(f"round {number + 1}, {side.name}: {seconds:.2f} s a step", file=sys.stderr, flush=True)
    return metrics


def difference(baseline: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Evidence that two runs did not train on the same tokens; empty if there is none."""
    name = "perf/total_num_tokens"
    ours, theirs = ([row[name] for row in run] for run in (rows, baseline))
    if ours != theirs:
        return f"{ours} tokens in the steps, not {theirs}"
    # Only of the first step, since runs drift apart; and not exactly, since rounding may change a token whose number lies
    # on the edge between two.
    for name in ("critic/score/mean", "actor/grad_norm", "critic/grad_norm"):
        if not math.isclose(rows[0][name], baseline[0][name], rel_tol=0.05):
            return f"{name} of the first step is {rows[0][name]:g}, not {baseline[0][name]:g}"
    return ""


def assigned(keys: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in keys.items())
