"""`examples/ppo_simple.py` as the seed documents call it."""

import json
import sys

import pytest

from tests.commands import ran
from tests.forked import run_forked
from tests.runtime.ranks import ROOT, environment
from verl.parallel.collectives import free_port

pytestmark = pytest.mark.seed("E8")

SCRIPT = ROOT / "examples" / "ppo_simple.py"
PLAIN = [SCRIPT, "--num_rollout_workers", "1", "--num_update_workers", "1"]


def summary(folder):
    return json.loads((folder / "outputs/ppo_simple/run/summary.json").read_text())


def run(command, folder):
    done = ran(*command, cwd=folder, env=environment(), timeout=150)
    return done.stdout + done.stderr


def test_plain_python(tmp_path):
    code, said = run_forked(*PLAIN, cwd=tmp_path, env=environment(), timeout_s=150)
    assert code == 0, said[-5000:]
    assert "devices" not in said
    assert summary(tmp_path)["steps"] == 5


@pytest.mark.slow
def test_under_torchrun(tmp_path, tiny_llama):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master-port={free_port()}"]
    options = ["--config-path", "configs/ppo_llama3.yaml", "--num-rollout-workers", "1", "--num-update-workers", "1"]
    text = run([*launcher, str(SCRIPT), *options, f"actor_rollout_ref.model.path={tiny_llama}"], tmp_path)
    assert "actor, critic on 0; rollout, reward on 1" in text
    assert "sharding: fsdp, all data-parallel devices, gradients summed in fp32" in text
    assert summary(tmp_path)["steps"] == 5
