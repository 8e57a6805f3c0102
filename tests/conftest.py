"""Shared fixtures. Tests use no network and one thread each, so that they can run side by side on two cores."""

import functools
import gc
import os
import sqlite3
import ssl
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
from hypothesis import HealthCheck, settings

from tests.loaded_once import remember_loads
from tests.unit_files import is_unit
from verl.compat.hydra_groups import main as write_groups

# how long an example takes says how busy the machine is, and nothing about the code
settings.register_profile("verl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("verl")

# Files of 10 s and more, the longest first: begun early they leave no core without work at the end. Launches of ranks take
# both cores, and run while the other test process is in a file that waits.
LONGEST = """
    runtime/test_ray.py rollout/test_contract.py rollout/test_device_backend.py engines/test_fsdp.py tinker/test_service.py
    runtime/test_spmd.py rewards/test_innocent.py rewards/test_pool.py runtime/test_reshard_runs.py runtime/test_faults.py
    agents/test_ways.py reshard/test_update.py tinker/test_ranks.py cli/test_supervise.py rollout/test_draft_head.py
    tinker/test_bases.py rollout/test_native_forward.py rewards/test_programs.py compat/test_own_fit.py
    rollout/test_drafts.py examples/test_pages.py data/test_scan.py rollout/test_draft_model.py rollout/test_trainer_bits.py
    rollout/test_cpu_kernels.py run/test_async.py tinker/test_tenants.py engines/test_contract.py rollout/test_vision.py
    run/test_vision.py run/test_preference.py run/test_distillation.py run/test_resume.py agents/test_images.py
    run/test_inputs.py planner/test_search.py agents/test_hostile_episodes.py tracking/test_ledger_crashes.py
    checkpoint/test_attack.py rollout/test_process.py parallel/test_child_main.py page/test_launch.py
    tinker/test_document.py
""".split()


def pytest_addoption(parser):
    parser.addoption(
        "--unit",
        action="store_true",
        help="one case of each test in files that start no process and no run, and tests/house",
    )


def pytest_ignore_collect(collection_path, config):
    is_other = collection_path.name.startswith("test_") and config.getoption("--unit") and not is_unit(collection_path)
    return is_other or None


def pytest_configure(config):
    if config.getoption("--unit"):
        settings.register_profile("unit", settings.get_profile("verl"), max_examples=10)
        settings.load_profile("unit")
    if not hasattr(config, "workerinput"):  # as an installation does, after a change of a key
        write_groups([str(config.rootpath / "verl/trainer/config")])
    os.environ["VERL_PAGE"] = "0"  # no run of a test starts a page unless it asks for one
    if hasattr(config.option, "loadscopereorder"):  # xdist would begin with the files of many tests
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not _repeats_in_another_dtype(item)]
    _mark_slow_cases(items)
    if config.getoption("--unit"):
        items[:] = {_unit_key(item): item for item in reversed(items)}.values()
        items.reverse()
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Looking for garbage among what imports make takes a fifth of the time of the collection of tests, and 4 s at the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)  # looking for garbage as often as by default takes 2% of the suite
        gc.enable()


def _unit_key(item):
    """A key that all cases of a parametrized test share; tests/house reads all files and pages, and keeps its cases."""
    return item.nodeid if item.path.parent.name == "house" else (item.path, item.cls, item.originalname)


def _mark_slow_cases(items):
    """slow_cases.txt says how many cases of a test the default suite runs. The later ones, of seconds each, are slow."""
    rows = Path(__file__).with_name("slow_cases.txt").read_text().splitlines()
    remaining = {name: int(count) for name, count in map(str.split, rows)}
    for item in items:
        key = f"{'/'.join(item.path.parts[-2:])}::{getattr(item, 'originalname', None)}"
        if key in remaining and item.get_closest_marker("slow") is None:
            remaining[key] -= 1
            if remaining[key] < 0:
                item.add_marker(pytest.mark.slow)


def _repeats_in_another_dtype(item):
    """Whether a test of several dtypes would run a second time for the path that only bfloat16 takes."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("bf16_path") == "widened" and "bfloat16" not in str(params.get("dtype", "bfloat16"))


@pytest.fixture(params=["native", "widened"])
def bf16_path(request, monkeypatch):
    """Runs a test as on a CPU with bfloat16 instructions, and as on one without, in child processes too."""
    monkeypatch.setenv("VERL_CPU_BF16", request.param)
    return request.param


class Unsynced(sqlite3.Connection):
    """Syncs nothing to the disk from the choice of a journal on, whatever is asked for: most of the time of a tiny run."""

    def execute(self, statement, *arguments):
        if statement.startswith(("PRAGMA journal_mode=", "PRAGMA synchronous=")):
            done = super().execute("PRAGMA synchronous=OFF")
        return done if "synchronous=" in statement else super().execute(statement, *arguments)


@pytest.fixture(scope="session", autouse=True)
def quick_process():
    """No file of this process is synced to the disk; tests of power losses count the calls. HTTP clients share certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Unsynced))
        # each HTTP client reads all certificates, 15 ms of a processor, and no test reads any
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="module", autouse=True)
def loaded_once(request):
    """Models of an unchanged folder are built once for all tests but those of loading."""
    with pytest.MonkeyPatch.context() as patch:
        if "verl.models.load" in sys.modules and request.path.parent.name != "models":
            remember_loads(patch)
        yield


@pytest.fixture
def forked_engines(monkeypatch):
    """Engine processes are forks of this process with torch in its memory."""
    from tests.forked import fork_instead
    from verl.rollout import process

    monkeypatch.setattr(process.subprocess, "Popen", fork_instead(process.subprocess.Popen))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Folder of a tiny random Llama with tokenizer and chat template."""
    from verl.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """family -> the folder of a tiny random vision-language model with tokenizer and image processor, made when asked for."""
    from tests.vision_families import vision_folders

    return vision_folders(tmp_path_factory)


@pytest.fixture
def around(monkeypatch):
    """`around(owner, name, call)`: `call(original, *arguments)` stands for a method or function of `owner`."""

    def replace(owner, name, call):
        original = getattr(owner, name)

        @functools.wraps(original)  # with the attributes that @register has set
        def replaced(*args, **kwargs):
            return call(original, *args, **kwargs)

        monkeypatch.setattr(owner, name, replaced)

    return replace


@pytest.fixture
def ends_after(around, monkeypatch):
    """`ends_after(step)`: the next run ends after that step, as a run that is stopped does, and knows nothing of it before."""
    from verl.programs.ppo_program import PPOProgram

    def set_last(last):
        def step_done(original, self, step, metrics):
            original(self, step, metrics)
            if step == last:
                self.data.num_steps = step
                monkeypatch.setattr(PPOProgram, "step_done", original)

        around(PPOProgram, "step_done", step_done)

    return set_last
