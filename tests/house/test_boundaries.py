"""Boundaries: code that must stay in one place, and modules that must start without heavy libraries."""

import re
import sys

import pytest

from tests.commands import python
from tests.house.source import ROOT, files, imports, relative
from verl.cli.main import VERBS
from verl.compat.finder import IS_PACKAGE

# A library that we adapt to lives in one file, so that a new version of it is one file's business.
ONE_FILE_EACH = (
    "ray",
    "vllm",
    "sglang",
    "megatron",
    "deepspeed",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
    "math_verify",
    "matplotlib",
)

TORCH_FREE = (
    "verl",
    "verl.errors",
    "verl.registry",
    "verl.data_proto.columns",
    "verl.data_proto.metrics",
    "verl.data_proto.samples",
    "verl.agents.sandboxed",  # in each process of a tool
    "verl.config",
    "verl.config.load",
    "verl.parallel.balance",
    "verl.parallel.mesh",
    "verl.parallel.placement",
    *(f"verl.parallel.{part}" for part in ("register", "slices")),
    *(f"verl.reshard.{part}" for part in ("layout", "grouping", "plan", "hf_sharding")),
    "verl.planner",
    "verl.rewards",
    "verl.rewards.functions",  # with which `verl.generate` scores
    "verl.cli.main",
    "verl.cli.supervise",
    *sorted({verb.function.partition(":")[0] for verb in VERBS.values()}),
    "verl.trainer.main_ppo",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation",
    "verl.trainer.main_generation_server",
    "verl.trainer.main_ppo_sync",
    "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy.main_ppo",
    "verl.utils.fs",
    "verl.utils.config",
    "verl.utils.import_utils",
    "verl.utils.py_functional",
    "verl.utils.reward_score",
)
HEAVY = ("torch", "ray", "transformers", "tensordict", "pandas", "matplotlib", "sympy", "datasets")
# statements of processes that start often, which import these neither
LIGHT = (
    "import verl.config",
    "from verl.config import load_config; load_config(['algorithm.adv_estimator=grpo'])",
    "import verl.rewards.worker",
)
NOT_LIGHT = ("numpy", "omegaconf")


@pytest.mark.parametrize("library", ONE_FILE_EACH)
def test_a_library_lives_in_one_file(library):
    where = {
        relative(path) for name, path in files().items() for i in imports(name) if i.module.split(".")[0] == library
    }
    assert len(where) <= 1, f"{library} is imported in {sorted(where)}"


def test_what_starts_without_torch():
    missing = {name for name in TORCH_FREE if name not in files() and name not in IS_PACKAGE}
    assert not missing, missing
    statements = dict.fromkeys(LIGHT, (*HEAVY, *NOT_LIGHT))
    statements |= {f"import {name}": HEAVY for name in TORCH_FREE}
    code = (
        "import sys\n"
        f"for statement, forbidden in {statements}.items():\n"
        "    exec(statement)\n"
        "    heavy = [name for name in forbidden if name in sys.modules]\n"
        "    assert not heavy, f'{statement}: imports {heavy}'\n"
    )
    python("-c", code)


BROUGHT_BY = {  # module -> the declared package that needs it itself
    "markupsafe": "jinja2",
    "tokenizers": "transformers",
    "mcp_types": "mcp",
    "httpx2": "mcp",
    "ipython": "the notebook, whose kernel it is",
    "sympy": "torch",
    "triton": "torch",  # where it computes on GPUs
    "peft": "the user, whose model is one of it",
    "trl": "the user, whose script is written for it",
}


def test_every_imported_package_is_declared():
    """An installation without the dependencies of dependencies names the missing packages."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = {name.lower().replace("-", "_") for name in re.findall(r'"([A-Za-z][\w.-]*)(?:\[\w+\])?[<>=]=?\d', text)}
    declared |= {"yaml", "megatron", "pil"}  # of PyYAML, megatron-core and Pillow
    allowed = {*sys.stdlib_module_names, *declared, *BROUGHT_BY, "verl"}
    undeclared = {
        f"{entry.module} in {relative(path)}:{entry.line}"
        for name, path in files().items()
        for entry in imports(name)
        if entry.module.partition(".")[0].lower() not in allowed
    }
    assert "pyyaml" in declared
    assert not undeclared
