"""A step of one process of two threads against two processes of one thread each, in turns on the same work, on a CPU.

    python benchmarks/peers/ranks_cpu.py                                         # GRPO, the main job, float32
    python benchmarks/peers/ranks_cpu.py --config sft_smollm2 --dtype bfloat16   # fine-tuning
    python benchmarks/peers/ranks_cpu.py --trl best --prompts 8     # GRPO against two processes of TRL; options of peers_cpu.py

Processes of a side take their step together; the slowest one's time counts, and the sum of processor times. A process can be 5%
slower than an equal one for as long as it lives. So sides start several times, in changing order, and the standard error is
of the starts. Rounds whose samples have another mean length are left out. A comparison with TRL ends with an error if a side
had other prompts, another number of tokens, or ranks with other weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer, in_turns
from peer_env import default_folder, python_of
from peers_cpu import TRL_FORMS, Unequal, describe, make_workload
from peers_cpu import parse as options_of
from report import Report, number, series_of
from workload import digest

PROGRAMS = {"grpo_smollm2": ("ppo", "actor_rollout_ref.actor.fsdp_config"), "sft_smollm2": ("sft", "engine")}
SIDES, TRL = ("two processes", "one process"), "two processes of TRL"
LIMIT_S = 900.0


class Ranks:
    """`count` processes that are asked as one. They build a run by `command`, and end before its last step, which validates."""

    def __init__(
        self, name: str, count: int, folder: Path, rounds: int, command: str, overrides: list[str], **run: Any
    ):
        keys = ["test_freq=-1", "save_freq=-1", "val_before_train=False", "resume_mode=disable", "logger=[file]"]
        keys += [f"total_training_steps={rounds + 2}", f"default_local_dir={folder / name}", f"n_gpus_per_node={count}"]
        self._start(name, count, folder, "child_verl.py", run.pop("python", None), {"VERL_PAGE": "0"})
        trainer = [f"trainer.{key}" for key in keys]
        self.facts = self.ask(command, LIMIT_S, overrides=[*trainer, *overrides], **run)

    @classmethod
    def of_trl(cls, count: int, folder: Path, form: str, work: dict[str, Any], num_rows: int) -> Ranks:
        """TRL's trainer, as accelerate runs it on `count` ranks; a step has `num_rows` rows."""
        ranks, chosen = cls.__new__(cls), TRL_FORMS[form]
        environment = {"HF_DATASETS_CACHE": str(folder / "datasets"), **chosen.environment}
        ranks._start(TRL, count, folder, "child_trl.py", python_of(default_folder("trl")), environment)
        micro_batch = min(chosen.micro_batch, num_rows // count)
        settings = {**chosen.settings, "gradient_accumulation_steps": num_rows // micro_batch // count}
        run = {"micro_batch": micro_batch, "settings": settings, "folder": str(folder / "trl")}
        ranks.facts = ranks.ask("build", LIMIT_S, work=work, **run)
        ranks.facts["package"] = ranks.facts["versions"]
        return ranks

    def _start(
        self, name: str, count: int, folder: Path, script: str, python: Path | None, environment: dict[str, str]
    ) -> None:
        from verl.parallel.collectives import free_port

        shared = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", **environment}
        self.name, self.pool, self.peers = name, ThreadPoolExecutor(count), []
        if count > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            shared |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), **address}
        for rank in range(count):
            environment = shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {})
            log = folder / f"{name} {rank}.log"
            self.peers.append(Peer(name, script, log=log, python=python, environment=environment))

    def ask(self, command: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """The answers of the processes as one."""
        answers = list(self.pool.map(lambda peer: peer.ask(command, limit_s, **arguments), self.peers))
        if len({a.get("weight_change") for a in answers}) > 1:
            raise Unequal(f"The ranks of {self.name} have different weights after a step.")
        times = {name: max(a.get(name) or 0.0 for a in answers) for name in ("step_s", "update_s")}
        return {**answers[0], **times, "processor_s": sum(a["cpu_s"] - a["cpu_before_s"] for a in answers)}

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def add_options(parser: argparse.ArgumentParser, starts: int) -> None:
    """Options of comparisons of two sides of ours."""
    parser.add_argument("--config", choices=list(PROGRAMS), default="grpo_smollm2")
    parser.add_argument("--starts", type=int, default=starts, help="starts of both sides, two at least")
    parser.add_argument("--rounds", type=int, default=4, help="measured steps of each side (after one to warm up)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of both sides")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def compare(
    options: argparse.Namespace,
    report: Report,
    start: Callable[[str, Path], Ranks],
    names: tuple[str, str],
    quantities: Sequence[str],
    check: Callable[[int, dict[str, Any]], None] = lambda round, answers: None,
) -> Report:
    """Medians of both sides, and the ratio of the second to the first, by round and by start. `check` raises Unequal for the
    answers of a round."""
    (first, second), starts, rows = names, [], []
    for count in range(max(2, options.starts)):
        with tempfile.TemporaryDirectory(prefix="verl-sides-") as folder, ExitStack() as stack:
            sides = [start(name, Path(folder)) for name in names[:: 1 - 2 * (count % 2)]]
            for side in sides:
                stack.callback(side.close)
                report.facts[side.name] = side.facts.get("package", "")
            rounds = list(in_turns(sides, options.rounds, LIMIT_S, "step_of_run"))
        for each in rounds:
            check(*each)
        rounds = [answers for _, answers in rounds[1:]]
        starts.append([r for r in rounds if r[first]["response_tokens"] == r[second]["response_tokens"]])
    equal = [r for rounds in starts for r in rounds]
    report.facts |= {"rounds": len(starts) * options.rounds, "rounds of equal samples": len(equal)}
    sent = [equal[0][name].get("sent_bytes") for name in names]
    report.facts["bytes that a process sends in a step"] = sent
    for quantity in quantities:
        by_start = [[r[second][quantity] / r[first][quantity] for r in rounds] for rounds in starts if rounds]
        ratios, means = [ratio for part in by_start for ratio in part], [statistics.mean(part) for part in by_start]
        error = statistics.stdev(means) / len(means) ** 0.5
        columns = [series_of([r[side] for r in equal], quantity) for side in names]
        mean = f"{statistics.mean(means):.3f} ± {error:.3f}"
        rows.append([quantity, *(number(c.median) for c in columns), f"{statistics.median(ratios):.3f}", mean])
        report.results[quantity] = {"ratios": ratios, first: columns[0].to_json(), second: columns[1].to_json()}
    header = ["seconds", first, second, f"median of {second} / {first}", "mean and its standard error"]
    report.tables.append((header, rows))
    report.finish(options.json)
    return report


def main(argv: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--trl", choices=sorted(TRL_FORMS), help="two processes of TRL in place of one process")
    add_options(parser, starts=2)
    options, sizes = parser.parse_known_args(argv)
    if options.trl is not None:
        return against_trl(options, sizes)
    if sizes:
        parser.error(f"unrecognized arguments without --trl: {' '.join(sizes)}")
    program, section = PROGRAMS[options.config]
    overrides, run = [f"{section}.dtype={options.dtype}", *options.set], {"config": options.config, "program": program}

    def start(name: str, folder: Path) -> Ranks:
        return Ranks(name, 2 - SIDES.index(name), folder, options.rounds, "build_ranks", overrides, **run)

    report = Report(f"A step of {options.config} in {options.dtype}")
    return compare(options, report, start, SIDES, ("step_s", "update_s", "processor_s"))


def against_trl(options: argparse.Namespace, sizes: list[str]) -> Report:
    """Two processes of ours and of TRL, on the work of `sizes`, options of peers_cpu.py."""
    from verl_side import overrides_of, write_prompts

    from verl.models.load import load_tokenizer

    work = make_workload(options_of(["--dtype", options.dtype, *sizes]), options.rounds + 2)
    encode, names = load_tokenizer(work.model).encode, ("num_tokens", "shortest", "longest")

    def check(step: int, answers: dict[str, Any]) -> None:
        prompts = digest([encode(text, add_special_tokens=False) for text in work.of_step(step)])
        if answers[TRL]["prompts"] != prompts or not answers[TRL]["weight_change"]:
            raise Unequal(f"TRL had other prompts in step {step}, or its weights did not change.")
        kinds = {name: [answer[key] for key in names] for name, answer in answers.items()}
        if kinds[TRL] != kinds[SIDES[0]]:
            raise Unequal(f"The sides did different work in step {step} ({', '.join(names)}): {kinds}.")

    def start(name: str, folder: Path) -> Ranks:
        if name == TRL:
            return Ranks.of_trl(2, folder, options.trl, work.to_json(), work.num_sequences)
        write_prompts(work, folder / "work")
        overrides = overrides_of(work, folder / "work", ["trainer.total_training_steps=", *options.set])
        overrides.remove("trainer.total_training_steps=")  # Ranks has it
        return Ranks(name, 2, folder, options.rounds, "build_ranks", overrides, config=None, program="ppo")

    report = Report(f"A step of GRPO in {options.dtype}, TRL as {options.trl}", {"workload": describe(work)})
    return compare(options, report, start, (SIDES[0], TRL), ("step_s", "processor_s"), check)


if __name__ == "__main__":
    main()
