"""Training and sampling on processes of their own: the bits of one process, and processes that are lost."""

import contextlib
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tests.processes import wait_until  # noqa: E402
from tests.runtime.ranks import ROOT, end_tree, environment  # noqa: E402
from tests.tinker.served import only, running  # noqa: E402
from tests.tinker.test_kills import compare, run  # noqa: E402
from verl.cli.serve import serving_config  # noqa: E402
from verl.errors import WorkerLostError  # noqa: E402
from verl.page.launch import listen  # noqa: E402
from verl.parallel.collectives import free_port  # noqa: E402
from verl.parallel.mesh import Mesh  # noqa: E402
from verl.runtime.ray_process import pack, unpack  # noqa: E402
from verl.runtime.worker_group import WorkerGroup  # noqa: E402
from verl.tinker import bases, server  # noqa: E402
from verl.tinker.bases import BaseEntry  # noqa: E402
from verl.tinker.tenants import Tenants  # noqa: E402
from verl.tinker.workbench import Workbench  # noqa: E402
from verl.tinker.worker import BenchWorker  # noqa: E402
from verl.tracking.files import read_metrics  # noqa: E402

APART = {
    "one_each": ["trainer.placement={actor:[0],rollout:[1]}", "ray_kwargs.ray_init.num_cpus=2"],
    "two_each": ["trainer.placement={actor:[0,1],rollout:[2,3]}", "ray_kwargs.ray_init.num_cpus=4"],
}
FLOAT = "actor_rollout_ref.actor.fsdp_config.dtype=float32"


def far(worker, on_call=lambda method, num_bytes: None):
    """A handle of `worker` whose arguments and results cross as between processes. `on_call` gets the name of each call, and
    the bytes of the tensors and arrays that it sends."""

    def runner(group, method, plan, blocking):
        packed = pack(tuple(plan.calls[0]))
        on_call(method, sum(map(len, packed[1:])))
        args, kwargs = unpack(packed)
        return plan.collect([unpack(pack(getattr(worker, method)(*args, **kwargs)))])

    return WorkerGroup("worker", BenchWorker, Mesh.flat((0,)), runner)


@pytest.fixture
def here(bench, tmp_path, monkeypatch):
    """The result of a run of as many steps on a service of one process."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

    def result(num_steps):
        with running(bench, tmp_path) as served:
            return run(served.url, num_steps)

    return result


def test_workers_apart_take_the_bits_of_one_process(bench, here, tiny_llama, tmp_path):
    other, sent = Workbench(serving_config(str(tiny_llama), [FLOAT], rank=8)), []
    training = BenchWorker(bench)
    sampling = far(BenchWorker(other), lambda method, num_bytes: sent.append(num_bytes))
    with running(bench, tmp_path, apart=(far(training), sampling)) as served:
        assert len(served.service.computers) == 2
        result = run(served.url, 2)
    (adapter,) = training.adapters.values()
    assert sum(sent) == adapter.weights.num_bytes(), "the weights of the one sampler travel, once"
    compare(tmp_path, result, here(2))


def test_requests_go_to_the_sampler_with_the_fewest_tokens_and_have_the_samples_of_one(bench, tiny_llama, tmp_path):
    """Two processes that sample, each with its own thread, and a client with many requests at once."""
    benches, calls = [Workbench(serving_config(str(tiny_llama), [FLOAT], rank=8)) for _ in range(2)], [[], []]
    samplers = [
        far(BenchWorker(one), lambda method, num_bytes, number=number: calls[number].append(method))
        for number, one in enumerate(benches)
    ]
    apart = (far(BenchWorker(bench)), *samplers)
    prompt = tinker.ModelInput.from_ints([3, 4, 5])

    def samples(served):
        client = served.client().create_sampling_client(base_model="base").result()
        ask = [tinker.SamplingParams(max_tokens=8 + 8 * n, seed=n, stop=[]) for n in range(12)]
        return [[list(s.tokens) for s in one.result().sequences] for one in [client.sample(prompt, 2, a) for a in ask]]

    with running(bench, tmp_path / "apart", apart=apart) as served:
        assert len(served.service.computers) == 3
        spread = samples(served)
    assert all("sample" in one for one in calls)
    with running(bench, tmp_path / "one") as served:
        assert samples(served) == spread


def test_a_worker_that_is_lost_is_replaced_under_the_clients(bench, here, tiny_llama, tmp_path, monkeypatch):
    calls, error = [], []

    def on_call(method, num_bytes):
        calls.append(method)
        if calls.count("optim_step") == 2 or "end" in calls:
            calls.append("optim_step")
            raise WorkerLostError("Rank 0 died.")

    @contextlib.contextmanager
    def opened(config):
        yield only(bench, ["base"], far(BenchWorker(bench), on_call)).bench()

    def serve():
        with pytest.raises(WorkerLostError) as raised:
            server.serve_tinker(entries, listening, tmp_path, Tenants(), lambda address: None)
        error.append(raised.value)

    entries = [BaseEntry(serving_config(str(tiny_llama), [FLOAT, "trainer.max_restarts=1"], rank=8), ["base"])]
    monkeypatch.setattr(bases, "open_bench", opened)
    listening = listen()
    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    result = run(url, 2)
    assert calls.count("facts") == 2
    calls.append("end")  # each call is lost from now on, and the service gives up
    session = result[1].removeprefix("tinker://").partition(":")[0]
    body = {"session_id": session, "model_seq_id": 9, "base_model": "base", "lora_config": {"rank": 2}}
    assert httpx.post(f"{url}/api/v1/create_model", json=body).status_code == 200
    thread.join(120)
    listening.close()
    assert error
    compare(tmp_path, result, here(2))


class Service:
    """`verl serve tinker` with a process that trains and one that samples, on Ray."""

    def __init__(self, model, folder, settings):
        arguments = [
            f"model={model}",
            "name=base",
            f"port={free_port()}",
            f"folder={folder}",
            "rank=8",
            FLOAT,
            *settings,
        ]
        self.command = [sys.executable, "-m", "verl", "serve", "tinker", *arguments]
        self.url = self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        return self.process.stdout.readline().strip()

    def processes(self, *names):
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in family if any(name in " ".join(p.cmdline()) for name in names)]

    def kill(self):
        """End the server at once; its processes end with it. Ray's agents, which only report, take up to a minute."""
        started = self.processes("RankProcess", "bin/raylet", "gcs_server")
        self.process.kill()
        self.process.wait(120)
        assert not psutil.wait_procs(started, 20)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_processes_of_ray_take_the_bits_of_one_through_kills(here, tiny_llama, tmp_path, name):
    """Two that train together add up in another order, so they repeat their own bits."""
    service, results = Service(tiny_llama, tmp_path, APART[name]), []
    client = threading.Thread(target=lambda: results.append(run(service.url, 8)), daemon=True)
    try:
        client.start()
        wait_for_steps(tmp_path, 1)
        service.kill()
        service.start()
        for number, steps in enumerate((3, 6)):
            wait_for_steps(tmp_path, steps)
            service.processes("RankProcess")[number].kill()
        client.join(600)
        undisturbed = run(service.url, 8) if name == "two_each" else None
    finally:
        end_tree(service.process.pid)
    compare(tmp_path, results[0], undisturbed or here(8))  # one service at a time has the folder


def wait_for_steps(folder, count):
    pattern = "models/*/metrics.jsonl"
    assert wait_until(lambda: sum(len(list(read_metrics(f))) for f in folder.glob(pattern)) >= count)
