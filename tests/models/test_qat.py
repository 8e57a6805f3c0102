"""Layers that train in the int8 numbers of the sampler: products and gradients by hand, and log-probs of the sampler."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.rollout.conftest import load, make_engine, make_prompts, tokenizer  # noqa: F401 - fixtures
from tests.rollout.test_quantized import gap, needs_kernels, rounding
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.models.decoder.rounded import round_layers
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import computed_by, decoder_for
from verl.models.qat import RoundedLinear
from verl.models.quantized import on_grid


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


def test_other_models_are_refused(load):  # noqa: F811
    with pytest.raises(ConfigError, match="qat.enable=True rounds plain dense decoders, and GemmaForCausalLM is none"):
        round_layers(copy.deepcopy(load("gemma")))
