"""Generation without the host between steps. On the CPU, with the plain kernel and no graphs, it must equal the native
engine; on a GPU, graphs must not change its result."""

import contextlib
import copy
import dataclasses
import functools
import gc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.models.plain_attention import PLAIN
from tests.models.recorded_modes import RecordedModes
from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.counted_launches import count
from tests.rollout.no_waits import WaitError, allowed, guarded, no_waits
from tests.slow import each_value
from verl.config import RolloutConfig
from verl.config.sections.rollout import KVCacheConfig
from verl.data_proto.samples import SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.models.decoder.weights import DenseDecoder
from verl.models.lora import LoRASpec, add_adapters, lora_layers, merge_adapters
from verl.models.ops import decoding, pointwise, table
from verl.models.ops.table import by_torch
from verl.models.ops.varlen import FLASH, flash_runs, spans_of
from verl.models.tiny import make_tiny_model
from verl.rollout import sampling
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.cuda import backend
from verl.rollout.native.cuda import device as rows_module
from verl.rollout.native.cuda import pages as pages_module
from verl.rollout.native.cuda.backend import DeviceBackend
from verl.rollout.native.cuda.device import DeviceRows, assign_places, next_power, step_rows
from verl.rollout.native.cuda.forward import StraightForward
from verl.rollout.native.cuda.graphs import StepGraphs
from verl.rollout.native.cuda.store import PromptAttention, TokenStore
from verl.rollout.native.engine import NativeRollout

DENSE = ("llama", "qwen2", "qwen3")
LENGTHS = [3, 20, 7, 40, 1, 20]


def generate(engine, prompts, params, *, step=1, on_finish=None):
    return engine.generate(prompts, params, step=step, on_finish=on_finish), engine.stats()


def assert_same(ours, theirs, tolerance=1e-5):
    """The same samples. A uniform may lie within a rounding of the boundary between two tokens, where other kernels sample
    the neighbour: then all before it is the same, and it happens to few samples (none with a tolerance of 0)."""
    assert [(c.ordinal, c.sample) for c in ours] == [(c.ordinal, c.sample) for c in theirs]
    num_parted = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
        parting = next((i for i, (x, y) in pairs if x != y), None)
        if parting is None:
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        else:
            assert abs(a.token_ids[parting] - b.token_ids[parting]) == 1
            num_parted += 1
        assert np.allclose(a.log_probs[:parting], b.log_probs[:parting], atol=tolerance)
    assert num_parted <= (1 + len(ours) // 20 if tolerance else 0)


@pytest.fixture
def device(make_engine):
    """An engine with the GPU backend, computed on the CPU by the plain kernel."""

    def make(family="llama", rows=64, budget=8192, **more):
        return make_engine("device", family, max_num_seqs=rows, max_num_batched_tokens=budget, **more)

    return make


CASES = {
    "greedy": SamplingParams(n=2, temperature=0, max_new_tokens=12),
    "sampled": SamplingParams(n=4, temperature=0.8, max_new_tokens=24),
    "alone": SamplingParams(n=1, temperature=1.0, max_new_tokens=24),
    "equal lengths": SamplingParams(n=3, temperature=1.0, max_new_tokens=9, ignore_eos=True),
    "one token": SamplingParams(n=3, temperature=1.0, max_new_tokens=1),
    "filtered": SamplingParams(n=2, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, max_new_tokens=12),
    "stopped early": SamplingParams(n=4, max_new_tokens=40, stop_token_ids=tuple(range(0, 250, 9))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", DENSE)
def test_samples_equal_the_host_backends(family, case, device, make_engine):
    prompts, params = make_prompts(LENGTHS), CASES[case]
    expected = make_engine("native", family).generate(prompts, params, step=1)
    ours, stats = generate(device(family), prompts, params)
    assert_same(ours, expected)
    assert stats["num_generated_tokens"] == sum(len(c.token_ids) for c in ours)
    assert stats["num_prompt_tokens_computed"] == stats["num_prompt_tokens"] == sum(LENGTHS)


BEYOND = ("mistral", "qwen3_moe", "mixtral", "qwen2_moe", "phi3")  # windows that act, mixtures, joined projections


@pytest.mark.parametrize(("family", "case"), each_value(BEYOND, ["greedy", "sampled", "alone"]))
def test_windows_and_experts_give_the_samples_of_the_host_backend(family, case, device, make_engine):
    prompts, params = make_prompts(LENGTHS), CASES[case]
    expected = make_engine("native", family).generate(prompts, params, step=1)
    for cache in (SLOTS, pages(None)):
        engine = device(family, kv_cache_config=cache)
        ours, _ = generate(engine, prompts, params)
        assert_same(ours, expected)
        assert (engine.device.stores.sizes.width == 0) == (family == "mistral" or params.n == 1), "prompts are shared"


def test_a_prompt_is_shared_within_the_window(device, make_engine):
    prompts, params = make_prompts([3, 9]), SamplingParams(n=3, max_new_tokens=6)
    engine = device("mistral")
    ours, _ = generate(engine, prompts, params)
    assert engine.device.stores.sizes.width == 3
    assert_same(ours, make_engine("native", "mistral").generate(prompts, params, step=1))


@pytest.mark.parametrize(
    ("family", "targets"),
    each_value(["llama", "qwen2", "qwen2_moe"], ["all-linear", ("q_proj", "v_proj", "down_proj")]),
)
def test_adapters_are_applied_with_their_present_values(family, targets, load, device, make_engine):
    """By the backend of the GPU too, after an update of the adapters that leaves the stores as they are."""
    module = copy.deepcopy(load(family))
    add_adapters(module, LoRASpec(4, 8.0, targets), torch.float32)
    prompts, params = make_prompts(LENGTHS), CASES["sampled"]
    plain, _ = generate(device(family), prompts, params)
    engine, host, held = device(module=module), make_engine("native", module=module), None
    for scale in (0.0, 0.1, 0.2):
        for number, layer in enumerate(lora_layers(module).values()):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                layer.lora_B.copy_(scale * torch.randn(layer.lora_B.shape, generator=generator))
        ours, _ = generate(engine, prompts, params)
        assert_same(ours, host.generate(prompts, params, step=1))
        assert ([c.token_ids for c in ours] == [c.token_ids for c in plain]) == (scale == 0)
        assert held is None or engine.device.stores is held
        held = engine.device.stores
    lora = DenseDecoder.of(module, adapters=True)
    merge_adapters(module, lambda name, weight: weight)
    assert DenseDecoder.of(module, adapters=True) is not lora
    assert_same(generate(engine, prompts, params)[0], ours)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 60), st.sampled_from([1, 10, 24]), st.integers(0, 1000),
)  # fmt: skip
def test_any_mixture_of_lengths_and_ends(make_engine, lengths, n, rows, budget, length, seed):
    """With room for any number of rows and tokens of prompts."""
    prompts = make_prompts(lengths, seed=seed)
    params = SamplingParams(n=n, max_new_tokens=length, seed=seed, stop_token_ids=tuple(range(seed % 5, 250, 5)))
    expected, _ = generate(make_engine("device", max_num_seqs=100), prompts, params)
    engine = make_engine("device", max_num_seqs=rows, max_num_batched_tokens=budget)
    ours, stats = generate(engine, prompts, params)
    assert_same(ours, expected)
    assert stats["max_running"] <= rows


SLOTS = KVCacheConfig(enable_paged_attention=False)


def pages(max_tokens, block_size=16):
    return KVCacheConfig(enable_paged_attention=True, block_size=block_size, max_tokens=max_tokens)


def refills(device, monkeypatch, n, cache, *, ahead):
    """Samples of random lengths, three times as many as the 32 rows. Returns them, the launches of each step, "r" for rows and
    "p" for prompts, and free rows of steps while prompts wait."""
    engine, steps, free = device(rows=32, kv_cache_config=cache), [], []

    def noted(kind, compute):
        def run(*arguments):
            steps[-1] += kind
            return compute(*arguments)

        return run

    def step(self, chunks, compute=DeviceBackend.step):
        steps.append("")
        free.append(self.rows.num_free if self.prompts.waiting else 0)
        return compute(self, chunks)

    params = SamplingParams(n=n, max_new_tokens=60, stop_token_ids=tuple(range(0, 250, 13)))
    with monkeypatch.context() as patch:
        if not ahead:
            patch.setattr(DeviceBackend, "ahead", 0)
        patch.setattr(DeviceRows, "launch", noted("r", DeviceRows.launch))
        patch.setattr(DeviceRows, "prefill", noted("p", DeviceRows.prefill))
        patch.setattr(DeviceBackend, "step", step)
        samples, _ = generate(engine, make_prompts([5 + i % 7 for i in range(96 // n)]), params)
    return samples, steps, sum(free[1:])


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("cache", [SLOTS, pages(None)], ids=["slots", "pages"])
def test_freed_rows_find_prompts_that_are_computed(cache, n, device, monkeypatch):
    """A forward of prompts has many launches, which the host begins while the rows compute. Several prompts share it."""
    expected, before, free_before = refills(device, monkeypatch, n, cache, ahead=False)
    samples, steps, free = refills(device, monkeypatch, n, cache, ahead=True)
    assert_same(samples, expected)
    assert {*steps[1:]} == {"r", "rp"}
    assert steps.count("rp") < 0.6 * before.count("rp")
    assert free < 0.7 * free_before


PREEMPTS = {
    (256, "sampled"),
    (192, "sampled"),
    (256, "stopped early"),
}  # with less, fewer samples begin at the same time


@pytest.fixture(scope="module")
def in_slots(make_engine):
    """Samples and statistics of a case without pages."""

    @functools.cache
    def of(case):
        engine = make_engine("device", max_num_seqs=64, kv_cache_config=SLOTS)
        return generate(engine, make_prompts(LENGTHS), CASES[case])

    return of


@pytest.mark.seed("C9")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_tokens", [None, 256, 192])
def test_pages_change_nothing(max_tokens, case, device, in_slots):
    """Nor do preempted samples: they are computed again."""
    prompts, params = make_prompts(LENGTHS), CASES[case]
    expected, before = in_slots(case)
    ours, stats = generate(device(kv_cache_config=pages(max_tokens)), prompts, params)
    assert_same(ours, expected)
    assert "kv_fragmentation" not in before
    assert 0 < stats["kv_fragmentation"] < 1
    if max_tokens is not None:
        token = TokenStore.bytes_per_token(DenseDecoder.of(device().module))
        assert stats["kv_cache_bytes"] == (max_tokens + 16) * token < before["kv_cache_bytes"]
    assert (stats["num_preempted"] > 0) == ((max_tokens, case) in PREEMPTS)


@pytest.mark.seed("C9")
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 60), st.integers(0, 6), st.integers(0, 1000),
)  # fmt: skip
def test_any_mixture_in_any_number_of_pages(make_engine, lengths, n, rows, budget, spare_blocks, seed):
    prompts = make_prompts(lengths, seed=seed)
    params = SamplingParams(n=n, max_new_tokens=24, seed=seed, stop_token_ids=tuple(range(seed % 5, 250, 25)))
    expected, _ = generate(make_engine("device", max_num_seqs=100, kv_cache_config=SLOTS), prompts, params)
    least = -(-(max(lengths) + (0 if n > 1 else 24)) // 16) + -(-(25 + (0 if n > 1 else max(lengths))) // 16) + 1
    config = pages(16 * (least + spare_blocks))
    engine = make_engine("device", max_num_seqs=rows, max_num_batched_tokens=budget, kv_cache_config=config)
    ours, stats = generate(engine, prompts, params)
    assert_same(ours, expected)
    held = engine.device.stores.pool
    again, _ = generate(engine, prompts, params)
    assert engine.device.stores.pool is held, "allocated once"
    assert_same(again, ours, tolerance=0)


@pytest.mark.seed("C9")
@pytest.mark.parametrize(
    ("name", "limit"),
    [("device", 224), pytest.param("native", 200, marks=pytest.mark.skipif(kernels() is None, reason=""))],
)
def test_turns_continue_in_pages(name, limit, make_engine):
    """Samples that are kept come back with their keys and values, and may be preempted too."""
    runs = []
    for config in (SLOTS, pages(None), pages(limit)):
        engine = make_engine(name, max_num_seqs=8, kv_cache_config=config)
        generation = engine.open(SamplingParams(n=2, max_new_tokens=24, temperature=1.0), step=0, keep=True)
        first, second = {}, {}
        for request in make_prompts([9, 21, 30]):
            generation.add(request)
        while done := generation.poll():
            first |= {c.key: c.token_ids for c in done}
        for ordinal, sample in first:
            generation.add(TurnRequest(ordinal, sample, (7, 8, 9)))
        while done := generation.poll():
            second |= {c.key: c.token_ids for c in done}
        runs.append((first, second, generation.close().get("num_preempted", 0)))
    assert runs[0][:2] == runs[1][:2] == runs[2][:2]
    assert runs[1][2] == 0 < runs[2][2]


def test_pages_are_as_long_as_the_kernel_reads(device):
    engine, prompts, params = device(kv_cache_config=pages(None)), make_prompts(LENGTHS), CASES["sampled"]
    expected, _ = generate(engine, prompts, params)
    engine.device.kernel = PLAIN._replace(page_multiple=256)
    ours, _ = generate(engine, prompts, params)
    assert engine.device.stores.sizes.page_size == 256
    assert_same(ours, expected)
    engine = device(kv_cache_config=pages(176))
    engine.device.kernel = PLAIN._replace(page_multiple=256)
    with pytest.raises(ConfigError, match="max_tokens=0 cannot hold one sample of 40 .* at least 768"):
        generate(engine, prompts, params)


@pytest.mark.parametrize("multiple", [0, 1])
def test_pages_are_the_default_of_the_device(multiple, device):
    """Options of a backend with a kernel that reads pages; the backend of the host has none by default."""
    engine, prompts = device(), make_prompts(LENGTHS)
    engine.device.kernel = PLAIN._replace(page_multiple=multiple)
    ours, stats = generate(engine, prompts, CASES["sampled"])
    assert ("kv_fragmentation" in stats) == (engine.device.stores.pool is not None) == bool(multiple)
    engine.device.fits = lambda module: False
    theirs, stats = generate(engine, prompts, CASES["sampled"])
    assert "kv_fragmentation" not in stats
    assert_same(ours, theirs)


def test_a_kernel_without_pages_is_refused(device, torch_computes):
    engine = device(kv_cache_config=pages(None))
    engine.device.kernel = PLAIN._replace(page_multiple=0)
    with pytest.raises(ConfigError, match=r"the flash attention of PyTorch 2\.12 or newer \(here: "):
        generate(engine, make_prompts(LENGTHS), CASES["sampled"])


def test_stores_stay_and_old_contents_do_not_matter(device):
    one, prompts = device(), make_prompts(LENGTHS)
    first, _ = generate(one, prompts, CASES["sampled"])
    held = one.device.stores
    again, _ = generate(one, prompts, CASES["sampled"])
    assert one.device.stores is held
    assert_same(again, first, tolerance=0)
    generate(one, prompts, dataclasses.replace(CASES["sampled"], temperature=0.5))
    assert one.device.stores is not held
    one.release()
    assert one.device.stores is None
    assert_same(generate(one, prompts, CASES["sampled"])[0], first, tolerance=0)


@pytest.mark.parametrize("cache", [SLOTS, pages(None)], ids=["slots", "pages"])
def test_deterministic_generation_sorts_no_index(cache, device):
    """On a GPU, deterministic mode sorts the places of every write by index: of each layer's keys and values, each step."""
    engine, params = device(kv_cache_config=cache), dataclasses.replace(CASES["stopped early"], n=2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with RecordedModes() as modes:
            generate(engine, make_prompts(LENGTHS), params)
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes.of_indexed_writes() == {(False, False)}


@pytest.mark.parametrize("cache", [SLOTS, pages(256)], ids=["slots", "pages"])
@pytest.mark.parametrize("case", ["greedy", "sampled", "alone", "filtered"])
def test_the_host_waits_only_for_tokens(case, cache, device, make_engine, torch_computes, monkeypatch):
    """Between the launch of a step and the reading of its tokens nothing makes it wait: prompts, starts, moves and decode
    steps read nothing back, and no shape depends on values."""
    for name in ("prefill", "begin", "move", "retire", "share", "launch"):
        monkeypatch.setattr(DeviceRows, name, guarded(getattr(DeviceRows, name)))
    for module in (rows_module, pages_module):
        monkeypatch.setattr(module, "to_device", allowed(module.to_device))
    monkeypatch.setattr(sampling, "_ranked_threshold", sampling._bisected_threshold)  # as on a GPU
    expected = make_engine("native").generate(make_prompts(LENGTHS), CASES[case], step=1)
    engine = device(rows=9, kv_cache_config=cache)
    engine.device.kernel = PLAIN._replace(forward=allowed(PLAIN.forward))
    assert_same(generate(engine, make_prompts(LENGTHS), CASES[case])[0], expected)


def test_what_replaces_a_kernel_waits_for_nothing():
    """On a GPU without Triton, torch computes the ops, and the guard of a step does not see their bodies."""
    torch.manual_seed(0)
    probs, u, places = torch.softmax(torch.randn(5, 700), -1), torch.rand(5).double(), torch.arange(5)
    qkv, turns, store = torch.randn(5, 32), torch.randn(5, 4), torch.zeros(2, 9, 2, 4)
    with no_waits():
        threshold = sampling._bisected_threshold(probs, 0.9 * probs.sum(-1, keepdim=True).double())
        tokens = sampling.draw(probs.masked_fill(probs < threshold, 0), u)
        by_torch(pointwise.write_kv)(qkv, turns, turns, turns[0], turns[0], 1e-6, store, places)
        by_torch(pointwise.swiglu)(by_torch(pointwise.add_norm)(qkv, qkv, qkv[0], 1e-6)[1])
        slots = (torch.tensor([0, 3, 6, 9, 12]), torch.tensor([1, 0, 2, 2, 0]), 3, None, 0)
        arguments = (qkv, turns, turns, None, None, 0.0, torch.zeros(2, 15, 2, 4), *slots, 3, 0, 0.5)
        by_torch(decoding.attend_decode)(*arguments, torch.ones(2, 15, 2, 4), *slots, places, places)
    assert (probs.gather(1, tokens[:, None]) >= threshold).all()


def test_what_waits_is_an_error():
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    waiting = {
        "a value": lambda: x[0].item(),
        "a branch": lambda: bool((x > 1).any()),
        "a list": x.tolist,
        "a copy": x.cpu,
        "a place": lambda: x.to("cpu", torch.float64),
        "an array": x.numpy,
        "a mask": lambda: x[mask],
        "places": lambda: x.nonzero(),
        "counts": lambda: torch.repeat_interleave(torch.arange(4), torch.arange(4)),
        "equality": lambda: torch.equal(x, x),
    }
    for name, call in waiting.items():
        with pytest.raises(WaitError), no_waits():
            call()
        allowed(call)()
        assert name
    with no_waits():
        assert (x[torch.tensor([1, 2])].sum() + x.cumsum(0)[-1]).shape == ()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cache", [SLOTS, pages(None)], ids=["slots", "pages"])
def test_requests_that_come_while_others_run_get_rows_of_their_own(cache, n, device, make_engine):
    """Three requests first, 37 longer ones after the first poll: stores grow with their contents."""
    prompts = make_prompts([5, 9, 7] + [11 + i for i in range(37)])
    params = dataclasses.replace(CASES["alone"], n=n)
    engine = device(rows=256, kv_cache_config=cache)
    generation = engine.open(params, step=1)
    for prompt in prompts[:3]:
        generation.add(prompt)
    ended = generation.poll(0.0)
    for prompt in prompts[3:]:
        generation.add(prompt)
    while done := generation.poll():
        ended += done
    stats = generation.close()
    expected = make_engine("native").generate(prompts, params, step=1)
    assert_same(sorted(ended, key=lambda c: c.key), expected)
    assert stats["max_running"] >= 40 * n - 3
    assert stats["num_decode_steps"] <= 3 * params.max_new_tokens
    assert_same(engine.generate(prompts[:3], params, step=1), expected[: 3 * n])


def test_rows_stay_as_they_are_where_memory_is_short(device, make_engine, monkeypatch):
    prompts, params = make_prompts([5, 9, 7, 30, 31, 32]), CASES["alone"]
    generation, ended = device(kv_cache_config=SLOTS).open(params, step=1), []
    for prompt in prompts[:3]:
        generation.add(prompt)
    ended += generation.poll(0.0)
    monkeypatch.setattr("verl.rollout.native.cuda.backend._free_bytes", lambda device: 0)
    for prompt in prompts[3:]:
        generation.add(prompt)
    while done := generation.poll():
        ended += done
    assert generation.close()["max_running"] == 3
    assert_same(sorted(ended, key=lambda c: c.key), make_engine("native").generate(prompts, params, step=1))


def test_a_generation_of_many_prompts_after_one_of_few_has_slots_for_them(device):
    engine, params = device(rows=8), CASES["alone"]
    few, many = make_prompts([9]), make_prompts([9] * 8)
    engine.generate(few * 1, dataclasses.replace(params, n=8), step=1)
    engine.generate(many[:1], params, step=1)
    _, stats = generate(engine, many, params)
    assert stats["max_running"] == 8
    assert engine.device.stores.sizes.num_prefixes == 8


def test_a_generation_of_turns_has_rows_for_episodes_that_come(device):
    engine = device(rows=24)
    generation = engine.open(CASES["alone"], step=0, keep=True)
    for prompt in make_prompts([9, 5]):
        generation.add(prompt)
    generation.poll(0.0)
    assert engine.device.stores.sizes.num_rows == 24
    generation.close()


def test_which_models_are_computed_straight_through(load):
    assert all(StraightForward.reads(load(family)) for family in DENSE + BEYOND)
    assert StraightForward.reads(load("gemma"))
    assert not any(StraightForward.reads(load(family)) for family in ("gemma2", "gemma3_text", "glm4", "deepseek_v3"))
    assert not DeviceBackend.fits(load("llama"))  # not on a GPU


def test_straight_forward_equals_the_module(load):
    """Hidden states and logits of a whole prompt, without any engine around."""
    for family in DENSE:
        module, ids = load(family).eval(), torch.arange(7, 24)
        decoder = DenseDecoder.of(module)
        forward = StraightForward(decoder, module.get_output_embeddings().weight, 32)
        attend = PromptAttention(
            TokenStore(decoder, 1, 32),
            torch.arange(17),
            spans_of([17], [17], torch.device("cpu")),
            PLAIN,
            decoder.scale,
            forward.windows,
        )
        with torch.no_grad():
            ours = forward.logits(forward.hidden(ids, torch.arange(17), attend))
            theirs = load(family, "eager").eval()(ids[None]).logits[0]
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("cached", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_a_step_is_that_to_all_keys(window, cached, monkeypatch):
    """Of a row's own tokens and then its prompt's, by torch and by flash attention without Triton."""
    torch.manual_seed(0)
    lengths, prompts, size, kv_heads, heads, dim = torch.tensor([3, 0, 11]), torch.tensor([9, 4]), 4, 2, 6, 8
    gather, place = (torch.from_numpy(x) for x in assign_places(np.array([1, 0, 1]), 2, 2))
    table = torch.randperm(20, dtype=torch.int32).view(5, 4) if cached else None
    starts = torch.arange(5) if cached else torch.arange(5) * 16
    row_slots = decoding.Slots(starts[[2, 0, 1]], lengths, 16, table, size if cached else 0)
    shared = decoding.Slots(starts[[4, 3]], prompts, 16, table, size if cached else 0)
    before = torch.randn(2, 80, kv_heads, dim, dtype=torch.float64)
    qkv, turns = torch.randn(3, (heads + 2 * kv_heads) * dim).double(), torch.randn(2, 3, dim).double()
    results = []
    for by_flash in (False, True):
        if by_flash:
            monkeypatch.setattr(decoding, "flash_runs", lambda device, dtype, head_dim: True)
            monkeypatch.setattr(decoding, "FLASH", PLAIN)
        store = before.clone()
        prompts_too = (store, decoding.SharedPrompts(shared, gather, place)) if window is None else ()
        out = decoding.attend_new_tokens(qkv, *turns, (None, None, 0.0), store, row_slots, window, 0.3, *prompts_too)
        q = pointwise.rotated(qkv.unflatten(1, (-1, dim))[:, :heads], *turns)
        results.append(out)
        for row in range(3):
            keys = decoding._places(row_slots, torch.arange(16)[None], store)[row][: lengths[row] + 1]
            keys = keys[-window:] if window else torch.cat([
                keys, decoding._places(shared, torch.arange(16)[None], store)[[1, 0, 1][row]][: prompts[[1, 0, 1][row]]]
            ])  # fmt: skip
            k, v = store[:, keys].repeat_interleave(heads // kv_heads, dim=2)
            weights = (torch.einsum("hd,khd->hk", q[row], k) * 0.3).softmax(-1)
            assert torch.allclose(out[row], torch.einsum("hk,khd->hd", weights, v), atol=1e-12)
    assert torch.allclose(*results, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12), st.integers(0, 3))
def test_no_two_rows_share_a_place(members, extra):
    members = np.array(members)
    width = max(np.bincount(members[members >= 0], minlength=1).max(), 1) + extra
    gather, place = assign_places(members, int(width), 4)
    for row, member in enumerate(members):
        if member >= 0:
            assert place[row] // width == member
            assert gather[place[row]] == row
    seated = place[members >= 0]
    assert len(set(seated.tolist())) == len(seated)


def test_a_capture_without_memory_costs_one_graph(monkeypatch, caplog):
    class Graph:
        def replay(self):
            runs.append("replayed")

    @contextlib.contextmanager
    def capture(graph, **settings):
        runs.append("captured")
        if runs.count("captured") == 1:
            raise torch.OutOfMemoryError("out of memory")
        collecting_during_capture.append(gc.isenabled())
        yield

    runs, collecting_during_capture = [], []
    graphs = StepGraphs(torch.device("cpu"), enabled=True)
    graphs._enabled = True
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for key in ("large", "small"):
        for _ in range(3):
            graphs.run(key, lambda: runs.append("run"))
    assert not any(collecting_during_capture)
    assert gc.isenabled()
    large, small = ["run", "captured", "run", "run"], ["run", "captured", "run", "replayed", "replayed"]
    assert runs == large + small
    assert graphs.num_graphs == 1
    assert "runs without a CUDA graph" in caplog.text


def test_sizes_that_ragged_rows_have_once_are_captured_in_the_first_generation(device, monkeypatch):
    """The second one replays all of its steps."""

    def simulated(self, *arguments, **settings):
        make(self, *arguments, **settings)
        self._enabled = True

    def run(self, key, step):
        steps.append(key)
        before(self, key, step)

    def capture(self, key, step):
        captured.append(key)
        self._graphs[key] = SimpleNamespace(replay=step)

    make, before, steps, captured = StepGraphs.__init__, StepGraphs.run, [], []
    for name, replacement in (("__init__", simulated), ("run", run), ("_capture", capture)):
        monkeypatch.setattr(StepGraphs, name, replacement)
    engine, prompts, params = device(rows=16), make_prompts(LENGTHS * 2), CASES["stopped early"]
    first, stats = generate(engine, prompts, params)
    assert 1 in Counter(steps).values()
    assert len(captured) == len(set(steps)) == stats["num_graphs"]
    again, _ = generate(engine, prompts, params)
    assert len(captured) == stats["num_graphs"]
    assert_same(again, first, tolerance=0)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("cache", [SLOTS, pages(None)], ids=["slots", "pages"])
def test_stores_that_stay_over_training_change_nothing(cache, n, device, monkeypatch):
    """Not even the bounds that kernels are given, by which some choose the order of their sums: a run that resumes has fresh
    stores."""
    calls = []

    def forward(q, k, v, spans, causal, scale):
        calls.append((len(spans.start_q), spans.max_q, spans.max_k, causal))
        return PLAIN.forward(q, k, v, spans, causal, scale)

    monkeypatch.setattr("verl.rollout.native.cuda.backend._has_room", lambda device, num_bytes: True)
    params = SamplingParams(n=n, max_new_tokens=12)
    long, short = make_prompts([200, 90, 7, 31]), make_prompts([40, 20, 7])
    fresh, lasting = device(rows=6, kv_cache_config=cache), device(rows=6, kv_cache_config=cache)
    for engine in (fresh, lasting):
        engine.device.kernel = PLAIN._replace(forward=forward)
    expected, _ = generate(fresh, short, params)
    before = list(calls)
    lasting.publish(1)
    generate(lasting, long, params)
    lasting.release()
    assert lasting.device.stores is None, "it is not known yet what training takes"
    lasting.publish(2)
    generate(lasting, long, params)
    stores = lasting.device.stores
    lasting.release()
    calls.clear()
    again, _ = generate(lasting, short, params)
    if n > 1:  # else fewer rows are asked for
        assert lasting.device.stores is stores
    assert calls == before
    assert_same(again, expected, tolerance=0)


@pytest.mark.parametrize(("peak", "stays"), [(50, True), (70, False)])
def test_stores_stay_where_the_device_has_memory_left_over_from_training(peak, stays, monkeypatch):
    """Of 100 bytes, 5 are other processes'."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (35, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(backend, "most_memory_allocated", lambda device: peak)
    assert backend._has_room(torch.device("cuda", 0), 20) is stays
    assert not backend._has_room(torch.device("cpu"), 0)


# of commit 7e46003, by this count: each part between two matrix products that torch.compile fused there, which became a kernel
# or more, counts once; as its parts are written there were 1,285. It read [rows, vocab] six times.
LAUNCHES_THEN = 385


@pytest.mark.parametrize("n", [1, 4])
def test_a_decode_step_launches_few_kernels(n):
    launches = count(n)
    assert sum(launches.names.values()) <= 0.6 * LAUNCHES_THEN, launches.names
    assert sum(launches.reads.values()) <= 3, launches.reads


def test_sizes_of_steps():
    assert [next_power(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    assert [step_rows(n) for n in (1, 3, 33, 64, 65, 80, 81, 500)] == [1, 4, 64, 64, 80, 80, 96, 512]


HAS_FLASH = torch.cuda.is_available() and flash_runs(torch.device("cuda:0"), torch.bfloat16, 64)


def log_prob_error(module, prompts, completions):
    """Mean absolute difference of log-probs from the log-probs of `module`."""
    token_ids, gaps = {p.ordinal: list(p.token_ids) for p in prompts}, []
    for completion in completions:
        prompt = token_ids[completion.ordinal]
        ids = torch.tensor([prompt + list(completion.token_ids)])
        with torch.no_grad():
            logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps += (exact - torch.tensor(completion.log_probs)).abs().tolist()
    return np.mean(gaps)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_FLASH, reason="needs an NVIDIA GPU with flash attention")
class TestOnACard:
    @pytest.fixture(scope="class")
    def module(self, tmp_path_factory):
        folder = make_tiny_model(tmp_path_factory.mktemp("gpu") / "qwen2", "qwen2", hidden_size=256)
        settings_ = {"attn_implementation": "verl", "dtype": torch.bfloat16}
        return AutoModelForCausalLM.from_pretrained(folder, **settings_).cuda()

    @pytest.fixture(scope="class")
    def engine(self, module):
        def make(eager=False, **config):
            return NativeRollout(module, None, RolloutConfig(enforce_eager=eager, **config), eos_token_ids=[EOS])

        return make

    @pytest.mark.parametrize("case", CASES)
    def test_graphs_change_nothing(self, module, engine, case):
        prompts, params = make_prompts(LENGTHS), CASES[case]
        assert DeviceBackend.fits(module)
        plain, _ = generate(engine(eager=True), prompts, params)
        fast, stats = generate(engine(), prompts, params)
        assert stats["num_graphs"] > 0 or params.max_new_tokens == 1
        assert_same(fast, plain, tolerance=1e-3)

    def test_garbage_with_graphs_does_not_end_a_capture(self, engine):
        params, thresholds = CASES["sampled"], gc.get_threshold()
        old = engine()
        generate(old, make_prompts(LENGTHS), params)
        cycle = [old]
        cycle.append(cycle)
        del old, cycle
        gc.set_threshold(1)
        try:
            _, stats = generate(engine(), make_prompts(LENGTHS), params)
        finally:
            gc.set_threshold(*thresholds)
        assert stats["num_graphs"] > 0

    @pytest.mark.parametrize("mixed", [None, decoding.attend_decode], ids=["none", "attention"])
    def test_kernels_are_as_close_to_float32_as_torch(self, module, engine, mixed, monkeypatch):
        """Also when Triton computes all ops but one."""
        prompts, params = make_prompts(LENGTHS), CASES["equal lengths"]
        ours, _ = generate(engine(), prompts, params)
        if mixed:
            replaced = {mixed.triton: by_torch(mixed)}
            monkeypatch.setattr(table, "load", lambda path, load=table.load: replaced.get(path) or load(path))
        else:
            monkeypatch.setattr(table, "has_triton", lambda: False)
        plain, _ = generate(engine(eager=True), prompts, params)
        exact = copy.deepcopy(module).float().cpu()
        exact.set_attn_implementation("sdpa")
        errors = [log_prob_error(exact, prompts, completions) for completions in (ours, plain)]
        assert max(errors) < 1.5 * min(errors)
        assert max(errors) < 0.1

    @pytest.mark.skipif(
        not FLASH.page_multiple, reason=f"the flash attention of PyTorch {torch.__version__} reads no pages; 2.12 does"
    )
    @pytest.mark.parametrize("eager", [True, False])
    def test_pages_change_little(self, engine, eager):
        prompts, params = make_prompts([3, 200, 7, 400, 1, 300]), CASES["equal lengths"]
        plain, _ = generate(engine(eager), prompts, params)
        ours, stats = generate(engine(eager, kv_cache_config=pages(2048)), prompts, params)
        same = [a.token_ids[:4] == b.token_ids[:4] for a, b in zip(plain, ours, strict=True)]
        assert np.mean(same) > 0.7
        assert stats["kv_fragmentation"] > 0

    def test_a_step_does_not_wait_for_the_device(self, engine):
        one, prompts, params = engine(), make_prompts(LENGTHS), CASES["equal lengths"]
        generate(one, prompts, params)
        generate(one, prompts, params)
        rows = one.device.stores
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows.launch(8, 4, 8, 8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
