"""The compiled kernels, each instruction set that this processor has, against torch in float64 and against themselves."""

import copy
import itertools
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.house.source import PACKAGE
from tests.rollout.conftest import make_prompts
from tests.sanitizer import run_checked
from tests.slow import each_value, slow
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ConfigError, NumericsError
from verl.models.tiny import make_tiny_model
from verl.parallel.compiled import INSTRUCTION_SETS, open_library
from verl.rollout.native.compiled import library
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.torch.forward import DenseForward
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms

pytestmark = pytest.mark.skipif(library._library() is None, reason="verl was installed without a C compiler")

SETS = [name for name in INSTRUCTION_SETS if library._library() and library._kernels(name)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=SETS)
def kernels(request, monkeypatch):
    monkeypatch.setenv("VERL_CPU_ISA", request.param)
    monkeypatch.setenv("VERL_CPU_BF16", "native")  # pairs if the set has them, even if they are slow
    return library.kernels()


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- which kernels


def test_the_fastest_set_is_taken_unless_one_is_named(monkeypatch):
    monkeypatch.delenv("VERL_CPU_ISA", raising=False)
    is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    assert library.kernels().name == next(
        name for name in SETS if is_amd or name != "avx512_bf16" or "avx512_amx" in SETS
    )
    for name in SETS:
        monkeypatch.setenv("VERL_CPU_ISA", name)
        assert library.kernels().name == name
    monkeypatch.setenv("VERL_CPU_ISA", "none")
    assert library.kernels() is None
    monkeypatch.setenv("VERL_CPU_ISA", "avx10")
    with pytest.raises(ConfigError, match="VERL_CPU_ISA=avx10"):
        library.kernels()


def test_without_the_compiled_file_torch_computes(monkeypatch, load, make_engine):
    monkeypatch.setattr(library, "_library", lambda: None)
    library._kernels.cache_clear()
    try:
        monkeypatch.delenv("VERL_CPU_ISA", raising=False)
        assert library.kernels() is None
        assert type(DenseForward.of(load("llama"), prepack=True)) is DenseForward
        engine = make_engine("native", "llama")
        assert len(engine.generate(make_prompts([5]), SamplingParams(max_new_tokens=3), step=0)) == 1
    finally:
        library._kernels.cache_clear()


def test_a_library_of_another_revision_is_not_used(caplog):
    stem = Path(library.__file__).with_name("_decoder")
    assert open_library(stem, library.REVISION) is not None
    assert open_library(stem, library.REVISION + 1) is None
    assert "Install verl again" in caplog.text


def test_float64_and_weights_that_must_not_be_copied_are_left_to_torch(load):
    assert type(DenseForward.of(copy.deepcopy(load("llama")).double(), prepack=True)) is DenseForward
    assert type(DenseForward.of(load("llama"), prepack=False)) is DenseForward


def test_no_second_openmp_runtime_is_loaded(kernels):
    """The kernels have separate threads, unknown to torch's runtime."""
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    assert any("_decoder" in name for name in libraries)
    assert len({name for name in libraries if re.match(r"lib(g|i)?omp", Path(name).name)}) <= 1


# -- matmuls

SHAPES = [(1, 1), (47, 33), (48, 64), (50, 31), (97, 130), (200, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_products(kernels, dtype, shape):
    outputs, inputs = shape
    weight = normal(outputs, inputs).to(dtype)
    packed = kernels.pack(weight)
    for rows in (1, 2, 5, 8, 9, 70):
        x = normal(rows, inputs, seed=rows).to(dtype)
        exact = x.double() @ weight.double().t()
        y = kernels.product(x, packed, outputs, threads=3)
        bound = 1e-6 * inputs**0.5 * 4 if dtype == torch.float32 else 2.0**-8
        assert torch.allclose(y.double(), exact, rtol=bound, atol=bound)
        if dtype == torch.bfloat16:
            assert torch.equal(y, y.bfloat16().float())


def test_a_product_does_not_depend_on_other_rows(kernels, dtype):
    """All row counts that fill up to eight register tiles, and more; every place of a row."""
    weight = normal(150, 77).to(dtype)
    packed = kernels.pack(weight)
    x = normal(130, 77, seed=1).to(dtype)
    alone = torch.cat([kernels.product(x[i : i + 1], packed, 150, threads=1) for i in range(130)])
    for rows in range(1, 131):
        assert torch.equal(kernels.product(x[:rows], packed, 150, threads=1 + rows % 3), alone[:rows])
    for shift in range(1, 17):
        assert torch.equal(kernels.product(x.roll(shift, 0), packed, 150, threads=2), alone.roll(shift, 0))


# -- whole forwards

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
ODD = {  # (query heads, key heads, head_dim, hidden size, inner size): none fills a vector or a panel
    "head_8": (4, 4, 8, 36, 50),
    "head_20": (6, 2, 20, 54, 33),
    "head_80": (7, 1, 80, 70, 47),
    "head_128": (12, 1, 128, 72, 96),
}
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size")


@pytest.fixture(scope="module")
def odd_models(tmp_path_factory):
    models, draw = {}, torch.Generator().manual_seed(0)
    for name, sizes in ODD.items():
        settings = {**dict(zip(_SIZES, sizes, strict=True)), "attention_bias": True, "mlp_bias": True}
        folder = make_tiny_model(tmp_path_factory.mktemp(name), "llama", **settings)
        models[name] = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="verl", dtype=torch.float32)
        with torch.no_grad():
            for parameter in models[name].parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return models


def generate(engine, lengths=(3, 20, 7, 33), expected=0, **params):
    settings = {"n": 3, "max_new_tokens": 40, "temperature": 0, "ignore_eos": True, **params}
    prompts = [replace(p, expected_tokens=p.ordinal * expected % 5) for p in make_prompts(list(lengths))]
    return engine.generate(prompts, SamplingParams(**settings), step=2)


def by_torch(monkeypatch, engine, **params):
    with monkeypatch.context() as patch:
        patch.setenv("VERL_CPU_ISA", "none")
        engine.publish(engine.weight_version)
        completions = generate(engine, **params)
    engine.publish(engine.weight_version)
    return completions


def assert_same(ours, theirs, atol):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert np.allclose(a.log_probs, b.log_probs, atol=atol)


@pytest.mark.parametrize(("kernels", "family"), each_value(SETS, FAMILIES), indirect=["kernels"])
def test_greedy_tokens_match_torch(kernels, family, make_engine, monkeypatch):
    """Over prompts in chunks, rows that end and refill, shared prompts and prompts in the rows' own slots."""
    for n in (1, 3):
        engine = make_engine("native", family, max_num_seqs=5, max_num_batched_tokens=24)
        assert type(engine.dense()) is CpuForward
        assert_same(generate(engine, n=n), by_torch(monkeypatch, engine, n=n), 1e-5)


@pytest.mark.parametrize(("kernels", "name"), each_value(SETS, list(ODD)), indirect=["kernels"])
def test_odd_sizes_equal_torch(kernels, name, odd_models, make_engine, monkeypatch):
    engine = make_engine("native", module=odd_models[name], max_num_seqs=4)
    assert type(engine.dense()) is CpuForward
    assert_same(generate(engine, n=2), by_torch(monkeypatch, engine, n=2), 1e-5)


@pytest.mark.parametrize(("kernels", "name"), each_value(SETS, [*FAMILIES, *ODD]), indirect=["kernels"])
def test_bfloat16_is_as_near_to_float64_as_torch(kernels, name, load, odd_models, make_engine, monkeypatch):
    """The first token's log-probs. Both round at the same places, so neither may be nearer by much."""
    source = odd_models[name] if name in ODD else load(name)
    module = copy.deepcopy(source).bfloat16()
    exact_engine = make_engine("native", module=copy.deepcopy(module).double())
    engine = make_engine("native", module=module)
    lengths = range(5, 37)
    one_token = {"lengths": lengths, "n": 1, "max_new_tokens": 1}
    exact = generate(exact_engine, **one_token)
    ours = generate(engine, **one_token)
    theirs = by_torch(monkeypatch, engine, **one_token)

    def error(completions):
        pairs = [
            (a.log_probs[0], b.log_probs[0])
            for a, b in zip(completions, exact, strict=True)
            if a.token_ids == b.token_ids
        ]
        assert len(pairs) > 16
        return np.sqrt(np.mean([(a - b) ** 2 for a, b in pairs]))

    assert error(ours) < 1.5 * error(theirs)


@pytest.mark.parametrize(
    ("kernels", "dtype", "family"),
    [slow(*case, when=number % 5 > 0) for number, case in enumerate(itertools.product(SETS, DTYPES, FAMILIES))],
    indirect=["kernels", "dtype"],
)
def test_samples_do_not_depend_on_slots_neighbours_order_or_pieces(kernels, dtype, family, load, make_engine):
    module = copy.deepcopy(load(family)).to(dtype)
    lengths = [3 + 5 * (i % 7) for i in range(16)]
    settings = {"n": 2, "max_new_tokens": 12, "temperature": 0.8, "lengths": lengths}
    runs = [
        generate(make_engine("native", module=module, max_num_seqs=slots, max_num_batched_tokens=tokens), **sampling)
        for slots, tokens, sampling in ((32, 8192, settings), (7, 19, settings), (1, 5, {**settings, "expected": 3}))
    ]
    assert [c.token_ids for c in runs[0]] == [c.token_ids for c in runs[1]] == [c.token_ids for c in runs[2]]
    assert [c.log_probs for c in runs[0]] == [c.log_probs for c in runs[1]] == [c.log_probs for c in runs[2]]
    assert "compiled kernels" in make_engine("native", module=module).invariance().why


def test_a_response_that_is_read_again_as_a_prompt_goes_on_with_the_same_bits(kernels, dtype, load, make_engine):
    """One prompt for several samples, or a prompt in its row's own slot, or tokens sampled before: a position's bits are a
    function of the tokens up to it."""
    engine = make_engine("native", module=copy.deepcopy(load("qwen3")).to(dtype))
    prompt = make_prompts([21])[0]
    full = engine.generate([prompt], SamplingParams(n=4, max_new_tokens=30, temperature=0, ignore_eos=True), step=0)[0]
    half = PromptRequest(0, (*prompt.token_ids, *full.token_ids[:15]))
    rest = engine.generate([half], SamplingParams(n=1, max_new_tokens=15, temperature=0, ignore_eos=True), step=0)[0]
    assert rest.token_ids == full.token_ids[15:]
    assert rest.log_probs == full.log_probs[15:]


def test_threads_do_not_change_bits(kernels, dtype, load, make_engine):
    engine = make_engine("native", module=copy.deepcopy(load("llama")).to(dtype))
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append([c.log_probs for c in generate(engine, max_new_tokens=6)])
    finally:
        torch.set_num_threads(before)
    assert runs[0] == runs[1] == runs[2]


def test_a_fork_has_its_own_threads(kernels, dtype):
    """The threads of a process that has multiplied are not in its child; it starts its own."""
    weight, x = normal(100, 64).to(dtype), normal(20, 64, seed=1).to(dtype)
    packed = kernels.pack(weight)
    expected = kernels.product(x, packed, 100, threads=3)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe()

    def multiply():
        torch.set_num_threads(1)  # torch's own threads do not survive a fork
        writer.send(torch.equal(kernels.product(x, packed, 100, threads=3), expected))

    child = context.Process(target=multiply, daemon=True)
    child.start()
    assert reader.poll(60)
    assert reader.recv()
    child.join(120)


def test_a_weight_that_is_nan_shows(kernels, dtype, load, make_engine):
    module = copy.deepcopy(load("llama")).to(dtype)
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight[3, 5] = float("nan")
    for temperature in (0, 1):
        with pytest.raises(NumericsError):
            generate(make_engine("native", module=module), temperature=temperature)


# -- tokens


@pytest.mark.parametrize("vocab", [1, 5, 256, 300, 5000])
def test_draws_equal_torch(kernels, vocab, monkeypatch):
    logits = normal(200, vocab) * 3
    u = uniforms(1, 2, torch.arange(200), torch.zeros(200, dtype=torch.int64), torch.zeros(200, dtype=torch.int64))
    for temperature in (0.0, 0.7, 1.0):
        params = SamplingParams(temperature=temperature)
        tokens, log_probs = sample(logits, params, u)
        with monkeypatch.context() as patch:
            patch.setenv("VERL_CPU_ISA", "none")
            exact_tokens, exact = sample(logits.double(), params, u)
        assert (tokens == exact_tokens).float().mean() >= 0.99  # sums in other orders: u may fall between two tokens
        same = tokens == exact_tokens
        assert torch.allclose(log_probs[same].double(), exact[same], atol=2e-6)


def test_draws_follow_the_distribution_and_never_take_an_impossible_token(kernels):
    logits = torch.tensor([-float("inf"), 0.0, 1.0, -float("inf"), 2.0, -float("inf")]).repeat(20000, 1)
    u = torch.linspace(0, 1, 20002, dtype=torch.float64)[1:-1]
    tokens, _ = kernels.draw(logits, 1.0, u)
    share = torch.bincount(tokens, minlength=6).double() / 20000
    assert torch.allclose(share, torch.softmax(logits[0].double(), 0), atol=1e-4)
    assert (tokens.diff() >= 0).all()
    ends = torch.tensor([1e-300, 1 - 2.0**-53], dtype=torch.float64)
    assert kernels.draw(logits[:2], 1.0, ends)[0].tolist() == [1, 4]


def test_greedy_takes_the_first_of_equals(kernels):
    logits = torch.zeros(3, 700)
    logits[1, 300] = logits[1, 600] = 2.0
    logits[2, 699] = 1.0
    assert kernels.draw(logits, 0.0, None)[0].tolist() == [0, 300, 699]


# -- memory

_RUN_CHECKED = """
import ctypes, sys, pytest
from verl.rollout.native.compiled import library
assert hasattr(ctypes.CDLL(None), "__asan_init")
checked = library.declare(ctypes.CDLL(sys.argv[1]))
library._library = lambda: checked
sys.exit(pytest.main(["-v", "-p", "no:cacheprovider", "-k", sys.argv[2], sys.argv[3]]))
"""


@pytest.mark.slow
def test_under_the_address_sanitizer(tmp_path):
    """Every kernel at odd sizes in a build that checks each access, with untouchable gaps between the buffers of a step."""
    selection = "products or odd or greedy or slots or draws"
    output = run_checked(PACKAGE / "csrc/decoder.c", tmp_path, _RUN_CHECKED, selection, __file__)
    assert output.count("PASSED") + output.count(".") > 50
