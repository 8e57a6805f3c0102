"""Distributions outside the core: sentences for parts that are missing, and for parts of another release."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

import verl
from tests.config.helpers import GRPO
from tests.house.source import ROOT
from verl import distributions
from verl.cli.main import main
from verl.config import load_config
from verl.distributions import PARTS, check_releases, owner_of
from verl.engines.api import require_library
from verl.errors import DistributionError, MissingExtraError
from verl.families import ROLLOUT_ENGINES, TRAINING_ENGINES
from verl.programs.ppo_data import known_loops
from verl.registry import Registry
from verl.runtime import weight_sync
from verl.runtime.api import _make
from verl.tracking.trained import TrainedRun

INSTALL = r"In a checkout of verl \S+, run: pip install \./packages/"


@pytest.fixture
def core_alone(monkeypatch):
    monkeypatch.setattr(distributions, "is_installed", lambda part: False)


def test_the_longest_name_decides():
    assert owner_of("verl.planner.search") == owner_of("verl.cli.plan") == "verl-planner"
    clusters = ("engines.megatron.engine", "rollout.vllm", "rollout.http.client", "runtime.ray", "reshard.delivery")
    assert {owner_of(f"verl.{name}") for name in clusters} == {"verl-clusters"}
    assert (owner_of("verl.tools.schemas"), owner_of("verl.agents.games")) == ("verl-agents", "verl-tasks")
    assert {owner_of(name) for name in ("verl.engines.fsdp", "verl.cli.planning", "verl.runtime.rank", "verl")} == {
        "verl"
    }


@pytest.mark.parametrize(
    ("verb", "part"),
    [
        ("plan", "planner"),
        ("view", "page"),
        ("serve", "tinker"),
        ("import-check", "compat"),
        ("data", "tasks"),
        ("scale", "clusters"),
    ],
)
def test_a_verb_of_a_part_that_is_missing(core_alone, capsys, verb, part):
    assert main([verb, "--help"]) == MissingExtraError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"verl {verb}: verl {verb} is part of verl-{part}, which is not installed. In a checkout of verl "
    )
    assert line.endswith(f"run: pip install ./packages/verl-{part}")


def test_a_scorer_of_a_known_data_source(core_alone):
    scorers = Registry("built-in scorer", {"openai/gsm8k": "verl.rewards.scorers.gsm8k:SCORER"})  # not yet loaded
    with pytest.raises(
        DistributionError, match="^The built-in scorer 'openai/gsm8k' is part of verl-tasks, which is not installed"
    ):
        scorers.get("openai/gsm8k")


def test_a_run_with_agents(core_alone):
    tools = [
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
    ]
    with pytest.raises(
        DistributionError, match=rf"^A run with agents \(.*\) is part of verl-agents, .*{INSTALL}verl-agents$"
    ):
        known_loops(load_config([*GRPO, *tools], check=False).config)
    assert known_loops(load_config(GRPO).config) == frozenset()


def test_an_engine_of_a_part_that_is_missing(core_alone, monkeypatch):
    with pytest.raises(
        DistributionError, match=f"^strategy=megatron is part of verl-clusters, .*{INSTALL}verl-clusters$"
    ):
        require_library("megatron")
    monkeypatch.setitem(TRAINING_ENGINES._rows, "deepspeed", TRAINING_ENGINES._declared["deepspeed"])
    with pytest.raises(DistributionError, match="The training engine 'deepspeed' is part of verl-clusters"):
        TRAINING_ENGINES.get("deepspeed")
    monkeypatch.setitem(ROLLOUT_ENGINES._rows, "vllm", ROLLOUT_ENGINES._declared["vllm"])
    with pytest.raises(DistributionError, match="^The rollout engine 'vllm' is part of verl-clusters"):
        ROLLOUT_ENGINES.get("vllm")
    with pytest.raises(DistributionError, match="^A run over several devices .* is part of verl-clusters"):
        _make(None, "ray")


def test_drafts(core_alone):
    config = load_config([*GRPO, "actor_rollout_ref.rollout.speculative.methods=[ngram]"]).config
    with pytest.raises(DistributionError, match=rf"methods=\['ngram'\] is part of verl-drafts.*{INSTALL}verl-drafts$"):
        ROLLOUT_ENGINES.get("native").require_package(config.actor_rollout_ref.rollout)


def test_an_engine_of_the_user_with_a_copy_of_the_weights(core_alone, monkeypatch):
    monkeypatch.setattr(weight_sync, "ModeSwitch", lambda *settings, **more: None)
    context = SimpleNamespace(rollout=SimpleNamespace(section=0), device=0, has_own_weights=True, shares_weights=False)
    with pytest.raises(DistributionError, match=f"^A rollout engine with a copy .* verl-clusters.*{INSTALL}"):
        weight_sync.RankWeightSync(context, None, None)


def test_a_run_of_the_core_has_its_model_and_names_the_part_that_reads_samples(core_alone, tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    for step in (2, 10):
        (tmp_path / f"global_step_{step}" / "actor" / "huggingface").mkdir(parents=True)
    run = TrainedRun(tmp_path)
    assert run.model_path == tmp_path / "global_step_10" / "actor" / "huggingface"
    with pytest.raises(DistributionError, match=f"Run.metrics is part of verl-page.*{INSTALL}verl-page"):
        _ = run.metrics
    assert not hasattr(run, "_repr_html_")


def test_imports_of_modules_that_are_not_there(core_alone):
    find = distributions.MissingPartFinder.find_spec
    with pytest.raises(ModuleNotFoundError, match="The module verl.planner.search is part of verl-planner") as failure:
        find("verl.planner.search")
    assert failure.value.name == "verl.planner.search"
    with pytest.raises(DistributionError, match="no module verl.utils.fs in the core.*is part of verl-compat"):
        find("verl.utils.fs")
    assert find("numpy.nothing") is None


def test_another_release_is_refused_at_start_with_both_versions(monkeypatch, capsys):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.0.9" if n == "verl-planner" else version(n))
    check_releases.cache_clear()
    try:
        assert main(["check"]) == MissingExtraError.exit_code
        said = f"verl-planner 0.0.9 is installed beside verl {verl.__version__}; both must be of one release"
        assert said in capsys.readouterr().err
        with pytest.raises(DistributionError, match="both must be of one release"):
            _ = verl.Trainer
    finally:
        check_releases.cache_clear()


def test_every_part_has_its_folder_in_packages():
    assert {folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir()} == set(PARTS)
    for part in PARTS:
        assert f'name = "{part}"' in (ROOT / "packages" / part / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    places = [str(ROOT), *(str(ROOT / "packages" / part) for part in PARTS)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, *places], check=True, timeout=900)
    return folder


def installed(wheels, names, target):
    """A function that runs `python -m verl ...` with the wheels of `names`, which stand before any other installation."""
    files = [str(next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))) for name in names]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *files]
    subprocess.run(install, check=True, timeout=300)

    def verb(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "verl", *arguments],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(target), "HOME": str(target), "HF_HUB_OFFLINE": "1"},
            cwd=target, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    return verb


VERBS = {"plan": "planner", "view": "page", "serve": "tinker", "import-check": "compat", "scale": "clusters"}


@pytest.mark.slow
def test_the_wheel_of_the_core_trains_and_names_the_wheels_of_its_verbs(wheels, tmp_path, tiny_llama):
    verb = installed(wheels, ["verl"], tmp_path / "core")
    (tmp_path / "rows.jsonl").write_text('{"text": "two and two are four"}\n' * 4)
    keys = [f"model.path={tiny_llama}", f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=2"]
    run = tmp_path / "run"
    done = verb("sft", *keys, "trainer.total_training_steps=2", f"trainer.default_local_dir={run}")
    assert done.returncode == 0, done.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
    assert not (tmp_path / "core" / "verl" / "planner").exists()
    for name, part in VERBS.items():
        done = verb(name, "--help")
        assert f"verl {name} is part of verl-{part}, which is not installed" in done.stderr
        assert done.returncode == MissingExtraError.exit_code


@pytest.mark.slow
def test_with_all_wheels_every_verb_starts(wheels, tmp_path):
    verb = installed(wheels, ["verl", *PARTS], tmp_path)
    from verl.cli.main import VERBS as EVERY

    for name in EVERY:
        done = verb(name, "--help")
        assert done.returncode == 0, done.stderr
    folders = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "verl").rglob("*.py")}
    assert folders == {path.relative_to(ROOT).as_posix() for path in (ROOT / "verl").rglob("*.py")}
