"""Matmuls by either library against float64, whatever this processor prefers."""

import pytest
import torch

from verl.models import log_probs
from verl.models.ops import linear as matmul
from verl.models.ops.linear import Matmul

CPU = torch.device("cpu")


@pytest.fixture(params=["oneDNN", "torch.mm"])
def library(request, monkeypatch):
    if request.param == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(matmul, "prefers_onednn", lambda device: request.param == "oneDNN")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_equals_float64(library, dtype, tokens, monkeypatch):
    monkeypatch.setenv("VERL_CPU_BF16", "widened")
    by = Matmul(dtype, CPU)
    assert by.by_onednn == (library == "oneDNN")
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, residual, d_y = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((tokens, 24), (40, 24), (40,), (tokens, 40), (tokens, 40))
    )
    original = residual.clone()
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.08, "rtol": 1e-2}
    exact = x.double() @ weight.double().t()
    for actual, expected in (
        (by.linear(x, weight), exact),
        (by.linear(x, weight, bias), exact + bias.double()),
        (by.linear(x, weight, residual=residual), exact + residual.double()),
        (by.linear(x, weight, bias, residual), exact + bias.double() + residual.double()),
        (by.input_gradient(d_y, weight), d_y.double() @ weight.double()),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, **close)
    assert torch.equal(residual, original)


def test_log_probs_of_a_chunk_in_several_products(library, monkeypatch):
    monkeypatch.setattr(matmul, "_PRODUCT_ELEMENTS", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (11, 50))
    targets = torch.arange(11)
    log_probs.token_log_probs(hidden, weight, targets, chunk_tokens=7).log_probs.sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (wide[0] @ wide[1].t()).log_softmax(1).gather(1, targets.unsqueeze(1)).sum().backward()
    for leaf, expected in zip((hidden, weight), wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), expected.grad, atol=1e-5, rtol=1e-5)
