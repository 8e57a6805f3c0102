"""The share of the Python names that existing recipes import and that import here, weighted by how many projects use each."""

import importlib
from pathlib import Path

from tests.commands import python

# module, name, projects of the recipe collection and the examples of August 2026 that import it
TABLE = Path(__file__).with_name("surface.tsv")
LEAST_SHARE = 0.9


def rows():
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    return [(module, name, int(projects)) for module, name, projects in (line.split("\t") for line in lines)]


def imports(module, name):
    try:
        imported = importlib.import_module(module)
        return hasattr(imported, name) or importlib.import_module(f"{module}.{name}") is not None
    except ImportError:
        return False


def test_enough_of_the_names_import():
    table = rows()
    assert len({(module, name) for module, name, _ in table}) == len(table)
    missing = [(module, name, projects) for module, name, projects in table if not imports(module, name)]
    total = sum(projects for _, _, projects in table)
    share = 1 - sum(projects for *_, projects in missing) / total
    listing = "\n".join(
        f"{projects:3} {module}.{name}" for module, name, projects in sorted(missing, key=lambda r: -r[2])
    )
    assert share >= LEAST_SHARE, f"{share:.1%} of {total} imports; missing:\n{listing}"


def test_only_worker_groups_need_ray():
    """Every other module of the table imports without Ray, vLLM and Hydra, and starts no CUDA. What needs Ray says so."""
    modules = sorted({module for module, *_ in rows() if not module.startswith("verl.single_controller.ray")})
    code = (
        "import gc, importlib, sys\n"
        "gc.disable()\n"
        "absent = ('ray', 'vllm', 'pandas', 'hydra', 'datasets', 'einops', 'flash_attn')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        f"for name in {modules}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name.startswith('verl'), f'{name} needs {error.name}'\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "from verl.errors import MissingExtraError\n"
        "from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage\n"
        "from verl.trainer.ppo.reward import compute_reward_async\n"
        "from verl.single_controller.base import Worker\n"
        "from verl.single_controller import ray as groups\n"
        "for use in (lambda: compute_reward_async.remote(None), lambda: groups.RayWorkerGroup):\n"
        "    try:\n"
        "        use()\n"
        "    except MissingExtraError as error:\n"
        "        print(error)\n"
    )
    done = python("-c", code)
    assert done.stdout.count("pip install 'ray[default]>=2.50'") == 2, done.stdout
