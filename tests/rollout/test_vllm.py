"""The vLLM engine without vLLM: its requests, its samples, and its reaction to weights that do not fit."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.simulated import send, transfer_of_run, weight_transfer
from tests.rollout.test_vllm_restart import Processes, SimulatedProcess
from verl.config import RolloutConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import MissingExtraError, ModelError, first_line
from verl.families import engine_facts
from verl.parallel import memory
from verl.reshard.shared_memory import read_shared_bucket
from verl.rollout.api import ENGINES
from verl.rollout.requests import StopRules
from verl.rollout.sampling import sample
from verl.rollout.uniforms import sample_keys, uniforms_at
from verl.rollout.vllm import core, engine
from verl.rollout.vllm.core import Core, request_arguments
from verl.rollout.vllm.sample import BatchSampler, SlotSampler, draw_arguments
from verl.rollout.vllm.settings import make_setup
from verl.rollout.vllm.weight_check import HeldWeights, _explained
from verl.rollout.vllm.weights import LINK_READER, READERS, WeightReceiver, _tied

pytestmark = pytest.mark.seed("B5")

VOCABULARY = 300
SHORT = SamplingParams(max_new_tokens=4)


class FakeCore(SimulatedProcess):
    """The same with new weights that arrive damaged: `damage` changes a bucket on its way, or loses it (None)."""

    def __init__(self, setup):
        super().__init__(Processes())
        self.damage = lambda bucket: bucket

    @property
    def calls(self):
        return [call for call in self.processes.calls if call != "update"]

    def update(self, bucket):
        bucket = self.damage(bucket)
        if bucket is not None:
            super().update(bucket)


@pytest.fixture
def make(load, tokenizer, monkeypatch):
    monkeypatch.setattr(engine, "Core", FakeCore)
    monkeypatch.setattr(engine, "require_vllm", lambda key: None)

    def build(**config):
        config = RolloutConfig(name="vllm", max_model_len=64, **config)
        return ENGINES.get("vllm")(load("llama"), tokenizer, config, eos_token_ids=[EOS], transfer=weight_transfer())

    return build


def weights_of(module):
    return list(module.named_parameters())


def test_it_is_known_to_hold_weights():
    assert engine_facts("vllm").holds_weights
    assert engine_facts("http").holds_weights
    assert not engine_facts("native").holds_weights


def test_weights_arrive_and_samples_carry_their_version(make, load):
    rollout, module = make(), load("llama")
    send(rollout, module, 7)
    assert rollout.core.calls == ["begin", "finish"]
    assert all(torch.equal(rollout.core.weights[name], p) for name, p in weights_of(module))
    assert {c.weight_version for c in rollout.generate(make_prompts([3]), SHORT, step=0)} == {7}
    with pytest.raises(ModelError, match="no new weights have come since version 7"):
        rollout.publish(8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[:-1], "missing"),
        (lambda tensors: [*tensors, ("model.other", torch.zeros(2))], "model.other"),
        (lambda tensors: [(tensors[0][0], tensors[0][1][:-1]), *tensors[1:]], "which the rollout model lacks"),
        (lambda tensors: [tensors[0], *tensors], "twice"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(change, words, make, load):
    rollout = make()
    with pytest.raises(ModelError, match=words):
        rollout.load(change(weights_of(load("llama"))))
    assert rollout.core.calls == ["begin", "abandon"]
    with pytest.raises(ModelError, match="did not end well"):
        rollout.generate(make_prompts([3]), SHORT, step=0)
    with pytest.raises(ModelError, match="did not end well"):
        rollout.publish(1)
    send(rollout, load("llama"), 1)
    assert rollout.generate(make_prompts([3]), SHORT, step=0)


def flip(bucket):
    for _, tensor in read_shared_bucket(bucket):
        tensor.view(-1).view(torch.uint8)[0] ^= 1
        return bucket


def swap(bucket):
    first, second = bucket["entries"][:2]
    first[0], second[0] = second[0], first[0]
    return bucket


@pytest.mark.parametrize(
    "damage",
    [lambda bucket: None, flip, swap, lambda bucket: {**bucket, "entries": bucket["entries"][:-1]}],
    ids=["lost", "flipped", "swapped", "a tensor dropped"],
)
def test_a_bucket_that_went_wrong_is_an_error(damage, make, load):
    rollout, done = make(), []

    def once(bucket):
        if done or len(bucket["entries"]) < 2:
            return bucket
        done.append(True)
        return damage(bucket)

    rollout.core.damage = once
    with pytest.raises(ModelError):
        rollout.load(weights_of(load("llama")))
    assert done
    with pytest.raises(ModelError, match="did not end well"):
        rollout.generate(make_prompts([3]), SHORT, step=0)


def batch_update(removed=(), added=(), moved=()):
    return SimpleNamespace(removed=removed, added=added, moved=moved)


def requested(key, num_drawn, params):
    return SimpleNamespace(extra_args=draw_arguments(key, num_drawn, params))


FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02)
RULES = pytest.mark.parametrize(
    "rules",
    [
        [FILTERED] * 3,
        [SamplingParams(temperature=0)] * 3,
        [SamplingParams()] * 3,
        [FILTERED, SamplingParams(), FILTERED],
    ],
    ids=["filtered", "greedy", "plain", "mixed"],
)
KEYS = sample_keys(3, 5, torch.arange(4), torch.zeros(4, dtype=torch.int64)).tolist()
POSITIONS = [2, 1, 4]  # of the next tokens of three requests
PLAIN = SimpleNamespace(extra_args=None)  # another client's


def logits_of(num_rows):
    return torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def assert_drawn(changed, logits, rules):
    """The first rows are the native samples of KEYS at POSITIONS under `rules`; further rows are as they were."""
    for row, params in enumerate(rules):
        u = uniforms_at(torch.tensor([KEYS[row]]), torch.tensor([POSITIONS[row]]))
        token, log_prob = sample(logits[row : row + 1], params, u)
        assert changed[row].argmax() == token
        assert changed[row].max() == log_prob
        assert int(torch.isfinite(changed[row]).sum()) == 1
    assert torch.equal(changed[len(rules) :], logits[len(rules) :])


@RULES
@pytest.mark.parametrize("num_others", [0, 1])
def test_the_first_runner_draws_as_the_native_engine(rules, num_others):
    logits, sampler = logits_of(3 + num_others), BatchSampler()
    outputs = [[], [1], [1, 2]]
    added = [(i, requested(KEYS[i], POSITIONS[i] - len(outputs[i]), rules[i]), None, outputs[i]) for i in range(3)]
    sampler.update_state(batch_update(added=[*added, *[(3, PLAIN, None, [])] * num_others]))
    assert_drawn(sampler.apply(logits.clone()), logits, rules)


def test_rows_follow_vllms_batch():
    params = SamplingParams()
    sampler = BatchSampler()
    sampler.update_state(batch_update(added=[(i, requested(10 + i, 0, params), None, []) for i in range(4)]))
    swapped, one_way = SimpleNamespace(name="SWAP"), SimpleNamespace(name="UNIDIRECTIONAL")
    sampler.update_state(batch_update(removed=[1], moved=[(3, 1, one_way), (0, 2, swapped)]))
    assert {index: row.key for index, row in sampler._rows.items()} == {0: 12, 1: 13, 2: 10}
    sampler.update_state(batch_update(added=[(0, SimpleNamespace(extra_args={}), None, [])]))
    assert torch.equal(sampler.apply(logits_of(1)), logits_of(1))
    before = dict(sampler._rows)
    sampler.update_state(None)
    assert sampler._rows == before


class Slots:
    """The second runner's part of a step, around a SlotSampler: requests in slots, rows in any order."""

    def __init__(self, num_slots=6):
        self.prompt_len = np.zeros(num_slots, np.int32)
        states = SimpleNamespace(
            max_num_reqs=num_slots, device=torch.device("cpu"), prompt_len=SimpleNamespace(np=self.prompt_len)
        )
        self.sampler = SlotSampler(states)

    def add(self, slot, params, num_prompt_tokens):
        self.prompt_len[slot] = num_prompt_tokens
        return self.sampler.add_request(slot, params)

    def step(self, logits, slots, positions):
        """`positions` are the inputs' in their sequences."""
        self.sampler.apply_staged_writes()
        rows = torch.tensor(slots)
        context = SimpleNamespace(
            expanded_idx_mapping=rows.int(), idx_mapping_np=rows.int().numpy(), pos=torch.tensor(positions)
        )
        return self.sampler.apply(logits.clone(), context)


@RULES
@pytest.mark.parametrize("num_others", [0, 1])
def test_the_second_runner_draws_as_the_native_engine(rules, num_others):
    """Slots in another order than rows, each with another length of prompt; a slot has the request that came last."""
    slots, logits = Slots(), logits_of(3 + num_others)
    places, lengths = [4, 0, 2], [7, 30, 1]
    assert slots.add(4, requested(99, 5, SamplingParams(temperature=0)), 3)
    for row in range(3):
        num_drawn = row  # of the prompt's tokens
        assert slots.add(places[row], requested(KEYS[row], num_drawn, rules[row]), lengths[row])
    assert not slots.add(5, PLAIN, 3)
    inputs = [lengths[row] - 1 + POSITIONS[row] - row for row in range(3)]
    changed = slots.step(logits, [*places, *[5] * num_others], [*inputs, *[2] * num_others])
    assert_drawn(changed, logits, rules)


def test_a_slot_of_another_client_is_not_sampled_here():
    slots, logits = Slots(), logits_of(2)
    slots.add(1, requested(KEYS[0], 0, SamplingParams()), 4)
    slots.add(1, PLAIN, 4)
    assert torch.equal(slots.step(logits, [1, 3], [3, 3]), logits)


class Written(TorchDispatchMode):
    """Counts operations that write a tensor of `size` elements or move values between host and device."""

    def __init__(self, size):
        super().__init__()
        self.size, self.writes, self.waits = size, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits.append(func)
        is_view = getattr(func, "is_view", False)
        if isinstance(result, torch.Tensor) and result.numel() == self.size and not is_view:
            self.writes.append(func)
        return result


def test_a_step_writes_the_logits_once_and_asks_the_device_nothing(monkeypatch):
    """Besides `sample` of the native engine: one fill, and one element a row."""
    slots, logits = Slots(), logits_of(2)
    for slot in range(2):
        slots.add(slot, requested(KEYS[slot], 0, SamplingParams()), 4)
    slots.sampler.apply_staged_writes()
    monkeypatch.setattr(
        "verl.rollout.vllm.sample.sample", lambda logits, params, u: (torch.tensor([3, 4]), torch.tensor([-1.0, -2.0]))
    )
    rows = torch.tensor([0, 1])
    context = SimpleNamespace(expanded_idx_mapping=rows, idx_mapping_np=rows.numpy(), pos=torch.tensor([3, 3]))
    with Written(logits.numel()) as ops:
        changed = slots.sampler.apply(logits, context)
    assert (changed[0, 3], changed[1, 4]) == (-1.0, -2.0)
    assert [func.name() for func in ops.writes] == ["aten::fill_.Scalar", "aten::scatter_.src"]
    assert not ops.waits


def test_arguments_follow_the_config(load):
    config = RolloutConfig(
        prompt_length=20,
        response_length=12,
        max_num_seqs=9,
        max_num_batched_tokens=16,
        seed=5,
        tensor_model_parallel_size=2,
    )
    config = dataclasses.replace(
        config, engine_kwargs=dataclasses.replace(config.engine_kwargs, vllm={"block_size": 32})
    )
    setup = make_setup(config, weight_transfer("a/model"), load("llama"), eos_token_ids=(EOS,), vocab_size=VOCABULARY)
    llm = setup.llm
    assert (llm["model"], llm["dtype"], llm["seed"], llm["max_num_seqs"]) == ("a/model", "float32", 5, 9)
    assert llm["max_model_len"] == 32
    assert llm["max_num_batched_tokens"] == 32  # a prompt at its longest must fit
    assert (llm["tensor_parallel_size"], llm["block_size"], llm["enforce_eager"]) == (2, 32, True)
    assert llm["logprobs_mode"] == "processed_logits"
    assert llm["kv_cache_memory_bytes"] > 0
    assert setup.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert setup.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert not setup.sleeps
    json.dumps(dataclasses.asdict(setup))


def test_the_kv_cache_stays_within_the_memory_of_a_container(load, monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text("0\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    config = RolloutConfig(max_num_seqs=100_000)
    setup = make_setup(config, weight_transfer(), load("llama"), eos_token_ids=(EOS,), vocab_size=VOCABULARY)
    assert setup.llm["kv_cache_memory_bytes"] <= 8 << 20


def test_stop_tokens_follow_the_rules_of_the_native_engine():
    params = SamplingParams(stop_token_ids=(7, VOCABULARY + 5), max_new_tokens=3)
    arguments = request_arguments(params, StopRules(params, [EOS], VOCABULARY, None), {})
    assert (arguments["stop_token_ids"], arguments["ignore_eos"], arguments["max_tokens"]) == ([7, EOS], True, 3)
    ignoring = dataclasses.replace(params, ignore_eos=True)
    assert request_arguments(ignoring, StopRules(ignoring, [EOS], VOCABULARY, None), {})["stop_token_ids"] == [7]


def test_a_missing_vllm_names_its_extra(monkeypatch):
    monkeypatch.setattr(core.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'vllm<0.33,>=0.32', or set actor_rollout_ref.rollout.name=native"):
        core.require_vllm("rollout.name")


def test_an_untried_version_says_which_were_tried(caplog):
    core.check_version(f"{core.TESTED_RELEASES[0]}.0+cpu")
    assert not caplog.records
    core.check_version("0.7.1")
    assert core.WORKING in caplog.text


def test_a_vllm_that_has_moved_its_names_says_which_were_tried(load, monkeypatch):
    setup = make_setup(RolloutConfig(), weight_transfer(), load("llama"), eos_token_ids=(EOS,), vocab_size=VOCABULARY)
    monkeypatch.setitem(sys.modules, "verl.rollout.vllm.library", None)  # importing it fails
    with pytest.raises(
        ModelError, match=rf"vLLM could not start with model: .*known to work: {core.TESTED_RELEASES[0]}"
    ):
        Core(setup)


def test_an_error_of_pydantic_says_what_is_wrong():
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError, match="1 validation error") as caught:
        pydantic.TypeAdapter(int).validate_python("x")
    assert first_line(caught.value).startswith("Input should be a valid integer")


def test_heads_that_share_the_embedding():
    class Head(torch.nn.Linear):
        pass

    embedding, tied, apart = torch.nn.Embedding(4, 3), Head(3, 4, bias=False), Head(3, 4, bias=False)
    tied.weight = embedding.weight
    assert _tied(torch.nn.ModuleList([embedding, tied, apart]).modules(), Head) == [tied]


class Packs:
    """A layer's method that leaves nothing of the weight to read."""

    def process_weights_after_loading(self, layer):
        layer.weight = torch.nn.Parameter(torch.empty(0))


def fused_model():
    """A model as vLLM has it: a fused projection that is packed away, and a norm that stays."""
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
    model.qkv, model.norm = torch.nn.Linear(4, 6, bias=False), torch.nn.LayerNorm(4, bias=False)
    model.qkv.quant_method = Packs()
    return model.requires_grad_(False)


def test_what_the_model_holds_is_compared_with_what_was_sent():
    generator = torch.Generator().manual_seed(2)
    pieces = {f"{n}.weight": torch.randn(2, 4, generator=generator) for n in ("v", "q", "k")}
    norm = torch.randn(4, generator=generator)

    def update(change):
        model = fused_model()
        held = HeldWeights(model, None)
        for name, tensor in {**pieces, "norm.weight": norm, "elsewhere": norm}.items():
            held.sent(name, tensor)
        model.qkv.weight.copy_(torch.cat([pieces[f"{n}.weight"] for n in "qkv"]))
        model.norm.weight.copy_(norm)
        change(model)
        model.qkv.quant_method.process_weights_after_loading(model.qkv)
        held.end()
        held.check()
        assert "process_weights_after_loading" not in vars(model.qkv.quant_method)

    update(lambda model: None)
    for name, wrong in {
        "qkv": lambda model: model.qkv.weight[2:4].zero_(),
        "norm": lambda model: model.norm.weight[1].mul_(1 + 1e-6),
    }.items():
        with pytest.raises(ModelError, match=rf"other values in {name}.weight than it was sent"):
            update(wrong)


@pytest.mark.parametrize("vllm_packs", [False, True])
def test_experts_of_an_update_are_packed_once(vllm_packs):
    """For a processor; vLLM 0.32 packs them only when it starts."""

    class Experts:
        def process_weights_after_loading(self, layer):
            layer.weight.data.add_(1)

    experts, layer = Experts(), torch.nn.Linear(2, 3)
    method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    method.process_weights_after_loading = lambda layer: vllm_packs and experts.process_weights_after_loading(layer)
    layer.quant_method, before = method, layer.weight.detach().clone()
    held = HeldWeights(torch.nn.Sequential(layer), None)
    method.process_weights_after_loading(layer)
    held.end()
    assert torch.equal(layer.weight, before + 1)


def test_joint_experts_are_loaded_as_published_files_have_them():
    """A vLLM that transposes the experts of these files."""
    receiver, experts = WeightReceiver(), torch.zeros(4, 6, 2)
    receiver._verl_flips = True
    assert receiver._verl_as_in_files("layers.0.mlp.experts.down_proj", experts).shape == (4, 2, 6)
    assert receiver._verl_as_in_files("visual.patch_embed.proj", experts) is experts
    receiver._verl_flips = False
    assert receiver._verl_as_in_files("layers.0.mlp.experts.down_proj", experts) is experts


def test_sums_of_parts_explain_a_whole():
    first, *further = pieces = [3, -(1 << 63), 1 << 62]
    total = sum(pieces)
    assert _explained(pieces, total, 2 * total, 2), "each rank has all of it"
    assert _explained(pieces, 5, total - (1 << 64), 2), "the ranks have it together, in integers that wrap around"
    assert _explained(pieces, 5, first + 2 * sum(further), 2), "two ranks have the same keys and values"
    assert not _explained(pieces, 5, total + 1, 2)
    assert not _explained(pieces, total + 1, total + 1, 1)


def test_a_message_runs_no_code_of_its_sender(tmp_path):
    """Any client of a service can send a description: it names a reader of ours, or nothing is called."""
    message = json.dumps({"reader": "os:mkdir", "bucket": str(tmp_path / "made")})
    with pytest.raises(ModelError, match="'os:mkdir' is not a reader of weights"):
        WeightReceiver.verl_load.__wrapped__(WeightReceiver(), message)
    assert not (tmp_path / "made").exists()


def test_the_readers_are_those_that_runs_name():
    _, copy = transfer_of_run()
    assert set(READERS) == {copy.reader, LINK_READER, copy.folder_reader}
