"""Two devices against one, by placement of the roles; and micro-batches cut by tokens against micro-batches of rows.

    python benchmarks/placement.py                          # five to seven minutes on two cores; needs the extra `ray`
    python benchmarks/placement.py --runtime torchrun       # several processes without Ray
    python benchmarks/placement.py --rounds 5 --json out.json

A device here is a process with one thread, with a core to itself where the machine has two idle ones. Every side is a whole run
of `verl train` of the same PPO work (actor, critic, reference policy, reward) with a random Llama of 4 million parameters in
float32. The sides take turns; results are medians over the steps of all rounds, without the first two steps of each run.

First table, against one process in which the roles work one after the other ("one device, serial"):
- device groups: actor and rollout on one device, critic and reference on the other. On Ray calls are futures, so that the two
  groups compute at the same time; under torchrun every process runs the whole program, and they take turns.
- every role on both devices, data-parallel (FSDP).
- one process with two threads: the same two cores without any placement.

Second table, on one device and with prompts of very uneven lengths: micro-batches of at most N tokens (`use_dynamic_bsz=True`)
against micro-batches of as many rows as fit in N tokens when all of them are as long as the longest.

A run whose token counts or first gradients differ from the baseline's ends the comparison.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Report, Series, ratio
from runs import REWARD, WARM_UP, Row, step_seconds, train, write_prompts

PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 64, 64  # of a step, first table
EVEN_TOKENS = PROMPTS * (PROMPT_TOKENS + RESPONSE_TOKENS)
UNEVEN_PROMPTS, SHORTEST, LONGEST, UNEVEN_RESPONSE = 24, 16, 256, 16  # second table
MICRO_TOKENS = 2 * (LONGEST + UNEVEN_RESPONSE)

PLACEMENT_PHASES = {
    "generate": ("gen",),
    "reference, values": ("ref", "values"),
    "update": ("update_critic", "update_actor", "update_weights"),
}
MICRO_BATCH_PHASES = {"update_actor": ("update_actor",), "update_critic": ("update_critic",)}


@dataclass(frozen=True)
class Side:
    name: str
    devices: int = 1
    threads: int = 1
    changes: tuple[str, ...] = ()


PLACEMENTS = (
    Side("one device, serial"),
    Side("device groups", 2, changes=("trainer.placement={actor:[0],rollout:[0],critic:[1],reference:[1]}",)),
    Side("every role on both", 2),
    Side("one process, two threads", threads=2),
)


def micro_batch_sides(max_tokens: int, longest: int) -> tuple[Side, Side]:
    """Fixed rows and token counts that can fill the same memory; `longest` is the length of prompt and response together."""
    rows = max(1, max_tokens // longest)
    fixed = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": rows,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": rows,
        "critic.ppo_micro_batch_size_per_gpu": rows,
    }
    return Side(f"{rows} rows", changes=_assigned(fixed)), Side(f"{max_tokens} tokens", changes=by_tokens(max_tokens))


def by_tokens(max_tokens: int) -> tuple[str, ...]:
    """Micro-batches of at most so many tokens for every role."""
    keys = {
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max_tokens,
        "critic.ppo_max_token_len_per_gpu": max_tokens,
    }
    return _assigned(keys)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    report = Report("Placement and micro-batches", facts=_facts(arguments))
    with tempfile.TemporaryDirectory(prefix="verl-placement-") as scratch:
        folder = Path(scratch)
        model = _make_model(folder)
        even = [[PROMPT_TOKENS] * PROMPTS for _ in range(arguments.steps)]
        common = overrides(model, folder / "even", even, RESPONSE_TOKENS) + by_tokens(EVEN_TOKENS)
        found = measure(PLACEMENTS, common, arguments, folder / "placement")
        fill(report, "placement", found, PLACEMENT_PHASES)
        report.notes.append(_allowed(found[PLACEMENTS[0].name]))
        uneven = [uneven_lengths(UNEVEN_PROMPTS, SHORTEST, LONGEST, step) for step in range(arguments.steps)]
        common = overrides(model, folder / "uneven", uneven, UNEVEN_RESPONSE)
        sides = micro_batch_sides(MICRO_TOKENS, LONGEST + UNEVEN_RESPONSE)
        fill(report, "micro_batches", measure(sides, common, arguments, folder / "micro"), MICRO_BATCH_PHASES)
    report.finish(arguments.json)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("ray", "torchrun"), default="ray", help="of the sides with two devices")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=5, help="of each run, warm-up included")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.steps < WARM_UP + 1:
        parser.error(f"at least --rounds 1 and --steps {WARM_UP + 1} are needed")
    return arguments


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "a device": "a process with one thread, on a core of its own where the machine has two idle ones",
        "runtime of two devices": arguments.runtime,
        "placement": f"{PROMPTS} samples of {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens a step",
        "micro-batches": f"{UNEVEN_PROMPTS} samples of {SHORTEST} to {LONGEST} + {UNEVEN_RESPONSE} tokens a step, one device",
        "rounds": arguments.rounds,
        "steps that count": arguments.steps - WARM_UP,
    }


def _make_model(folder: Path) -> Path:
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
    return _assigned(keys)


def texts_of(lengths: Sequence[int]) -> list[str]:
    """A text of each length, each with different letters, since samples of equal prompts would share their computation."""
    return ["".join(random.Random(i).choices(string.ascii_lowercase, k=length)) for i, length in enumerate(lengths)]


def uneven_lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """The same lengths for every seed, in another order: as many short as long ones on a logarithmic scale."""
    step = math.log(longest / shortest) / max(1, count - 1)
    lengths = [round(shortest * math.exp(step * i)) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def launch(side: Side, runtime: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what starts the module, further keys) for the devices of `side`."""
    if side.devices == 1:
        return (), ()
    count = f"trainer.n_gpus_per_node={side.devices}"
    if runtime == "ray":
        return (), (count, f"ray_kwargs.ray_init.num_cpus={side.devices}")
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={side.devices}"), (count,)


def measure(
    sides: Sequence[Side], common: Sequence[str], arguments: argparse.Namespace, folder: Path,
    make: Callable[..., list[Row]] | None = None,
) -> dict[str, list[list[Row]]]:  # fmt: skip
    """The metrics of every run of every side, the first of which is the baseline. `make` runs one, in place of `train`."""
    found: dict[str, list[list[Row]]] = {side.name: [] for side in sides}
    baseline: list[Row] = []
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            launcher, more = launch(side, arguments.runtime)
            run = folder / f"{number}-{side.name.replace(' ', '-').replace(',', '')}"
            rows = (make or train)(run, [*common, *side.changes, *more], threads=side.threads, launcher=launcher)
            baseline = baseline or rows
            if unlike := difference(baseline, rows):
                raise SystemExit(f"{side.name} did not do the work of {sides[0].name}: {unlike}")
            found[side.name].append(rows)
            seconds = statistics.median(step_seconds(rows))
            print(f"round {number + 1}, {side.name}: {seconds:.2f} s a step", file=sys.stderr, flush=True)
    return found


def difference(baseline: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Evidence that two runs did not train on the same tokens; empty if there is none."""
    name = "perf/total_num_tokens"
    ours, theirs = ([row[name] for row in run] for run in (rows, baseline))
    if ours != theirs:
        return f"{ours} tokens in the steps, not {theirs}"
    # Only of the first step, since runs drift apart; and not exactly, since rounding may change a token whose draw lies
    # on the edge between two.
    for name in ("critic/score/mean", "actor/grad_norm", "critic/grad_norm"):
        if not math.isclose(rows[0][name], baseline[0][name], rel_tol=0.05):
            return f"{name} of the first step is {rows[0][name]:g}, not {baseline[0][name]:g}"
    return ""


def fill(report: Report, name: str, found: Mapping[str, Sequence[Sequence[Row]]], phases: Mapping[str, Any]) -> None:
    """A table and the results `name`: seconds of the step and of `phases` (column -> spans), with baseline over side."""
    series = {side: {"step": _steps(runs), **_phases(runs, phases)} for side, runs in found.items()}
    baseline = next(iter(series.values()))
    ratios = {side: {what: ratio(baseline[what], s) for what, s in mine.items()} for side, mine in series.items()}
    rows = [
        [side, *(f"{s.text('s')} {ratios[side][what]:.2f}x" for what, s in mine.items())]
        for side, mine in series.items()
    ]
    report.add_table([name.replace("_", "-"), *baseline], rows)
    seconds = {side: {what: s.to_json() for what, s in mine.items()} for side, mine in series.items()}
    report.results[name] = {"seconds": seconds, "times_faster": ratios}


def _steps(runs: Sequence[Sequence[Row]]) -> Series:
    return Series(tuple(seconds for rows in runs for seconds in step_seconds(rows)))


def _phases(runs: Sequence[Sequence[Row]], phases: Mapping[str, Sequence[str]]) -> dict[str, Series]:
    """Seconds that the program spent in these spans, of the steps whose time counts."""
    counted = [row for rows in runs for row in rows if row["step"] > WARM_UP]
    return {
        column: Series(tuple(sum(row.get(f"timing_s/{span}", 0.0) for span in spans) for row in counted))
        for column, spans in phases.items()
    }


def _allowed(serial: Sequence[Sequence[Row]]) -> str:
    """Possible gain of device groups: reference and values share a device, so only the updates overlap."""
    shorter = [
        min(row["timing_s/update_actor"], row["timing_s/update_critic"])
        for rows in serial
        for row in rows
        if row["step"] > WARM_UP
    ]
    step = _steps(serial).median
    return (
        "Each cell: seconds, and how many times faster than the first line. In device groups it is the two updates that "
        f"overlap; by the serial run's own times that can make a step {step / (step - statistics.median(shorter)):.2f}x faster."
    )


def _assigned(keys: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in keys.items())


if __name__ == "__main__":
    raise SystemExit(main())
