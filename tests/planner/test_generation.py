"""Generation, length distributions, and the transition from training to generation."""

import pytest

from verl.errors import ConfigError
from verl.planner import (
    Cluster,
    EngineLayout,
    Lengths,
    ModelShape,
    ParallelLayout,
    Workload,
    decode_step,
    known_shape,
    time_generate,
)
from verl.planner.generation import received_bytes


@pytest.mark.parametrize(("devices", "milliseconds"), [(1, 22.0), (2, 13.5)])
def test_a_measured_decode_step(devices, milliseconds):
    """13B on A100, one sample with a context of 512 (llm-analysis, from FasterTransformer): within 12%."""
    step = decode_step(ModelShape.gpt(40, 5120, 40, 50000), devices, Cluster.of("a100_sxm", devices), 1, 512)
    assert 1000 * step.seconds == pytest.approx(milliseconds, rel=0.12)


def test_lengths():
    lengths = Lengths.of(mean=701, longest=1536)
    assert lengths.mean == pytest.approx(701, rel=1e-3)
    assert lengths.longest == 1536
    through = Lengths.through(100, 400, 900, 2000)
    assert through.quantile(0.5) == pytest.approx(400, rel=0.02)
    assert through.longest == pytest.approx(2000, rel=0.02)
    with pytest.raises(ConfigError, match="does not ascend"):
        Lengths.through(500, 400, 900, 2000)


@pytest.mark.parametrize(("samples", "slots"), [(256, 256), (300, 64), (2048, 256), (8192, 100), (1, 8)])
def test_a_profile_keeps_tokens_and_slots(samples, slots):
    lengths = Lengths.of(701, 1536)
    profile = lengths.profile(samples, slots)
    assert sum(s.steps * s.active for s in profile) == pytest.approx(
        lengths.mean * samples, rel=0.01 if samples > 1 else 1
    )
    assert max(s.active for s in profile) <= slots * 1.02


def test_the_tail_costs_more_than_the_mean():
    """As many tokens, but the longest response decides when a step ends."""
    shape, cluster = known_shape("Qwen2.5-7B"), Cluster.of("h100_sxm", 8)
    layout = EngineLayout(8, slots=256)
    equal, wide = (
        time_generate(shape, layout, cluster, Workload(64, 8, 200, lengths)).seconds
        for lengths in (Lengths.constant(1000), Lengths.of(1000, 8192))
    )
    assert wide > 2 * equal


@pytest.mark.parametrize(("t", "p", "t_g"), [(2, 1, 1), (4, 1, 2), (2, 2, 1)])
def test_the_reshard_plan_moves_the_bytes_of_hybridflow(t, p, t_g):
    """A model with every parameter divided: our plan moves (d_g - 1) / (t p) M (arXiv:2409.19256, Table 2)."""
    from verl.parallel.mesh import Mesh
    from verl.reshard.grouping import interval_engines
    from verl.reshard.layout import RolloutLayout as Engines
    from verl.reshard.layout import Tensor, TrainingLayout
    from verl.reshard.plan import make_plan

    tensors = [Tensor(f"layers.{i}", (64, 32), layers=(i,), tensor_dim=0) for i in range(4)]
    num = t * p * 2
    mesh = Mesh.grid(range(num), replicate=2, pp=p, tp=t)
    training = TrainingLayout(mesh, layers_per_stage=(4 // p,) * p)
    rollout = Engines(interval_engines(training, tensor_parallel=t_g))
    plan = make_plan(tensors, training, rollout, dict.fromkeys(range(num), 0))
    model = 4 * 64 * 32 * 2
    expected = (p * t // t_g - 1) * model // (t * p)
    assert set(plan.received_bytes.values()) == {expected}


def test_a_device_lacks_what_it_does_not_hold():
    shape = ModelShape.gpt(32, 4096, 32)
    model = 2 * shape.num_parameters
    got = received_bytes(shape, ParallelLayout(data=2, tensor=8), EngineLayout(8, 2))
    assert got == pytest.approx((8 / 2 - 1) / 8 * model)
    assert received_bytes(shape, ParallelLayout(data=16, zero=3), EngineLayout(16)) == pytest.approx(model * 15 / 16)


def test_shapes_from_configs(tmp_path):
    config = {
        "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    shape = ModelShape.from_config(config)
    assert shape == known_shape("Qwen/Qwen2.5-7B-Instruct").__class__(**{**vars_of("Qwen2.5-7B"), "name": ""})
    assert shape.num_parameters == pytest.approx(7.615e9, rel=1e-3)
    with pytest.raises(ConfigError, match="no positive whole number as num_hidden_layers"):
        ModelShape.from_config({"hidden_size": 8})


def vars_of(name):
    shape = known_shape(name)
    return {field: getattr(shape, field) for field in shape.__dataclass_fields__}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("DeepSeek-V3", 671e9, 37e9),
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
        ("Llama-3.1-405B", 405.8e9, 405e9),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.777e9, 1.5e9),
        ("Qwen/Qwen2-7B-Instruct", 7.616e9, 7.1e9),
        ("deepseek-ai/deepseek-llm-7b-chat", 6.91e9, 6.5e9),
        ("google/gemma-2-2b-it", 2.614e9, 2.6e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6, 134.5e6),
    ],
)
def test_published_sizes(name, total, active):
    shape = known_shape(name)
    assert shape.num_parameters == pytest.approx(total, rel=0.005)
    assert shape.active_parameters == pytest.approx(active, rel=0.1)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'Qwen2.5-7B'"):
        known_shape("Qwen/Qwen25-7B")


def test_a_larger_name_is_no_smaller_model():
    """A word after a known name may be no size: R1's distillations are not R1."""
    with pytest.raises(ConfigError, match="is not known"):
        known_shape("deepseek-ai/DeepSeek-R1-Distill-Other-9B")
