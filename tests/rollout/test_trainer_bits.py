"""In bfloat16 the sampler and the training forward compute the same hidden states, if processor and torch allow it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.models.test_routing import near_ties
from tests.rollout.conftest import make_prompts
from verl.config.sections.rollout import SpeculativeConfig
from verl.data_proto.samples import SamplingParams
from verl.models.decoder import reuse
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import packed_outputs
from verl.models.ops.linear import Matmul
from verl.models.packing import pack_rows
from verl.models.rounding import Rounding
from verl.models.routing import Routing
from verl.models.tiny import make_tiny_model
from verl.rollout.native.compiled import library
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.torch.forward import DenseForward

WIDE = {"hidden_size": 576, "intermediate_size": 2304, "head_dim": 36, "num_attention_heads": 16}  # sums in parts


@pytest.fixture(scope="module")
def kernels():
    kernels = library.kernels()
    if kernels is None or kernels.kind(torch.bfloat16) != library.PAIRS:
        pytest.skip("matmuls of this processor read no pairs of bfloat16 values")
    return kernels


def load(folder, family, sizes):
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(folder, family, initializer_range=0.05, **sizes)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and weights of norms
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def rows_of(prompts, completions):
    """The columns of the completions, prompts padded on the left and responses on the right."""
    ids = {prompt.ordinal: torch.tensor(prompt.token_ids) for prompt in prompts}
    size = max(map(len, ids.values()))
    columns = {
        "prompts": torch.zeros(len(completions), size, dtype=torch.long),
        "prompt_mask": torch.zeros(len(completions), size, dtype=torch.bool),
    }
    for row, completion in enumerate(completions):
        prompt = ids[completion.ordinal]
        columns["prompts"][row, size - len(prompt) :] = prompt
        columns["prompt_mask"][row, size - len(prompt) :] = True
    responses = [torch.tensor(completion.token_ids) for completion in completions]
    columns["responses"] = pad_sequence(responses, batch_first=True)
    columns["response_mask"] = pad_sequence([torch.ones_like(x, dtype=torch.bool) for x in responses], batch_first=True)
    return columns


EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3}
MIXTURES = {
    "qwen3_moe": EXPERTS,
    "qwen3_moe, a dense layer between": {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": []},
    "qwen2_moe": EXPERTS,  # with a shared expert
    "mixtral": EXPERTS,
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("replays", [False, True])
def test_mixtures_have_one_order_of_sums(kernels, name, replays, tmp_path, make_engine):
    """Samples do not depend on the slots, and have the trainer's log-probs and experts: routers near a tie would show it."""
    model = near_ties(load(tmp_path, name.partition(",")[0], MIXTURES[name]), scale=0.01)
    if not kernels.equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    prompts, params = make_prompts([3, 20, 7, 33, 65]), SamplingParams(n=3, max_new_tokens=24, ignore_eos=True)
    settings = {"module": model, "enable_rollout_routing_replay": replays}
    engines = [make_engine("native", max_num_seqs=slots, **settings) for slots in (1, 6, 64)]
    if not replays:
        engines.append(make_engine("native", speculative=SpeculativeConfig(methods=["ngram", "history"]), **settings))
    assert "training forward" in str(engines[0].invariance())
    completions, *repeats = [engine.generate(prompts, params, step=0) for engine in engines]
    for other in repeats:
        assert [(c.token_ids, c.log_probs) for c in other] == [(c.token_ids, c.log_probs) for c in completions]
    sampled = torch.tensor([completion.log_probs for completion in completions])
    columns = rows_of(prompts, completions)
    for share_prompts in (True, False):
        packed = pack_rows(columns, share_prompts=share_prompts)
        packed.layout.routing = Routing()
        trained = packed_outputs(model, packed, ["log_probs"])["log_probs"].detach()
        assert (trained - sampled).abs().max() < 1e-5
    if replays:
        record, start = packed.layout.routing.recorded(model.config).numpy(), 0
        for completion in completions:
            size = len(completion.experts)
            assert np.array_equal(completion.experts, record[start : start + size])
            start += size


def test_torch_computes_mixtures_with_adapters(kernels, tmp_path, make_engine):
    """Adapters are numbered by the four products of a dense layer."""
    engine = make_engine("native", module=load(tmp_path, "qwen2_moe", EXPERTS))
    if not kernels.equals_trainer(DenseDecoder.of(engine.module)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    assert isinstance(engine.dense(), CpuForward)
    engine.adapters = {}
    assert isinstance(engine.dense(), DenseForward)


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", WIDE), ("qwen2", {}), ("qwen3", WIDE)], ids=["llama", "qwen2", "qwen3"]
)
def test_log_probs_of_the_sampler_are_the_trainers(kernels, family, sizes, tmp_path, make_engine):
    model = load(tmp_path, family, sizes)
    if not kernels.equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    prompts = make_prompts([3, 20, 7, 33, 65])
    engine = make_engine("native", module=model)
    assert "training forward" in str(engine.invariance())
    completions = engine.generate(prompts, SamplingParams(n=3, max_new_tokens=24, ignore_eos=True), step=0)
    sampled = torch.tensor([completion.log_probs for completion in completions])
    columns = rows_of(prompts, completions)
    for share_prompts in (True, False):
        packed = pack_rows(columns, share_prompts=share_prompts)
        trained = packed_outputs(model, packed, ["log_probs"])["log_probs"].detach()
        assert (trained - sampled).abs().max() < 1e-5  # rounding of the log-softmax


@pytest.mark.parametrize("inputs", [576, 896, 1536, 2048, 4864, 8192])
def test_sums_of_products_are_added_as_the_trainer_adds_them(kernels, inputs):
    block = kernels.sum_block(inputs)
    if block is None:
        pytest.skip("the matmuls of this version of torch sum in another order")
    x, weight = torch.randn(37, inputs).bfloat16(), torch.randn(96, inputs).bfloat16()
    assert torch.equal(
        kernels.product(x, kernels.pack(weight), 96, 3, block), Matmul(x.dtype, x.device).product(x, weight).float()
    )


def gradients_of(model, columns, share_prompts=True):
    """Gradients of two micro-batches, and the share of their tokens with reused activations."""
    model.zero_grad()
    for rows in (slice(0, 6), slice(6, None)):
        packed = pack_rows({name: x[rows] for name, x in columns.items()}, share_prompts=share_prompts)
        log_probs = packed_outputs(model, packed, ["log_probs"])["log_probs"]
        (log_probs * torch.linspace(-1, 2, log_probs.numel()).view_as(log_probs)).sum().backward()
    (metrics,) = reuse.reuse_metrics(model)
    share = metrics["reused_activations_ratio"].value
    return {name: p.grad.clone() for name, p in model.named_parameters()}, share


def recorded_samples(model, make_engine, num_bytes, **settings):
    """Columns of samples of mixed lengths, with activations recorded in a store of `num_bytes`."""
    store = reuse.store_for(model, DenseDecoder.of(model), lambda: num_bytes, 0)
    for part in store.parts:
        part.fill_(torch.nan)
    prompts = [replace(p, max_new_tokens=n) for p, n in zip(make_prompts([3, 20, 7, 33]), (1, 9, 24, 2), strict=True)]
    engine = make_engine("native", module=model, max_num_seqs=5, max_num_batched_tokens=16, **settings)
    engine.trains = True
    completions = engine.generate(prompts, SamplingParams(n=3, max_new_tokens=24), step=0)
    return rows_of(prompts, completions), store


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", WIDE), ("qwen2", {}), ("qwen3", WIDE)], ids=["llama", "qwen2", "qwen3"]
)
def test_recorded_activations_give_the_gradients_of_a_forward(kernels, family, sizes, tmp_path, make_engine):
    model = load(tmp_path, family, sizes)
    if not kernels.equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    columns, store = recorded_samples(model, make_engine, 100_000_000)
    for share_prompts in (True, False):
        reused, share = gradients_of(model, columns, share_prompts)
        assert (share, store.fails) == (1.0, False)
        version, store.version = store.version, -1
        computed, share = gradients_of(model, columns, share_prompts)
        store.version = version
        assert share == 0.0
        assert [name for name, x in computed.items() if not torch.equal(x, reused[name])] == []


def test_a_module_with_equal_weights_reads_records_until_it_steps(kernels, tmp_path, make_engine):
    """On several ranks the sampler has another module."""
    model = load(tmp_path, "llama", {})
    if not kernels.equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    trained, other = copy.deepcopy(model), copy.deepcopy(model)
    reuse.borrow_records(trained)
    for module in (trained, other):
        reuse.lend_records(model, module)
    columns, _ = recorded_samples(model, make_engine, 100_000_000)
    reused, share = gradients_of(trained, columns)
    assert share == 1.0
    reuse.forget_records(trained)
    computed, share = gradients_of(trained, columns)
    assert share == 0.0
    assert all(torch.equal(x, reused[name]) for name, x in computed.items())
    packed_outputs(other, pack_rows(columns, share_prompts=True), ["log_probs"])
    assert reuse.reuse_metrics(other) == [], "it has not asked for records"


def test_recorded_activations_end_with_the_weights_and_with_the_memory(kernels, tmp_path, make_engine):
    model = load(tmp_path, "llama", {})
    if not kernels.equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    token = reuse.bytes_per_token(DenseDecoder.of(model))
    columns, store = recorded_samples(model, make_engine, 90 * token)  # of 63 tokens of prompts and 96 of responses
    some, share = gradients_of(model, columns)
    assert 0 < share < 1
    assert len(store.free) < 30
    weight = model.get_input_embeddings().weight.detach()
    Rounding().write(weight, "embeddings", weight.float())  # as an optimizer does; the same values
    computed, share = gradients_of(model, columns)
    assert share == 0
    assert all(torch.equal(x, some[name]) for name, x in computed.items())
