"""Requests of several adapters in one batch: each has the samples that it gets by itself, and the log-probs of its module."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.rollout.conftest import make_prompts
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ModelError
from verl.models.adapter_weights import AdapterWeights
from verl.models.lora import LoRASpec, add_adapters, lora_layers
from verl.parallel.compiled import INSTRUCTION_SETS
from verl.rollout.native.compiled import library
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.torch.forward import DenseForward

SETS = [name for name in INSTRUCTION_SETS if library._library() and library._kernels(name)]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=5)
# the last rank makes 3 * 33 columns, more than a panel of the compiled kernels; the third adapts the MLP only
ADAPTERS = {"two": (2, ""), "three": (3, ""), "mlp": (4, "mlp"), "many": (33, "")}


def adapted(module, dtype=torch.float32):
    """A copy of `module` with adapters on all its linear layers, switched off."""
    module = copy.deepcopy(module).to(dtype)
    add_adapters(module, LoRASpec(2, 32, "all-linear", head=True), dtype)
    for layer in lora_layers(module).values():
        layer.active = False
    return module


def weights_of(module, rank, part, seed):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in lora_layers(module).items():
        if part in name:
            tensors[f"{name}.lora_A"] = torch.randn(rank, layer.in_features, generator=generator) * 0.1
            tensors[f"{name}.lora_B"] = torch.randn(layer.out_features, rank, generator=generator) * 0.05
    return AdapterWeights(rank, tensors)


def engine_of(make_engine, module, **config):
    engine = make_engine("native", module=module, max_num_seqs=16, max_num_batched_tokens=48, **config)
    engine.adapters = {name: weights_of(module, *of, seed) for seed, (name, of) in enumerate(ADAPTERS.items())}
    return engine


def requests():
    """Prompts of all adapters and of the base model in turn, with two samples each, some of them longer."""
    names, prompts = [*ADAPTERS, None], make_prompts([3, 20, 7, 33, 12, 9, 25, 5, 17, 60])
    return [
        replace(p, adapter=names[p.ordinal % len(names)], random_ordinal=p.ordinal // 2, max_new_tokens=4 + p.ordinal)
        for p in prompts
    ]


def generate(engine, prompts):
    return engine.generate(prompts, replace(PARAMS, n=2), step=0)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_mixed_batch_has_the_bits_of_separate_batches(isa, dtype, load, make_engine, monkeypatch):
    monkeypatch.setenv("VERL_CPU_ISA", isa)
    monkeypatch.setenv("VERL_CPU_BF16", "native")
    engine = engine_of(make_engine, adapted(load("llama"), dtype), batch_invariant="require")
    assert type(engine.dense()) is CpuForward
    prompts = requests()
    mixed = generate(engine, prompts)
    assert engine.stats()["max_running"] > len(ADAPTERS)
    for name in {p.adapter for p in prompts}:
        alone = generate(engine, [p for p in prompts if p.adapter == name])
        assert alone == [done for done in mixed if prompts[done.ordinal].adapter == name]


@pytest.mark.parametrize(
    "config", [{}, {"prepack_weights": False}, {"prepack_weights": False, "batch_invariant": "off"}]
)
def test_log_probs_of_a_mixed_batch_are_the_log_probs_of_each_module(config, load, make_engine):
    engine = engine_of(make_engine, adapted(load("llama")), **config)
    assert type(engine.dense()) is (DenseForward if config else CpuForward)
    prompts, plain = requests(), adapted(load("llama", "eager"))
    for done in generate(engine, prompts):
        prompt = prompts[done.ordinal]
        show(plain, engine.adapters.get(prompt.adapter))
        ids = torch.tensor([[*prompt.token_ids, *done.token_ids]])
        with torch.no_grad():
            log_p = plain(ids).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)


def show(module, weights):
    for name, layer in lora_layers(module).items():
        layer.active = weights is not None and f"{name}.lora_A" in weights.tensors
        if layer.active:
            layer.lora_A.data, layer.lora_B.data = (weights.tensors[f"{name}.lora_{part}"] for part in "AB")
            layer.scale = weights.scale


def test_a_modules_own_adapters_decode_as_its_forward_does(load, make_engine, monkeypatch):
    """Without names, as in a run that trains one adapter."""
    module = adapted(load("llama"))
    show(module, weights_of(module, 4, "", 7))
    compiled, prompts = make_engine("native", module=module), make_prompts([5, 9])
    assert type(compiled.dense()) is CpuForward
    done = compiled.generate(prompts, PARAMS, step=0)
    monkeypatch.setattr(DenseForward, "of", lambda module, **settings: None)
    for one, other in zip(done, make_engine("native", module=module).generate(prompts, PARAMS, step=0), strict=True):
        assert one.token_ids == other.token_ids
        assert torch.allclose(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-4)


def test_an_unknown_adapter_and_a_module_that_has_one_at_a_time_are_refused(load, make_engine):
    engine = engine_of(make_engine, adapted(load("llama")))
    with pytest.raises(ModelError, match="no adapter 'other'"):
        engine.generate([PromptRequest(0, (1, 2), adapter="other")], PARAMS, step=0)
    module = adapted(load("llama"))
    module.config.hidden_act = "relu"
    with pytest.raises(ModelError, match="one adapter at a time"):
        engine_of(make_engine, module).generate([PromptRequest(0, (1, 2), adapter="two")], PARAMS, step=0)
