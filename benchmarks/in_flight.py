"""Samples a second of asynchronous runs whose responses have a long tail: rank 0 trains, rank 1 generates, on Ray.

    python -m benchmarks.in_flight --rounds 2

The lengths are log-normal, a function of prompt and sample, in a model of two layers. The ways take turns: whole
responses, parts of fixed lengths with keys kept, and weights that change in flight. Steps in which the queue fills or
empties are left out. Also says how many decode steps a token took, as a multiple of full slots.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.scale import overrides, write_rows
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.models.tiny import make_tiny_model
from verl.rollout.native.engine import NativeGeneration, NativeRollout
from verl.rollout.requests import one_by_one

LIMIT, SLOTS, PROMPTS, SAMPLES = 1024, 64, 8, 8
ROLLOUT = "actor_rollout_ref.rollout"
WAYS = {
    "whole": (),
    "in parts, keys kept": (f"{ROLLOUT}.partial_rollout=True", f"{ROLLOUT}.keep_partial_kv_cache=True"),
    "in flight, keys kept": (f"{ROLLOUT}.in_flight_updates=True",),
    "in flight, computed again": (f"{ROLLOUT}.in_flight_updates=True", f"{ROLLOUT}.in_flight_keys=computed_again"),
}


class LongTails(NativeRollout):
    """The native engine; each sample stops at its length."""

    def generate(self, prompts: Sequence[PromptRequest], params: SamplingParams, **more: Any) -> list[Completion]:
        """See RolloutEngine."""
        began = time.process_time()
        requests = [one for p in prompts for one in one_by_one(replace(p, num_samples=p.num_samples or params.n))]
        completions = super().generate([self._bounded(request, params) for request in requests], params, **more)
        self._stats["processor_s"] = time.process_time() - began
        return completions

    def _bounded(self, request: PromptRequest, params: SamplingParams) -> PromptRequest:
        num_tokens = length_of(request.ordinal, request.first_sample) - request.num_drawn
        return replace(request, max_new_tokens=min(num_tokens, request.max_new_tokens or params.max_new_tokens))

    def open(self, *arguments: Any, **more: Any) -> NativeGeneration:
        """See RolloutEngine."""
        generation = super().open(*arguments, **more)
        scheduler, end = generation.scheduler, generation.scheduler._end

        def ended(row: int, stopped: bool) -> None:
            group, rows = scheduler.rows.groups[row], scheduler.rows
            assert group is not None
            length = length_of(group.request.ordinal, group.request.first_sample)
            end(row, stopped or int(group.request.num_drawn + rows.length[row]) >= length)

        vars(scheduler)["_end"] = ended
        return generation


def length_of(ordinal: int, sample: int) -> int:
    """Tokens of a response: log-normal, 1% at the limit, half of the variance between prompts."""
    prompt_deviation, *sample_deviations = np.random.default_rng((7, ordinal)).normal(size=1 + SAMPLES)
    deviation = np.sqrt(0.5) * (prompt_deviation + sample_deviations[sample])
    return int(np.exp(np.log(LIMIT) - 2.326 + deviation).clip(1, LIMIT))


def samples_a_second(
    model: Path, folder: Path, run: Path, keys: Sequence[str], ahead: int, steps: int
) -> dict[str, float]:
    """Of the steps in which the queue is full at start and end."""
    changes = {
        f"{ROLLOUT}.name": f"{Path(__file__).resolve()}:LongTails", f"{ROLLOUT}.n": SAMPLES, f"{ROLLOUT}.max_num_seqs": SLOTS,
        f"{ROLLOUT}.prefetch_num": ahead, f"{ROLLOUT}.ignore_eos": True, "data.max_response_length": LIMIT,
        "trainer.n_gpus_per_node": 2, "trainer.placement": "{actor: [0], rollout: [1]}", "ray_kwargs.ray_init.num_cpus": 2,
        "trainer.total_training_steps": steps, "trainer.default_local_dir": run,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    }  # fmt: skip
    base = [key for key in overrides(model, folder, folder / "rows.parquet") if key.split("=")[0] not in changes]
    arguments = [*base, *(f"{key}={value}" for key, value in changes.items()), *keys]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        if subprocess.run(command, stdout=log, stderr=log, env=environment).returncode:
            raise RuntimeError((folder / "log").read_text()[-3000:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if ahead < row["step"] <= steps - ahead]
    spent, tokens = rows[-1]["time"] - rows[0]["time"], sum(row["rollout/num_generated_tokens"] for row in rows[1:])
    return {
        "samples a second": PROMPTS * SAMPLES * (len(rows) - 1) / spent,
        "decode steps": SLOTS * sum(row["rollout/num_decode_steps"] for row in rows[1:]) / tokens,
        "processor seconds of generation": mean(row["rollout/processor_s"] for row in rows[1:]),
        "seconds of generation": mean(row["rollout/seconds"] for row in rows[1:]),
        "seconds of training": mean(row["timing_s/update_actor"] + row["timing_s/old_log_prob"] for row in rows[1:]),
        "staleness": mean(row["training/off_policy/trajectory_staleness/mean"] for row in rows[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ahead", type=int, default=3, help="rollout.prefetch_num")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(
            folder / "model", hidden_size=256, intermediate_size=512, max_position_embeddings=2 * LIMIT
        )
        write_rows(folder / "rows.parquet", 1000)
        for number in range(arguments.rounds):
            for way in arguments.ways:
                run = folder / f"{number} {way}"
                costs = samples_a_second(model, folder, run, WAYS[way], arguments.ahead, arguments.steps)
                print(f"{way}: {', '.join(f'{what} {value:.3g}' for what, value in costs.items())}", flush=True)


if __name__ == "__main__":
    main()
