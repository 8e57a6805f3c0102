"""`verl import-check`: what of a script, YAML or Python file of the existing verl runs here; 1 when something is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.cli.arguments import Parser
from verl.cli.report import Line, Report
from verl.errors import ConfigError

_ABOUT = """Read files that were written for the existing verl, without running them: launch scripts (.sh), YAML files of its
config, and Python files (reward functions, data sets, recipes). Says what runs, what was renamed and what is missing."""
_NUM_NAMED = 12


def run(argv: list[str]) -> int:
    parser = Parser(prog="verl import-check", description=_ABOUT)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .sh, .yaml or .py file")
    files = [Path(name) for name in parser.parse_args(argv).files]
    report = Report()
    for file in files:
        for line in _examine(file):
            report.add(file.name, line)
    return report.close("This runs here", "Something is missing")


def _examine(file: Path) -> Iterator[Line]:
    if not file.is_file():
        yield Line("fail", f"there is no file {file}")
    elif file.suffix == ".py":
        from verl.cli.compat import python_files

        yield from python_files.examine(file)
    elif file.suffix in (".yaml", ".yml"):
        yield from _config([], str(file), None)
    else:
        yield from _script(file)


def _script(file: Path) -> Iterator[Line]:
    from verl.cli.compat.launch_scripts import read_commands

    commands = read_commands(file.read_text(encoding="utf-8", errors="replace"))
    if not commands:
        yield Line("fail", "no command `python -m verl...` was found")
    for command in commands:
        yield from _module(command.module)
        for argument, variable in command.unknown.items():
            yield Line("info", f"{argument} is not looked at: {variable} has no value in the script")
        if command.module in _PROGRAMS:
            yield from _config(command.overrides, command.config_path, command.config_name)


# the programs that read the config tree
_PROGRAMS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main_generation")


def _module(module: str) -> Iterator[Line]:
    import importlib.util

    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if there:
        yield Line("pass", f"python -m {module} is here")
    elif module.startswith("recipe"):
        yield Line("warn", f"python -m {module} is a program of the recipe: check its Python files too")
    else:
        yield Line("fail", f"python -m {module} is not available in this version; `verl --help` lists what there is")


def _config(overrides: list[str], config_path: str | None, config_name: str | None) -> Iterator[Line]:
    from verl.config.load import inspect_config

    try:
        loaded, problems = inspect_config(overrides, config_path, config_name)
    except ConfigError as error:
        yield Line("fail", str(error))
        return
    for problem in problems:
        level = {"error": "fail", "warning": "warn", "notice": "info"}[problem.level]
        yield Line(level, problem.sentence)  # type: ignore[arg-type]
    renamed = [f"{s.spelled} -> {path}" for path, s in loaded.given.items() if s.origin != s.source]
    if renamed:
        yield Line("info", f"renamed, and understood: {', '.join(renamed)}")
    yield Line("pass", f"{len(loaded.given)} keys are known: {_named(list(loaded.given))}")


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - _NUM_NAMED} more" if len(keys) > _NUM_NAMED else ""
    return ", ".join(keys[:_NUM_NAMED]) + more
