"""`verl import-check`: the commands, keys, functions and classes of scripts and files that run here, read without running
them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.parser import Parser
from verl.cli.report import Line, Report, fail, info, passed, warn
from verl.config import PPO, PREFERENCE, RM, SFT, PPOConfig, RunConfig, Schema
from verl.errors import ConfigError, VerlError, install_command, nearest
from verl.families import engine_facts
from verl.rewards.functions import BATCH_ARGUMENTS, MODEL_REPLY, MODEL_SCORE, SAMPLE_ARGUMENTS, SIGNATURE

if TYPE_CHECKING:
    from verl.cli.compat.launch_scripts import Command

EXTRA = {name: name for name in ("datasets", "pandas", "hydra")}  # package -> the extra of verl that brings it
_DATASET_ARGUMENTS = ("data_files", "tokenizer", "config", "processor", "max_samples")
_WORKERS = {"ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"}
# section of a YAML file that is no config ("": the file is a list) -> its key, and the field that names a class
_LISTS = {
    "tools": ("multi_turn.tool_config_path", "class_name"),
    "interaction": ("multi_turn.interaction_config_path", "class_name"),
    "": ("agent.agent_loop_config_path", "_target_"),
}
_GIVEN = {*SAMPLE_ARGUMENTS, *BATCH_ARGUMENTS, *MODEL_SCORE, *MODEL_REPLY}


def examine_file(file: Path, folders: Sequence[Path] = ()) -> Iterator[Line]:
    """Findings of `file`: available and missing names of verl, packages, reward functions, dataset classes. Packages may lie
    in its folder and in `folders`."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))  # in the encoding that it names
    except (SyntaxError, ValueError) as error:
        yield fail(f"it is not Python: {error}")
        return
    yield from _imports(tree, (file.parent, *folders))
    calls = {getattr(node.func, "id", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("compute_score"):
            yield _reward_function(node)
        elif isinstance(node, ast.ClassDef):
            bases = {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}  # the last part of a.b
            if "RLHFDataset" in bases and node.name not in calls:  # else the script makes it by itself
                yield from _dataset_class(node)
            if "RayPPOTrainer" in bases:
                yield from _trainer_class(node)
            if bases & _WORKERS:
                yield fail(f"line {node.lineno}: {node.name} would not be used: engines compute, not workers")


def _imports(tree: ast.Module, folders: Sequence[Path]) -> Iterator[Line]:
    available: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.split(".")[0] == "verl":
                problem = missing_name(module, name)
                if problem:
                    yield fail(f"line {node.lineno}: {problem}")
                else:
                    available.append(f"{module}.{name}".rstrip("."))
            elif problem := _missing_package(module, folders):
                yield warn(f"line {node.lineno}: {problem}")
    if available:
        yield passed(f"imports {', '.join(dict.fromkeys(available))}")


def missing_name(module: str, name: str) -> str:
    """The reason why `from module import name` fails; "" if it works. `module` is one of verl, and is imported."""
    try:
        imported = importlib.import_module(module)
    except (ImportError, VerlError) as error:
        return f"{module} cannot be imported: {error}"
    if not name or name == "*":
        return ""
    try:
        if hasattr(imported, name) or (hasattr(imported, "__path__") and importlib.util.find_spec(f"{module}.{name}")):
            return ""
    except (ImportError, VerlError) as error:
        return f"{module}.{name} cannot be imported: {error}"
    return f"{module} has no {name!r}{nearest(name, dir(imported))}"


def _missing_package(module: str, folders: Sequence[Path]) -> str:
    package = module.split(".")[0]
    in_folders = any((f / package).is_dir() or (f / f"{package}.py").is_file() for f in folders)
    if in_folders or importlib.util.find_spec(package):
        return ""
    fix = f"install it with: {install_command(EXTRA[package], package)}" if package in EXTRA else "install it"
    return f"{package} is not installed; {fix}"


def _reward_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Line:
    """Whether the function accepts a call by keyword, with the four arguments of a sample or the arguments of a batch."""
    arguments = node.args
    names = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
    optional = {a.arg for a in arguments.args[len(arguments.args) - len(arguments.defaults) :]}
    optional |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    batched = BATCH_ARGUMENTS[1] in names
    expected = BATCH_ARGUMENTS if batched else SAMPLE_ARGUMENTS[1:3]
    lacking = [] if arguments.kwarg else [name for name in expected if name not in names]
    required = [name for name in names if name not in optional and name not in _GIVEN]
    place = f"line {node.lineno}: {node.name}({', '.join(names)})"
    if lacking or arguments.posonlyargs:
        taken = ", ".join(lacking) or "keywords"
        return fail(f"{place} takes no {taken}; it is called by keyword as {node.name}{SIGNATURE}")
    if required:
        return info(
            f"{place} needs {', '.join(required)} too: set reward.custom_reward_function.reward_kwargs.{required[0]}"
        )
    manager = " and reward.reward_manager.name=batch" if batched else ""
    return passed(f"{place} can score: set reward.custom_reward_function.path to this file{manager}")


def _dataset_class(node: ast.ClassDef) -> Iterator[Line]:
    from verl.data.dataset import RLHFDataset

    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    replaced = [name for name in methods if hasattr(RLHFDataset, name)]
    uncalled = [name for name in methods if name not in replaced]
    yield passed(
        f"line {node.lineno}: {node.name} is a dataset for data.custom_cls; it replaces {', '.join(replaced) or 'nothing'}"
    )
    if uncalled:
        yield info(f"{', '.join(uncalled)} of {node.name}: verl does not call it")
    init = methods.get("__init__")
    if init is not None and not init.args.kwarg:
        names = [a.arg for a in (*init.args.args, *init.args.kwonlyargs)]
        lacking = [name for name in _DATASET_ARGUMENTS if name not in names]
        if lacking:
            yield fail(
                f"line {init.lineno}: {node.name}.__init__ takes no {', '.join(lacking)}; it is called by keyword with "
                f"{', '.join(_DATASET_ARGUMENTS)}. Add **kwargs"
            )


def _trainer_class(node: ast.ClassDef) -> Iterator[Line]:
    """Attributes that methods of a RayPPOTrainer read, and neither they nor the class here have."""
    spec = importlib.util.find_spec("verl.compat.ray_trainer")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    here_attributes = {name for cls in tree.body if isinstance(cls, ast.ClassDef) for name in _own_attributes(cls)[0]}
    defined, read = _own_attributes(node)
    for name, line in read.items():
        if name not in defined | here_attributes and not name.startswith("__"):
            yield fail(f"line {line}: RayPPOTrainer has no {name!r} here{nearest(name, here_attributes)}")


def _own_attributes(node: ast.ClassDef) -> tuple[set[str], dict[str, int]]:
    """(names that a class defines or sets on self, name that it reads of self -> first line)."""
    defined = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    read: dict[str, int] = {}
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            defined.add(item.id)  # of the class; the names of a function's variables do no harm
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            if isinstance(item.ctx, ast.Load):
                read.setdefault(item.attr, item.lineno)
            else:
                defined.add(item.attr)
    return defined, read


_ABOUT = """Read files that were written for other verl releases, without running them: launch scripts (.sh), YAML config files,
and Python files (reward functions, datasets, recipes). Reports what runs, what was renamed and what is missing."""
_NUM_NAMED = 12
_MAX_BYTES = 10_000_000
_SUFFIXES = (".sh", ".py", ".yaml", ".yml")
# in a project: an import of verl, a command that starts a module of it, a config, a class in a list of tools, a scorer
_NAMES_VERL = re.compile(
    r"^\ufeff?\s*(from|import) verl\b|-m verl\.|^actor_rollout_ref:|:\s*verl\.\w|def compute_score\b", re.M
)
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
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .sh, .yaml or .py file, or the folder of a project")
    paths = [Path(name) for name in parser.parse_args(argv).files]
    report = Report()
    for folder in filter(Path.is_dir, paths):
        _examine_folder(folder, report)
    files = [path for path in paths if not path.is_dir()]
    configs = {os.path.realpath(config) for file in files for config in _configs_of(file)}  # of links in a circle too
    for file in files:
        if os.path.realpath(file) in configs:
            report.add(file.name, info("read with the command of the script that names it"))
            continue
        for line in _readable(file):
            report.add(file.name, line)
    return report.close(
        "All names and keys exist here; `verl check` tries model, data and devices", "Something is missing"
    )


def _readable(file: Path, folders: Sequence[Path] = ()) -> list[Line]:
    try:
        return list(_examine(file, folders))
    except (RecursionError, MemoryError):  # of Python's own parser
        return [fail("it is nested too deep to be read")]


def _examine_folder(folder: Path, report: Report) -> None:
    """Report on the files of a project that name verl: a line for each file that runs, findings without the passed ones for
    each other file, and counts. Paths in its scripts are relative to the folder."""
    start = Path.cwd()
    os.chdir(folder)
    try:
        files = [f for f in sorted(Path().glob("**/*")) if f.suffix in _SUFFIXES and f.is_file() and not _is_hidden(f)]
        copies = [f.parent for f in files if f.parts[-2:] == ("verl", "__init__.py")]
        for copy in copies:
            report.add(str(copy), info("a copy of verl, which is not read: this installation takes its place"))
        files = [f for f in files if not any(copy in f.parents for copy in copies) and _names_verl(f)]
        configs = {os.path.realpath(path) for file in files for path in _configs_of(file)}
        counts: Counter[str] = Counter()
        for file in files:
            if os.path.realpath(file) in configs:
                continue
            lines = _readable(file, file.parents)
            levels = {line.level for line in lines}
            counts["fail" if "fail" in levels else "info" if levels & {"warn", "info"} else "pass"] += 1
            for line in [line for line in lines if line.level != "pass"] or [passed("runs")]:
                report.add(str(file), line)
    finally:
        os.chdir(start)
    verdicts = f"run {counts['pass']}, run with notices {counts['info']}, stop {counts['fail']}"
    report.add(folder.resolve().name, info(f"files that name verl: {verdicts}"))
    if not counts:
        report.add(folder.resolve().name, warn("no script, YAML or Python file in it names verl: nothing was examined"))


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") or part in ("node_modules", "site-packages") for part in file.parts)


def _names_verl(file: Path) -> bool:
    if file.stat().st_size > _MAX_BYTES:
        return False
    return _NAMES_VERL.search(file.read_text(encoding="utf-8", errors="replace")) is not None


def _examine(file: Path, folders: Sequence[Path] = ()) -> Iterator[Line]:
    if not file.is_file():
        yield fail(f"{file} is not a file" if file.exists() else f"there is no file {file}")
    elif file.stat().st_size > _MAX_BYTES:
        yield fail(f"{file} has more than {_MAX_BYTES // 10**6} MB, which no script or config has")
    elif file.suffix == ".py":
        yield from examine_file(file, folders)
    elif file.suffix in (".yaml", ".yml"):
        yield from list(_declared(file)) or _config([], str(file), None)
    else:
        yield from _script(file)


def _declared(file: Path) -> Iterator[Line]:
    """Findings of a YAML file that lists tools, users or agent loops; none for a config."""
    from verl.config.sources import read_limited

    try:
        tree = read_limited(file)
    except ConfigError:  # the reader of configs says it
        return
    for section, (key, field) in _LISTS.items():
        entries = (tree.get(section) if section else None) if isinstance(tree, dict) else None if section else tree
        if not isinstance(entries, list):
            continue
        yield passed(f"{len(entries)} entries: set actor_rollout_ref.rollout.{key} to this file")
        for entry in entries:
            module, _, name = str(entry.get(field) or "" if isinstance(entry, dict) else "").rpartition(".")
            if module.split(".")[0] == "verl" and (problem := missing_name(module, name)):
                yield fail(problem)
            elif module and (problem := _missing_package(module, (Path(),))):
                yield warn(f"{module}.{name}: {problem}, or put its folder on PYTHONPATH")


def _commands(file: Path) -> list[Command]:
    from verl.cli.compat.launch_scripts import read_commands

    return read_commands(file.read_text(encoding="utf-8", errors="replace"))


def _configs_of(file: Path) -> Iterator[Path]:
    """The YAML files that commands of the script `file` name."""
    if file.suffix not in (".py", ".yaml", ".yml") and file.is_file() and file.stat().st_size <= _MAX_BYTES:
        for command in _commands(file):
            if command.config_path and command.config_name:
                yield Path(command.config_path) / f"{command.config_name.removesuffix('.yaml')}.yaml"


def _script(file: Path) -> Iterator[Line]:
    commands = _commands(file)
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
    if schema is PPO:
        yield from _surroundings(loaded.config)
    keys = [path for path, s in loaded.settings.items() if s.source == "command line" or not overrides]
    more = f" and {len(keys) - _NUM_NAMED} more" if len(keys) > _NUM_NAMED else ""
    yield passed(f"{len(keys)} known keys: {', '.join(keys[:_NUM_NAMED])}{more}")


def _surroundings(config: PPOConfig) -> Iterator[Line]:
    """Lines about packages and devices of the machine that starts the run."""
    engine, num_devices = config.actor_rollout_ref.rollout.name, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if engine and engine_facts(engine).starts_process and importlib.util.find_spec(engine.partition(":")[0]) is None:
        yield warn(f"actor_rollout_ref.rollout.name={engine} needs the package {engine!r}, which is not installed here")
    if num_devices > 1:
        yield info(
            f"the run takes {num_devices} devices; docs/coming-from-verl.md has the keys for a machine without GPUs"
        )
