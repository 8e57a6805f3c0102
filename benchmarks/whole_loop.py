"""The whole PPO loop on two devices against one: placement, rollout on a device of its own, samples ahead of training.

    python benchmarks/whole_loop.py                       # five to eight minutes on two cores; needs the extra `ray`
    python benchmarks/whole_loop.py --rounds 3 --reward-seconds 0.5 --json out.json

A device is a process with one thread. Every side is a whole run of `verl train` of the same work (actor, critic, reference
policy, a reward that takes its time) with a random Llama of 4 million parameters in float32; they take turns.

- serial: one device, the roles one after the other, samples made right before they train. The baseline.
- ahead: the same with samples one step ahead, so that rewards are waited for while others train.
- groups: actor and rollout on one device, critic and reference on the other.
- groups, ahead: both.
- rollout apart, ahead: generation and rewards on a device of their own, which generates while the other trains; new weights
  travel by the resharding plan.

"bound" is how many times faster the serial run's own times allow that side to be: what runs at the same time counts as the
longer of the two. "share" is the part of the bound that is reached. Utilisation is the time in which a device's roles work, of
the steps that count. With samples ahead of training old log-probs are computed again and importance weights are on, which the
serial side does not do; its bound leaves them out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from placement import PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, Side, _make_model, by_tokens, measure, overrides
from prefetch import WARM_UP, Row, step_seconds
from report import Report, Series, ratio

_AHEAD = ("actor_rollout_ref.rollout.prefetch_num=1",)
_GROUPS = ("trainer.placement={actor:[0],rollout:[0],reward:[0],critic:[1],reference:[1]}",)
_APART = ("trainer.placement={actor:[0],critic:[0],reference:[0],rollout:[1],reward:[1]}",)
SERIAL = "serial"
SIDES = (
    Side(SERIAL),
    Side("ahead", changes=_AHEAD),
    Side("groups", 2, changes=_GROUPS),
    Side("groups, ahead", 2, changes=(*_GROUPS, *_AHEAD)),
    Side("rollout apart, ahead", 2, changes=(*_APART, *_AHEAD)),
)
# roles on each device, by side
DEVICES = {
    SERIAL: (("rollout", "actor", "critic", "reference"),),
    "ahead": (("rollout", "actor", "critic", "reference"),),
    "groups": (("rollout", "actor"), ("critic", "reference")),
    "groups, ahead": (("rollout", "actor"), ("critic", "reference")),
    "rollout apart, ahead": (("actor", "critic", "reference"), ("rollout",)),
}
_SPANS = ("gen", "reward", "ref", "values", "update_actor", "update_critic")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    report = Report("The whole loop", facts=_facts(arguments))
    with tempfile.TemporaryDirectory(prefix="verl-loop-") as scratch:
        folder = Path(scratch)
        even = [[PROMPT_TOKENS] * PROMPTS for _ in range(arguments.steps)]
        common = overrides(_make_model(folder), folder / "task", even, RESPONSE_TOKENS)
        common += by_tokens(PROMPTS * (PROMPT_TOKENS + RESPONSE_TOKENS))
        common += (
            f"reward.custom_reward_function.reward_kwargs.seconds={arguments.reward_seconds}", f"reward.num_workers={PROMPTS}",
        )  # fmt: skip
        fill(report, measure(SIDES, common, arguments, folder / "runs"))
    report.finish(arguments.json)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("ray",), default="ray", help="of the sides with two devices")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=7, help="of each run, warm-up included")
    parser.add_argument("--reward-seconds", type=float, default=0.3, help="seconds that the reward of a sample takes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.steps < WARM_UP + 1 or arguments.reward_seconds < 0:
        parser.error(f"at least --rounds 1 and --steps {WARM_UP + 1} are needed, and --reward-seconds of 0 or more")
    return arguments


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "a device": "a process with one thread",
        "step": f"{PROMPTS} samples of {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens, a reward of {arguments.reward_seconds} s",
        "rounds": arguments.rounds,
        "steps that count": arguments.steps - WARM_UP,
    }


def fill(report: Report, found: Mapping[str, Sequence[Sequence[Row]]]) -> None:
    """The table and results."""
    steps = {name: Series(tuple(s for rows in runs for s in step_seconds(rows))) for name, runs in found.items()}
    allowed = bounds(found[SERIAL])
    lines = []
    for name, series in steps.items():
        gained, used = ratio(steps[SERIAL], series), utilisation(found[name], DEVICES[name])
        samples = PROMPTS / series.median
        lines.append(
            [
                name, series.text("s"), f"{samples:.2f}", f"{gained:.2f}", f"{allowed[name]:.2f}",
                f"{gained / allowed[name]:.0%}", " ".join(f"{share:.0%}" for share in used),
            ]
        )  # fmt: skip
        report.results[name] = {
            "step_s": series.to_json(), "samples_per_s": samples, "times_faster": gained, "bound": allowed[name],
            "share_of_bound": gained / allowed[name], "utilisation": used,
        }  # fmt: skip
    report.add_table(["", "step", "samples/s", "times serial", "bound", "share", "utilisation"], lines)


def bounds(serial: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Times that each side can be faster, by the serial run's median times."""
    counted = [row for rows in serial for row in rows if row["step"] > WARM_UP]
    t = {span: statistics.median(row.get(f"timing_s/{span}", 0.0) for row in counted) for span in _SPANS}
    step = statistics.median(s for rows in serial for s in step_seconds(rows))
    updates = min(t["update_actor"], t["update_critic"])  # at the same time on two devices
    generation = t["gen"] + t["reward"]
    best = {
        SERIAL: step,
        "ahead": step - t["reward"],
        "groups": step - updates,
        "groups, ahead": step - updates - t["reward"],
        "rollout apart, ahead": max(step - generation, generation),
    }
    return {name: step / max(seconds, 1e-9) for name, seconds in best.items()}


def utilisation(runs: Sequence[Sequence[Row]], devices: Sequence[Sequence[str]]) -> list[float]:
    """Share of the counted steps in which the roles of each device work."""
    of_role = {
        "rollout": ("gen",), "actor": ("old_log_prob", "update_actor"), "critic": ("values", "update_critic"),
        "reference": ("ref",),
    }  # fmt: skip
    counted = [row for rows in runs for row in rows if row["step"] > WARM_UP]
    total = sum(row["perf/time_per_step"] for row in counted)
    shares = []
    for roles in devices:
        spans = [span for role in roles for span in of_role[role]]
        generated = sum(row.get("rollout/seconds", 0.0) for row in counted) if "rollout" in roles else 0.0
        trained = sum(row.get(f"timing_s/{span}", 0.0) for row in counted for span in spans if span != "gen")
        shares.append(min(1.0, (generated + trained) / total) if total else 0.0)
    return shares


if __name__ == "__main__":
    raise SystemExit(main())
