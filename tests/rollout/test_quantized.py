"""A sampler in int8 and fp8: products against integers, forwards against modules that round to the same numbers."""

import contextlib
import copy
import ctypes
import functools
import itertools
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.house.source import PACKAGE
from tests.rollout.conftest import make_prompts
from tests.rollout.simulated import weight_transfer
from tests.rollout.test_cpu_kernels import DTYPES, ODD, SETS, odd_models  # noqa: F401 - a fixture
from verl.config import ModelConfig, RolloutConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.models.load import empty_model
from verl.models.quantized import BLOCK, fp8_blocks, levels, on_grid, outliers
from verl.models.tiny import make_tiny_model
from verl.rollout.hf import eager_view
from verl.rollout.http.server import arguments as server_arguments
from verl.rollout.native.compiled import library
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.recording import obstacle
from verl.rollout.vllm.settings import make_setup
from verl.runtime.rank_workers import _generation_facts

needs_kernels = pytest.mark.skipif(library._library() is None, reason="verl was installed without a C compiler")
SHAPES = [(1, 1), (47, 33), (48, 64), (50, 31), (97, 130), (24, 20000)]  # outputs, inputs


def operands(outputs, inputs, rows, dtype, seed=0):
    """Weights and activations with a row of zeros, a row of equal largest values and outliers."""
    draw = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, inputs, generator=draw), torch.randn(rows, inputs, generator=draw)
    weight[-1], x[-1] = 3.0, -2.0  # all levels at the end: pairs of products would not fit into 16 bits
    weight[0], x[0, 0] = 0.0, 500.0
    return weight.to(dtype), x.to(dtype)


def by_integers(x, weight):
    """The product as exact sums of integers, scaled in the order of the kernels, rounded like `x`."""
    apart = outliers(x)
    (a, a_scale), (b, b_scale) = levels(x.masked_fill(apart, 0.0), "int8"), levels(weight, "int8")
    sums = torch.from_numpy(a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T)
    y = sums.float() * b_scale[:, 0] * a_scale
    for row, floats in enumerate(apart):
        if floats.any():
            products = torch.zeros(len(weight))
            for i in floats.nonzero()[:, 0].tolist():
                products += b[:, i] * x[row, i].float()
            y[row] += products * b_scale[:, 0]
    return y.to(x.dtype).float()


@needs_kernels
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_equal_sums_of_integers(isa, dtype, shape, monkeypatch):
    monkeypatch.setenv("VERL_CPU_ISA", isa)
    kernels = library.kernels()
    for rows in (1, 2, 5, 8, 9, 40):
        weight, x = operands(*shape, rows, dtype)
        packed = kernels.pack(weight, int8=True)
        for threads in (1, 3):
            assert torch.equal(kernels.int8_product(x, packed, len(weight), threads), by_integers(x, weight))


_WITH_DOTS = """
#include <immintrin.h>
#include <stdint.h>
#include "decoder.h"
__attribute__((target("avx2"))) static inline __m256i dot(__m256i sum, __m256i a, __m256i w)
{
    uint8_t x[32]; int8_t y[32]; int32_t z[8];
    _mm256_storeu_si256((__m256i *)x, a), _mm256_storeu_si256((__m256i *)y, w), _mm256_storeu_si256((__m256i *)z, sum);
    for (int i = 0; i < 32; i++)
        z[i / 4] += x[i] * y[i];
    return _mm256_loadu_si256((__m256i *)z);
}
#define _mm256_dpbusd_avx_epi32 dot
#define ISA dots
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define HAS_DOT 1
#include "int8_kernels.h"
void product(const char *x, const char *w, char *packed, char *levels, char *apart, float *scales, float *out, int64_t rows,
             int64_t outputs, int64_t inputs)
{
    const int64_t panels = (outputs + 23) / 24;
    pack_dots(0, packed, w, outputs, inputs, 0, panels);
    for (int64_t r = 0; r < rows; r++)
        quantize_dots(levels + r * inputs * 4, scales + r, apart + r * apart_bytes(inputs), x + r * inputs * 4, inputs, 0);
    struct gemm g = {.a = levels, .a_stride = inputs * 4, .a_scale = scales, .b = packed, .out = out,
                     .apart = apart, .apart_stride = apart_bytes(inputs),
                     .out_stride = 24 * panels, .rows = rows, .steps = (inputs + 3) / 4, .panels = panels};
    gemm_dots(&g, 0, panels * ((rows + 3) / 4));
}
"""


@needs_kernels
def test_kernels_of_byte_products_give_the_same_bits(tmp_path):
    """The code for processors with vpdpbusd, with that instruction as a function: its operands and what it takes off again."""
    (tmp_path / "dots.c").write_text(_WITH_DOTS)
    flags = ["-O1", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC", f"-I{PACKAGE / 'csrc'}", "-lm"]
    command = ["gcc", str(tmp_path / "dots.c"), "-o", str(tmp_path / "dots.so"), *flags]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"gcc for this processor is needed: {built.stderr[-200:]}")
    compiled = ctypes.CDLL(str(tmp_path / "dots.so"))
    compiled.product.argtypes = [*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 3]
    for outputs, inputs in SHAPES:
        for rows in (1, 2, 3, 9):
            weight, x = operands(outputs, inputs, rows, torch.float32)
            padded = -(-outputs // 24) * 24
            x = torch.cat([x, torch.zeros(8, inputs)])  # a tile reads further rows
            buffers = [
                torch.zeros(padded * (inputs + 12), dtype=torch.uint8),
                torch.zeros(len(x) * inputs * 4 + 4, dtype=torch.uint8),
                torch.zeros(len(x) * (16 + inputs // 4), dtype=torch.uint8),
            ]
            out, scales = torch.empty(rows, padded), torch.empty(len(x))
            compiled.product(*(t.data_ptr() for t in (x, weight, *buffers, scales, out)), rows, outputs, inputs)
            assert torch.equal(out[:, :outputs], by_integers(x[:rows], weight))


def test_levels_and_blocks_by_hand():
    level, scale = levels(torch.tensor([[127.0, -63.4, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0]]), "int8")
    assert level.tolist() == [[127.0, -63.0, 0.0, 2.0], [0.0] * 4]
    assert scale.tolist() == [[1.0], [0.0]]
    weight = torch.zeros(BLOCK + 1, BLOCK + 1)
    weight[0, 0], weight[0, 1], weight[-1, -1] = 448.0, 17.0, -2.0
    level, scale = fp8_blocks(weight)
    assert (level.dtype, level.shape, scale.shape) == (torch.float8_e4m3fn, weight.shape, (2, 2))
    assert (scale[0, 0], level[0, 1], level[-1, -1]) == (1.0, 16.0, -448.0)  # between 16 and 18, a tie, to even
    assert on_grid(weight, "fp8", weights=True)[-1, -1] == pytest.approx(-2.0)
    assert on_grid(torch.tensor([[float("nan")] + [1.0] * 3]), "int8").isnan().all()


def on_rows(x, grid, weights=False):
    """The values of `x` with a scale for each row."""
    level, scale = levels(x, grid)
    return level.float() * scale


def rounding(module, grid, rounded=on_grid, *, head=False):
    """A copy of `module` whose layers, and `head` if it is chosen, round weights and inputs to `grid`."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and (head or layer is not module.lm_head):
            layer.weight = nn.Parameter(rounded(layer.weight.data, grid, weights=True))  # no longer the embedding's
            layer.register_forward_pre_hook(lambda layer, inputs: rounded(inputs[0], grid))
        elif isinstance(getattr(layer, "gate_up_proj", None), nn.Parameter):
            layer.forward = functools.partial(experts_of_rows, layer, lambda x, **more: rounded(x, grid, **more))
    return module


def experts_of_rows(layer, rounded, x, chosen, shares):
    """The output of experts, each product of one token and one expert."""
    out = torch.zeros_like(x)
    for token, slot in np.ndindex(*chosen.shape):
        gate_up, down = layer.gate_up_proj[chosen[token, slot]], layer.down_proj[chosen[token, slot]]
        gate, up = (rounded(x[token : token + 1]) @ rounded(half, weights=True).T for half in gate_up.chunk(2))
        out[token] += shares[token, slot] * (rounded(F.silu(gate) * up) @ rounded(down, weights=True).T)[0]
    return out


def gap(completions, prompts, module):
    """|log-prob of the engine - log-prob of the module| of all sampled tokens."""
    differences = []
    for done in completions:
        prompt = prompts[done.ordinal].token_ids
        with torch.no_grad():
            logits = eager_view(module)(input_ids=torch.tensor([[*prompt, *done.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        at = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        differences.append(np.abs(at.numpy() - np.array(done.log_probs)))
    return np.concatenate(differences)


@needs_kernels
@pytest.mark.parametrize(
    ("grid", "name"), [*itertools.product(["int8", "fp8"], ["llama", "qwen2", "qwen3", *ODD]), ("fp8", "qwen3_moe")]
)
def test_log_probs_equal_modules_that_round_alike(grid, name, load, odd_models, make_engine):  # noqa: F811
    module = odd_models[name] if name in ODD else load(name)
    engine = make_engine("native", module=module, max_num_seqs=5, max_num_batched_tokens=24, quantization=grid)
    assert isinstance(engine.dense(), CpuForward) == (grid == "int8")
    prompts = make_prompts([3, 20, 7, 33])
    done = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=16, ignore_eos=True), step=1)
    alike, exact = gap(done, prompts, rounding(module, grid, head=grid == "int8")), gap(done, prompts, module)
    # a value at the border of two levels may go either way, after sums in another order: in a prompt, for all later tokens
    assert np.quantile(alike, 0.6) < 1e-5
    assert alike.mean() < 0.2 * exact.mean()


@needs_kernels
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_samples_do_not_depend_on_their_batch(isa, dtype, load, make_engine, monkeypatch):
    monkeypatch.setenv("VERL_CPU_ISA", isa)
    module, params = copy.deepcopy(load("qwen3")).to(dtype), SamplingParams(n=2, max_new_tokens=12, ignore_eos=True)
    prompts, runs = make_prompts([3 + 5 * (i % 7) for i in range(12)]), []
    for slots, tokens in ((32, 8192), (7, 19), (1, 5)):
        engine = make_engine(
            "native", module=module, max_num_seqs=slots, max_num_batched_tokens=tokens, quantization="int8",
            batch_invariant="require",
        )  # fmt: skip
        runs.append([(c.token_ids, c.log_probs) for c in engine.generate(prompts, params, step=0)])
    assert runs[0] == runs[1] == runs[2]
    assert "trainer" not in engine.invariance().why
    assert "int8" in obstacle(module, replace(engine.config, reuse_activations_gb=1.0))
    assert _generation_facts(engine)["sampler"] == "int8 layers"


@needs_kernels
def test_weights_that_changed_are_quantized_again_and_nan_shows(load, make_engine):
    module = copy.deepcopy(load("llama"))
    engine = make_engine("native", module=module, quantization="int8")
    prompts, params = make_prompts([9]), SamplingParams(max_new_tokens=8, ignore_eos=True)
    before = engine.generate(prompts, params, step=0)
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    engine.publish(1)
    assert before[0].log_probs != engine.generate(prompts, params, step=0)[0].log_probs
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight[3, 1] = float("nan")
    engine.publish(2)
    with pytest.raises(Exception, match=r"NaN|not finite|nan"):
        engine.generate(prompts, params, step=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_layers_of_a_gpu_multiply_rows_in_fp8(name, load, make_engine, monkeypatch):
    """By torch's product, here on a CPU: four a layer in each forward, by the present weights, and none for the head. In
    float32, since values at the border of two levels would go either way after each rounding to bfloat16."""
    module, product, shapes = copy.deepcopy(load(name)), torch._scaled_mm, []

    def scaled_mm(a, b, **more):
        assert (a.dtype, b.dtype, more["out_dtype"]) == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32)
        assert a.is_contiguous(), "rows of tokens"
        assert b.t().is_contiguous(), "columns of weights"
        assert all(more[f"scale_{x}"].is_contiguous() and more[f"scale_{x}"].dtype == torch.float32 for x in "ab")
        shapes.append(tuple(b.shape))
        return product(a, b, **more)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    engine = make_engine("device", module=module, max_num_seqs=5, max_num_batched_tokens=24, quantization="fp8")
    prompts, params = make_prompts([3, 20, 7, 33]), SamplingParams(n=2, max_new_tokens=16, ignore_eos=True)
    for version in (1, 2):
        done = engine.generate(prompts, params, step=1)
        alike, exact = gap(done, prompts, rounding(module, "fp8", on_rows)), gap(done, prompts, module)
        assert np.quantile(alike, 0.2) < 1e-5
        assert alike.mean() < 0.1 * exact.mean()
        assert engine.stats()["weight_copy_bytes"] > sum(map(math.prod, shapes[: 4 * len(module.model.layers)]))
        with torch.no_grad():
            module.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
        engine.publish(version)
    assert shapes[:4] == [(64, 128), (64, 64), (64, 256), (128, 64)]
    assert shapes == shapes[:4] * (len(shapes) // 4)


@pytest.mark.parametrize(
    ("change", "capability", "words"),
    [
        ({}, (9, 0), ""),
        ({}, (8, 0), "needs a GPU with fp8 instructions .*, and cuda:0 has 8.0"),
        ({"dtype": torch.float32}, (9, 0), "rounded to bfloat16 on a GPU, and the model is in torch.float32"),
        ({"intermediate_size": 130}, (9, 0), "multiples of 16 on a GPU, and one has 130"),
        ({"kv_cache_dtype": "int8"}, (9, 0), "computes in int8 on a CPU, and the model is on cuda"),
    ],
)
def test_gpus_and_models_that_do_not_multiply_in_fp8_are_refused(change, capability, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sizes = {"intermediate_size": 128, **change}
    dtype, cache = sizes.pop("dtype", torch.bfloat16), sizes.pop("kv_cache_dtype", "auto")
    module = empty_model(ModelConfig(path=str(make_tiny_model(tmp_path, **sizes))), "lm", dtype, False)
    refused = pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext()
    with refused:
        config = RolloutConfig(quantization="fp8", kv_cache_dtype=cache)
        NativeRollout.require_model(module, config, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("engine", "family", "isa", "grid", "words"),
    [
        ("hf", "llama", None, "fp8", "sampled by transformers, .*Set actor_rollout_ref.rollout.quantization=null"),
        ("native", "gemma", None, "int8", "plain dense decoders .*, and GemmaForCausalLM is none"),
        ("native", "gemma", None, "fp8", "plain decoders and mixtures of experts .*, and GemmaForCausalLM is none"),
        (
            "native",
            "llama",
            "none",
            "int8",
            "int8 needs the compiled decoder, .*Set actor_rollout_ref.rollout.quantization=null",
        ),
    ],
)
def test_a_model_or_processor_that_cannot_is_refused_at_the_start(
    engine, family, isa, grid, words, make_engine, monkeypatch
):
    if isa is not None:
        monkeypatch.setenv("VERL_CPU_ISA", isa)
    with pytest.raises(ConfigError, match=words):
        make_engine(engine, family, quantization=grid)


@pytest.mark.parametrize(
    ("engine", "config", "expected"),
    [
        ("vllm", {"quantization": "fp8"}, {"quantization": "fp8_per_block"}),
        ("vllm", {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        ("vllm", {}, {}),
        ("sglang", {"quantization": "fp8"}, {"--quantization": "fp8"}),
        ("sglang", {"kv_cache_dtype": "fp8"}, {"--kv-cache-dtype": "fp8_e4m3"}),
        ("sglang", {}, {}),
    ],
)
def test_fp8_is_an_argument_of_engines_on_a_gpu_and_refused_on_a_cpu(engine, config, expected, load):
    def arguments(device):
        settings, transfer = RolloutConfig(name=engine, **config), replace(weight_transfer("a/model"), device=device)
        if engine == "sglang":
            words = server_arguments(settings, transfer, load("llama"), 8123)
            return dict(itertools.pairwise(words))
        return make_setup(settings, transfer, load("llama"), eos_token_ids=(1,), vocab_size=264).llm

    engine_arguments = arguments(torch.device("cuda", 0))
    chosen = {
        name: value
        for name, value in engine_arguments.items()
        if name.lstrip("-").replace("-", "_") in ("quantization", "kv_cache_dtype")
    }
    assert chosen == expected
    if expected:
        with pytest.raises(ConfigError, match=f"needs a GPU with actor_rollout_ref.rollout.name={engine}"):
            arguments(torch.device("cpu"))
