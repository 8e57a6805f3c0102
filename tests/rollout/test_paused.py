"""Samples that pause while the weights change, and continue with the keys and values that they had."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.conftest import make_prompts
from verl.config.sections.rollout import KVCacheConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.models.tiny import make_tiny_model
from verl.rollout.native.compiled.library import kernels

LENGTHS, FIRST, LIMIT = [3, 16, 20, 37], 9, 48
COMPILED = pytest.mark.skipif(kernels() is None, reason="the decoding kernels are not compiled for this processor")
FULL = KVCacheConfig(enable_paged_attention=True, max_tokens=200)  # samples are preempted


def paused(make_engine, name, n, between=lambda: None, **settings):
    """The parts of each sample, with `between` between them, and the engine."""
    engine = make_engine(name, max_num_seqs=8, keep_partial_kv_cache=True, **settings)
    engine.trains, engine.resumes_below = True, LIMIT
    prompts = make_prompts(LENGTHS)
    first = engine.generate(prompts, sampling(n, FIRST), step=1)
    between()
    engine.publish(1)
    again = [
        PromptRequest(
            c.ordinal, (*prompts[c.ordinal].token_ids, *c.token_ids), c.sample, FIRST, 1, LIMIT - FIRST, random_step=1
        )
        for c in first
    ]
    return prompts, list(zip(first, engine.generate(again, sampling(n, LIMIT), step=2), strict=True)), engine


def sampling(n, max_tokens):
    return SamplingParams(n=n, max_new_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize(("name", "n"), [("native", 3), ("native", 1), ("device", 3), ("device", 1), ("torch", 3)])
def test_a_part_sees_the_keys_of_older_weights(make_engine, load, request, name, n):
    if name == "torch":
        request.getfixturevalue("torch_computes")
    old, new = (copy.deepcopy(load("llama", "eager")).eval() for _ in range(2))
    module = copy.deepcopy(load("llama"))

    def train():
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for ours, theirs in zip(module.parameters(), new.parameters(), strict=True):
                ours.add_(0.02 * torch.randn(ours.shape, generator=generator))
                theirs.copy_(ours)

    prompts, parts, engine = paused(make_engine, name.replace("torch", "native"), n, train, module=module)
    assert engine.stats()["num_prompt_tokens_computed"] == len(parts) == n * len(prompts)  # the last token of each part
    assert not engine._paused
    for first, second in parts:
        begun = [*prompts[first.ordinal].token_ids, *first.token_ids]
        with torch.no_grad():
            cache = old(torch.tensor([begun[:-1]]), use_cache=True).past_key_values
            logits = new(torch.tensor([[begun[-1], *second.token_ids[:-1]]]), past_key_values=cache).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(second.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(second.log_probs), expected, atol=1e-4, rtol=0, check_dtype=False)


@COMPILED
@pytest.mark.parametrize(("dtype", "cache"), [("float32", None), ("float32", FULL), ("bfloat16", None)])
def test_with_equal_weights_parts_are_the_whole_sample(make_engine, tmp_path, dtype, cache):
    path = make_tiny_model(tmp_path / "model")
    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=getattr(torch, dtype))
    settings = {"module": module, "batch_invariant": "require"}
    unbroken = make_engine("native", max_num_seqs=8, **settings).generate(
        make_prompts(LENGTHS), sampling(3, LIMIT), step=1
    )
    settings |= {} if cache is None else {"kv_cache_config": cache}
    _, parts, engine = paused(make_engine, "native", 3, **settings)
    assert [first.token_ids + second.token_ids for first, second in parts] == [c.token_ids for c in unbroken]
    assert [first.log_probs + second.log_probs for first, second in parts] == [c.log_probs for c in unbroken]
    assert (engine.stats().get("num_preempted", 0) > 0) == (cache is not None)


def test_what_is_forgotten_is_computed_again(make_engine):
    """So are samples that were given up, two steps later."""
    for between, later in ((lambda engine: engine.forget(), 2), (lambda engine: None, 3)):
        engine = make_engine("native", keep_partial_kv_cache=True)
        engine.trains, engine.resumes_below = True, LIMIT
        (done,) = engine.generate(make_prompts([5]), sampling(1, FIRST), step=1)
        assert [saved.num_tokens for saved in engine._paused.values()] == [5 + FIRST - 1]
        between(engine)
        request = PromptRequest(0, (1,) * (5 + FIRST), done.sample, FIRST, 1, 2)
        engine.generate([request], sampling(1, FIRST), step=later)
        assert engine.stats()["num_prompt_tokens_computed"] == 5 + FIRST
