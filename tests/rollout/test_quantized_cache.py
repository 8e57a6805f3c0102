"""Keys and values in int8: log-probs against modules that round to the same numbers, and samples that keep their bits."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from tests.rollout.conftest import make_prompts
from tests.rollout.test_cpu_kernels import DTYPES, ODD, SETS, odd_models  # noqa: F401 - a fixture
from tests.rollout.test_quantized import gap, needs_kernels
from verl.config.sections.rollout import KVCacheConfig
from verl.data_proto.samples import SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.models.quantized import on_grid
from verl.rollout.hf import own_view
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.paged_store import PagedStore
from verl.rollout.native.compiled.store import BlockStore, Shape
from verl.rollout.native.recording import obstacle

pytestmark = needs_kernels
PARAMS = SamplingParams(n=2, max_new_tokens=24, ignore_eos=True)
LENGTHS = [3, 20, 7, 33]


def attention(module, query, key, value, *arguments, **options):
    key, value = (on_grid(x, "int8", weights=True).to(x.dtype) for x in (key, value))
    return eager_attention_forward(module, query, key, value, *arguments, **options)


AttentionInterface.register("int8_cache", attention)
AttentionMaskInterface.register("int8_cache", eager_mask)


def rounding(module):
    """A view of `module` that rounds keys and values of each head and token to int8."""
    view = own_view(module)
    view.set_attn_implementation("int8_cache")
    return view


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", *ODD])
def test_log_probs_equal_modules_that_round_alike(name, load, odd_models, make_engine, monkeypatch):  # noqa: F811
    module = odd_models[name] if name in ODD else load(name)
    engine = make_engine("native", module=module, max_num_seqs=5, max_num_batched_tokens=24, kv_cache_dtype="int8")
    assert isinstance(engine.dense(), CpuForward)
    prompts = make_prompts(LENGTHS)
    done, exact = engine.generate(prompts, PARAMS, step=1), []
    exact = gap(done, prompts, module)
    monkeypatch.setattr("tests.rollout.test_quantized.eager_view", rounding)
    alike = gap(done, prompts, module)
    # a value at the border of two levels may go either way, after sums in another order
    assert np.quantile(alike, 0.5) < 1e-5
    assert alike.mean() < 0.1 * exact.mean()


def turns(engine, prompts):
    """Three turns of each sample, whose keys and values are kept between them."""
    generation, texts = engine.open(PARAMS, step=0, keep=True), {}
    for prompt in prompts:
        generation.add(prompt)
    while ended := generation.poll():
        for done in ended:
            text = texts.setdefault(done.key, [])
            text.append((done.token_ids, done.log_probs))
            if len(text) < 3:
                generation.add(TurnRequest(*done.key, (5, 6, 7)))
    generation.close()
    return texts


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_do_not_depend_on_batch_pages_and_turns(isa, dtype, quantization, load, make_engine, monkeypatch):
    monkeypatch.setenv("VERL_CPU_ISA", isa)
    module = copy.deepcopy(load("qwen3")).to(dtype)
    prompts, runs, episodes = make_prompts([3 + 5 * (i % 7) for i in range(12)]), [], []
    pages = KVCacheConfig(enable_paged_attention=True)
    for slots, tokens, cache in ((32, 8192, KVCacheConfig()), (7, 19, pages), (1, 5, KVCacheConfig())):
        engine = make_engine(
            "native", module=module, max_num_seqs=slots, max_num_batched_tokens=tokens, kv_cache_dtype="int8",
            quantization=quantization, batch_invariant="require", kv_cache_config=cache,
        )  # fmt: skip
        runs.append([(c.token_ids, c.log_probs) for c in engine.generate(prompts, PARAMS, step=0)])
        episodes.append(turns(engine, prompts[:4]))
    assert runs[0] == runs[1] == runs[2]
    assert episodes[0] == episodes[1] == episodes[2]
    assert "trainer" not in engine.invariance().why
    assert "int8" in obstacle(module, replace(engine.config, reuse_activations_gb=1.0))


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 68 / 256), (torch.bfloat16, 68 / 128)])
def test_the_cache_takes_a_quarter_or_half_of_the_memory(dtype, share, load, make_engine):
    module, held = copy.deepcopy(load("llama")).to(dtype), {}
    for stored in ("auto", "int8"):
        engine = make_engine("native", module=module, kv_cache_dtype=stored)
        engine.generate(make_prompts(LENGTHS), PARAMS, step=0)
        held[stored] = engine.stats()["kv_cache_bytes"]
        if stored == "auto":
            width = engine.row_store.shape.width // 16
    levels = width * dtype.itemsize
    assert held["int8"] / held["auto"] == pytest.approx((width + 4) / levels)
    assert Shape(1, 1, 64, torch.int8).width / (Shape(1, 1, 64, dtype).width * dtype.itemsize) == share


def test_tokens_join_at_any_place_of_a_block(load, make_engine):
    """A token that moves to another place of its block takes its scale along."""
    draw = torch.Generator().manual_seed(0)
    shape = Shape(1, 2, 20, torch.int8)

    def stored(keys, values, scales):
        store = BlockStore(shape)
        store.reserve(1, keys.shape[1], keys.shape[1])
        store.view()
        for t in range(keys.shape[1]):
            block = store._blocks[0][0, :, t // 16]
            block[:, 0, :-64].unflatten(1, (32, 16))[:, :20, t % 16] = keys[:, t]
            block[:, 1, :-64].unflatten(1, (16, 32))[:, t % 16, :20] = values[:, t]
            block[:, :, -64:].view(torch.float32)[:, :, t % 16] = scales[:, :, t]
        return store.take(0, keys.shape[1])

    for first in (1, 15, 16, 17, 33):
        for then in (1, 16, 20):
            sizes = first, then
            keys, values = (torch.randint(-127, 128, (2, sum(sizes), 20), generator=draw) for _ in range(2))
            scales = torch.randn(2, 2, sum(sizes), generator=draw)
            parts = [
                stored(k, v, s)
                for k, v, s in zip(keys.split(sizes, 1), values.split(sizes, 1), scales.split(sizes, 2), strict=True)
            ]
            [joined] = BlockStore.joined(parts[0], first, parts[1], then)[0]
            [expected] = stored(keys, values, scales)[0]
            assert torch.equal(joined, expected)


def test_pages_hold_its_blocks():
    store = PagedStore(Shape(2, 3, 64, torch.int8))
    store.reserve(4, 64, 64)
    store.keep(np.array([16, 48]))
    store.view()
    assert store.num_bytes == 4 * 3 * 2 * 2 * 16 * 68


@pytest.mark.parametrize(
    ("engine", "family", "isa", "words"),
    [
        ("hf", "llama", None, "sampled by transformers, .*Set actor_rollout_ref.rollout.kv_cache_dtype=auto"),
        ("native", "gemma", None, "plain dense decoders .*, and GemmaForCausalLM"),
        ("native", "llama", "none", "kv_cache_dtype=int8 needs the compiled decoder, .*kv_cache_dtype=auto"),
    ],
)
def test_a_model_or_processor_that_cannot_is_refused_at_the_start(engine, family, isa, words, make_engine, monkeypatch):
    if isa is not None:
        monkeypatch.setenv("VERL_CPU_ISA", isa)
    with pytest.raises(ConfigError, match=words):
        make_engine(engine, family, kv_cache_dtype="int8")
