"""The program as a driver over actors: the same metrics, roles on separate pools, users' worker groups, faults."""

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.processes import wait_until
from tests.runtime.adder import Adder
from tests.runtime.conftest import PPO, assert_same, assert_same_weights, train_here
from tests.runtime.ranks import ROOT, end_tree, environment, survivors, wait_for_steps
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DeadlineError, WorkerLostError

pytestmark = pytest.mark.seed("A3")

ray = pytest.importorskip("ray")

from verl.runtime.ray_cluster import RayCluster, Request, own_device, services  # noqa: E402 - needs ray
from verl.runtime.ray_node import apart_from_signals  # noqa: E402 - needs ray
from verl.runtime.ray_request import passed_environment  # noqa: E402 - needs ray
from verl.single_controller.ray import (  # noqa: E402 - needs ray
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

TWO = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4"]
APART = [
    "trainer.n_gpus_per_node=3",
    "ray_kwargs.ray_init.num_cpus=4",
    "trainer.placement={actor:[0],critic:[1],reward:[2],rollout:[0],reference:[1]}",
    "actor_rollout_ref.actor.checkpoint.async_save=True",  # the critic's process writes its files before its call returns
]


@pytest.fixture(scope="module")
def cluster():
    """One cluster for the tests of this file; runs find it and do not stop it."""
    os.environ.update(RAY_AUTH_MODE="disabled", VERL_TEST_WIDE_NORMS="1", RAY_worker_niceness="0")
    for attempt in range(2):  # a busy machine can miss the deadline of its start
        try:
            ray.init(num_cpus=4, include_dashboard=False, logging_level="WARNING", log_to_driver=False)
            break
        except Exception:
            if attempt or "timed out during startup" not in traceback.format_exc():
                raise
            ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def driven(cluster, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("verl.parallel.serialize._STORED_BYTES", 1)  # small columns too stay in the store


def runs_alike(jobs, name, changes, places, num_steps=3):
    """The run `name` at its places, and the equal run of one process."""
    run = train_here(jobs, f"{name}_ray", *changes, *places)
    reference = train_here(jobs, f"{name}_here", *changes)
    assert_same(run, reference, rel=1e-10)
    assert_same_weights(run, reference, num_steps, rel=1e-10)
    return run, reference


@pytest.fixture(scope="module")
def ppo_here(jobs):
    return train_here(jobs, "ppo_here", *PPO)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("on two processes", TWO), pytest.param("actor, critic and reward apart", APART, marks=pytest.mark.slow)],
)
def test_ppo(driven, jobs, ppo_here, name, changes):
    run = train_here(jobs, f"ppo {name}".replace(" ", "_").replace(",", ""), *PPO, *changes)
    assert_same(run, ppo_here, rel=1e-10)
    for role in ("actor", "critic"):
        assert_same_weights(run, ppo_here, 3, rel=1e-10, role=role)
    assert (run.folder / "logs" / "rank_1.log").exists()


@pytest.mark.seed("D1", "D4")
@pytest.mark.slow
def test_samples_made_ahead_on_devices_of_their_own(driven, jobs):
    """Generation and scoring during training: the same samples train in the same steps as in one process."""
    ahead = ["actor_rollout_ref.rollout.prefetch_num=2", "trainer.total_training_steps=5", "trainer.save_freq=5"]
    apart = ["trainer.n_gpus_per_node=2", "trainer.placement={actor:[0],rollout:[1],reward:[1]}"]
    run, reference = runs_alike(jobs, "ahead", ahead, [*apart, "ray_kwargs.ray_init.num_cpus=4"], 5)
    ages = [row["training/off_policy/trajectory_staleness/max"] for row in run.rows]
    assert ages == [0, 1, 2, 2, 2]
    apart = ["trainer.n_gpus_per_node=2", "trainer.placement={actor:[0],rollout:[1],reward:[0]}"]
    scored_elsewhere = train_here(jobs, "scored_ray", *ahead, *apart, "ray_kwargs.ray_init.num_cpus=4")
    assert_same(scored_elsewhere, reference, rel=1e-10)


@pytest.mark.slow
def test_separate_async_with_both_pools_on_one_machine(driven, jobs):
    mode = ["trainer.v1.trainer_mode=separate_async", "trainer.nnodes=1", "trainer.n_gpus_per_node=1"]
    pools = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    runs_alike(jobs, "separate", mode, [*pools, "ray_kwargs.ray_init.num_cpus=4"])


@pytest.mark.slow
def test_damage_that_shows_while_ranks_load(driven, jobs, monkeypatch, caplog):
    """Damage to a header, then to a value: each time the ranks load the checkpoint before, and repeat the step."""
    monkeypatch.setattr("verl.run.state.SMALL_BYTES", 0)
    changes = ["trainer.save_freq=1", "trainer.test_freq=-1", *TWO]
    run = train_here(jobs, "damaged", *changes)
    expected = {name: tensor.clone() for name, tensor in run.weights(3).items()}
    for place in (12, -5):
        file = run.folder / "global_step_3/actor/huggingface/model.safetensors"
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
        caplog.clear()
        resumed = train_here(jobs, "damaged", *changes).weights(3)
        assert "global_step_3 is damaged and not used: actor/huggingface/model.safetensors does not have" in caplog.text
        assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


def test_more_devices_than_the_cluster_has(driven, jobs):
    with pytest.raises(ConfigError, match="cluster has 1 with 4"):
        train_here(jobs, "large", "trainer.n_gpus_per_node=64")


class TestUserGroups:
    @pytest.fixture(scope="class")
    def pool(self, cluster):
        pool = RayResourcePool([2], use_gpu=False)
        yield pool
        pool.close()

    @pytest.fixture(scope="class")
    def group(self, pool):
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 10), timeout_s=30)
        yield group
        group.close()

    def test_calls(self, group):
        batch = DataProto.from_dict({"x": torch.arange(3)}, auto_padding=True)
        assert group.add(batch).batch["x"].tolist() == [10, 11, 12]
        assert group.place().get() == [(0, 2), (1, 2)]
        assert group.first() == 0
        assert group.execute_all_sync("first") == [0, 1]
        assert group.execute_rank_zero_async("place").get() == (0, 2)

    def test_a_mesh_that_the_workers_name(self, group):
        returned = group.add_by_mesh(DataProto.from_dict({"x": torch.arange(3)}), 5)
        assert returned.batch["x"].tolist() == [5, 6, 7]
        assert returned.batch["rank"].tolist() == [0, 0, 0]

    def test_an_error_comes_with_its_traceback(self, group):
        with pytest.raises(
            RuntimeError, match=r"rank 1 \(Adder; .*, process \d+\).*fail(.|\n)*ValueError: no such luck"
        ):
            group.fail(1, "raise")

    @pytest.mark.slow
    def test_colocated_classes_share_processes(self, pool):
        classes = {"one": RayClassWithInitArgs(Adder, 1), "two": RayClassWithInitArgs(ray.remote(Adder), amount=2)}
        both = RayWorkerGroup(pool, create_colocated_worker_cls(classes))
        groups = both.spawn(prefix_set={"one", "two"})
        batch = DataProto.from_dict({"x": torch.arange(2)})
        assert groups["one"].add(batch).batch["x"].tolist() == [1, 2]
        assert groups["two"].add(batch).batch["x"].tolist() == [2, 3]
        with pytest.raises(ConfigError, match="hold no worker 'three'"):
            both.spawn(["three"])
        both.close()

    def test_processes_that_hang_and_die_are_named(self, group):
        group.timeout_s = 2
        stack = r"its stack: \w+.fail for \d+ s, in fail \(adder.py:\d+\)"
        with pytest.raises(DeadlineError, match=rf"rank 1 .*{stack}.* did not finish .*fail within 2 s"):
            group.fail(1, "hang")
        with pytest.raises(WorkerLostError, match=r"Rank 0 .*died in .*fail after"):
            group.fail(0, "die")


def test_rays_own_processes_do_not_get_signals_of_the_run():
    before = signal.getsignal(signal.SIGTERM)
    with apart_from_signals(services):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as ray.init does
        process = services.ConsolePopen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(b"\n", timeout=120)
    assert process.returncode == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert services.ConsolePopen.__name__ == "ConsolePopen"


def test_the_end_of_ray_ends_its_processes():
    with apart_from_signals(services):
        process = services.ConsolePopen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.terminate()  # as ray.shutdown does
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "number", "words"),
    [
        ("rank", signal.SIGKILL, "ERROR WorkerLostError: Rank .*actor, rollout.* died in "),
        ("rank", signal.SIGSTOP, r"rank 1 \(.*, process \d+\).* did not finish \S+ within 25 s"),
        ("raylet", signal.SIGKILL, r"Ray's process raylet \(pid \d+\) has ended"),
    ],
)
def test_a_process_ends_or_stops_while_training(jobs, target, number, words):
    """A driver with its own cluster reports which process it was, ends, and leaves nothing behind."""
    changes = [*TWO, "trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    name = f"{target}_{number.name}"
    jobs.add(name, *changes, "trainer.call_timeout_s=25", may_fail=True)
    folder = jobs.run(name).folder
    command = [sys.executable, "-m", "tests.runtime.several_runs", str(jobs.file())]
    driver = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_for_steps(folder / "metrics.jsonl", 2, driver)
        family = psutil.Process(driver.pid).children(recursive=True)
        mine = [p.pid for p in family if "RankProcess" in " ".join(cmdline(p))]
        assert len(mine) == 2
        raylets = [p.pid for p in family if p.name() == "raylet"]
        os.kill({"rank": mine[1], "raylet": raylets[0]}[target], number)
        text, _ = driver.communicate(timeout=120)
    finally:
        end_tree(driver.pid)
    assert re.search(words, text), text[-3000:]
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in mine))
    assert survivors(str(jobs.root)) == []


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# ranks share the cores as equals of other programs
OWNER = """
import os, sys, ray
from verl.runtime.ray_cluster import RayCluster, Request
cluster = RayCluster({"num_cpus": 1}, Request([1], False, 60))
print("niceness", ray.get(ray.remote(lambda: os.nice(0)).remote(), timeout=300), flush=True)
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
cluster.close()
"""
GUEST = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False); print('inside')"


@pytest.mark.slow
def test_strangers_do_not_get_into_a_cluster_of_our_own():
    """Ray listens on all interfaces: `pytest -m slow tests/runtime/test_ray.py -k strangers` takes a minute and a half."""
    token = "5" * 64
    plain = {k: v for k, v in environment().items() if not k.startswith("RAY_AUTH")}
    knows = {**plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, env={**plain, "RAY_AUTH_TOKEN": token}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said = []
        while not (said and said[-1].startswith("address ")):
            said.append(owner.stdout.readline())
            assert said[-1], "".join(said)[-3000:]
        command = [sys.executable, "-c", GUEST, said[-1].split()[1]]
        outputs = [
            subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False).stdout
            for env in (plain, {**knows, "RAY_AUTH_TOKEN": "6" * 64}, knows)
        ]
    finally:
        end_tree(owner.pid)
    assert ["inside" in output for output in outputs] == [False, False, True]
    assert "niceness 0\n" in said


def nodes_with(monkeypatch, *gpus):
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, **({"GPU": float(n)} if n else {})}} for n in gpus]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


@pytest.mark.parametrize(
    ("resources", "gpus", "expected"),
    [(None, (0, 4), True), (None, (0, 0), False), (True, (0, 4), True), (False, (0, 4), False)],
)
def test_the_cluster_has_gpus_not_the_driver(monkeypatch, resources, gpus, expected):
    """A head node usually has none."""
    nodes_with(monkeypatch, *gpus)
    cluster = object.__new__(RayCluster)
    cluster.request = Request([4], resources, 10.0)
    cluster._check_resources()
    assert cluster.request.gpus is expected


def test_a_cluster_with_too_few_gpus_is_refused(monkeypatch):
    nodes_with(monkeypatch, 0, 2)
    cluster = object.__new__(RayCluster)
    cluster.request = Request([4], None, 10.0)
    with pytest.raises(ConfigError, match="with 4 GPUs, but the Ray cluster has 2 with 2, 0"):
        cluster._check_resources()


@pytest.mark.parametrize(
    ("visible", "assigned", "expected"),
    [("3", ["3"], "cuda:0"), ("2,5", ["5"], "cuda:1"), ("", ["1"], "cuda:1"), ("", [], "cuda")],
)
def test_a_rank_takes_the_gpu_that_ray_gave_it(monkeypatch, visible, assigned, expected):
    """The GPU of a rank with Ray's mask of the others (one is visible), and without the mask."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert own_device("auto") == torch.device(expected)
    assert own_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "VLLM_X", "SGLANG_X", "TRITON_CACHE_DIR", "CUBLAS_X"])
def test_settings_of_libraries_reach_every_node(monkeypatch, name):
    monkeypatch.setenv(name, "value")
    assert passed_environment()[name] == "value"


def test_the_config_travels_whole(base):
    from verl.config import PPO, load_config
    from verl.runtime.ray_process import pack, unpack

    config = load_config([*base, "actor_rollout_ref.rollout.stop=[a,b]"]).config
    sent = unpack(pack(PPO.flatten(config)))
    assert PPO.build(sent) == config
    assert json.dumps(sent["trainer.placement"]) == "{}"


@pytest.mark.parametrize(
    ("address", "error", "expected", "words"),
    [
        (None, ConnectionError("the socket was closed"), WorkerLostError, r"the socket was closed\). Look at /tmp/ray"),
        (None, ValueError("no such argument"), ConfigError, r"Check ray_kwargs.ray_init\."),
        ("10.0.0.1:6379", ConnectionError("refused"), ConfigError, r"Check ray_kwargs.ray_init.address\."),
    ],
)
def test_a_cluster_that_does_not_start(monkeypatch, address, error, expected, words):
    """A process of a cluster of ours may have been killed by hand: that is worth the supervisor's second attempt."""

    def fail(**_):
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(expected, match=f"Ray did not start after .* s .*{words}"):
        RayCluster({"address": address, "num_cpus": 1}, Request([1], False, 10.0))
