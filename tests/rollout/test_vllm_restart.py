"""A vLLM process that is lost comes back with its weights and its samples; processes and vLLM are simulated here."""

import dataclasses

import pytest
import torch

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.simulated import send, transfer_of_run
from verl.config import RolloutConfig
from verl.data_proto.samples import Completion, SamplingParams
from verl.errors import DeadlineError, ModelError, WorkerLostError
from verl.reshard.delivery import Delivery
from verl.reshard.shared_memory import read_shared_bucket
from verl.rollout.api import ENGINES
from verl.rollout.vllm import engine
from verl.rollout.vllm.process import RestartingCore
from verl.rollout.vllm.weights import Manifest

CPU = torch.device("cpu")
PARAMS = SamplingParams(n=3, max_new_tokens=4)


class Processes:
    """`script` names calls, by their number over all processes, at which the process is lost, and how; `ways` are noted by
    processes on a device."""

    def __init__(self, kind=None):
        self.script, self.calls, self.started, self.ways = {}, [], [], []
        self.kind = kind or SimulatedProcess

    def __call__(self, *args, **kwargs):
        self.note("start")
        self.started.append(self.kind(self))
        return self.started[-1]

    def note(self, what, process=None):
        if process is not None and process.has_ended:
            raise lost()
        self.calls.append(what)
        error = self.script.get(len(self.calls))
        if error is not None:
            for other in self.started:
                other.has_ended = True
            raise error


class SimulatedProcess:
    """Receives weights as WeightReceiver does; a sample is a function of them, the prompt and its number."""

    def __init__(self, processes):
        self.processes, self.has_ended = processes, False
        self.weights, self.sum, self.usable = {}, 0.0, True

    def begin_update(self):
        self.processes.note("begin", self)
        self.weights, self.manifest, self.usable = {}, Manifest(), False

    def update(self, bucket):
        self.processes.note("update", self)
        self.weights |= {name: tensor.clone() for name, tensor in read_shared_bucket(bucket)}
        self.manifest.add(bucket)

    def finish_update(self, manifest):
        self.processes.note("finish", self)
        if manifest != self.manifest.digest:
            raise ModelError("did not receive the tensors that were sent")
        self.sum, self.usable = sum(float(w.sum()) for w in self.weights.values()), True

    def abandon_update(self):
        self.processes.note("abandon", self)

    def sleep(self, discards=False):
        self.processes.note("sleep, weights discarded" if discards else "sleep", self)
        if discards:
            self.weights, self.sum, self.usable = {}, 0.0, False

    def close(self):
        self.has_ended = True

    def open(self, params, step):
        self.processes.note("open", self)
        assert self.usable
        self.step, self.requests = step, []

    def add(self, requests):
        self.processes.note("add", self)
        self.requests += requests

    def poll(self, timeout_s):
        self.processes.note("poll", self)
        request = self.requests.pop()
        tokens = [request.token_ids[-1], request.first_sample]
        return [Completion(request.ordinal, request.first_sample, tokens, [self.sum, self.step], "length", -1)]

    def close_generation(self):
        self.processes.note("close", self)
        return {"num_decode_steps": 2}


def lost():
    return WorkerLostError("The vLLM process (pid 1) was ended. Its samples are not used; start the run again.")


def builder(load, tokenizer, monkeypatch, kind, sending, device="cpu"):
    """`build(max_engine_restarts=)`: an engine that sends weights by `sending()`, and its Processes, which are of a `kind`."""
    monkeypatch.setattr(engine, "require_vllm", lambda key: None)

    def build(max_engine_restarts=2):
        processes = Processes(kind)
        monkeypatch.setattr(engine, "RemoteCore", processes)
        config = RolloutConfig(name="vllm", max_model_len=64, max_engine_restarts=max_engine_restarts)
        keys = "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.fsdp_config.dtype=float32"
        transfer = dataclasses.replace(transfer_of_run(*keys, device=device)[1], **sending())
        return ENGINES.get("vllm")(load("llama"), tokenizer, config, eos_token_ids=[EOS], transfer=transfer), processes

    return build


@pytest.fixture
def make(load, tokenizer, monkeypatch):
    def several_buckets():
        return {"write_buckets": Delivery(None, CPU, (0,), ((0,),), torch.float32, 1 << 14, keeps=True)}

    return builder(load, tokenizer, monkeypatch, SimulatedProcess, several_buckets)


def one_step(rollout, module, version):
    """An update and a generation: the samples, and (ordinal, sample) of each as `on_finish` received it."""
    ended = []
    send(rollout, module, version)
    completions = rollout.generate(make_prompts([3, 5]), PARAMS, step=version, on_finish=ended.append)
    rollout.release()
    return completions, sorted((c.ordinal, c.sample) for c in ended)


def test_nothing_is_lost_wherever_a_process_is(make, load):
    """The process is lost at each call of two steps in turn, at starts of new ones too."""
    module = load("llama")
    rollout, undisturbed = make()
    assert isinstance(rollout.core, RestartingCore)
    expected = [one_step(rollout, module, version) for version in (1, 2)]
    stats = rollout.stats() | {"seconds": None}
    assert {"begin", "update", "finish", "open", "add", "poll", "sleep"} <= set(undisturbed.calls)
    assert undisturbed.calls.count("update") > 4
    for number in range(2, len(undisturbed.calls) + 1):
        rollout, processes = make()
        processes.script = {number: lost(), number + 1: DeadlineError("It was silent. Raise the deadline.")}
        assert [one_step(rollout, module, version) for version in (1, 2)] == expected, undisturbed.calls[number - 1]
        assert rollout.stats() | {"seconds": None} == stats
        assert len(processes.started) == 2, "one to begin with, one that did not start, and one that did"
        assert all(torch.equal(processes.started[-1].weights[name], p) for name, p in module.named_parameters())


def test_a_batch_that_is_sampled_again_is_the_batch_that_was_asked_for(make, load, around):
    """In a smaller one, matmuls round otherwise."""
    rollout, processes = make()
    one_step(rollout, load("llama"), 1)
    batches = []
    around(SimulatedProcess, "add", lambda add, engine, rows: batches.append(list(rows)) or add(engine, rows))
    processes.script = {len(processes.calls) + 6: lost()}
    rollout.generate(make_prompts([3, 5]), PARAMS, step=2)
    assert len(batches) == 3, "prompt by prompt, and then all again"
    assert batches[0] + batches[1] == batches[2]


@pytest.mark.parametrize("lost_at", [None, 2, 4])
def test_discarded_weights_come_again_for_a_generation_without_an_update(make, load, monkeypatch, lost_at):
    """vLLM need not copy weights to the host that lie in buckets there."""
    rollout, processes = make()
    rollout.core._sleeps = True
    first, _ = one_step(rollout, load("llama"), 1)
    number = len(processes.calls)
    assert processes.calls[-1] == "sleep, weights discarded"
    processes.script = {} if lost_at is None else {number + lost_at: lost()}
    again = rollout.generate(make_prompts([3, 5]), PARAMS, step=1)
    assert again == first
    calls = processes.calls[number:]
    assert [calls[0], calls[-1]] == ["begin", "close"]
    assert calls.index("finish") < calls.index("open")
    rollout.release()
    number = len(processes.calls)
    one_step(rollout, load("llama"), 2)
    assert processes.calls[number:].count("begin") == 1, "an update brings them"


def test_what_keeps_being_lost_stops_the_run(make, load):
    rollout, processes = make()
    one_step(rollout, load("llama"), 1)
    first = len(processes.calls)
    processes.script = {number: lost() for number in range(first + 1, first + 100)}
    with pytest.raises(WorkerLostError, match=r"again 2 times .*max_engine_restarts.*lost again: The vLLM process"):
        rollout.generate(make_prompts([3]), PARAMS, step=2)
    assert len(processes.calls) == first + 3


def test_a_whole_update_is_a_new_beginning(make, load):
    rollout, processes = make(max_engine_restarts=1)
    for version in range(1, 4):
        processes.script = {len(processes.calls) + 3: lost()}
        one_step(rollout, load("llama"), version)
    assert len(processes.started) == 4


def test_after_an_update_that_went_wrong_old_weights_do_not_come_back(make, load):
    rollout, processes = make()
    one_step(rollout, load("llama"), 1)
    with pytest.raises(ModelError, match="missing"):
        rollout.load(list(load("llama").named_parameters())[:-1])
    with pytest.raises(ModelError, match="did not end well"):
        rollout.generate(make_prompts([3]), PARAMS, step=2)
    first = len(processes.calls)
    processes.script = {first + 1: lost()}
    rollout.release()
    assert processes.calls[first:] == ["sleep", "start", "sleep"]


def test_without_restarts_the_loss_itself_is_raised(make, load):
    rollout, processes = make(max_engine_restarts=0)
    one_step(rollout, load("llama"), 1)
    processes.script = {len(processes.calls) + 1: lost()}
    with pytest.raises(WorkerLostError, match="The vLLM process"):
        rollout.generate(make_prompts([3]), PARAMS, step=2)
    assert len(processes.started) == 1


@pytest.mark.parametrize("syncs", [True, False])
def test_weights_that_an_update_replaces_are_not_copied_to_the_host(make, load, syncs):
    """Without restarts, there is no copy of them for a generation that comes before the update."""
    rollout, processes = make(max_engine_restarts=0)
    rollout.syncs = syncs
    module = load("llama")
    first, _ = one_step(rollout, module, 1)
    assert processes.calls[-1] == ("sleep, weights discarded" if syncs else "sleep")
    if syncs:
        with pytest.raises(ModelError, match="did not come"):
            rollout.generate(make_prompts([3, 5]), PARAMS, step=1)
        send(rollout, module, 1)
    assert rollout.generate(make_prompts([3, 5]), PARAMS, step=1) == first


def test_an_answer_of_a_process_that_goes_on_is_no_loss(make, load):
    rollout, processes = make()
    one_step(rollout, load("llama"), 1)

    def refuse(done):
        raise WorkerLostError("The reward process is gone.")

    with pytest.raises(WorkerLostError, match="reward"):
        rollout.generate(make_prompts([3]), PARAMS, step=2, on_finish=refuse)
    assert len(processes.started) == 1
