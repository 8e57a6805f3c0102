"""The switch between training and generation where both have the same layout: bytes and time, against gathering and copying.

    python benchmarks/switch.py --model PATH                     # half a minute on two cores
    python benchmarks/switch.py --model PATH --dtype bfloat16 --rounds 21 --json out.json

One process trains and generates, as `verl train` builds it. In turns, on the same weights:

- in place: `sync` (random state and weights noted, version published, training caches freed), a short generation that is
  not timed, then `end_generation` (KV cache freed, weights compared, random state back). Bytes count writes to tensors of
  the rollout engine that are not training tensors.
- gather and copy: `gather_weights()` into a copy of the model that only generates, one tensor after the other.

Exit code 1: a tensor of the engine is not the trained one, or the two ways left different weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Report, Series, number, ratio

_REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
_NEW_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="verl-switch-") as scratch:
        report, is_right = measure(arguments, Path(scratch))
    report.finish(arguments.json)
    return 0 if is_right else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--dtype", default="float32", help="in which it computes; masters are float32")
    parser.add_argument("--rounds", type=int, default=11, help="switches of each kind; the first is not counted")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2:
        parser.error("at least --rounds 2 are needed")
    return arguments


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[Report, bool]:
    """The report, and whether both ways left the trained weights."""
    import torch

    from verl.parallel.process_settings import keep_freed_memory
    from verl.programs.ppo import PPO
    from verl.runtime.local import LocalRuntime

    keep_freed_memory()  # as every process of a run does
    config = _config(arguments, folder)
    runtime = LocalRuntime(config, PPO)
    roles = runtime.build_roles(total_steps=1, data_sources=["none"])
    try:
        assert runtime.workers is not None
        engine, rollout = runtime.workers.models["actor"].engine, runtime.workers.rollout
        assert rollout is not None
        assert roles.weights is not None
        sync = roles.weights.sync
        replica = _replica(config)
        there: list[float] = []
        back: list[float] = []
        copied: list[float] = []
        for number_of_round in range(arguments.rounds):
            _change(engine)
            there.append(_seconds(lambda version=number_of_round: sync(version)))
            _generate(rollout)
            back.append(_seconds(rollout.end_generation))
            copied.append(_seconds(lambda: replica.load(engine.gather_weights())))
        trained = dict(engine.module.named_parameters())
        used = dict(rollout.engine.module.named_parameters())
        moved = sum(p.nbytes for name, p in used.items() if p.data_ptr() != trained[name].data_ptr())
        same = all(torch.equal(p, trained[name]) for name, p in replica.module.named_parameters())
        num_bytes = sum(p.nbytes for p in trained.values())
    finally:
        roles.close()
    sides = {"sync": there, "end_generation": back, "gather and copy": copied}
    return _report(arguments, {k: Series(tuple(v[1:])) for k, v in sides.items()}, moved, num_bytes), same and not moved


def _report(arguments: argparse.Namespace, found: dict[str, Series], moved: int, num_bytes: int) -> Report:
    both = Series(tuple(a + b for a, b in zip(found["sync"].values, found["end_generation"].values, strict=True)))
    facts = {"model": arguments.model.name, "dtype": arguments.dtype, "rounds that count": arguments.rounds - 1}
    report = Report("The switch in one process", facts=facts)
    rows = [
        [name, number(1000 * s.median), number(1000 * max(s.values)), f"{size:,}"]
        for name, s, size in (
            ("to generation: sync", found["sync"], moved),
            ("to training: end_generation", found["end_generation"], 0),
            ("both ways, in place", both, moved),
            ("gather and copy", found["gather and copy"], num_bytes),
        )
    ]
    report.add_table(["", "median ms", "largest ms", "bytes"], rows)
    report.notes.append(f"Gathering and copying takes {number(ratio(found['gather and copy'], both))} times as long.")
    report.results = {"moved_bytes": moved, "model_bytes": num_bytes, "both_ways_s": both.to_json()}
    report.results |= {name.replace(" ", "_") + "_s": s.to_json() for name, s in found.items()}
    return report


def _config(arguments: argparse.Namespace, folder: Path) -> Any:
    from verl.config import load_config

    row = {"data_source": "none", "prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": ""}}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(_REWARD)
    return load_config(
        [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={arguments.model}",
            f"data.train_files={folder}/train.jsonl",
            "data.train_batch_size=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "data.max_prompt_length=64",
            f"data.max_response_length={_NEW_TOKENS}",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.actor.fsdp_config.dtype={arguments.dtype}",
            f"reward.custom_reward_function.path={folder}/reward.py",
            "reward.num_workers=1",
            f"trainer.default_local_dir={folder}/run",
        ]
    ).config


def _replica(config: Any) -> Any:
    import torch

    from verl.models.load import load_causal_lm
    from verl.parallel.device import compute_dtype
    from verl.rollout.rollout_model import Replica

    dtype = compute_dtype(config.actor_rollout_ref.actor.fsdp_config.dtype, torch.device("cpu"))
    return Replica(load_causal_lm(config.actor_rollout_ref.model.path, device="cpu", dtype=dtype).requires_grad_(False))


def _change(engine: Any) -> None:
    """A training step, as far as the switch can tell: other weights, and one more step."""
    import torch

    with torch.no_grad():
        for master in engine.optimizer.masters.values():
            master.mul_(1.0001)
    engine.optimizer.num_steps += 1
    engine.optimizer.round_masters()


def _generate(rollout: Any) -> None:
    from verl.data_proto.samples import PromptRequest

    requests = [PromptRequest(ordinal, tuple(range(5, 37))) for ordinal in range(4)]
    rollout.engine.generate(requests, rollout.params, step=0)


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
