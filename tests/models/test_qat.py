"""Layers that train in int8 or with weights in NVFP4: products and gradients by hand, the sampler's log-probs."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine as make_local_engine
from tests.rollout.conftest import load, make_engine, make_prompts, tokenizer  # noqa: F401 - fixtures
from tests.rollout.test_quantized import gap, needs_kernels, rounding
from verl.config.sections.actor import QATConfig
from verl.data_proto.samples import SamplingParams
from verl.engines.api import MicroBatching
from verl.errors import ConfigError
from verl.models.decoder.rounded import round_layers
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import computed_by, decoder_for
from verl.models.qat import RoundedLinear
from verl.models.quantized import largest_of_matrices, nvfp4, on_grid
from verl.models.tiny import make_tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_rounded_product(dtype, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(33, 17, bias=bias).to(dtype), torch.randn(2, 5, 33, dtype=dtype, requires_grad=True)
    layer.__class__ = RoundedLinear
    y = layer(x)
    grids = on_grid(x.detach(), "int8"), on_grid(layer.weight.detach(), "int8", weights=True)
    rounded = [grid.double().requires_grad_() for grid in grids]
    expected = rounded[0] @ rounded[1].T + (layer.bias.detach().double() if bias else 0.0)
    assert y.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope.double())
    torch.testing.assert_close(x.grad.double(), rounded[0].grad, **tolerance)
    torch.testing.assert_close(layer.weight.grad.double(), rounded[1].grad, **tolerance)
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), slope.double().sum((0, 1)), **tolerance)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_sampler_has_the_log_probs_of_the_trained_module(family, load, make_engine):  # noqa: F811
    module = copy.deepcopy(load(family))
    plain, names = copy.deepcopy(module), list(module.state_dict())
    round_layers(module)
    assert list(module.state_dict()) == names
    cpu = torch.device("cpu")
    assert decoder_for(module, cpu) is None
    assert "rounded to int8" in computed_by(module, cpu)
    assert DenseDecoder.of(module) is not None, "the sampler reads its weights"
    engine, prompts = make_engine("native", module=module, quantization="int8"), make_prompts([3, 20, 7])
    done = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=16, ignore_eos=True), step=1)
    trained, rounded, other = (gap(done, prompts, of) for of in (module, rounding(plain, "int8"), plain))
    assert trained.mean() == pytest.approx(rounded.mean(), abs=1e-6)
    assert np.quantile(trained, 0.2) < 1e-5
    assert trained.mean() < 0.1 * other.mean()


def test_nvfp4_is_the_nearest_number_of_each_group():
    weight = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[0, 0, :16] = 0.0
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for matrix, rounded in zip(weight, nvfp4(weight), strict=True):
        matrix_scale = matrix.abs().max() / (6 * 448)
        for row, got in zip(matrix, rounded, strict=True):
            for first in range(0, 40, 16):
                group, part = row[first : first + 16], got[first : first + 16]
                scale = (group.abs().max() / 6 / matrix_scale).to(torch.float8_e4m3fn).float() * matrix_scale
                nearest = (group.abs()[:, None] - numbers * scale).abs().argmin(1)
                torch.testing.assert_close(part, numbers[nearest] * scale * group.sign(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_computes_with_weights_of_four_bits_and_trains_their_masters(dtype, tmp_path):
    rounds = QATConfig(enable=True, mode="w4a16", ignore_patterns=["lm_head", "re:.*v_proj$", "*o_proj"])
    engine = make_local_engine(make_tiny_model(tmp_path, "qwen3_moe"), dtype=dtype, rounds=rounds)
    before = {name: master.detach().clone() for name, master in engine.optimizer.masters.items()}
    assert engine.train_batch(make_batch(0, (3, 1)), policy_loss, ("log_probs", "entropy"), MicroBatching(), 1.0)
    four_bit = engine.rounding.four_bit
    assert {name.rpartition("mlp")[2] for name in four_bit if "layers.0.mlp" in name} == {
        ".experts.gate_up_proj", ".experts.down_proj",
    }  # fmt: skip
    assert {name.rpartition("self_attn.")[2] for name in four_bit if "self_attn" in name} == {
        "q_proj.weight",
        "k_proj.weight",
    }
    for name, p in engine.module.named_parameters():
        master = engine.optimizer.masters[name].detach()
        assert not torch.equal(master, before[name])
        if name in four_bit:
            fused = [name, name.replace("q_proj", "k_proj"), name.replace("k_proj", "q_proj")]  # v is ignored
            largest = [largest_of_matrices(engine.optimizer.masters[other].detach()) for other in fused]
            assert torch.equal(p, nvfp4(master, torch.stack(largest).amax(0)).to(p.dtype))
    assert dict(engine.gather_weights())[min(four_bit)].equal(engine.module.get_parameter(min(four_bit)))


def test_patterns_that_leave_nothing_are_refused(tmp_path):
    rounds = QATConfig(enable=True, mode="w4a16", ignore_patterns=["*"])
    with pytest.raises(ConfigError, match=r"qat\.ignore_patterns leaves no layer that is rounded"):
        make_local_engine(make_tiny_model(tmp_path, "llama"), dtype="float32", rounds=rounds)


def test_other_models_are_refused(load):  # noqa: F811
    with pytest.raises(ConfigError, match="qat.enable=True rounds plain dense decoders, and GemmaForCausalLM is none"):
        round_layers(copy.deepcopy(load("gemma")))
