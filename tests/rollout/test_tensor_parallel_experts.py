"""The outputs of the experts of a replica's ranks add up to the layer's output."""

import pytest
import torch

from tests.rollout.test_rollout_model import Place
from verl.models.load import load_causal_lm
from verl.models.parallel import experts
from verl.models.tiny import make_tiny_model

NAME = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(("family", "num_experts"), [("qwen3_moe", 4), ("qwen3_moe", 5), ("mixtral", 4)])
def test_the_sum_over_ranks(family, num_experts, tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "leave_group", lambda x, group: x)
    key = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    path = make_tiny_model(tmp_path / "model", family, **{key: num_experts})
    modules = [load_causal_lm(path, dtype=torch.float64) for _ in range(3)]
    for rank, module in enumerate(modules[1:]):
        assert NAME in experts.divide_experts(module, Place(rank), experts.SummedExperts)
    whole, *parts = (module.get_submodule(NAME) for module in modules)
    assert [len(part.down_proj) for part in parts] == [(num_experts + 1) // 2, num_experts // 2]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, whole.down_proj.shape[1], dtype=torch.float64, generator=generator)
    chosen = torch.rand(6, num_experts, generator=generator).topk(2).indices
    weights = torch.rand(6, 2, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        expected = whole(hidden, chosen, weights)
        total = sum(part(hidden, chosen, weights) for part in parts)
    assert torch.allclose(total, expected, rtol=1e-13, atol=1e-15)
    assert expected.abs().max() > 0
