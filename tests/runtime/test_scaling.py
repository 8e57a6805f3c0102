"""Roles of a run on Ray that grow and shrink while it runs, on groups of devices of uneven sizes."""

import json
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from tests.runtime.conftest import REWARD, assert_same, assert_same_weights, train_here
from verl.cli.main import main
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.parallel.dispatch import plan_call
from verl.parallel.mesh import Mesh
from verl.parallel.register import registered
from verl.roles.reward import RewardWorker
from verl.roles.rollout import RolloutWorker
from verl.runtime.ray_sizes import NAME, ask_role_sizes, read_role_sizes, write_role_sizes
from verl.runtime.worker_group import WorkerGroup

pytestmark = pytest.mark.seed("G1")
AHEAD = ["actor_rollout_ref.rollout.prefetch_num=1", "trainer.total_training_steps=40", "trainer.save_freq=40"]
# in float64 the bits of a sample depend on the number of samples beside it
AHEAD += ["actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.rollout.batch_invariant=require"]
UNEVEN = [
    "trainer.n_gpus_per_node=4",
    "ray_kwargs.ray_init.num_cpus=9",
    "trainer.placement={actor:[0,1],rollout:[2],reward:[3]}",
]


@pytest.fixture
def folder(tmp_path):
    """Of a run that can scale both roles."""
    (tmp_path / "config.yaml").write_text("")
    write_role_sizes(tmp_path, {"rollout": 1, "reward": 1})
    return tmp_path


def test_each_role_keeps_its_sizes(folder):
    assert ask_role_sizes(folder, {"rollout": 3}) == {"rollout": 3, "reward": 1}
    assert ask_role_sizes(folder, {"reward": 2}) == {"rollout": 3, "reward": 2} == read_role_sizes(folder)


@pytest.mark.parametrize(
    ("sizes", "words"), [({"actor": 2}, "role actor cannot be scaled"), ({"rollout": 0}, "rollout=0")]
)
def test_sizes_that_no_role_can_have(folder, sizes, words):
    with pytest.raises(ConfigError, match=words):
        ask_role_sizes(folder, sizes)


def test_a_run_that_can_scale_nothing_is_refused(tmp_path):
    assert read_role_sizes(tmp_path) == {}
    with pytest.raises(ConfigError, match="cannot scale rollout. It must run on Ray"):
        ask_role_sizes(tmp_path, {"rollout": 2})
    write_role_sizes(tmp_path, {"reward": 1})
    with pytest.raises(ConfigError, match="cannot scale rollout, only reward"):
        ask_role_sizes(tmp_path, {"rollout": 2})


@pytest.mark.parametrize("text", ["{", "[]", '{"rollout": "many"}', '{"rollout": -1}', '{"critic": 2}'])
def test_a_damaged_file_is_named(folder, text):
    (folder / NAME).write_text(text)
    with pytest.raises(ConfigError):
        read_role_sizes(folder)


def test_the_verb(folder, capsys):
    assert main(["scale", str(folder), "rollout=3", "reward=2"]) == 0
    assert "rollout=3, reward=2" in capsys.readouterr().out
    assert read_role_sizes(folder) == {"rollout": 3, "reward": 2}
    assert main(["scale", str(folder)]) == 0
    assert main(["scale", str(folder), "rollout"]) == 2
    assert "'rollout' is not a size of a role" in capsys.readouterr().err
    assert main(["scale", str(folder / "nowhere"), "rollout=3"]) == 2


def test_a_group_that_has_shrunk_scores_the_rows_of_the_ranks_that_left():
    group = WorkerGroup("reward", RewardWorker, Mesh.flat([1, 4]), lambda *_: None, beside_rollout=True)
    rows = DataProto.from_dict({"rollout_rank": torch.tensor([0, 2, 1, 3, 5])}, {"x": np.arange(5, dtype=object)})
    plan = plan_call(registered(RewardWorker)["start_scoring"], group, (rows,), {})
    assert [rows.tolist() for rows in plan.rows] == [[0, 1], [2, 3, 4]]


def test_metrics_of_a_process_that_was_lost_are_left_out():
    group = WorkerGroup("rollout", RolloutWorker, Mesh.flat([1, 4]), lambda *_: None)
    plan = plan_call(registered(RolloutWorker)["end_generation"], group, (), {})
    merged = plan.collect([{"num_replicas": Metric.sum(1.0)}, None])
    assert merged["num_replicas"].value == 1.0


@pytest.mark.slow
def test_roles_that_grow_and_shrink_change_no_sample_and_no_weight(jobs, monkeypatch):
    """Two devices train, one generates, one scores; then three generate and two score; then one each again."""
    pytest.importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VERL_TEST_WIDE_NORMS", "1")
    requests, slow = [], jobs.root / "slow"  # while it is there, steps last long enough for processes to start
    slow.touch()

    def scale(run: Path) -> None:
        until, sizes = time.monotonic() + 300, [{"rollout": 3, "reward": 2}, {"rollout": 1, "reward": 1}]
        while time.monotonic() < until and len(requests) < 2:
            metrics = run / "metrics.jsonl"
            complete_lines = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
            rows = [json.loads(line) for line in complete_lines.splitlines()]
            if rows and not requests:
                requests.append(ask_role_sizes(run, sizes[0]))
            elif rows and rows[-1].get("rollout/num_replicas") == 3:
                requests.append(ask_role_sizes(run, sizes[1]))
                slow.unlink()
            time.sleep(0.02)

    waits = f"    time.sleep(0.06 if pathlib.Path({str(slow)!r}).exists() else 0)\n    share ="
    (jobs.root / "reward.py").write_text("import pathlib, time\n" + REWARD.replace("    share =", waits))
    reward = f"reward.custom_reward_function.path={jobs.root}/reward.py"
    thread = Thread(target=scale, args=(jobs.root / "scaled",), daemon=True)
    thread.start()
    run = train_here(jobs, "scaled", *AHEAD, *UNEVEN, reward)
    thread.join(timeout=1)
    sizes = [row["rollout/num_replicas"] for row in run.rows[:-1]]  # the last step generates nothing
    assert sizes[0] == sizes[-1] == 1
    assert max(sizes) == 3
    fixed = train_here(jobs, "fixed", *AHEAD, *UNEVEN, reward)
    assert_same(run, fixed, rel=0.0)
    assert_same_weights(run, fixed, 40, rel=0.0)
