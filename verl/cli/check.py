"""`verl check`: checks of a config, its model and its data before training; exit code 1 when one fails."""

import argparse
from collections.abc import Callable
from typing import Any

from verl.cli.arguments import ConfigArguments, parse, with_run_folder
from verl.config import PPO, SCHEMAS, RunConfig, Schema
from verl.config.sources import built_in_names
from verl.errors import ConfigError, VerlError

_ABOUT = """Check before training: the config, the model folder and tokenizer, every row of the data with its template and
length, the reward on each reference answer, trackers, memory and disk. `verl VERB --dry-run` does the same."""
PROGRAM = {
    "choices": tuple(SCHEMAS),
    "help": "program of the config, by default that of --config-name, else ppo: "
    + ", ".join(f"{name} ({schema.command})" for name, schema in SCHEMAS.items()),
}


def run_check(argv: list[str]) -> int:
    """Print the checklist of a command line: the exit code."""
    return check(parse("check", _ABOUT, argv, {"--program": PROGRAM}, schema=schema_asked(argv)))


def schema_asked(argv: list[str]) -> Schema[RunConfig]:
    """The schema of --program, or that with the built-in config --config-name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--program", nargs="?")  # `parse` reports a missing value
    parser.add_argument("--config-name", "-cn", nargs="?")
    arguments, _ = parser.parse_known_args(argv)
    name = (arguments.config_name or "").removesuffix(".yaml")
    default = next((schema for schema in SCHEMAS.values() if name in built_in_names(schema)), PPO)
    return SCHEMAS.get(arguments.program, default)


def check(arguments: ConfigArguments) -> int:
    """Print the checklist; 0 when the run can start, 1 when something would stop it."""
    from verl.cli.checklist import Subject
    from verl.cli.report import Report, fail, skip

    report = Report()
    try:
        subject = Subject(with_run_folder(arguments.load(check=False)))
    except ConfigError as error:
        for sentence in _every_problem(arguments, error):
            report.add("config", fail(sentence))
        return report.close("Ready to train", "This would not train")
    failed: dict[str, str] = {}  # sentence -> the topic that has it
    for topic, examine in _checks(arguments.schema.name):
        try:
            for line in examine(subject):
                report.add(topic, line)
        except VerlError as error:
            first = failed.setdefault(str(error), topic)
            report.add(topic, fail(str(error)) if first == topic else skip(f"not checked: see {first}"))
    return report.close("Ready to train", "This would not train")


def _every_problem(arguments: ConfigArguments, error: ConfigError) -> list[str]:
    """All problems of a config that cannot be loaded, not only the problem that stopped loading."""
    try:
        arguments.load()
    except ConfigError as every:
        error = every
    return str(error).splitlines()


def _checks(program: str) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """(topic, check) of a program, in order."""
    from verl.cli.checklist import data, model, resources, setup

    devices, rows = {
        "ppo": (
            (("layout", setup.check_layout), ("engines", setup.check_engines), ("code", setup.check_code)),
            (("data", data.check_rows_of_data), ("template", data.check_template), ("reward", data.check_reward)),
        )
    }.get(program, ((("device", setup.check_device),), (("data", data.check_conversations),)))
    return (
        ("config", setup.check_config_problems),
        *devices,
        ("model", model.check_model_files),
        ("tokenizer", model.check_tokenizer),
        ("lengths", model.check_sequence_lengths),
        *rows,
        ("trackers", setup.check_trackers),
        ("run folder", setup.check_run_folder),
        ("memory", resources.check_memory),
        ("disk", resources.check_disk),
    )
