"""QLoRA: adapters above a base in four bits train as above the weights that the four bits stand for."""

import sys

import pytest
import torch
from torch import nn

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine
from verl.config import load_config
from verl.engines.api import MicroBatching, whole
from verl.errors import ConfigError, MissingExtraError
from verl.models.four_bits import quantize_base
from verl.models.lora import LoRASpec, add_adapters, lora_layers
from verl.models.tiny import make_tiny_model

ALL = MicroBatching(max_tokens=10**6)
MODEL = "actor_rollout_ref.model"
NF4 = {"lora_rank": 4, "lora_alpha": 8, "quantization": "nf4"}


def needs_torchao():
    return pytest.importorskip("torchao.quantization", reason="the extra 'qlora' is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=64, intermediate_size=96, head_dim=16)


class Two(nn.Module):
    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96, bias=bias), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_dequantized_base(dtype):
    needs_torchao()
    is_wide = dtype == torch.float32  # torchao rounds once more before it adds a bias
    quantized, plain = (Two(bias=is_wide).to(dtype) for _ in range(2))
    before = plain.up.weight.clone()
    for module in (quantized, plain):
        add_adapters(module, LoRASpec(4, 8.0, "all-linear"), dtype)
        for layer in lora_layers(module).values():
            nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(1))
    quantize_base(quantized)
    for name, layer in lora_layers(quantized).items():
        plain.get_submodule(name).weight.data = layer.weight.get_original_weight()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    outs = []
    for module in (quantized, plain):
        outs.append(module(inputs := x.clone().requires_grad_()))
        outs[-1].square().sum().backward()
        outs.append(inputs.grad)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    for name, layer in lora_layers(quantized).items():
        other = plain.get_submodule(name)
        assert torch.equal(layer.lora_A.grad, other.lora_A.grad)
        assert torch.equal(layer.lora_B.grad, other.lora_B.grad)
        assert torch.equal(layer.merged_weight(), other.merged_weight())
        assert sum(getattr(layer.weight, part).nbytes for part in layer.weight.__tensor_flatten__()[0]) < before.nbytes
    error = (plain.up.weight - before).float().norm() / before.float().norm()
    assert 0.01 < error < 0.15  # of sixteen levels


def test_an_engine_trains_gathers_and_saves_the_merged_model(folder):
    """The weights for rollout and of an export are the dequantized base with its adapters; other weights are the folder's."""
    needs_torchao()
    trained = make_engine(folder, model=NF4)
    assert {type(layer.weight).__name__ for layer in lora_layers(trained.module).values()} == {"NF4Tensor"}
    plain = make_engine(folder, model={**NF4, "quantization": None})
    for name, layer in lora_layers(trained.module).items():
        plain.module.get_submodule(name).weight.data = layer.weight.get_original_weight()
    for seed in range(2):
        losses = [e.train_batch(make_batch(seed), policy_loss, ("log_probs", "entropy"), ALL) for e in (trained, plain)]
        assert losses[0] == losses[1]
    for gathered in (lambda e: dict(e.gather_weights()), lambda e: {n: whole(t) for n, t in e.state().model.items()}):
        ours, theirs = gathered(trained), gathered(plain)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert {type(tensor) for tensor in ours.values()} == {torch.Tensor}
    with trained.reference(), plain.reference():
        inside = [e.forward(make_batch(5), ("log_probs",), ALL)["log_probs"] for e in (trained, plain)]
    assert torch.equal(*inside)
    state = trained.state()
    again = make_engine(folder, model=NF4)
    again.load_state(state)
    assert torch.equal(*(e.forward(make_batch(5), ("log_probs",), ALL)["log_probs"] for e in (trained, again)))


def test_without_torchao(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingExtraError, match="model.quantization=nf4 needs the package 'torchao'.*pip install"):
        make_engine(folder, model=NF4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ((), "quantization=nf4 holds the base of adapters in four bits, and there are none"),
        ((f"{MODEL}.lora_rank=4", f"{MODEL}.use_dora=True"), "quantization=nf4 does not work with .*use_dora"),
        ((f"{MODEL}.lora_rank=4", "trainer.n_gpus_per_node=2"), "quantization=nf4 trains on one device"),
        ((f"{MODEL}.lora_rank=4", f"{MODEL}.quantization=int3"), "quantization=int3 .* is not one of null, nf4"),
    ],
)
def test_what_it_does_not_fit(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config([f"{MODEL}.path=m", "data.train_files=x", f"{MODEL}.quantization=nf4", *changes])


@pytest.mark.parametrize("value", ["nf4", "null"])
def test_both_values_of_a_saved_config_are_read(value):
    settings = [f"{MODEL}.path=m", "data.train_files=x", f"{MODEL}.lora_rank=4", f"{MODEL}.quantization={value}"]
    assert load_config(settings).config.actor_rollout_ref.model.quantization == (None if value == "null" else value)
