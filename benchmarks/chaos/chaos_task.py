"""Targets of the attacks: a small run of a program on each runtime, and the processes and moments to kill."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES = 4, 4  # of a step
SAVE_FREQ = 3
_ROWS = 24
_STEPS = "trainer.total_training_steps="
SLOW = "slow"  # while a file of this name is in the folder of the task, steps are long enough for processes to start
_REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # long enough to be killed in
    time.sleep(0.3 if pathlib.Path(__file__).with_name("slow").exists() else 0.003)
    share = sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
    return {"score": share + 0.1 * len(solution_str), "letters": share}
"""


@dataclass(frozen=True)
class Runtime:
    """`launcher`: arguments of Python before the module; `targets`: what can be killed (see chaos_run.Family); `needs`: a
    module that is not installed with verl; `steps_of_a_kill`: how long a run is for each that it gets."""

    keys: tuple[str, ...]
    targets: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    needs: str = ""
    steps_of_a_kill: int = 3


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000")
_ON_FOUR = tuple("--nproc-per-node=4" if word.startswith("--nproc") else word for word in _TORCHRUN)
# on four ranks: each trains and generates; two do each; two train and all generate; three train and one generates
_PLACEMENTS = {
    "together": (),
    "apart": ("trainer.placement={actor: [0, 1], rollout: [2, 3]}",),
    "twice": ("trainer.placement={actor: [0, 1], rollout: [0, 1, 2, 3]}",),
    "uneven": ("trainer.placement={actor: [0, 1, 2], rollout: [3]}",),
}
_ONE = ("supervisor", "driver", "driver", "reward worker", "any")
_RANKS = ("launcher", "driver", "rank", "rank", "reward worker", "any")
_RAY = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2")
_ENGINE, _TOOLS, _RUNNER = (Path(__file__).with_name(f"chaos_{name}.py") for name in ("engine", "tools", "runner"))
_ROLLOUT = "actor_rollout_ref.rollout"
# samples of a random model that repeat, so that texts guess, and are right now and then
_REPEATING = (f"{_ROLLOUT}.top_k=2", "data.max_response_length=48")
_LONGER = ("data.max_response_length=96", f"{_ROLLOUT}.stop_token_ids={list(range(80))}")  # turns of some tokens each
# few slots, so that samples of several batches pause in them
_IN_FLIGHT = (*_LONGER, f"{_ROLLOUT}.max_num_seqs=6", f"{_ROLLOUT}.in_flight_updates=True")
# scores are computed in the process of the run, so that all other processes belong to tools
_AGENTS = (
    *_LONGER, "reward.debug=True", f"actor_rollout_ref.model.external_lib={_TOOLS}", f"{_ROLLOUT}.multi_turn.enable=True",
    f"{_ROLLOUT}.multi_turn.function_tool_path={_TOOLS}", f"{_ROLLOUT}.multi_turn.format=chaos",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns=4",
)  # fmt: skip
# local: the engine is the process that trains; torchrun, ray: every rank trains and generates
RUNTIMES = {
    "local": Runtime((), _ONE),
    "engine": Runtime(
        (f"{_ROLLOUT}.name={_ENGINE}:EngineOfItsOwn",), (*["engine"] * 3, "driver", "supervisor", "reward worker")
    ),
    "async": Runtime((f"{_ROLLOUT}.prefetch_num=2", f"{_ROLLOUT}.partial_rollout=True"), _ONE),
    "async-kept": Runtime(
        tuple(f"{_ROLLOUT}.{key}" for key in ("prefetch_num=2", "partial_rollout=True", "keep_partial_kv_cache=True")),
        _ONE,
    ),
    "in-flight": Runtime((*_IN_FLIGHT, f"{_ROLLOUT}.prefetch_num=2"), _ONE),
    "agents": Runtime(_AGENTS, ("tool process", "tool process", "driver", "driver", "supervisor")),
    "agents-ahead": Runtime(
        (*_AGENTS, f"{_ROLLOUT}.prefetch_num=2", f"{_ROLLOUT}.partial_rollout=True"),
        ("tool process", "driver", "driver", "supervisor"),
    ),
    "agents-engine": Runtime(
        (*_AGENTS, f"{_ROLLOUT}.name={_ENGINE}:EngineOfItsOwn"), ("engine", "engine", "tool process", "driver")
    ),
    # the gateway is in the driver's process
    "agents-endpoint": Runtime(
        (*_LONGER, f"{_ROLLOUT}.agent.runner=command:{sys.executable} {_RUNNER}", f"{_ROLLOUT}.agent.max_episodes=4"),
        ("runner", "runner", "driver", "supervisor"),
    ),
    "torchrun": Runtime((), _RANKS, _TORCHRUN),
    **{f"four-{name}": Runtime(keys, _RANKS, _ON_FOUR) for name, keys in _PLACEMENTS.items()},
    "ray": Runtime(_RAY, ("supervisor", "driver", "rank", "rank", "node", "reward worker", "any")),
    # rank 0 trains, rank 1 only generates, a batch ahead
    "ray-apart": Runtime(
        (*_RAY, "trainer.placement={actor: [0], rollout: [1]}", "actor_rollout_ref.rollout.prefetch_num=1"),
        ("engine", "engine", "rank", "driver", "supervisor", "node", "reward worker"),
    ),
    "ray-in-flight": Runtime(
        (*_RAY, *_IN_FLIGHT, "trainer.placement={actor: [0], rollout: [1]}", f"{_ROLLOUT}.prefetch_num=2"),
        ("engine", "engine", "rank", "driver", "supervisor", "node", "reward worker"),
    ),
    # rank 0 trains, 1 generates, 2 scores, and others join and leave the latter two, see chaos_scale.py
    "ray-scaled": Runtime(
        (
            "trainer.n_gpus_per_node=3",
            "ray_kwargs.ray_init.num_cpus=8",
            "trainer.placement={actor: [0], rollout: [1], reward: [2]}",
            f"{_ROLLOUT}.prefetch_num=1",
        ),
        ("starting", "at work", "at work", "driver"),
        steps_of_a_kill=20,
    ),
    # other training engines, which are asked for by name
    "megatron": Runtime(
        ("model_engine=megatron", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"),
        *(_RANKS, _TORCHRUN, "megatron.core"),
    ),
    "zero3": Runtime(
        ("actor_rollout_ref.actor.strategy=deepspeed", "actor_rollout_ref.actor.deepspeed.zero_stage=3"),
        *(_RANKS, _TORCHRUN, "deepspeed"),
    ),
}
# phases of a step (verl/tracking/timeline.py); "any": wherever the step is
PHASES = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "any")
_RANKED = ("torchrun", "ray")
_ROW_PHASES = ("batch", "update", "save_checkpoint", "any")
_ANY_S = 0.2  # in which such a kill comes
_AGAIN = 0.25  # share of kills after which the run is killed once more while it comes back


@dataclass(frozen=True)
class Program:
    """`module`: what `python -m` runs; `role`: name of the trained model; `has_ledger`: samples are generated and recorded."""

    module: str
    role: str
    phases: tuple[str, ...] = _ROW_PHASES
    has_ledger: bool = False
    runtimes: tuple[str, ...] = ("local", *_RANKED)


PROGRAMS = {
    "ppo": Program("verl.trainer.main_ppo", "actor", PHASES, True, tuple(RUNTIMES)),
    # rows with images
    "images": Program("verl.trainer.main_ppo", "actor", PHASES, True, ("local", "agents", "agents-ahead", *_RANKED)),
    "preference": Program("verl.trainer.preference_trainer", "model"),
    "reward_model": Program("verl.trainer.rm_trainer", "model"),
}


@dataclass(frozen=True)
class Task:
    """Settings that all runs of a session share, and `changes` to keys of killed runs, which must change no bit."""

    folder: Path
    model: Path
    keys: tuple[str, ...]
    steps: int
    changes: tuple[str, ...] = ()
    program: Program = PROGRAMS["ppo"]

    def lasting(self, steps: int) -> Task:
        """The same of so many steps."""
        keys = (key for key in self.keys if not key.startswith(_STEPS))
        return replace(self, steps=steps, keys=(*keys, f"{_STEPS}{steps}"))


@dataclass(frozen=True)
class Moment:
    """`share` of the usual length of the phase passes before the kill. With `again`, a share of the usual time of starting,
    a process of the kind `target_again` is killed when so much of the time of coming back has passed."""

    step: int
    phase: str
    target: str
    share: float
    again: float | None = None
    target_again: str = "any"

    def delay_s(self, usual_s: dict[str, float]) -> float:
        """From the beginning of the phase."""
        return self.share * usual_s.get(self.phase, _ANY_S if self.phase == "any" else 0.0)


def make_task(
    folder: Path, *, steps: int, model: str | None = None, dtype: str = "float32", program: str = "ppo",
    drafts: Sequence[str] = (), changes: Sequence[str] = (),
) -> Task:  # fmt: skip
    """Write the files of the task, and the keys that name them. Killed runs have `drafts` by these methods, and `changes`, in
    which MODEL stands for the folder of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model or str(_model(folder / "model", "mtp" if "mtp" in drafts else program))
    if drafts:
        libraries = ",".join(str(Path(__file__).with_name(f"chaos_{name}.py")) for name in ("tools", "drafts"))
        guesses = {"methods": f"[{','.join(drafts)}]", **({"model_path": model} if "model" in drafts else {})}
        changes = (
            f"actor_rollout_ref.model.external_lib=[{libraries}]", *changes,
            *(f"{_ROLLOUT}.speculative.{name}={value}" for name, value in guesses.items()),
        )  # fmt: skip
    rows, keys = (_prompts if PROGRAMS[program].has_ledger else _pairs)(folder, model, dtype, program)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"data.train_files={folder}/train.jsonl", f"data.train_batch_size={PROMPTS}", "trainer.logger=[file]",
        "trainer.val_before_train=False", f"{_STEPS}{steps}", f"trainer.save_freq={SAVE_FREQ}", "trainer.max_restarts=10",
        "trainer.restart_backoff_s=0.05",
    )  # fmt: skip
    keys = (*keys, *(_REPEATING if drafts else ()))
    changes = tuple(key.replace("MODEL", model) for key in changes)
    return Task(folder, Path(model), (*keys, *common), steps, changes, PROGRAMS[program])


def _model(folder: Path, kind: str) -> Path:
    """A tiny random model: for the program `images`, with a head for further tokens (`mtp`), or a plain model of text."""
    from verl.models.tiny import make_tiny_model

    sys.path.append(str(Path(__file__).parents[2]))
    if kind == "images":
        from tests.vision_families import vision_folder

        return vision_folder(folder, "qwen2_vl")
    if kind == "mtp":
        from tests.engines.tiny import make_model_with_head

        return Path(make_model_with_head(folder, "qwen3"))
    return make_tiny_model(folder)


def _prompts(folder: Path, model: str, dtype: str, program: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Rows of GRPO and its keys; with the program `images` a row has a picture of its color."""
    rows: list[dict[str, Any]] = [
        {"data_source": "letters", "prompt": [{"role": "user", "content": f"{'x' * (i % 5)} {i}"}],
         "reward_model": {"style": "rule", "ground_truth": str(i)}}
        for i in range(_ROWS)
    ]  # fmt: skip
    if program == "images":
        from PIL import Image

        from verl.data.pictures import image_text

        for i, row in enumerate(rows):
            row["prompt"][0]["content"] = f"<image>{row['prompt'][0]['content']}"
            row["images"] = [image_text(Image.new("RGB", (56, 28), (10 * i, 99, 255 - 10 * i)), "")]
    (folder / "reward.py").write_text(_REWARD)
    return rows, (
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", f"data.val_files={folder}/train.jsonl",
        "data.max_prompt_length=64", "data.max_response_length=8", f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=0.002",
        f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}", "reward.num_workers=2",
        f"reward.custom_reward_function.path={folder}/reward.py",
    )  # fmt: skip


def _pairs(folder: Path, model: str, dtype: str, program: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Rows of preferences and reward models, and their keys."""
    rows = [
        {"prompt": f"question {i}", "chosen": f" yes {i}" * (1 + i % 2), "rejected": " no" * (1 + i % 3)}
        for i in range(_ROWS)
    ]
    return rows, (f"model.path={model}", "data.max_length=64", "optim.lr=0.002", f"engine.dtype={dtype}")


def plan(
    rng: random.Random,
    runtime: str,
    count: int,
    targets: Sequence[str] | None = None,
    program: Program = PROGRAMS["ppo"],
    phases: Sequence[str] | None = None,
    early: float | None = None,
) -> list[Moment]:
    """`count` kills in step after step, kills during recovery included. `phases`: the phases of a step in which to kill (None:
    all of the program). `early`: the probability that a kill comes before the first checkpoint; all others come after it
    (None: wherever their step is)."""
    choices = [t for t in RUNTIMES[runtime].targets if targets is None or t in targets]
    if not program.has_ledger:
        choices = [target for target in choices if target != "reward worker"]
    moments: list[Moment] = []
    # a separate step for each: the supervisor takes two ends in one step for a fault of the run
    num_early = min(SAVE_FREQ - 1, sum(rng.random() < early for _ in range(count))) if early is not None else count
    while count > 0:
        again = rng.random() if count > 1 and rng.random() < _AGAIN else None
        count -= 1 if again is None else 2
        phase, target, share = rng.choice(phases or program.phases), rng.choice(choices), rng.random()
        step = len(moments) + (1 if len(moments) < num_early else 1 + SAVE_FREQ - num_early)
        moments.append(Moment(step, phase, target, share, again, rng.choice(choices)))
    return moments
