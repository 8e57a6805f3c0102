"""Verbs that run a config: `verl train`, `rejection`, `sft`, `rm`, `preference` and its losses, `eval`, `generate`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verl.cli.arguments import ConfigArguments, parse
from verl.cli.run_name import with_run_folder
from verl.cli.view import page_of
from verl.config import PREFERENCE, RM, SFT, LoadedConfig, RunConfig
from verl.parallel.child_processes import die_with
from verl.parallel.process_settings import imports_stay

_TRAIN = (
    "Train a policy with PPO, GRPO or another estimator. Run the same command again to resume after an interruption."
)
_REJECTION = "Sample, score, keep the best samples of each prompt, and fine-tune on them. Takes the keys of verl train."
_SFT = "Train on conversations or texts. Run the same command again to resume after an interruption."
_PREFERENCE = "Train on pairs or on labelled completions. Run the same command again to resume after an interruption."
_RM = "Train a reward model on pairs, ratings or labelled steps. Run the same command again to resume after an interruption."
_EVAL = (
    "Validate actor_rollout_ref.model.path on data.val_files; metrics go to trainer.default_local_dir/eval. `verl eval "
    "--tasks=NAME,... SOURCE` evaluates a model on tasks of lm_eval instead."
)
_GENERATE = "Sample from actor_rollout_ref.model.path for every prompt of data.val_files, by rollout.*, with scores."

_DRY_RUN = {"--dry-run": {"action": "store_true", "help": "check the config, its model and its data, then stop"}}
_OUTPUT = {
    "required": True,
    "metavar": "FILE",
    "help": "JSON-lines file to write, one line per sample; or .parquet: the rows, each with its responses",
}


def run_train(argv: list[str], *, supervised: bool = False) -> int:
    """Train a policy: the exit code. `supervised`: in a child process, which is restarted after a crash."""
    return _run(parse("train", _TRAIN, argv, _DRY_RUN), supervised)


def run_rejection(argv: list[str], *, supervised: bool = False) -> int:
    """Rejection sampling: the exit code. `supervised` as in `run_train`."""
    arguments = parse("rejection", _REJECTION, argv, _DRY_RUN)
    arguments.overrides.insert(0, "algorithm.program=rejection_sampling")
    return _run(arguments, supervised)


def run_sft(argv: list[str], *, supervised: bool = False) -> int:
    """Fine-tune a model: the exit code. `supervised` as in `run_train`."""
    return _run(parse("sft", _SFT, argv, _DRY_RUN, schema=SFT), supervised)


def run_preference(argv: list[str], *, supervised: bool = False, verb: str = "preference", loss: str = "") -> int:
    """Train on preferences: the exit code. `loss` is preference.loss unless it is given; `supervised` as in `run_train`."""
    arguments = parse(verb, _PREFERENCE, argv, _DRY_RUN, schema=PREFERENCE)
    if loss and "preference.loss" not in arguments.load(check=False).settings:
        arguments.overrides.append(f"preference.loss={loss}")
    return _run(arguments, supervised)


run_dpo = partial(run_preference, verb="dpo", loss="sigmoid")
run_kto = partial(run_preference, verb="kto", loss="kto")
run_orpo = partial(run_preference, verb="orpo", loss="orpo")
run_simpo = partial(run_preference, verb="simpo", loss="simpo")
run_cpo = partial(run_preference, verb="cpo", loss="cpo")


def run_rm(argv: list[str], *, supervised: bool = False) -> int:
    """Train a reward model: the exit code. `supervised` as in `run_train`."""
    return _run(parse("rm", _RM, argv, _DRY_RUN, schema=RM), supervised)


def _run(arguments: ConfigArguments, supervised: bool) -> int:
    if arguments.options.dry_run:
        from verl.cli.check import check

        return check(arguments)
    loaded = with_run_folder(arguments.load())
    with page_of(loaded, whole_process=supervised):
        return _started(loaded, supervised)


def _started(loaded: LoadedConfig[RunConfig], supervised: bool) -> int:
    trainer = loaded.config.trainer
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun supervises and restarts its ranks; none may outlive it
        return _train(loaded, restarted=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    if supervised and "RANK" not in os.environ and trainer.max_restarts and not trainer.val_only:
        from verl.cli.supervise import supervise

        folder = Path(trainer.default_local_dir).expanduser()
        return supervise(lambda saved, again: _train(_resumed(loaded, saved), again), folder, trainer)
    return _train(loaded)


def run_eval(argv: list[str]) -> int:
    """Validate a model, with --tasks on tasks of lm_eval: the exit code."""
    if any(argument.partition("=")[0] == "--tasks" for argument in argv):
        from verl.cli.tasks import run_tasks

        return run_tasks(argv)
    loaded = parse("eval", _EVAL, argv).load()
    with imports_stay():
        from verl.run.host import evaluate

    return evaluate(loaded)


def run_generate(argv: list[str]) -> int:
    """Write samples: the exit code."""
    arguments = parse("generate", _GENERATE, argv, {"--output": _OUTPUT})
    loaded = arguments.load()
    with imports_stay():
        from verl.programs.generate import generate

    if sentence := generate(loaded, Path(arguments.options.output).expanduser()):
        print(sentence)
    return 0


def _train(loaded: LoadedConfig[RunConfig], restarted: bool = False) -> int:
    with imports_stay():
        import verl.models.load  # noqa: F401 - the largest import of every run
        from verl.run.host import train

    return train(loaded, loaded.schema.name, restarted=restarted)


def _resumed(loaded: LoadedConfig[Any], saved: Path | None) -> LoadedConfig[Any]:
    """The config of a restart: a run with resume_mode disable or resume_path resumes from its own newest checkpoint."""
    config = loaded.config
    if saved is None or config.trainer.resume_mode == "auto":
        return loaded
    trainer = replace(config.trainer, resume_mode="resume_path", resume_from_path=str(saved.absolute()))
    return replace(loaded, config=replace(config, trainer=trainer))
