"""Facts are read without harm, and the findings follow from them."""

import copy
import importlib.metadata
import json
import os
import re
import sys

import pytest

from tests.commands import python
from tests.house.source import ROOT
from tests.slow import slow
from verl.cli.doctor import facts
from verl.cli.machine import packages
from verl.cli.machine.findings import findings
from verl.cli.machine.host import host, usable_cores
from verl.cli.machine.packages import installed_version, probe
from verl.cli.machine.probes import PROBES
from verl.cli.machine.requirements import _fits, unmet_requirements
from verl.cli.main import main
from verl.parallel.memory import available_memory, memory_limit

pytestmark = pytest.mark.seed("F8")

GIB = 1 << 30
HOST = {
    "system": "Linux 6.1 x86_64", "libc": "glibc 2.36", "cpu": "Some CPU", "cpu_flags": ["avx2", "avx512f"],
    "num_cores": 4, "num_usable_cores": 4.0, "memory_bytes": 32 * GIB, "available_memory_bytes": 20 * GIB,
    "swap_bytes": 0, "shared_memory_bytes": 16 * GIB, "free_disk_bytes": 100 * GIB, "free_temporary_bytes": 100 * GIB,
    "file_system": {"kind": "ext4", "refusals": [], "notices": []},
    "limits": {"nofile": 65536, "as": None}, "environment": {"OMP_NUM_THREADS": "4"},
    "links": {"gpu_links": [], "fabric": [], "interfaces": {"eth0": 10000}, "settings": {}},
}  # fmt: skip
TORCH = {"version": "2.13.0", "cuda_build": None, "num_threads": 4, "cuda_available": False, "devices": [],
         "mps_available": False, "gflops": {"float32": 100.0, "bfloat16": 300.0}}  # fmt: skip
PACKAGES = {
    "python": "3.12.1", "executable": "/env/bin/python", "virtual_environment": True, "other_pythons": [],
    "verl_command": "/env/bin/verl", "requirements": {}, "driver": None, "torch_probe": TORCH,
    "transformers_probe": {"version": "5.19.0"}, "companions": {},
    "decoder_probe": {"name": "avx2", "compiled": True},
    "engine_names": {"vllm": {}, "sglang": {}},
    "optional": {"vllm": None, "sglang": None, "megatron": None, "deepspeed": None, "torchvision": None},
}  # fmt: skip
GPU = {"name": "Old GPU", "memory_bytes": 16 * GIB, "capability": [7, 0]}
DRIVER = {"gpus": ["New GPU, 80 GB, 535.1"], "newest_cuda": "12.2"}


def judge(host_changes=None, package_changes=None, torch_changes=None):
    host_facts, package_facts = {**HOST, **(host_changes or {})}, copy.deepcopy(PACKAGES)
    package_facts.update(package_changes or {})
    package_facts["torch_probe"] = {**package_facts["torch_probe"], **(torch_changes or {})}
    return [(line.level, line.text) for line in findings(host_facts, package_facts)]


def test_what_products_do_on_this_cpu_is_said():
    packages = {**PACKAGES, "torch_probe": {**TORCH, "bf16": "widened"}}
    texts = [text for topic, text in facts(HOST, packages) if topic == "cpu"]
    assert "bfloat16 on this CPU: widened to float32, which is faster on this CPU" in texts
    assert "bfloat16 on this CPU: unknown" in [text for _, text in facts(HOST, PACKAGES)]


def test_a_healthy_machine():
    assert judge() == [("pass", "no problem for training in one process")]


CASES = {
    "unmet requirement": ({"package_changes": {"requirements": {"torch>=2.8": "2.1.0"}}}, "fail", "pip install 'torch>=2.8'"),
    "not installed": ({"package_changes": {"requirements": {"verl": "not installed"}}}, "warn", "pip install -e ."),
    "broken torch": ({"package_changes": {"torch_probe": {"error": "no libtorch.so"}}}, "fail", "no libtorch.so"),
    "GPU without a CUDA build": ({"package_changes": {"driver": DRIVER}}, "warn", "a build without CUDA"),
    "old driver": (
        {"package_changes": {"driver": DRIVER}, "torch_changes": {"cuda_build": "13.0"}}, "fail",
        "the driver supports up to CUDA 12.2",
    ),
    "old GPU": ({"torch_changes": {"cuda_available": True, "devices": [GPU]}}, "warn", "Old GPU has no bfloat16"),
    "torchvision": (
        {"package_changes": {"transformers_probe": {"error": "operator torchvision::nms does not exist"},
                             "companions": {"torchvision": {"error": "operator torchvision::nms does not exist"}}}},
        "fail", "uninstall -y torchvision",
    ),
    "torchvision alone": (
        {"package_changes": {"companions": {"torchaudio": {"error": "undefined symbol"}}}},
        "warn", "torchaudio does not fit this torch and may break transformers: undefined symbol",
    ),
    "broken transformers": ({"package_changes": {"transformers_probe": {"error": "no regex"}}}, "fail", "no regex"),
    "slow bfloat16": ({"torch_changes": {"gflops": {"float32": 80.0, "bfloat16": 20.0}}}, "info", "dtype=auto"),
    "no kernels": (
        {"package_changes": {"decoder_probe": {"name": None, "compiled": False}}}, "warn", "apt install gcc",
    ),
    "unknown instruction set": (
        {"package_changes": {"decoder_probe": {"error": "VERL_CPU_ISA=avx10 was asked for"}}}, "warn", "VERL_CPU_ISA=avx10",
    ),
    "idle cores": ({"torch_changes": {"num_threads": 1}}, "warn", "torch uses 1 of 4 cores"),
    "no AVX2": ({"host_changes": {"cpu_flags": ["sse"]}}, "warn", "no AVX2"),
    "little memory": ({"host_changes": {"available_memory_bytes": GIB}}, "warn", "1.0 GiB of memory"),
    "small shm": ({"host_changes": {"shared_memory_bytes": 64 << 20}}, "warn", "--shm-size"),
    "full disk": ({"host_changes": {"free_disk_bytes": GIB}}, "warn", "1.0 GiB of disk"),
    "no renames": (
        {"host_changes": {"file_system": {"kind": "fuse.x", "refusals": ["renaming a folder fails"], "notices": []}}},
        "warn", "cannot hold checkpoints: renaming a folder fails",
    ),
    "network disk": (
        {"host_changes": {"file_system": {"kind": "nfs4", "refusals": [], "notices": ["nfs4 is far away"]}}},
        "info", "nfs4 is far away",
    ),
    "few files": ({"host_changes": {"limits": {"nofile": 256}}}, "warn", "ulimit -n"),
    "address space": ({"host_changes": {"limits": {"as": 1 << 30}}}, "warn", "ulimit -v"),
    "engine without a name": (
        {"package_changes": {"engine_names": {"vllm": {"as a service": {"vllm.a:/b": True, "vllm.a:/c": False}}}}},
        "warn", "has no vllm.a:/c, which verl uses as a service",
    ),
    "several Pythons": (
        {"package_changes": {"virtual_environment": False, "other_pythons": ["/usr/bin/python3.9"]}}, "warn", "python -m venv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_findings(name):
    changes, level, words = CASES[name]
    judged = judge(**changes)
    assert any(of == level and words in text for of, text in judged), judged
    assert len(judged) == 1, judged


def test_every_fact_can_be_shown_even_when_torch_is_broken():
    broken = {**PACKAGES, "torch_probe": {"error": "no libtorch.so"}, "transformers_probe": {"error": "no torch"}}
    lines = dict(facts(HOST, broken))
    assert "no libtorch.so" in lines["torch"]
    assert lines["devices"].startswith("the CPU alone")


def test_names_of_engines_are_listed_by_place():
    names = {"vllm.a:B.c": True, "vllm.a:B.d": False, "vllm.a:e": True, "vllm.f:/g": True}
    packages = {**PACKAGES, "engine_names": {"vllm": {"here": names}}, "optional": {"vllm": "0.99"}}
    assert [text for topic, text in facts(HOST, packages) if topic == "names"] == [
        "vllm 0.99 here: vllm.a:B.{c, d (missing)}",
        "vllm 0.99 here: vllm.a:{e}",
        "vllm 0.99 here: vllm.f:{/g}",
    ]


PROGRAMS = {
    "noisy": "import json; print('noise'); print(json.dumps({'version': '1'}))",
    "lacking": "import no_such_module_at_all",
    "slow": "import time; time.sleep(60)",
    "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}


def test_a_probe_reports_and_never_raises(tmp_path, monkeypatch):
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe("noisy") == {"version": "1"}
    assert probe("lacking") == {"error": "ModuleNotFoundError: No module named 'no_such_module_at_all'"}
    assert "took longer than" in probe("slow", timeout_s=0.5)["error"]
    if sys.platform != "win32":
        assert "signal 11" in probe("crashing")["error"]


def test_host_facts_are_plausible():
    host_facts = host()
    assert 0 < usable_cores() <= host_facts["num_cores"]
    assert 0 < available_memory() <= memory_limit()
    json.dumps(host_facts)


def test_versions():
    assert installed_version("pytest", ("no-such-distribution", "pytest")) == pytest.__version__
    assert installed_version("no_such_parent.child", ("no-such-distribution",)) is None
    assert unmet_requirements() == {}


@pytest.mark.parametrize("fresh", [False, slow(True)])
def test_doctor_end_to_end(verl, monkeypatch, fresh):
    """`fresh`: heavy packages are imported in separate processes, as elsewhere."""
    if not fresh:
        monkeypatch.setattr(packages, "probe", lambda module, name: PROBES[name]())
    said = verl.ends(0, "doctor", "--json")
    report = json.loads(said)
    assert report["packages"]["torch_probe"]["gflops"]["float32"] > 0
    assert report["packages"]["torch_probe"]["bf16"] in ("native", "widened")
    assert report["findings"]


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path):
    """Run in a separate process: no module that doctor itself needs may import torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
    )
    done = python("-m", "verl", "doctor", env={**os.environ, "PYTHONPATH": str(tmp_path)}, code=1)
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert "libcudart.so.13" in failed[0]
    assert "pip install --force-reinstall torch" in failed[0]
    for topic in ("system", "cpu", "memory", "disk", "limits", "python", "torch", "devices", "packages", "engines"):
        assert f"info  {topic} " in done.stdout, topic
    assert "rollout native" in done.stdout
    assert done.stdout.rstrip().endswith("This machine cannot train yet: 1 failure, 0 warnings.")
    assert not done.stderr


PIP_METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open shared object file')",
            "torch cannot be imported: libcudart.so.13: cannot open shared object file. Reinstall it: pip install "
            "--force-reinstall torch",
        ),
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
            "the package torch is not installed. Install it: pip install torch (`verl doctor` looks for others)",
        ),
        (
            "__version__ = '2.1.0'",
            "unmet requirements: torch>=2.9 (here: 2.1.0). Install them: pip install 'torch>=2.9'",
        ),
    ],
    ids=["broken", "missing", "too old"],
)
def test_training_with_a_torch_that_is_not_there(tmp_path, content, sentence):
    """The sentence of the doctor; no second attempt, and no advice to report a bug."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{content}\n")
    if "version" in content:
        (tmp_path / "torch-2.1.0.dist-info").mkdir()
        (tmp_path / "torch-2.1.0.dist-info" / "METADATA").write_text(PIP_METADATA)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    keys = (
        "data.train_files=x.jsonl",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    done = python("-m", "verl", "train", *keys, env={**os.environ, "PYTHONPATH": str(tmp_path)}, code=7)
    assert done.stderr.splitlines()[-1] == f"verl train: {sentence}"
    assert "Traceback" not in done.stderr
    assert "bug in verl" not in done.stderr
    assert not [line for line in done.stderr.splitlines() if "restart" in line and not line.startswith(" ")]


def test_a_release_outside_the_bounds_is_refused_before_a_run_starts(monkeypatch, capsys):
    unmet = {"torch>=2.9": "2.8.0", "math-verify>=0.9": "not installed"}
    monkeypatch.setattr("verl.cli.machine.requirements.unmet_requirements", lambda: unmet)
    assert main(["train", "data.train_files=x.jsonl"]) == 7
    assert capsys.readouterr().err == (
        "verl train: unmet requirements: torch>=2.9 (here: 2.8.0). Install them: pip install 'torch>=2.9'\n"
    )


def test_not_installed_is_a_requirement_that_is_not_met(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert unmet_requirements() == {"verl": "not installed"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "2.11.0+cu130"}, ["torch 2.11.0+cu130 reads no pages"]),
        ({"version": "2.12.0"}, []),
        ({"version": "2.13.0", "hip_build": "6.4"}, ["is built for ROCm"]),
        ({"devices": [GPU]}, ["generation has no CUDA graphs"]),
    ],
)
def test_what_a_gpu_computes_slowly_or_not_at_all_is_said(changes, words):
    card = {**GPU, "name": "New GPU", "capability": [9, 0]}
    judged = judge(torch_changes={"cuda_available": True, "cuda_build": "13.0", "devices": [card], **changes})
    warnings = [text for level, text in judged if level == "warn"]
    assert len(warnings) == len(words)
    assert all(word in text for word, text in zip(words, warnings, strict=True))


DEPENDENCIES = re.findall(
    r'^    "([\w-]+)>=', (ROOT / "pyproject.toml").read_text().partition("[project.optional")[0], re.M
)
DECLARED = {
    re.match(r"[\w-]+", text)[0] for text in importlib.metadata.requires("verl") if "extra ==" not in text
}  # an older installation of the checkout declares fewer
MODULES = {"PyYAML": "yaml"}


def without(folder, *distributions):
    """The environment of a process that has none of these packages: no module, and no record of an installation."""
    blocked = [MODULES.get(name, name.replace("-", "_")) for name in distributions]
    (folder / "sitecustomize.py").write_text(
        "import importlib.metadata, sys\n\n\n"
        "class Missing:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {blocked}:\n"
        "            raise ModuleNotFoundError(f'No module named {name.partition(chr(46))[0]!r}', name=name)\n\n\n"
        "sys.meta_path.insert(0, Missing)\n"
        "version = importlib.metadata.version\n\n\n"
        "def of_others(name):\n"
        f"    if name in {list(distributions)}:\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n\n\n"
        "importlib.metadata.version = of_others\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "name", [*(slow(name, when=name != "transformers") for name in DEPENDENCIES), "packaging", "all"]
)
def test_the_doctor_needs_the_standard_library_only(tmp_path, name):
    """torch is always missing too: its probe takes seconds."""
    missing = [*DEPENDENCIES, "packaging"] if name == "all" else ["torch", name]
    done = python("-m", "verl", "doctor", env=without(tmp_path, *missing), code=1)
    assert not done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    for distribution in set(missing) - {"packaging"}:
        assert f"'{distribution}>=" in line or distribution not in DECLARED
    assert "checkout" not in done.stdout
    if "transformers" in missing:
        assert "transformers not installed" in done.stdout
    assert "broken" not in done.stdout


def test_a_missing_package_is_named_as_pip_knows_it(tmp_path):
    environment = without(tmp_path, "PyYAML", "torch")
    assert "pip install PyYAML" in python("-m", "verl", "train", "x=1", env=environment, code=7).stderr
    done = python("-c", "from verl.worker import ActorRolloutRefWorker", env=environment, code=1)
    assert "the package torch is not installed. Install it: pip install torch" in done.stderr.splitlines()[-1]


def test_versions_fit_their_bounds():
    for version, bounds, fits in (
        ("2.8", ">=2.8", True), ("2.13.0+cpu", ">=2.8", True), ("2.7.1", ">=2.8", False), ("0.20", ">=0.19,<0.20", False),
        ("0.19.9", ">=0.19,<0.20", True), ("0.16.1", "==0.16.1", True), ("5.0.0rc1", ">=5.0", True), ("1", "", True),
    ):  # fmt: skip
        assert _fits(version, bounds) is fits, (version, bounds)
