"""`verl import-check`: which commands, keys and names of scripts and files run here; exit code 1 when one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.cli.parser import Parser
from verl.cli.report import Line, Report, fail, info, passed, warn
from verl.config import PPO, PREFERENCE, RM, SFT, RunConfig, Schema
from verl.errors import ConfigError

_ABOUT = """Read files that were written for other verl releases, without running them: launch scripts (.sh), YAML config files,
and Python files (reward functions, datasets, recipes). Reports what runs, what was renamed and what is missing."""
_NUM_NAMED = 12
_MAX_BYTES = 10_000_000
_LEVELS = {"error": "fail", "warning": "warn", "notice": "info"}

# commands that read a config -> its schema; and the config of commands that have their own defaults
_NAMES = {"verl.trainer.fsdp_sft_trainer": "sft_trainer"}
_PROGRAMS: dict[str, Schema[RunConfig]] = {
    **dict.fromkeys(("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main_generation"), PPO),
    "verl.trainer.rm_trainer": RM,
    **dict.fromkeys((f"verl.trainer.{name}" for name in ("sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer")), SFT),
    "verl.trainer.preference_trainer": PREFERENCE,
}


def run_import_check(argv: list[str]) -> int:
    """Report on each file: the exit code."""
    parser = Parser(prog="verl import-check", description=_ABOUT)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .sh, .yaml or .py file")
    files = [Path(name) for name in parser.parse_args(argv).files]
    report = Report()
    for file in files:
        try:
            for line in _examine(file):
                report.add(file.name, line)
        except (RecursionError, MemoryError):  # of Python's own parser
            report.add(file.name, fail("it is nested too deep to be read"))
    return report.close("This runs here", "Something is missing")


def _examine(file: Path) -> Iterator[Line]:
    if not file.is_file():
        yield fail(f"{file} is not a file" if file.exists() else f"there is no file {file}")
    elif file.stat().st_size > _MAX_BYTES:
        yield fail(f"{file} has more than {_MAX_BYTES // 10**6} MB, which no script or config has")
    elif file.suffix == ".py":
        from verl.cli.compat import python_files

        yield from python_files.examine_file(file)
    elif file.suffix in (".yaml", ".yml"):
        yield from _config([], str(file), None)
    else:
        yield from _script(file)


def _script(file: Path) -> Iterator[Line]:
    from verl.cli.compat.launch_scripts import read_commands

    commands = read_commands(file.read_text(encoding="utf-8", errors="replace"))
    if not commands:
        yield fail("no command `python -m verl...` was found")
    for command in commands:
        yield _module(command.module)
        for argument, variable in command.unknown.items():
            yield info(f"{argument} is not checked: {variable} has no value in the script")
        if command.module in _PROGRAMS:
            schema = _PROGRAMS[command.module]
            yield from _config(
                command.overrides, command.config_path, command.config_name or _NAMES.get(command.module), schema
            )


def _module(module: str) -> Line:
    from importlib.util import find_spec

    try:
        exists = find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that is not there; of a name that no module can have
        exists = False
    if exists:
        return passed(f"python -m {module} is available")
    if module.startswith("recipe"):
        return warn(f"python -m {module} is a program of the recipe: check its Python files too")
    return fail(f"python -m {module} is not available in this version; `verl --help` lists the verbs")


def _config(
    overrides: list[str], config_path: str | None, config_name: str | None, schema: Schema[RunConfig] = PPO
) -> Iterator[Line]:
    from verl.config.load import inspect_config

    try:
        loaded, problems = inspect_config(overrides, config_path, config_name, schema=schema)
    except ConfigError as error:
        yield fail(str(error))
        return
    for problem in problems:
        yield Line(_LEVELS[problem.level], problem.sentence)  # type: ignore[arg-type]
    renamed = [f"{s.spelled} -> {path}" for path, s in loaded.settings.items() if s.origin != s.source]
    if renamed:
        yield info(f"renamed and accepted: {', '.join(renamed)}")
    keys = list(loaded.settings)
    more = f" and {len(keys) - _NUM_NAMED} more" if len(keys) > _NUM_NAMED else ""
    yield passed(f"{len(keys)} known keys: {', '.join(keys[:_NUM_NAMED])}{more}")
