"""verl: reinforcement-learning post-training for large language models.

The API is `verl.train` with `sft`, `dpo` and the other functions of verl/api.py, `verl.Trainer` and `verl.Session`. `RLRunner`,
`Controller` and `ExperienceBuffer` are for scripts of other releases.

`import verl` imports neither torch nor Ray: the names below are resolved on first use, and import paths of other releases
are made on import, if verl-compat is installed (verl/distributions.py). It also sets how torch's threads wait, if torch is
imported afterwards (verl/parallel/process_settings.py).
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - no installer has checked a checkout on the path
    raise ImportError(
        "verl needs Python 3.10 or newer, and this is {}.{} ({}). Make an environment with a newer one: "
        "python3.11 -m venv .venv".format(*sys.version_info[:2], sys.executable)
    )

from typing import TYPE_CHECKING, Any

from verl._version import __version__
from verl.cli.machine.requirements import imported
from verl.distributions import install
from verl.parallel.process_settings import spin_briefly

if TYPE_CHECKING:
    from verl.api import Trainer, cpo, dpo, evaluate, generate, kto, orpo, preference, reward_model, sft, simpo, train
    from verl.compat.dataflow import Controller
    from verl.compat.experience_buffer import ExperienceBuffer
    from verl.config import load_config
    from verl.data_proto.proto import DataProto, DataProtoItem
    from verl.page.notebook import Run
    from verl.parallel.placement import DataParallelConfig
    from verl.programs.stages import Stage
    from verl.runner.runner import RLRunner
    from verl.session import Session

install()
spin_briefly()  # torch reads the setting when it is imported

_API = (
    "Trainer", "cpo", "dpo", "evaluate", "generate", "kto", "orpo", "preference", "reward_model", "sft", "simpo", "train",
)  # fmt: skip
_LAZY = {
    "Controller": "verl.compat.dataflow",
    "DataParallelConfig": "verl.parallel.placement",
    "DataProto": "verl.data_proto.proto",
    "DataProtoItem": "verl.data_proto.proto",
    "ExperienceBuffer": "verl.compat.experience_buffer",
    "RLRunner": "verl.runner.runner",
    "Run": "verl.page.notebook",
    "Session": "verl.session",
    "Stage": "verl.programs.stages",
    "load_config": "verl.config",
    **dict.fromkeys(_API, "verl.api"),
}

_MODULES = ("trainer", "utils", "worker", "workers")  # of other releases: `import verl; verl.utils.benchmark_nccl()`

__all__ = [
    "Controller", "DataParallelConfig", "DataProto", "DataProtoItem", "ExperienceBuffer", "RLRunner", "Run",
    "Session", "Stage", "Trainer", "__version__", "cpo", "dpo", "evaluate", "generate", "kto", "load_config",
    "orpo", "preference", "reward_model", "sft", "simpo", "train",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]  # the completion of notebooks


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(imported(_LAZY[name]), name)
    if name in _MODULES:
        return imported(f"verl.{name}")
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
