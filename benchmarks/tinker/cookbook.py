"""Unchanged scripts of tinker-cookbook against `verl serve tinker`: whether they run, what they learn, seconds per step.

    python -m benchmarks.tinker.cookbook sft --model MODEL --client PYTHON
    python -m benchmarks.tinker.cookbook rl --model MODEL --client PYTHON
    python -m benchmarks.tinker.cookbook preference --model MODEL --client PYTHON --steps 2
    python -m benchmarks.tinker.cookbook distillation --model MODEL --client PYTHON --steps 2

`--client` is the Python of an environment with tinker-cookbook[math-rl]. `sft` is its supervised/train.py on generated
conversations, `rl` its recipes/math_rl/train.py with env=arithmetic, `preference` its preference/train_dpo.py on pairs,
`distillation` its distillation/train_on_policy.py with the base model as teacher. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 120.0
_SFT = """
import asyncio, sys
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
model, url, data, log, steps = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="role_colon", max_length=128, batch_size=8
)
builder = FromConversationFileBuilder(file_path=data, test_size=32, common_config=common)
asyncio.run(train.main(train.Config(
    log_path=log, model_name=model, recipe_name="sft", renderer_name="role_colon", dataset_builder=builder,
    learning_rate=5e-4, lora_rank=16, base_url=url, eval_every=int(steps) // 2, save_every=0, num_epochs=8,
    max_steps=int(steps), lr_schedule="constant",
)))
"""
_RL = """
import asyncio, sys
from tinker_cookbook.recipes.math_rl.train import CLIConfig, cli_main
model, url, _, log, steps = sys.argv[1:]
asyncio.run(cli_main(CLIConfig(
    model_name=model, renderer_name="role_colon", env="arithmetic", loss_fn="importance_sampling", base_url=url,
    log_path=log, max_steps=int(steps), groups_per_batch=8, group_size=8, learning_rate=5e-4, lora_rank=16,
    max_tokens=10,  # the stop string of the renderer takes 3
    eval_every=0, save_every=0, behavior_if_log_dir_exists="delete",
)))
"""
_PREFERENCE = """
import sys
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
model, url, data, log, steps = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="role_colon", max_length=128, batch_size=4
)
builder = DPODatasetBuilderFromComparisons(
    comparison_builder=ComparisonBuilderFromJsonl(train_path=data + ".pairs"), common_config=common
)
train_dpo.main(train_dpo.Config(
    log_path=log, model_name=model, recipe_name="dpo", renderer_name="role_colon", dataset_builder=builder, base_url=url,
    learning_rate=1e-4, lora_rank=16, save_every=0, eval_every=0, infrequent_eval_every=0, max_steps=int(steps),
))
"""
_DISTILLATION = """
import asyncio, json, sys
import chz
from tinker_cookbook.distillation import datasets, train_on_policy
model, url, data, log, steps = sys.argv[1:]
prompts = [json.loads(line)["messages"][0]["content"] for line in open(data)]
datasets.load_tulu3_prompts = lambda: prompts  # in place of a download
builder = datasets.PromptOnlyDatasetBuilder(
    dataset_name="tulu3", groups_per_batch=4, group_size=2, model_name_for_tokenizer=model, renderer_name="role_colon"
)
config = datasets.DistillationDatasetConfig(
    dataset_builder=builder, teacher_config=datasets.TeacherConfig(base_model=model), groups_per_batch=4
)
asyncio.run(train_on_policy.main(train_on_policy.Config(
    log_path=log, model_name=model, recipe_name="distillation", renderer_name="role_colon", dataset_configs=[config],
    base_url=url, learning_rate=1e-4, lora_rank=16, max_tokens=16, eval_every=0, save_every=0, max_steps=int(steps),
)))
"""
SCRIPTS = {  # its source, and the metric that is to improve
    "sft": (_SFT, "test/nll"),
    "rl": (_RL, "env/all/reward/total"),
    "preference": (_PREFERENCE, "dpo_loss"),
    "distillation": (_DISTILLATION, "teacher_kl"),
}


def main() -> None:
    """Run one script and print its metrics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--client", required=True, help="Python of the client's environment")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout-s", type=float, default=900.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(arguments, Path(name)), indent=1))


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The metrics of one script."""
    data, log = folder / "conversations.jsonl", folder / "log"
    data.write_text("".join(json.dumps(row) + "\n" for row in conversations(232)), encoding="utf-8")
    pairs = data.with_name(data.name + ".pairs")
    pairs.write_text("".join(json.dumps(row) + "\n" for row in comparisons(64)), encoding="utf-8")
    script, _ = SCRIPTS[arguments.script]
    with server(arguments.model, folder) as url:
        start = time.perf_counter()
        environment = {**os.environ, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        command = [arguments.client, "-c", script, arguments.model, url, str(data), str(log), str(arguments.steps)]
        client = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = client.communicate(timeout=arguments.timeout_s)
            if client.returncode:
                raise SystemExit(output[-5000:])
        except subprocess.TimeoutExpired:  # its steps until then count
            client.kill()
            client.communicate()
        seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"seconds": round(seconds, 1), **learned(arguments.script, rows)}


def learned(script: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last values of what the script is to improve."""
    key = SCRIPTS[script][1]
    values = [row[key] for row in rows if key in row]
    if not values:
        return {"metrics": sorted({name for row in rows for name in row})}
    times = [row["time/total"] for row in rows if "time/total" in row]
    return {
        "key": key,
        "values": values,
        "num_rows": len(rows),
        "seconds_per_step": sum(times) / len(times) if times else None,
    }


def conversations(count: int) -> list[dict[str, Any]]:
    """Conversations whose answers follow a rule that a model can learn: a word, and its letters with dashes."""
    syllables = ["ba", "ko", "mi", "tu", "re", "sa", "lo", "ni"]
    rows = []
    for number in range(count):
        word = "".join(syllables[number >> shift & 7] for shift in (0, 3, 6))
        messages = [
            {"role": "user", "content": f"Spell {word}."},
            {"role": "assistant", "content": f"Sure: {'-'.join(word)}, which has {len(word)} letters."},
        ]
        rows.append({"messages": messages})
    return rows


def comparisons(count: int) -> list[dict[str, Any]]:
    """Conversations with their answer, which is preferred, and a refusal."""
    rows = []
    for row in conversations(count):
        question, answer = row["messages"]
        refusal = {"role": "assistant", "content": "I cannot spell."}
        pair = {"prompt_conversation": [question], "completion_A": [answer], "completion_B": [refusal]}
        rows.append({"comparison": pair, "label": "A"})
    return rows


@contextmanager
def server(model: str, folder: Path) -> Iterator[str]:
    """The address of a service of `model`, which ends on leaving."""
    command = [sys.executable, "-m", "verl", "serve", "tinker", f"model={model}", f"folder={folder / 'served'}"]
    command.append("actor_rollout_ref.actor.fsdp_config.dtype=float32")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    output = process.stdout
    threading.Thread(target=lambda: [lines.put(line) for line in output], daemon=True).start()
    try:
        yield lines.get(timeout=START_S).strip()
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
