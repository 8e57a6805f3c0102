"""The computation behind the service against plain torch: gradients in float64, AdamW, adapters that take turns."""

import gc
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from verl.cli.serve import serving_config  # noqa: E402
from verl.data_proto.samples import PromptRequest, SamplingParams  # noqa: E402
from verl.models.adapter_weights import ALPHA  # noqa: E402
from verl.models.optim import AdamStep  # noqa: E402
from verl.rollout.native.drafts.drafter import Drafter  # noqa: E402
from verl.tinker.records import Datum, SamplingRequest, TrainingRequest  # noqa: E402
from verl.tinker.rows import computed_rows  # noqa: E402
from verl.tinker.workbench import Workbench  # noqa: E402

SETTINGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
    "dro": {"beta": 0.2},
}


def loss_of(name, lp, inputs):
    """The sum of section 3 of the protocol's documents, written as one expression for each loss."""
    if name == "cross_entropy":
        return -(lp * inputs["weights"]).sum()
    q, a = inputs["logprobs"], inputs["advantages"]
    r, settings = (lp - q).exp(), SETTINGS[name]
    low, high = (settings.get(f"clip_{side}_threshold", 0.0) for side in ("low", "high"))
    return {
        "importance_sampling": lambda: -(r * a).sum(),
        "ppo": lambda: -torch.minimum(r * a, r.clamp(low, high) * a).sum(),
        "cispo": lambda: -(r.detach().clamp(low, high) * lp * a).sum(),
        "dro": lambda: -(lp * a - 0.5 * settings.get("beta", 0.0) * (lp - q) ** 2).sum(),
    }[name]()


def request(loss, count=7):
    generator, data = np.random.default_rng(0), []
    for number in range(count):
        length = 3 + number
        inputs = {"target_tokens": generator.integers(1, 30, length)}
        if loss == "cross_entropy":
            inputs["weights"] = generator.random(length, np.float32)
        else:
            inputs["logprobs"] = -3 - generator.random(length, np.float32)
            inputs["advantages"] = generator.standard_normal(length).astype(np.float32)
        tokens = generator.integers(1, 30, length)
        if number > 3:  # these are equal before the first token that counts
            tokens[:4], inputs["target_tokens"][:3] = (5, 6, 7, 8), (6, 7, 8)
            for name in set(inputs) - {"target_tokens"}:
                inputs[name][:3] = 0
        data.append(Datum(tokens, inputs))
    return TrainingRequest("m", loss, SETTINGS[loss], data)


def new_adapter(bench, seed=0, rank=4):
    """An adapter with a second factor that is not 0, so that both have gradients."""
    adapter, generator = bench.engine.new_adapter(rank, seed), torch.Generator().manual_seed(seed)
    for name, tensor in adapter.weights.tensors.items():
        if name.endswith("lora_B"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return adapter


@pytest.fixture(scope="module")
def reference(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64).requires_grad_(False)


@pytest.mark.parametrize("loss", SETTINGS)
def test_losses_and_gradients_equal_torch_in_float64(bench, reference, loss):
    adapter, batch = new_adapter(bench), request(loss)
    output = bench.forward_backward(adapter, batch)
    value, log_probs = output.metrics["loss:sum"], iter(output.log_probs)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in adapter.weights.tensors.items()}
    base, scale = dict(reference.named_parameters(remove_duplicate=False)), ALPHA / adapter.weights.rank
    weights = {
        f"{layer}.weight": base[f"{layer}.weight"] + scale * leaves[f"{layer}.lora_B"] @ leaves[f"{layer}.lora_A"]
        for layer in adapter.weights.layers
    }
    total = torch.zeros((), dtype=torch.float64)
    for datum in batch.data:
        ids = torch.from_numpy(datum.tokens)[None]
        logits = torch.func.functional_call(reference, weights, (ids,), tie_weights=False).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        lp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        assert np.abs(next(log_probs) - lp.detach().numpy()).max() < 1e-4
        inputs = {name: torch.from_numpy(values).double() for name, values in datum.inputs.items()}
        total = total + loss_of(loss, lp, inputs)
    total.backward()
    assert value == pytest.approx(total.item(), rel=1e-5)
    for name, leaf in leaves.items():
        assert (adapter.gradients[name] - leaf.grad).norm() <= 1e-5 * leaf.grad.norm(), name


def test_rows_that_begin_alike_share_a_prompt():
    for loss, count in (("ppo", 8), ("cross_entropy", 8), ("dro", 7)):
        rows = computed_rows(request(loss).data, loss)
        assert len(rows) == count
        assert sum(len(row.members) > 1 for row in rows) == count - 7


def held_bytes():
    """Bytes of the tensors of this process, each storage once."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def sampled(bench, pairs):
    """The outputs of requests that decode together, each under its weights."""
    lane, outputs = bench.open_lane(pairs[0][1].params, 256), {}
    for number, (weights, request) in enumerate(pairs):
        lane.add(number, weights, request)
    while not lane.is_empty:
        outputs |= bench.advance(lane, 64)
    return [outputs[number] for number in range(len(pairs))]


def test_ten_adapters_add_their_own_tensors_and_share_the_base(bench):
    """Between steps an adapter has its weights and two moments of AdamW, and no gradients; samplers share the base too."""
    ask = SamplingRequest((1, 2, 3), 1, 2, SamplingParams(), 0)
    first_adapter = new_adapter(bench, rank=8)  # whose tensors the module has until another one's replace them
    bench.forward_backward(first_adapter, request("cross_entropy", 2))
    bench.optim_step(first_adapter, AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))  # gives up the buffer of logits
    sampled(bench, [(None, ask)] * 10)
    before = held_bytes()
    adapters = [new_adapter(bench, seed, rank=8) for seed in range(10)]
    adapter_bytes = sum(adapter.weights.num_bytes() for adapter in adapters)
    for adapter in adapters:
        bench.forward_backward(adapter, request("cross_entropy", 2))
        bench.optim_step(adapter, AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))
        assert not adapter.gradients
    assert 3 * adapter_bytes <= held_bytes() - before < 3.1 * adapter_bytes
    snapshots = [adapter.snapshot() for adapter in adapters]
    sampled(bench, [(weights, ask) for weights in snapshots])
    assert held_bytes() - before < 10 * adapter_bytes
    del snapshots
    assert held_bytes() - before < 3.1 * adapter_bytes


def drawn(output):
    return [(c.token_ids, c.log_probs) for c in output.completions]


def test_requests_join_an_open_lane_and_have_the_samples_of_lanes_for_themselves(bench):
    """Also with parts of a request that has more samples than rows, between training steps of another adapter, and beside a
    request that is dropped."""
    adapters = [new_adapter(bench, seed).snapshot() for seed in (1, 2)]
    asks = [SamplingRequest((1, 2, n), n + 1, 20 + n, SamplingParams(), n) for n in range(4)]
    pairs = list(zip([None, *adapters, adapters[0]], asks, strict=True))
    alone = [drawn(sampled(bench, [pair])[0]) for pair in pairs]
    lane, outputs, trained = bench.open_lane(SamplingParams(), 256), {}, new_adapter(bench, 3)
    lane._most_rows = 2
    lane.add(9, adapters[1], SamplingRequest((4, 5), 5, 200, SamplingParams(ignore_eos=True), 9))
    for number, pair in enumerate(pairs):
        lane.add(number, *pair)
        outputs |= bench.advance(lane, 1)
        bench.forward_backward(trained, request("cross_entropy", 2))
    assert len(lane.weights()) == 3
    lane.drop([9])
    while not lane.is_empty:
        outputs |= bench.advance(lane, 64)
    assert [drawn(outputs[number]) for number in sorted(outputs)] == alone


def test_drafts_act_and_change_no_sample(bench, tiny_llama, monkeypatch):
    """Of the base model and of an adapter, in one lane."""
    monkeypatch.setattr(Drafter, "_best_count", lambda self, certainties, now: len(certainties))
    key = "actor_rollout_ref.rollout.speculative.methods=[ngram]"
    drafting = Workbench(serving_config(str(tiny_llama), ["actor_rollout_ref.actor.fsdp_config.dtype=float32", key], 8))
    ask = SamplingRequest((3, 4, 5) * 6, 2, 60, SamplingParams(temperature=0.1, ignore_eos=True), 0)
    pairs = [(None, ask), (new_adapter(bench, 1).snapshot(), ask)]
    lane, outputs = drafting.open_lane(ask.params, 256), {}
    for number, pair in enumerate(pairs):
        lane.add(number, *pair)
    outputs |= drafting.advance(lane, 64)
    drafter = lane._generation.scheduler.drafter
    while not lane.is_empty:
        outputs |= drafting.advance(lane, 64)
    assert drafter.num_accepted > 0
    assert [drawn(outputs[number]) for number in range(2)] == [drawn(one) for one in sampled(bench, pairs)]


def test_equal_prompts_of_requests_are_computed_once(bench):
    """For each adapter, also if one of them ends before the others begin."""
    weights = new_adapter(bench, 1).snapshot()
    asks = [SamplingRequest((1, 2, 3, 4, 5), n % 2 + 1, 2 + n, SamplingParams(), n) for n in range(6)]
    pairs = [(None if number < 4 else weights, ask) for number, ask in enumerate(asks)]
    alone = [drawn(sampled(bench, [pair])[0]) for pair in pairs]
    lane, outputs = bench.open_lane(SamplingParams(), 256), {}
    for number, pair in enumerate(pairs):
        lane.add(number, *pair)
    while not lane.is_empty:
        outputs |= bench.advance(lane, 1)
        assert lane._generation._backend is None or lane._generation._backend.num_computed == 10
    assert [drawn(outputs[number]) for number in range(6)] == alone


def test_a_prompt_whose_first_request_is_dropped_is_computed_for_the_next_one(bench):
    engine = bench._rollout
    prompt, params = tuple(range(1, 12)), SamplingParams(max_new_tokens=4)
    generation = engine.open(params, step=0)
    generation.scheduler.max_num_batched_tokens = 4  # the prompt takes several steps
    for ordinal in range(3):
        generation.add(PromptRequest(ordinal, prompt))
    assert generation.poll(0) == []
    generation.abort([(0, 0), (2, 0)])
    (done,) = generation.poll()
    generation.close()
    other = engine.open(params, step=0)
    other.add(PromptRequest(1, prompt))
    (alone,) = other.poll()
    other.close()
    assert (done.ordinal, done.token_ids, done.log_probs) == (1, alone.token_ids, alone.log_probs)


@pytest.mark.parametrize("mode", ["vanilla", "gspo"])
def test_the_loss_of_the_config_reads_whole_sequences(bench, monkeypatch, mode):
    """Against formulas on the log-probs of a forward: PPO's per token, GSPO's ratio of a sequence."""
    adapter = bench.engine.new_adapter(4, 1)
    actor = replace(bench._actor, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9)
    actor = replace(actor, policy_loss=replace(actor.policy_loss, loss_mode=mode))
    monkeypatch.setattr(bench, "_actor", actor)
    monkeypatch.setattr(bench, "_loss_params", {**asdict(actor), **asdict(actor.policy_loss)})
    sent = request("importance_sampling")
    log_probs = bench.forward_backward(adapter, replace(sent, forward_only=True)).log_probs
    generator = np.random.default_rng(1)
    for datum, values in zip(sent.data, log_probs, strict=True):  # ratios on both sides of the clip
        datum.inputs["logprobs"][:] = values + generator.normal(0, 0.3, len(values))
    expected = 0.0
    for datum, values in zip(sent.data, log_probs, strict=True):
        advantages, chosen = datum.inputs["advantages"], datum.inputs["advantages"] != 0
        ratio = np.exp(values - datum.inputs["logprobs"])
        if mode == "gspo":
            ratio = np.exp((values - datum.inputs["logprobs"])[chosen].mean())
        loss = np.maximum(-ratio * advantages, -np.clip(ratio, 0.8, 1.2) * advantages)
        expected += loss[chosen].sum()
    result = bench.forward_backward(adapter, replace(sent, loss="custom_from_config"))
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert bench.optim_step(adapter, AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))["grad_norm"] > 0
