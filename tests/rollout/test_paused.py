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


@pytest.mark.parametrize(
    ("name", "n"),
    [("native", 3), ("native", 1), ("device", 3), ("device", 1), ("torch", 3), ("states", 3), ("states", 1)],
)
def test_a_part_sees_the_keys_of_older_weights(make_engine, load, request, name, n):
    """Of "states", in linear attention too."""
    if name == "torch":
        request.getfixturevalue("torch_computes")
    family = "qwen3_5_text" if name == "states" else "llama"
    old, new = (copy.deepcopy(load(family, "eager")).eval() for _ in range(2))
    module = copy.deepcopy(load(family))

    def train():
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for ours, theirs in zip(module.parameters(), new.parameters(), strict=True):
                ours.add_(0.02 * torch.randn(ours.shape, generator=generator))
                theirs.copy_(ours)

    engine_name = "device" if name == "device" else "native"
    prompts, parts, engine = paused(make_engine, engine_name, n, train, module=module)
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


STOPS = tuple(range(12))  # lengths of 1 to LIMIT tokens


def in_flight(make_engine, name, between, keeps="kept", **settings):
    """The parts of each sample of four prompts, which are due one after the other; `between` follows each pause."""
    engine = make_engine(name, max_num_seqs=5, in_flight_updates=True, in_flight_keys=keeps, **settings)
    engine.trains, engine.resumes_below = True, LIMIT
    params, prompts = SamplingParams(n=3, max_new_tokens=LIMIT, stop_token_ids=STOPS), make_prompts(LENGTHS)
    parts, requests, counts = {(p.ordinal, i): [] for p in prompts for i in range(3)}, prompts, []
    for step, due in enumerate(reversed(prompts), 1):  # the longest begin first
        engine.due = frozenset((due.ordinal, i) for i in range(3))
        for done in engine.generate(requests, params, step=step) if requests else ():
            parts[done.key].append(done)
        between(step)
        engine.publish(step)
        counts.append(engine.stats()["num_prompt_tokens_computed"])
        drawn = {key: [t for part in sequence for t in part.token_ids] for key, sequence in parts.items()}
        unfinished = [
            key for key, sequence in parts.items() if sequence[-1].finish_reason == "length" and len(drawn[key]) < LIMIT
        ]
        assert all(key[0] < due.ordinal for key in unfinished)
        requests = [
            PromptRequest(
                ordinal, (*prompts[ordinal].token_ids, *drawn[ordinal, i]), i, len(drawn[ordinal, i]), 1, random_step=1,
                max_new_tokens=LIMIT - len(drawn[ordinal, i]),
            )
            for ordinal, i in unfinished
        ]  # fmt: skip
    assert not requests
    assert max(map(len, parts.values())) >= 2
    return prompts, parts, counts


@COMPILED
@pytest.mark.parametrize("keeps", ["kept", "computed_again"])
@pytest.mark.parametrize(("dtype", "cache"), [("float32", None), ("float32", FULL), ("bfloat16", None)])
def test_samples_that_pause_in_flight_are_the_whole_samples(make_engine, tmp_path, dtype, cache, keeps):
    path = make_tiny_model(tmp_path / "model")
    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=getattr(torch, dtype))
    settings = {"module": module, "batch_invariant": "require"}
    params = SamplingParams(n=3, max_new_tokens=LIMIT, stop_token_ids=STOPS)
    unbroken = make_engine("native", **settings).generate(make_prompts(LENGTHS), params, step=1)
    settings |= {} if cache is None else {"kv_cache_config": cache}
    _, parts, _ = in_flight(make_engine, "native", lambda step: None, keeps, **settings)
    for name in ("token_ids", "log_probs"):
        expected = {done.key: getattr(done, name) for done in unbroken}
        assert {
            key: [v for part in sequence for v in getattr(part, name)] for key, sequence in parts.items()
        } == expected


@pytest.mark.parametrize("name", ["native", "device"])
def test_weights_enter_between_two_decode_steps(make_engine, load, name):
    """Each part is of the weights of its version, over the keys of the versions before."""
    module, models = copy.deepcopy(load("llama")), [copy.deepcopy(load("llama", "eager")).eval()]

    def train(step):
        generator = torch.Generator().manual_seed(step)
        models.append(copy.deepcopy(models[-1]))
        with torch.no_grad():
            for ours, theirs in zip(module.parameters(), models[-1].parameters(), strict=True):
                ours.add_(0.02 * torch.randn(ours.shape, generator=generator))
                theirs.copy_(ours)

    prompts, parts, _ = in_flight(make_engine, name, train, module=module)
    for (ordinal, _), sequence in parts.items():
        history, cache = list(prompts[ordinal].token_ids), None
        for part in sequence:
            ids = [*history, *part.token_ids[:-1]]
            with torch.no_grad():
                num_cached = 0 if cache is None else cache.get_seq_length()
                output = models[part.weight_version](
                    torch.tensor([ids[num_cached:]]), past_key_values=cache, use_cache=True
                )
            cache, logits = output.past_key_values, output.logits[0, len(history) - 1 - num_cached :]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(part.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(part.log_probs), expected, atol=1e-4, rtol=0, check_dtype=False)
            history += part.token_ids
