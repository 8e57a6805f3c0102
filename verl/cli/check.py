"""`verl check`: checks of a config, its model and its data before training; exit code 1 when one fails."""

from __future__ import annotations

from verl.cli.arguments import ConfigArguments, parse
from verl.errors import ConfigError, VerlError

_ABOUT = """Check before training: the config, the model folder and tokenizer, every row of the data with its template and
length, the reward on each reference answer, trackers, memory and disk."""


def run_check(argv: list[str]) -> int:
    """Print the checklist of a command line: the exit code."""
    return check(parse("check", _ABOUT, argv))


def check(arguments: ConfigArguments) -> int:
    """Print the checklist; 0 when the run can start, 1 when something would stop it."""
    from verl.cli.checklist import Subject
    from verl.cli.report import Line, Report

    report = Report()
    try:
        subject = Subject(arguments.load(check=False))
    except ConfigError as error:
        for sentence in _every_problem(arguments, error):
            report.add("config", Line("fail", sentence))
        return report.close("Ready to train", "This would not train")
    for topic, examine in _checks():
        try:
            for line in examine(subject):
                report.add(topic, line)
        except VerlError as error:
            report.add(topic, Line("fail", str(error)))
    return report.close("Ready to train", "This would not train")


def _every_problem(arguments: ConfigArguments, error: ConfigError) -> list[str]:
    """All problems of a config that cannot be loaded, not only the one that stopped loading it."""
    try:
        arguments.load()
    except ConfigError as every:
        error = every
    return str(error).splitlines()


def _checks() -> tuple:
    from verl.cli.checklist import data, model, resources, setup

    return (
        ("config", setup.check_config_problems),
        ("layout", setup.check_layout),
        ("engines", setup.check_engines),
        ("model", model.check_model_files),
        ("tokenizer", model.check_tokenizer),
        ("lengths", model.check_lengths),
        ("data", data.check_rows_of_data),
        ("template", data.check_template),
        ("reward", data.check_reward),
        ("trackers", setup.check_trackers),
        ("run folder", setup.check_run_folder),
        ("memory", resources.check_memory),
        ("disk", resources.check_disk),
    )
