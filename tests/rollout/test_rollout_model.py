"""A rank's part of a model takes its part of the weights, and the outputs of the ranks' experts add up to the layer's.

Nothing is exchanged here: tests/runtime/test_rollout_tp.py."""

import pytest
import torch

from verl.errors import ModelError
from verl.models.load import load_causal_lm
from verl.models.parallel import experts
from verl.models.tiny import make_tiny_model
from verl.parallel.mesh import Mesh
from verl.rollout.native.torch.forward import DenseForward
from verl.rollout.requests import vocab_size
from verl.rollout.rollout_model import Replica, copy_group

SIZE = 2
MODELS = {
    "tied": ("llama", {}),
    "odd_vocabulary": ("qwen3", {"vocab_size": 265, "tie_word_embeddings": False}),
    "biases": ("qwen2", {"tie_word_embeddings": False}),
    "experts": ("qwen3_moe", {}),
}


class Place:
    """One rank's view of a group, as far as cutting asks."""

    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank

    def size(self):
        return SIZE


@pytest.fixture(scope="module", params=MODELS)
def folders(request, tmp_path_factory):
    """The model before and after some training."""
    family, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return [make_tiny_model(folder / str(seed), family, seed=seed, **changes) for seed in (0, 1)]


def parts(folder):
    return [Replica(load_causal_lm(folder).requires_grad_(False), Place(rank)) for rank in range(SIZE)]


def named(module):
    return dict(module.named_parameters(remove_duplicate=False))


def test_parts_of_the_new_weights_make_the_whole(folders):
    replicas, trained = parts(folders[0]), load_causal_lm(folders[1])
    for replica in replicas:
        replica.load(trained.named_parameters())
    cut = 0
    for name, full in named(trained).items():
        pieces = [named(replica.module)[name] for replica in replicas]
        different = [d for d in range(full.dim()) if pieces[0].shape[d] != full.shape[d]]
        for dim in different:
            cut += 1
            assert torch.equal(torch.cat(pieces, dim), full), name
        if not different:
            assert all(torch.equal(piece, full) for piece in pieces), name
    assert cut > 0


def test_ties_the_vocabulary_and_memory_of_a_part(folders):
    for replica in parts(folders[0]):
        module = replica.module
        is_tied = module.config.tie_word_embeddings
        assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == is_tied
        assert vocab_size(module) == module.config.vocab_size > len(module.get_input_embeddings().weight)
        for name, parameter in module.named_parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


def test_a_part_is_computed_by_verls_layers(folders):
    assert all(DenseForward.of(replica.module, prepack=True) for replica in parts(folders[0]))


def test_a_tied_weight_may_have_either_name(tiny_llama):
    trained = load_causal_lm(tiny_llama)
    weights = dict(trained.named_parameters())
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    replica = parts(tiny_llama)[1]
    replica.load(weights.items())
    assert torch.equal(replica.module.lm_head.weight, trained.lm_head.weight[132:])


@pytest.mark.parametrize("place", [None, 0])
def test_weights_that_are_not_the_models(tiny_llama, place):
    weights = dict(load_causal_lm(tiny_llama).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    half = weights[name][:, :64]
    replica = Replica(load_causal_lm(tiny_llama).requires_grad_(False), None if place is None else Place(place))
    wrong = {
        rf"missing parameter {name}": {n: w for n, w in weights.items() if n != name},
        r"sent adapter \(3,\)": {**weights, "adapter": torch.zeros(3)},
        r"\(64, 64\)": {**weights, name: half},
    }
    for match, tensors in wrong.items():
        with pytest.raises(ModelError, match=match):
            replica.load(tensors.items())
    replica.load(weights.items())


def test_no_groups_where_every_rank_has_a_copy():
    assert copy_group(Mesh.grid(range(4), replicate=4, tp=1), None) is None


NAME = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(("family", "num_experts"), [("qwen3_moe", 4), ("qwen3_moe", 5), ("mixtral", 4)])
def test_the_sum_over_ranks(family, num_experts, tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "leave_group", lambda x, group: x)
    key = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    path = make_tiny_model(tmp_path / "model", family, **{key: num_experts})
    modules = [load_causal_lm(path, dtype=torch.float64) for _ in range(3)]
    for rank, module in enumerate(modules[1:]):
        assert NAME in experts.divide_experts(module, Place(rank), experts.SummedExperts)
    full, *parts = (module.get_submodule(NAME) for module in modules)
    assert [len(part.down_proj) for part in parts] == [(num_experts + 1) // 2, num_experts // 2]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, full.down_proj.shape[1], dtype=torch.float64, generator=generator)
    chosen = torch.rand(6, num_experts, generator=generator).topk(2).indices
    weights = torch.rand(6, 2, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        expected = full(hidden, chosen, weights)
        total = sum(part(hidden, chosen, weights) for part in parts)
    assert torch.allclose(total, expected, rtol=1e-13, atol=1e-15)
    assert expected.abs().max() > 0
