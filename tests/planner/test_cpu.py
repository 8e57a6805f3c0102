"""The device `cpu`: float32, prompts that are computed once, and activations that the sampler keeps for the update."""

from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from verl.cli.checklist.resources import reused_bytes
from verl.config import load_config
from verl.models.decoder.reuse import bytes_per_token
from verl.models.decoder.weights import DenseDecoder
from verl.models.memory import recorded_activations
from verl.planner import Cluster, Lengths, ParallelLayout, SequenceBatch, Workload, known_shape, memory, time_forward
from verl.planner.cluster import measure_cpu
from verl.planner.kernels import matmul_time
from verl.planner.request import shape_of
from verl.planner.search import search
from verl.planner.workload import Dataflow

SHAPE, LAYOUT, BATCH = known_shape("Qwen2.5-0.5B"), ParallelLayout(zero=0), SequenceBatch.equal(8, 512)


def test_float32_state_is_16_bytes_a_parameter_and_activations_are_doubled():
    narrow, wide = (memory(SHAPE, LAYOUT, tokens=1024, sequence=512, width=width) for width in (2, 4))
    assert (narrow.state, wide.state) == (18 * narrow.weights / 2, 16 * wide.weights / 4)
    assert wide.activations == 2 * narrow.activations


def test_a_shared_prompt_is_computed_once():
    apart = Workload(4, 8, 100, Lengths.constant(50))
    shared = replace(apart, shares_prompts=True)
    assert apart.batch.tokens == 4 * 8 * 150
    assert shared.batch.tokens == 4 * (100 + 8 * 50)
    # each response token attends to the prompt and to half of the response, in both cases
    pairs = 4 * (100**2 + 8 * (2 * 100 * 50 + 50**2))
    assert shared.batch.num * shared.batch.square == pytest.approx(pairs)


def test_sequences_are_whole():
    """96 ranks take as long for 128 sequences as for 192: the slowest has two."""
    cluster, layout = Cluster.of("h100_sxm", 96), ParallelLayout(data=96)
    one, many, two = (
        time_forward(SHAPE, layout, cluster, SequenceBatch.equal(n, 8192)).seconds for n in (96, 128, 192)
    )
    assert many == two > 1.8 * one


def test_the_bytes_of_kept_activations_are_the_store_s(tiny_llama):
    bytes_of_token = bytes_per_token(DenseDecoder.of(AutoModelForCausalLM.from_pretrained(tiny_llama)))
    shape = shape_of(str(tiny_llama))
    assert recorded_activations(shape, 100, 1e9) == 100 * bytes_of_token
    assert recorded_activations(shape, 1e6, 1e12) == 65_536 * bytes_of_token
    assert recorded_activations(shape, 1e6, 1e5) == 1e5
    assert recorded_activations(replace(shape, num_experts=4), 100, 1e9) == 0


def test_kept_activations_stay_between_calls():
    workload = Workload(8, 4, 100, Lengths.constant(50), shares_prompts=True)
    flows = (Dataflow.ppo(SHAPE), replace(Dataflow.ppo(SHAPE), reused_bytes=5e8))
    without, recording = (search(flow, Cluster.of("h100_sxm", 1), workload)[0].option("actor") for flow in flows)
    assert recording.resident == without.resident + 5e8
    assert [recording.parts[kind].activations - part.activations for kind, part in without.parts.items()] == [5e8, 5e8]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), 2e9),
        (("rollout.reuse_activations_gb=0.5",), 5e8),
        (("rollout.prefetch_num=1",), 0),
        (("rollout.kv_cache_config.enable_paged_attention=True",), 0),
        (("rollout.name=hf",), 0),
        (("model.lora_rank=8",), 0),
        (("actor.fsdp_config.dtype=float32",), 0),
    ],
)
def test_which_runs_keep_activations(keys, expected, monkeypatch):
    monkeypatch.setenv("VERL_CPU_BF16", "native")
    config = load_config([f"actor_rollout_ref.{key}" for key in keys], check=False).config
    assert reused_bytes(config) == expected


@pytest.mark.slow
def test_this_processor():
    """The micro-benchmark's own sizes: a matmul of twice the rows takes twice the time."""
    device = measure_cpu(16e9, threads=1).device
    assert device.width == 4
    assert 1e9 < device.bandwidth < 1e12
    assert 1e9 < device.peak < 1e13
    large, small = (float(matmul_time(device, m, 768, 768)) for m in (4096, 2048))
    assert large == pytest.approx(2 * small, rel=0.05)
