"""The program is one page, and knows no runtime and no engine."""

import re
import sys

import pytest

from tests.house.source import PACKAGE
from verl.config import load_config
from verl.errors import ConfigError, MissingExtraError
from verl.programs.api import ProgramSpecs
from verl.programs.ppo import PPO
from verl.runtime.api import choose, open_runtime

PROGRAM = PACKAGE / "programs" / "ppo.py"


def test_under_200_lines_without_names_of_runtimes_or_engines():
    text = PROGRAM.read_text()
    assert len(text.splitlines()) < 200
    names = r"\b(ray|spmd|torchrun|local|fsdp2?|megatron|deepspeed|vllm|sglang|gloo|nccl|rank|world_size)\b"
    assert not re.findall(names, text, re.I)


def test_without_ray(monkeypatch):
    for name in [n for n in sys.modules if n.startswith(("verl.runtime.ray", "verl.compat.ray_worker_group"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    config = load_config(["actor_rollout_ref.model.path=x", "trainer.n_gpus_per_node=2"], check=False).config
    with (
        pytest.raises(MissingExtraError, match=r"pip install 'ray\[default\]>=2.50'"),
        open_runtime(ProgramSpecs(PPO, config)),
    ):
        pass


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.n_gpus_per_node=64"], "64 devices, but this machine has"),
        (["trainer.nnodes=2"], "ray_kwargs.ray_init.address=auto"),
        (
            ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=3"],
            "2 devices do not divide into groups of 1 .* x 3",
        ),
        (["trainer.n_gpus_per_node=2", "trainer.placement={actor:[0]}"], "No role is placed on device 1"),
    ],
)
def test_refused_before_anything_starts(monkeypatch, overrides, words):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(["actor_rollout_ref.model.path=x", *overrides], check=False).config
    with pytest.raises(ConfigError, match=words), open_runtime(ProgramSpecs(PPO, config)):
        pass


def test_which_runtime(monkeypatch):
    def config(*overrides):
        return PPO.roles(load_config(["actor_rollout_ref.model.path=x", *overrides], check=False).config)

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert choose(config()) == "local"
    assert choose(config("trainer.n_gpus_per_node=2")) == "ray"
    assert choose(config("trainer.placement={actor:[0],critic:[1]}")) == "ray"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert choose(config()) == "spmd"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert choose(config()) == "local"
