"""Run folders without a run: the files that one would write."""

import json
import random
from contextlib import contextmanager

from tests.json_lines import write_lines
from verl.tracking.heartbeat import Heartbeat
from verl.tracking.lock import FolderLock

VOCABULARY = dict(enumerate(["<|end|>", "The", " answer", " is", " 7", " 8", ".", "\n", " so", "ß"]))

_CALL = {"total": 2.0, "bound": "matmul", "matmul": 1.5, "head": 0.5}
PLAN = {
    "run": "grpo", "model": "Small-1B", "device": {"name": "H100", "bytes": 80e9}, "step_s": 9.5, "gpu_hours": 0.04,
    "weight_sync_s": 0.0, "overrides": ["trainer.nnodes=2"],
    "placement": [{"roles": ["actor"], "devices": 16, "peak_bytes": 40e9, "choices": {
        "actor": {"text": "dp 16, ZeRO-3", "seconds": {"train": _CALL}, "bytes": {"train": {"weights": 8e9, "kv": 0.0}}}}}],
}  # fmt: skip


def sample(ordinal, index, *, step=1, score=None, response=None, **more):
    rng = random.Random(f"{ordinal} {index} {step}")
    ids = [1, 2, 3, 4 if score is None or score > 0.5 else 5, 6, 0]
    log_probs = [-rng.random() for _ in ids]
    return {
        "step": step, "uid": str(ordinal), "ordinal": ordinal, "sample_index": index, "data_source": "sums",
        "finish_reason": "stop", "reward_parts": {"acc": score}, "reward_error": None, "weight_version": step - 1,
        "prompt": f"<|user|>How much is {ordinal} + {index % 2}?<|assistant|>", "ground_truth": "7",
        "response": response if response is not None else "".join(VOCABULARY[i] for i in ids[:-1]),
        "score": float(rng.random() > 0.5) if score is None else score,
        "prompt_ids": [1, 2, 3], "response_ids": ids, "log_probs": log_probs,
        "train_log_probs": [value - 0.01 for value in log_probs], "advantages": [0.5] * len(ids), **more,
    }  # fmt: skip


def write_samples(folder, split, step, rows):
    place = folder / "samples" / split
    place.mkdir(parents=True, exist_ok=True)
    write_lines(place / f"step_{step:06d}.jsonl", rows)


def append(file, row):
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def add_step(folder, step, *, of=10, reward=0.5, samples=True, seconds=2.0):
    """One step as the host writes it: samples, metrics, spans, timeline."""
    start = 1_700_000_000 + (step - 1) * seconds
    if samples:
        rows = [sample(4 * (step - 1) + i, k, step=step) for i in range(4) for k in range(4)]
        write_samples(folder, "train", step, rows)
    metrics = {
        "critic/score/mean": reward,
        "response_length/mean": 6.0,
        "actor/grad_norm": 1.0 / step,
        "perf/throughput": 99.0,
    }
    append(folder / "metrics.jsonl", {"step": step, "time": start + seconds, **metrics})
    for name, at, took in (("gen", 0.0, 1.0), ("reward", 1.0, 0.2), ("update_actor", 1.2, 0.7)):
        append(
            folder / "spans.jsonl", {"step": step, "name": name, "parent": None, "start": start + at, "seconds": took}
        )
    append(
        folder / "timeline.jsonl",
        {"step": step, "of": of, "start": start, "seconds": seconds, "phases": {"rollout": 1.0, "training": 0.9, "other": 0.1},
         "roles": {"rollout": {"busy_s": 1.0}}, "communication": {"seconds": 0.0, "bytes": 0}},
    )  # fmt: skip


def make_run(folder, steps=3):
    """A GRPO run of 4 prompts x 4 samples a step that has stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        "algorithm:\n  adv_estimator: grpo  # given\ntrainer:\n  total_training_steps: 10  # given\n"
    )
    (folder / "curves.json").write_text(json.dumps({"mean reward": {"critic/score/mean": "training"}}))
    write_lines(folder / "tokens.jsonl", ({"id": i, "text": text} for i, text in VOCABULARY.items()))
    for step in range(1, steps + 1):
        add_step(folder, step)
    return folder


@contextmanager
def live_run(folder):
    """This process holds the folder meanwhile and writes its heartbeat (entered here)."""
    lock, heartbeat = FolderLock(folder), Heartbeat(folder)
    (folder / "logs").mkdir(exist_ok=True)
    lock.acquire()
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.end()
        lock.release()
