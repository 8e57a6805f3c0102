"""The fused forward of dense decoders against the modules' forward, and the copies of weights that it may hold."""

import copy
import gc
import weakref

import pytest
import torch

from tests.rollout.conftest import make_prompts
from verl.data_proto.samples import SamplingParams
from verl.models.decoder.projection import Projection
from verl.models.decoder.weights import DenseDecoder, why_modules
from verl.models.ops.linear import Matmul
from verl.models.tiny import make_tiny_model
from verl.rollout.native.torch.forward import DenseForward, product

DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "deepseek_v3"]
LENGTHS = [3, 20, 7, 33]


def generate(engine, **params):
    settings = {"n": 3, "max_new_tokens": 40, "temperature": 0.8, "ignore_eos": True, **params}
    return engine.generate(make_prompts(LENGTHS), SamplingParams(**settings), step=2)


def same_samples(a, b, atol):
    for x, y in zip(a, b, strict=True):
        assert x.token_ids == y.token_ids
        assert torch.allclose(torch.tensor(x.log_probs), torch.tensor(y.log_probs), atol=atol)


def without_dense(monkeypatch, engine, **params):
    with monkeypatch.context() as patch:
        patch.setattr(DenseForward, "of", lambda module, **settings: None)
        return generate(engine, **params)


def test_a_hook_or_another_activation_is_left_to_the_module(load):
    module = copy.deepcopy(load("llama"))
    assert DenseForward.of(module, prepack=False) is not None
    handle = module.lm_head.register_forward_hook(lambda *args: None)
    assert DenseForward.of(module, prepack=False) is None
    handle.remove()
    handle = module.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert DenseForward.of(module, prepack=False) is None
    assert why_modules(module) == "layers.0.mlp has a hook or another forward"
    handle.remove()
    assert not why_modules(module)
    module.config.hidden_act = "relu"
    assert DenseForward.of(module, prepack=False) is None
    assert why_modules(module) == "its activation is relu"


@pytest.mark.parametrize("family", DENSE)
def test_samples_match_the_module(family, load, make_engine, monkeypatch, torch_computes):
    """Over prompts in chunks, rows that end and refill, and lengths past several capacities."""
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 24}
    assert all(DenseForward.of(load(family), prepack=prepack) for prepack in (True, False))
    for n in (1, 3):
        engines = [make_engine("native", family, prepack_weights=prepack, **sizes) for prepack in (True, False)]
        samples = [generate(engine, n=n) for engine in engines]
        expected = without_dense(monkeypatch, engines[-1], n=n)
        for actual in samples:
            same_samples(actual, expected, 1e-5)


def test_biases_and_an_untied_head(tmp_path, make_engine, monkeypatch, torch_computes):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, "llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="verl", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    engine = make_engine("native", module=module)
    same_samples(generate(engine), without_dense(monkeypatch, engine), 1e-5)


@pytest.mark.parametrize("family", DENSE)
def test_float64_modules(family, load, make_engine, monkeypatch):
    engine = make_engine("native", module=copy.deepcopy(load(family)).double())
    same_samples(generate(engine), without_dense(monkeypatch, engine), 1e-7)
    assert engine.stats()["weight_copy_bytes"] == 0


@pytest.mark.parametrize("family", DENSE)
def test_bfloat16_rounds_where_the_module_does(family, bf16_path, load, make_engine, monkeypatch, torch_computes):
    """Greedy, so that an exchange of two nearly equal tokens shows as a difference of log-probs, not of everything."""
    engine = make_engine("native", module=copy.deepcopy(load(family)).bfloat16())
    ours = generate(engine, n=1, temperature=0, max_new_tokens=1)
    theirs = without_dense(monkeypatch, engine, n=1, temperature=0, max_new_tokens=1)
    for a, b in zip(ours, theirs, strict=True):
        assert abs(a.log_probs[0] - b.log_probs[0]) < 0.03
    assert (engine.stats()["weight_copy_bytes"] > 0) == (bf16_path == "widened")


def test_the_copy_stays_until_weights_change_or_memory_is_asked_for(load, make_engine):
    module = copy.deepcopy(load("llama"))
    engine = make_engine("native", module=module)
    generate(engine)
    first = engine.dense()
    generate(engine)
    assert engine.dense() is first
    assert engine.stats()["weight_copy_bytes"] == first.num_copied_bytes > 0
    engine.publish(1)
    second = engine.dense()
    assert second is not first
    engine.release()
    assert engine.dense() is not second


def test_a_copy_of_old_weights_is_freed_at_once(load, make_engine):
    """Not by the next garbage collection: until then every step would add a copy of the weights."""
    module = copy.deepcopy(load("llama"))
    engine = make_engine("native", module=module)
    gc.collect()
    gc.disable()
    try:
        generate(engine)
        old = weakref.ref(engine.dense())
        with torch.no_grad():
            module.lm_head.weight.add_(1.0)
        engine.dense()
        assert old() is None
    finally:
        gc.enable()


def test_weights_changed_without_a_word_are_used(load, make_engine):
    module = copy.deepcopy(load("llama"))
    engine = make_engine("native", module=module)
    before = generate(engine)
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    after = generate(engine)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    same_samples(after, generate(make_engine("native", module=module)), 0.0)


def test_without_prepacking_nothing_is_copied(load, make_engine):
    module = copy.deepcopy(load("llama"))
    engine = make_engine("native", module=module, prepack_weights=False)
    generate(engine)
    assert engine.stats()["weight_copy_bytes"] == 0
    decoder = DenseDecoder.of(module)
    first = decoder.layers[0].qkv
    _, multiply = engine.dense()._products[id(first)]
    assert multiply.keywords["weight"].data_ptr() == first.weight.data_ptr()


def projection(outputs, inputs, bias, dtype=torch.float32):
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    return Projection(linear.weight.detach(), linear.bias.detach() if bias else None, (linear,))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_equal_the_linear(bias, dtype):
    weights = projection(50, 30, bias, dtype)
    for prepack in (True, False):
        multiply = product(weights, prepack=prepack)
        for rows in (1, 2, 7, 130):
            x = torch.randn(rows, 30, dtype=dtype)
            y = multiply(x)
            assert y.dtype == dtype
            assert torch.allclose(y, weights.parts[0](x).detach(), atol=1e-5 if dtype != torch.bfloat16 else 0.02)


def test_a_widened_copy_multiplies_as_the_weights_do(monkeypatch):
    narrow = projection(50, 30, True, torch.bfloat16)
    monkeypatch.setenv("VERL_CPU_BF16", "widened")
    multiply = product(narrow, prepack=True)
    x = torch.randn(5, 30).bfloat16()
    assert multiply.num_bytes == 4 * 50 * 30
    expected = Matmul(torch.bfloat16, x.device).linear(x, narrow.weight, narrow.bias)
    assert torch.equal(multiply(x), expected)
