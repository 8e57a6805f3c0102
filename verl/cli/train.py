"""Verbs that run a config: `verl train`, `rejection`, `sft`, `rm`, `preference` and its losses, `eval`, `generate`."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verl.cli.arguments import ConfigArguments, parse, with_model, with_run_folder
from verl.cli.model_folders import model_folder
from verl.cli.page import page_of
from verl.cli.supervise import Life, supervise
from verl.config import PPO, PREFERENCE, RM, SFT, LoadedConfig, RunConfig, Schema
from verl.config.values import escape_path
from verl.errors import ConfigError
from verl.foreign_text import printable
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
_GENERATE = (
    "Print the responses of a model to prompts: `verl generate MODEL --prompt TEXT`. With --output, write samples for each "
    "prompt of data.val_files, by rollout.*; rows with a reference answer get a score."
)

_DRY_RUN = {"--dry-run": {"action": "store_true", "help": "check the config, its model and its data, then stop"}}
_GENERATE_OPTIONS: dict[str, dict[str, Any]] = {
    "--output": {
        "metavar": "FILE",
        "help": "JSON-lines file to write, one line per sample; or .parquet: the rows, each with its responses",
    },
    "--model": {"metavar": "MODEL", "help": "folder, name of the Hub, run or checkpoint; also as the first argument"},
    "--prompt": {
        "action": "append",
        "metavar": "TEXT",
        "help": "a prompt whose responses are printed; several are given",
    },
}


def _run(
    argv: list[str],
    *,
    verb: str,
    about: str,
    schema: Schema[RunConfig] = PPO,
    setting: str = "",
    supervised: bool = False,
) -> int:
    """Train by the keys of `schema`: the exit code. `setting` is an override unless its key is given. `supervised`: in a child
    process, restarted after a crash."""
    arguments = parse(verb, about, argv, _DRY_RUN, schema=schema)
    if setting and setting.partition("=")[0] not in arguments.load(check=False).settings:
        arguments.overrides.append(setting)
    if arguments.options.dry_run:
        from verl.cli.check import check

        return check(arguments)
    loaded = with_run_folder(with_model(arguments.load()))
    _require_model(loaded)
    with page_of(loaded, whole_process=supervised), _life(loaded, supervised) as life:
        return _train(_resumed(loaded, life.saved), life.is_restart) if life.code is None else life.code


def _require_model(loaded: LoadedConfig[Any]) -> None:
    """Raises ModelError for a model that is not there: before a page has an address, and before torch is imported."""
    from verl.models.folder import fetch

    config = loaded.config
    group = config.actor_rollout_ref if loaded.schema is PPO else config
    fetch(group.model.path, weights=False, only="config.json")


run_train = partial(_run, verb="train", about=_TRAIN)
run_rejection = partial(_run, verb="rejection", about=_REJECTION, setting="algorithm.program=rejection_sampling")
run_sft = partial(_run, verb="sft", about=_SFT, schema=SFT)
run_rm = partial(_run, verb="rm", about=_RM, schema=RM)
_preference = partial(_run, about=_PREFERENCE, schema=PREFERENCE)
run_preference = partial(_preference, verb="preference")
run_dpo = partial(_preference, verb="dpo", setting="preference.loss=sigmoid")
run_kto = partial(_preference, verb="kto", setting="preference.loss=kto")
run_orpo = partial(_preference, verb="orpo", setting="preference.loss=orpo")
run_simpo = partial(_preference, verb="simpo", setting="preference.loss=simpo")
run_cpo = partial(_preference, verb="cpo", setting="preference.loss=cpo")


@contextmanager
def _life(loaded: LoadedConfig[RunConfig], supervised: bool) -> Iterator[Life]:
    """The part of this process in the run: it trains, or it is the supervisor, whose children train, and has the exit code."""
    trainer = loaded.config.trainer
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun supervises and restarts its ranks; none may outlive it
        yield Life(is_restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    elif supervised and "RANK" not in os.environ and trainer.max_restarts and not trainer.val_only:
        with supervise(Path(trainer.default_local_dir).expanduser(), trainer) as life:
            yield life
    else:
        yield Life()


def run_eval(argv: list[str]) -> int:
    """Validate a model, with --tasks on tasks of lm_eval: the exit code."""
    if any(argument.partition("=")[0] == "--tasks" for argument in argv):
        from verl.cli.tasks import run_tasks

        return run_tasks(argv)
    loaded = with_model(parse("eval", _EVAL, argv).load())
    with imports_stay():
        from verl.run.host import evaluate

    return evaluate(loaded)


def run_generate(argv: list[str]) -> int:
    """Write samples: the exit code."""
    if argv and "=" not in argv[0] and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    arguments = parse("generate", _GENERATE, argv, _GENERATE_OPTIONS, defaults="release")
    options = arguments.options
    if not options.output and not options.prompt:
        raise ConfigError(
            "Name prompts: `verl generate MODEL --prompt TEXT`, or data.val_files=FILE with --output FILE."
        )
    if options.output and options.prompt:
        raise ConfigError(
            "--prompt prints responses, and --output writes the samples of data.val_files. Give one of them."
        )
    with ExitStack() as stack:
        if options.model:
            folder = stack.enter_context(model_folder(options.model))
            arguments.set_by("the model of the command", "actor_rollout_ref.model.path", escape_path(str(folder)))
        if options.prompt:
            return _print_responses(options.prompt, arguments)
        loaded = with_model(arguments.load())
        with imports_stay():
            from verl.programs.generate import generate

        if sentence := generate(loaded, Path(options.output).expanduser()):
            print(sentence)
    return 0


def _print_responses(prompts: list[str], arguments: ConfigArguments) -> int:
    """Print the responses to `prompts`: the exit code."""
    with tempfile.TemporaryDirectory(prefix="verl-generate-") as folder, imports_stay():
        from verl.data.tables import NAMES_OF_ROWS
        from verl.programs.generate import generate

        rows, samples = Path(folder, "prompts.jsonl"), Path(folder, "samples.jsonl")
        NAMES_OF_ROWS[str(rows)] = "--prompt {} (counted from 0)".format
        rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
        arguments.set_by("--prompt", "data.val_files", str(rows))
        arguments.overrides.append(f"trainer.default_local_dir={folder}/run")
        if generate(with_model(arguments.load()), samples):
            responses = [json.loads(line)["response"] for line in samples.read_text(encoding="utf-8").splitlines()]
            print("\n\n".join(map(printable, responses)))
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
