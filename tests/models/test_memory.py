"""Memory closed forms against the published numbers of Calculon and of Megatron's paper (arXiv:2205.05198)."""

import pytest
import torch

from verl.models.memory import kept_activations, kv_bytes_per_token, state_bytes, training_state
from verl.planner import EngineLayout, ModelShape, ParallelLayout, generation_memory, known_shape, memory
from verl.planner.generation import rollout_weights
from verl.planner.workload import Lengths, Workload

GIB = 2**30
# name: layers, hidden, heads, t, p, chunks, sequences of a micro-batch
MEGATRON = {
    "22B": (48, 6144, 64, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (105, 20480, 128, 8, 35, 3, 1),
    "1T": (128, 25600, 160, 8, 64, 1, 1),
}
# GiB of weights and optimizer, of activations kept whole, and with sequence parallelism and selective recomputation
TABLE = {
    "22B": (45.56, 59.25, 9.56),
    "175B": (45.56, 66.84, 12.35),
    "530B": (31.64, 114.02, 23.08),
    "1T": (32.96, 131.25, 26.56),
}
# per cent of the activations kept whole: sequence parallel, selective, both, full recomputation
PERCENT = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}


def megatron(name):
    layers, hidden, heads, tensor, pipeline, chunks, sequences = MEGATRON[name]
    layout = ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        zero=0,
        keeps_scores=True,
        dropout=True,
        sequence_parallel=False,
    )
    return ModelShape.gpt(layers, hidden, heads), layout, 2048 * sequences


@pytest.mark.parametrize("name", MEGATRON)
def test_memory_of_megatron_to_four_digits(name):
    shape, layout, tokens = megatron(name)
    both = layout.replace(sequence_parallel=True, recompute="scores")
    sizes = (
        training_state(shape, layout).total / GIB,
        kept_activations(shape, layout, tokens, 2048) / GIB,
        kept_activations(shape, both, tokens, 2048) / GIB,
    )
    assert tuple(round(value, 2) for value in sizes) == TABLE[name]


@pytest.mark.parametrize("name", MEGATRON)
def test_shares_of_recomputation(name):
    """The published percentages include small terms that the paper's closed forms leave out: they agree within 0.15."""
    shape, layout, tokens = megatron(name)
    full = kept_activations(shape, layout, tokens, 2048)
    changes = (
        {"sequence_parallel": True},
        {"recompute": "scores"},
        {"sequence_parallel": True, "recompute": "scores"},
        {"recompute": "full"},
    )
    shares = [100 * kept_activations(shape, layout.replace(**change), tokens, 2048) / full for change in changes]
    assert shares == pytest.approx(PERCENT[name], abs=0.15)


def test_zero_divides_optimizer_then_gradients_then_weights():
    shape = ModelShape.gpt(10, 1024, 16)
    sizes = [memory(shape, ParallelLayout(data=4, zero=stage)) for stage in range(4)]
    n = shape.num_parameters
    assert [f.weights for f in sizes] == [2 * n, 2 * n, 2 * n, n / 2]
    assert [f.grads for f in sizes] == [4 * n, 4 * n, n, n]
    assert [f.optimizer for f in sizes] == [12 * n, 3 * n, 3 * n, 3 * n]


def test_experts_are_divided_by_expert_ranks_only():
    shape = known_shape("DeepSeek-V3")
    layout = ParallelLayout(data=16, pipeline=16, expert=16, zero=1)
    experts = shape.routed_parameters * (4 / 61) / 16
    dense = shape.block_parameters * (4 / 61) + shape.vocab * shape.hidden
    assert memory(shape, layout).weights == pytest.approx(2 * (experts + dense))
    assert memory(shape, layout).optimizer == pytest.approx(12 * (experts + dense / 16))


def test_keys_and_values():
    llama, deepseek = known_shape("Llama-3.1-8B"), known_shape("DeepSeek-V3")
    assert kv_bytes_per_token(llama, 1) == 131072  # 32 layers, 2 x 8 heads of 128, 2 bytes
    assert kv_bytes_per_token(llama, 1, stored="int8") == 32 * 2 * 8 * (128 + 4)
    assert kv_bytes_per_token(llama, 16) == 131072 / 8  # eight heads do not divide further
    assert kv_bytes_per_token(deepseek, 8) == 61 * 576 * 2  # a latent is repeated
    assert rollout_weights(llama, 4) == pytest.approx(2 * llama.num_parameters / 4)


@pytest.mark.parametrize(("name", "kind"), [("Qwen3.5-9B", "qwen3_5"), ("Qwen3.5-35B-A3B", "qwen3_5_moe")])
def test_linear_attention_has_states_in_place_of_keys(name, kind):
    """Its config in transformers has the sizes of the published model."""
    transformers = pytest.importorskip("transformers", minversion="5.19")
    published, config = known_shape(name), transformers.AutoConfig.for_model(kind)
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    shape = ModelShape.from_config(config, name)
    assert (shape.linear, shape.tower) == (published.linear, published.tower)
    with torch.device("meta"):
        module = transformers.AutoModelForImageTextToText.from_config(config)
    assert shape.num_parameters == pytest.approx(sum(p.numel() for p in module.parameters()), rel=2e-3)
    assert published.num_parameters == shape.num_parameters
    layers, heads = (8, 4) if kind == "qwen3_5" else (10, 2)
    assert kv_bytes_per_token(shape, 1) == 2 * layers * 2 * heads * 256
    assert state_bytes(shape) == 4 * 3 * layers * 32 * 128 * 128
    assert not state_bytes(known_shape("Llama-3.1-8B"))


def test_slots_cost_memory():
    shape, work = known_shape("Qwen2.5-7B"), Workload(64, 8, 200, Lengths.of(1000, 4096))
    few, many = (generation_memory(shape, EngineLayout(1, slots=slots), work) for slots in (32, 256))
    assert many.kv > 7 * few.kv
    assert many.weights == few.weights
