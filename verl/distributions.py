"""The distributions of a release: the core `verl`, and the parts beside it, each a wheel (packages/, docs/architecture.md).

A module belongs to the part with the longest matching name below, else to the core. The core imports no module of a part
(tests/house/test_layers.py): tables of the core name these modules as strings, and `load_part` imports one on first use. In a
checkout all parts are there.
"""

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from verl._version import __version__
from verl.errors import DistributionError

CORE = "verl"
# part -> its modules, with everything below them; the first is a package by which a part is recognized
PARTS: dict[str, tuple[str, ...]] = {
    "verl-compat": ("verl.compat", "verl.runner", "verl.cli.compat", "verl.cli.import_check", "verl.trainer.main_ppo"),
    "verl-page": (
        "verl.page",
        "verl.cli.view",
        "verl.tracking.console_notebook",
        *(f"verl.tracking.sinks.{name}" for name in ("mlflow", "swanlab", "trackio", "wandb")),
    ),
    "verl-planner": ("verl.planner", "verl.cli.plan"),
    "verl-tinker": ("verl.tinker", "verl.cli.serve"),
    "verl-clusters": (
        "verl.engines.megatron",
        "verl.engines.deepspeed",
        "verl.rollout.vllm",
        "verl.rollout.http",
        "verl.rollout.engine_names",
        "verl.rollout.other_engines",
        "verl.rollout.process",
        "verl.rollout.process_main",
        "verl.reshard.cuda_ipc",
        "verl.reshard.delivery",
        "verl.reshard.delta",
        "verl.reshard.device_memory",
        "verl.reshard.engine_transfer",
        "verl.reshard.link",
        "verl.reshard.route",
        "verl.reshard.shared_memory",
        "verl.reshard.weight_files",
        "verl.roles.judge_server",
        *(
            f"verl.runtime.ray{name}"
            for name in ("", "_cluster", "_node", "_process", "_request", "_scaling", "_sizes")
        ),
        "verl.cli.scale",
    ),
    "verl-drafts": ("verl.rollout.native.drafts",),
    "verl-agents": ("verl.agents", "verl.tools", "verl.rewards.programs"),
    "verl-tasks": (
        "verl.data.tasks",
        "verl.data.prepare",
        "verl.programs.label",
        "verl.programs.rejection",
        "verl.models.convert",
        "verl.models.gguf_file",
        "verl.models.gguf_header",
        "verl.models.gguf_tokenizer",
        "verl.cli.data",
        "verl.agents.games",
        "verl.agents.tools.calculator",
        *(f"verl.rewards.scorers.{name}" for name in ("code", "exact_match", "gsm8k", "puzzles", "reasoning_gym")),
        *(f"verl.rewards.scorers.math_{name}" for name in ("answers", "forms")),
    ),
}


def owner_of(module: str) -> str:
    """The distribution that has a module of verl."""
    names = ((name, part) for part, modules in PARTS.items() for name in modules)
    return max(((len(name), part) for name, part in names if f"{module}.".startswith(f"{name}.")), default=(0, CORE))[1]


@functools.cache
def is_installed(part: str) -> bool:
    """Whether the modules of a part are here."""
    return (Path(__file__).parent.joinpath(*PARTS[part][0].split(".")[1:]) / "__init__.py").is_file()


def require_part(module: str, what: str) -> None:
    """Raise DistributionError if the part that has `module` is not installed; `what` needs it, in the user's terms."""
    part = owner_of(module)
    if part != CORE and not is_installed(part):
        raise DistributionError(f"{what} is part of {part}, which is not installed. {_fix(part)}", module)


def load_part(module: str) -> ModuleType:
    """A module of a part, imported. Raises DistributionError if the part is not installed."""
    require_part(module, f"The module {module}")
    return importlib.import_module(module)


@functools.cache
def check_releases() -> None:
    """Raise DistributionError for an installed part of another release than the core."""
    for part in PARTS:
        try:
            version = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed, or of this checkout
        if version != __version__ and is_installed(part):
            raise DistributionError(
                f"{part} {version} is installed beside verl {__version__}; both must be of one release. {_fix(part)}",
                part,
            )


def _fix(part: str) -> str:
    return f"In a checkout of verl {__version__}, run: pip install ./packages/{part}"


class MissingPartFinder:
    """The last meta path finder: explains the import of a module of verl that no other finder has."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise DistributionError if a part that is not installed has, or may have, the module `name`."""
        if name.startswith("verl."):
            require_part(name, f"The module {name}")
            if not is_installed("verl-compat"):
                require_part(
                    PARTS["verl-compat"][0], f"There is no module {name} in the core. An import path of other releases"
                )


def install() -> None:
    """Called by `import verl`: import paths of other releases, and errors for parts that are not installed."""
    if is_installed("verl-compat"):
        load_part("verl.compat.finder").install()
    if MissingPartFinder not in sys.meta_path:
        sys.meta_path.append(MissingPartFinder)  # the class itself has find_spec
