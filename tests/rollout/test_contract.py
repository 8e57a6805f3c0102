"""The contract of every rollout engine. One row per engine (conftest.make_engine); a new engine adds its name to ROWS."""

import copy
import dataclasses
import functools
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rollout.conftest import EOS, FAMILIES, make_prompts
from tests.slow import slow
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams, TurnRequest
from verl.errors import ConfigError, ModelError, NumericsError
from verl.rollout.api import RolloutEngine

ROWS = ["native", "device", "hf", "vllm", "http"]
KEEPS_KV = {"native", "device"}
SIMULATED = {"vllm", "http"}  # the same model behind another engine: its family changes nothing there
LENGTHS = [3, 20, 7, 40, 1, 20]

pytestmark = pytest.mark.seed("B6")


BATCHES = [(1, 8192), (3, 16), (64, 1), (64, 8192)]  # slots, and tokens of a step


def pytest_generate_tests(metafunc):
    """Simulated engines compute token by token: one batch shows that they pass what identifies a sample. The engine of
    transformers computes with the model that is its reference: one family in the default run."""
    if "family" in metafunc.fixturenames:
        pairs = [
            slow(name, family, when=name == "hf" and family != "llama")
            for name in ROWS
            for family in FAMILIES
            if family == "llama" or name not in SIMULATED
        ]
        metafunc.parametrize(("name", "family"), pairs)
    elif "slots" in metafunc.fixturenames:
        batches = {**dict.fromkeys(SIMULATED, BATCHES[1:2]), "hf": BATCHES[:3]}  # it has no tokens of a step
        rows = [(name, *batch) for name in ROWS for batch in batches.get(name, BATCHES)]
        metafunc.parametrize(("name", "slots", "budget"), rows)
    else:
        metafunc.parametrize("name", ROWS)


def renew(engine, module, version):
    """The engine generates with the weights that `module` has now."""
    if hasattr(engine, "load"):
        engine.load(module.named_parameters())
    engine.publish(version)


def tokens_of(completions):
    return {(c.ordinal, c.sample): c.token_ids for c in completions}


@functools.cache
def hf_greedy(module, prompt, num_tokens, eos=None):
    """The continuation of one prompt by itself, by transformers' `generate`."""
    ids = torch.tensor([prompt.token_ids])
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": eos, "pad_token_id": 256}
    with torch.no_grad():
        out = module.eval().generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(prompt.token_ids) :].tolist()


def hf_log_probs(module, prompt, response, temperature=1.0):
    with torch.no_grad():
        logits = module.eval()(torch.tensor([[*prompt.token_ids, *response]])).logits[0].float() / temperature
    picked = logits.log_softmax(-1)[len(prompt.token_ids) - 1 : -1]
    return picked.gather(1, torch.tensor(response)[:, None])[:, 0]


eager_log_probs = functools.cache(hf_log_probs)  # of a tuple of tokens: engines have the same samples


def test_greedy_equals_generate_token_for_token(name, family, load, make_engine):
    engine = make_engine(name, family, max_num_seqs=5, max_num_batched_tokens=24)
    prompts = make_prompts(LENGTHS)
    for n in (1, 2) if family == "llama" else (2,):
        params = SamplingParams(n=n, temperature=0, max_new_tokens=20, ignore_eos=True)
        completions = engine.generate(prompts, params, step=0)
        for i, prompt in enumerate(prompts):
            expected = hf_greedy(load(family, "eager"), prompt, 20)
            for c in completions[i * n : (i + 1) * n]:
                assert c.token_ids == expected
                assert torch.allclose(
                    torch.tensor(c.log_probs),
                    eager_log_probs(load(family, "eager"), prompt, tuple(c.token_ids)),
                    atol=1e-4,
                )


def test_sampled_log_probs_equal_a_plain_forward(name, family, load, make_engine):
    engine = make_engine(name, family, max_num_seqs=7, max_num_batched_tokens=32)
    prompts = make_prompts(LENGTHS, seed=2)
    params = SamplingParams(n=3, temperature=0.7, top_p=0.95, max_new_tokens=20)
    for c in engine.generate(prompts, params, step=3):
        expected = eager_log_probs(load(family, "eager"), prompts[c.ordinal], tuple(c.token_ids), 0.7)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


@pytest.fixture(scope="module")
def tokens_at_once(make_engine):
    """`tokens_at_once(name, params, step)`: the samples of an engine that has room for all of them."""
    return functools.cache(
        lambda name, params, step: tokens_of(make_engine(name).generate(make_prompts(LENGTHS), params, step=step))
    )


def test_samples_are_the_native_ones(name, make_engine, tokens_at_once):
    """The uniform number is a function of (seed, step, ordinal, sample, weights): not of the engine."""
    params = SamplingParams(n=2, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, max_new_tokens=16)
    drawn = make_engine(name, max_num_seqs=12).generate(make_prompts(LENGTHS), params, step=5)
    assert tokens_of(drawn) == tokens_at_once("native", params, 5)


def test_a_sample_does_not_depend_on_the_batch(name, slots, budget, make_engine, tokens_at_once):
    prompts = make_prompts(LENGTHS)
    params = SamplingParams(n=3, temperature=1.0, max_new_tokens=12)
    batched = tokens_at_once(name, params, 1)
    engine = make_engine(name, max_num_seqs=slots, max_num_batched_tokens=budget)
    assert tokens_of(engine.generate(prompts[::-1], params, step=1)) == batched
    assert tokens_of(engine.generate(prompts[2:4], params, step=1)).items() <= batched.items()


def test_seed_step_and_sample_matter(name, make_engine):
    engine, prompts = make_engine(name), make_prompts([9, 9])
    params = SamplingParams(n=4, max_new_tokens=12)
    first = engine.generate(prompts, params, step=1)
    assert tokens_of(engine.generate(prompts, params, step=1)) == tokens_of(first)
    assert tokens_of(engine.generate(prompts, params, step=2)) != tokens_of(first)
    assert tokens_of(engine.generate(prompts, dataclasses.replace(params, seed=7), step=1)) != tokens_of(first)
    assert len({tuple(c.token_ids) for c in first}) == len(first)


def test_order_and_shape_of_the_result(name, load, make_engine):
    prompts = [PromptRequest(n, p.token_ids) for n, p in zip((9, 4, 6), make_prompts([5, 30, 2]), strict=True)]
    engine = make_engine(name, max_num_seqs=4)
    assert isinstance(engine, RolloutEngine)
    renew(engine, load("llama"), 17)
    completions = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=10), step=0)
    assert [(c.ordinal, c.sample) for c in completions] == [(9, 0), (9, 1), (4, 0), (4, 1), (6, 0), (6, 1)]
    for c in completions:
        assert 1 <= len(c.token_ids) == len(c.log_probs) <= 10
        assert c.finish_reason == ("stop" if c.token_ids[-1] == EOS else "length")
        assert EOS not in c.token_ids[:-1]
        assert c.weight_version == 17
        assert all(p <= 0 for p in c.log_probs)
    assert engine.generate([], SamplingParams(), step=0) == []


def test_on_finish_once_per_sample_as_it_ends(name, make_engine):
    engine, ended = make_engine(name, max_num_seqs=30), []
    params = SamplingParams(n=8, max_new_tokens=20, stop_token_ids=tuple(range(40)))  # of 264: lengths differ
    completions = engine.generate(make_prompts([12, 5, 30]), params, step=1, on_finish=ended.append)
    key = lambda c: (c.ordinal, c.sample)  # noqa: E731
    assert sorted(map(key, ended)) == sorted(map(key, completions))
    assert all(any(c is s for s in ended) for c in completions)
    lengths = [len(c.token_ids) for c in ended]
    assert min(lengths) < max(lengths)
    if name != "http":  # there each sample has a thread
        assert lengths == sorted(lengths)  # all began together


def test_an_error_in_on_finish_comes_out_and_the_engine_lives_on(name, make_engine):
    engine, prompts = make_engine(name, max_num_seqs=3), make_prompts([4, 6])
    params = SamplingParams(n=2, max_new_tokens=5)

    def fail(completion: Completion) -> None:
        raise KeyError(completion.ordinal)

    expected, running = tokens_of(engine.generate(prompts, params, step=1)), engine.stats()["max_running"]
    with pytest.raises(KeyError):
        engine.generate(prompts, params, step=1, on_finish=fail)
    assert tokens_of(engine.generate(prompts, params, step=1)) == expected
    assert engine.stats()["max_running"] == running, "rows of the broken generation are free again"


def test_stop_token_ids_and_ignore_eos(name, make_engine):
    engine, prompts = make_engine(name), make_prompts(LENGTHS[:3])
    params = SamplingParams(n=2, max_new_tokens=20, ignore_eos=True)
    free = engine.generate(prompts, params, step=1)
    assert all(len(c.token_ids) == 20 and c.finish_reason == "length" for c in free)
    stop = free[0].token_ids[4]
    for c, unstopped in zip(
        engine.generate(prompts, dataclasses.replace(params, stop_token_ids=(stop,)), step=1), free, strict=True
    ):
        at = unstopped.token_ids.index(stop) + 1 if stop in unstopped.token_ids else 20
        assert c.token_ids == unstopped.token_ids[:at]
        assert c.finish_reason == ("stop" if stop in unstopped.token_ids else "length")
    for c, unstopped in zip(
        engine.generate(prompts, dataclasses.replace(params, ignore_eos=False), step=1), free, strict=True
    ):
        at = unstopped.token_ids.index(EOS) + 1 if EOS in unstopped.token_ids else 20
        assert c.token_ids == unstopped.token_ids[:at]


def test_stop_strings_end_with_the_token_that_completes_them(name, make_engine, tokenizer):
    engine, prompts = make_engine(name), make_prompts(LENGTHS[:3])
    params = SamplingParams(n=2, temperature=0.9, max_new_tokens=20, ignore_eos=True)
    free = engine.generate(prompts, params, step=1)

    def readable(ids, start):
        pairs = (tokenizer.decode(ids[t : t + 2]) for t in range(start, 19))
        return next(text for text in pairs if "\ufffd" not in text)

    stops = (readable(free[0].token_ids, 5), readable(free[5].token_ids, 10), "never, ever")
    stopped = engine.generate(prompts, dataclasses.replace(params, stop=stops), step=1)
    for c, unstopped in zip(stopped, free, strict=True):
        ends = (t for t in range(1, 21) if any(s in tokenizer.decode(unstopped.token_ids[:t]) for s in stops))
        end = next(ends, None)
        assert c.token_ids == unstopped.token_ids[: end or 20]
        assert c.finish_reason == ("stop" if end else "length")
    assert stopped[0].finish_reason == stopped[5].finish_reason == "stop"


def test_the_last_token_may_be_the_stopping_one(name, make_engine):
    engine, prompts = make_engine(name), make_prompts([8])
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    last = engine.generate(prompts, params, step=0)[0].token_ids[5]
    [c] = engine.generate(prompts, dataclasses.replace(params, stop_token_ids=(last,)), step=0)
    assert c.finish_reason == "stop"
    [one] = engine.generate(prompts, dataclasses.replace(params, max_new_tokens=1), step=0)
    assert (len(one.token_ids), one.finish_reason) == (1, "length")


def test_new_weights_are_used_at_once(name, load, make_engine):
    module = copy.deepcopy(load("llama"))
    engine, prompts = make_engine(name, module=module), make_prompts([10, 4])
    params = SamplingParams(n=2, max_new_tokens=8)
    before = engine.generate(prompts, params, step=1)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.1)  # in place, as an optimizer does
    renew(engine, module, 1)
    after = engine.generate(prompts, params, step=1)
    assert {c.weight_version for c in after} == {1}
    assert {c.weight_version for c in before} == {0}
    assert tokens_of(after) == tokens_of(make_engine(name, module=module).generate(prompts, params, step=1))
    assert [c.log_probs for c in after] != [c.log_probs for c in before]


def test_release_and_go_on(name, make_engine):
    engine, prompts, params = make_engine(name), make_prompts(LENGTHS), SamplingParams(n=2, max_new_tokens=8)
    before = engine.generate(prompts, params, step=1)
    engine.release()
    assert tokens_of(engine.generate(prompts, params, step=1)) == tokens_of(before)


def test_what_came_before_changes_no_bit(name, make_engine):
    """A resumed run has a fresh engine, the unbroken one has memory of larger batches: samples must be the same bits."""
    prompts, params = make_prompts(LENGTHS), SamplingParams(n=2, max_new_tokens=10)
    used, fresh = make_engine(name), make_engine(name)
    number, length = (3, 10) if name in SIMULATED else (9, 50)
    used.generate(make_prompts([60] * number, seed=9), SamplingParams(n=3, max_new_tokens=length), step=0)
    for a, b in zip(used.generate(prompts, params, step=1), fresh.generate(prompts, params, step=1), strict=True):
        assert (a.token_ids, a.log_probs) == (b.token_ids, b.log_probs)


def test_the_module_comes_back_as_it_was(name, load, make_engine):
    module = load("llama").train()
    module.gradient_checkpointing_enable()
    module.model.layers[1].eval()
    flags = [m.training for m in module.modules()]
    try:
        engine = make_engine(name)
        engine.generate(make_prompts([5]), SamplingParams(max_new_tokens=3), step=0)
        assert [m.training for m in module.modules()] == flags
        assert module.config._attn_implementation == "verl"
        assert all(p.requires_grad and p.grad is None for p in module.parameters())
    finally:
        module.gradient_checkpointing_disable()
        module.train()


@pytest.mark.usefixtures("bf16_path")
def test_bfloat16_modules_work(name, load, make_engine):
    module = copy.deepcopy(load("qwen3")).bfloat16()
    engine, prompts = make_engine(name, module=module), make_prompts([10, 4])
    for c in engine.generate(prompts, SamplingParams(n=3, max_new_tokens=12), step=1):
        exact = hf_log_probs(load("qwen3", "eager"), prompts[c.ordinal], c.token_ids)
        assert (torch.tensor(c.log_probs) - exact).abs().mean() < 0.1


def test_stats(name, make_engine):
    engine, prompts = make_engine(name, max_num_seqs=8), make_prompts(LENGTHS)
    completions = engine.generate(prompts, SamplingParams(n=3, max_new_tokens=9), step=1)
    stats = engine.stats()
    assert stats["num_prompt_tokens"] == sum(LENGTHS)
    assert stats["num_prompt_tokens_computed"] == sum(LENGTHS) * (3 if name == "hf" else 1)
    assert stats["num_generated_tokens"] == sum(len(c.token_ids) for c in completions)
    assert stats["max_running"] == (18 if name == "vllm" else 8)
    assert stats["seconds"] > 0
    assert stats["num_decode_steps"] >= 8
    assert (stats["kv_cache_bytes"] > 0) == (name in KEEPS_KV)


LONG, SHORT = [PromptRequest(3, (1,) * 1000)], [PromptRequest(0, (1,))]
BAD = {
    "too long": (LONG, {}, {"max_new_tokens": 100}, ModelError, "Prompt 3 of 1000 tokens plus 100 .*1024"),
    "max_model_len": (LONG, {"max_model_len": 16}, {"max_new_tokens": 8}, ModelError, r"rollout.max_model_len \(16\)"),
    "empty": ([*SHORT, PromptRequest(8, ())], {}, {}, ModelError, "Prompt 8 is empty"),
    "unknown token": ([PromptRequest(2, (1, 264))], {}, {}, ModelError, "Prompt 2 has token id 264"),
    "negative token": ([PromptRequest(2, (1, -1))], {}, {}, ModelError, "Prompt 2 has token id -1"),
    "n": (SHORT, {}, {"n": 0}, ConfigError, "n is 0"),
    "max_new_tokens": (SHORT, {}, {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
    "temperature": (SHORT, {}, {"temperature": -1.0}, ConfigError, "temperature is -1"),
    "top_p": (SHORT, {}, {"top_p": 0.0}, ConfigError, "top_p is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_before_any_token(name, case, make_engine):
    prompts, config, params, error, words = BAD[case]
    ended = []
    with pytest.raises(error, match=words):
        make_engine(name, **config).generate(prompts, SamplingParams(**params), step=0, on_finish=ended.append)
    assert not ended


def test_prompt_and_response_may_fill_the_model(name, make_engine):
    [c] = make_engine(name, max_model_len=16).generate(
        [PromptRequest(0, (1,) * 8)], SamplingParams(max_new_tokens=8, ignore_eos=True), step=0
    )
    assert len(c.token_ids) == 8


def test_weights_that_are_not_finite_are_said_so(name, load, make_engine):
    module = copy.deepcopy(load("llama"))
    engine = make_engine(name, module=module)  # a service samples once when it is opened
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan
    with pytest.raises(NumericsError, match="Sample 0 of prompt 5 .* weight version 0"):
        engine.generate([PromptRequest(5, (1, 2))], SamplingParams(max_new_tokens=4), step=0)
    with torch.no_grad():
        module.model.norm.weight[0] = 1.0
    assert engine.generate([PromptRequest(5, (1, 2))], SamplingParams(max_new_tokens=4), step=0)


def converse(generation, prompts, num_turns, answer):
    """Each sample as (segments of the policy as Completion, response with the answers of the environment)."""
    for prompt in prompts:
        generation.add(prompt)
    turns, responses = {}, {}
    while ended := generation.poll():
        for done in ended:
            turns.setdefault(done.key, []).append(done)
            responses.setdefault(done.key, []).extend(done.token_ids)
            if len(turns[done.key]) < num_turns:
                tokens = answer(done.key, len(turns[done.key]))
                responses[done.key].extend(tokens)
                generation.add(TurnRequest(*done.key, tokens))
    return turns, responses


def answer(key, turn):
    """Of 0 to some tokens, different for each sample and turn."""
    return tuple((31 * key[0] + 7 * key[1] + 3 * i) % 250 for i in range(5 * turn - 5 + key[0]))


TURNS = SamplingParams(n=2, temperature=0.8, max_new_tokens=6)


def test_turns_match_one_unbroken_sequence(name, load, make_engine):
    """Log-probs equal a plain forward's over the whole conversation, environment tokens included. Positions of the
    response key the random numbers, so that a sample that resumes with its history is the same."""
    prompts, module = make_prompts(LENGTHS, seed=5), load("llama", "eager")
    engine = make_engine(name, max_num_seqs=5, max_num_batched_tokens=24)
    generation = engine.open(TURNS, step=2, keep=True)
    turns, responses = converse(generation, prompts, 3, answer)
    stats = generation.close()
    assert len(turns) == 12
    assert all(len(completions) == 3 for completions in turns.values())
    num_answered = 0
    for key, completions in turns.items():
        start, expected = 0, hf_log_probs(module, prompts[key[0]], responses[key], 0.8)
        for turn, done in enumerate(completions, 1):
            end = start + len(done.token_ids)
            assert responses[key][start:end] == done.token_ids
            assert torch.allclose(torch.tensor(done.log_probs), expected[start:end], atol=1e-4)
            resumed = PromptRequest(
                key[0], (*prompts[key[0]].token_ids, *responses[key][:start]), key[1], num_drawn=start, num_samples=1
            )
            if turn == 3:
                [again] = engine.generate([resumed], TURNS, step=2)
                assert again.token_ids == done.token_ids
            start = end + (len(answer(key, turn)) if turn < 3 else 0)
        num_answered += sum(len(answer(key, turn)) for turn in (1, 2))
    assert stats["num_prompt_tokens"] == sum(LENGTHS) + num_answered
    if name in KEEPS_KV:  # the prompts once, the answers, and the last token of each turn that was continued
        assert stats["num_prompt_tokens_computed"] == sum(LENGTHS) + num_answered + 24


def test_turns_do_not_depend_on_other_samples(name, make_engine):
    """On the native engine with the compiled kernels, or required to be invariant, to the last bit."""
    prompts = make_prompts(LENGTHS, seed=5)
    engine = make_engine(name, max_num_seqs=30, batch_invariant="require" if name == "native" else "auto")
    generation = engine.open(TURNS, step=2, keep=True)
    together, _ = converse(generation, prompts, 2, answer)
    generation.close()
    for prompt in prompts[1:4]:
        generation = engine.open(TURNS, step=2, keep=True)
        alone, _ = converse(generation, [prompt], 2, answer)
        generation.close()
        for key, completions in alone.items():
            for a, b in zip(completions, together[key], strict=True):
                assert a.token_ids == b.token_ids
                if name == "native":
                    assert a.log_probs == b.log_probs


def test_requests_may_come_while_others_run(name, make_engine):
    prompts, params = make_prompts(LENGTHS), SamplingParams(n=2, max_new_tokens=10)
    engine = make_engine(name, max_num_seqs=6)
    expected = engine.generate(prompts, params, step=1)
    generation, ended = engine.open(params, step=1), []
    for prompt in prompts:
        generation.add(prompt)
        ended += generation.poll(0.0)
    while batch := generation.poll():
        ended += batch
    assert generation.poll() == []
    stats = generation.close()
    assert {**generation.close(), "seconds": 0} == {**stats, "seconds": 0}
    assert tokens_of(sorted(ended, key=lambda done: done.key)) == tokens_of(expected)


def test_a_sample_that_resumes_is_the_unbroken_one(name, make_engine):
    """Partial rollouts: a part of each response, and the others later with what there is so far."""
    prompts, engine = make_prompts(LENGTHS), make_engine(name)
    complete = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=12, ignore_eos=True), step=4)
    part = SamplingParams(n=2, max_new_tokens=5, ignore_eos=True)
    first = engine.generate(prompts, part, step=4)
    assert {done.finish_reason for done in first} == {"length"}
    requests = [
        PromptRequest(d.ordinal, (*prompts[d.ordinal].token_ids, *d.token_ids), d.sample, num_drawn=5, num_samples=1)
        for d in first
    ]
    rest = engine.generate(requests, dataclasses.replace(part, max_new_tokens=7), step=4)
    for a, b, unbroken in zip(first, rest, complete, strict=True):
        assert a.token_ids + b.token_ids == unbroken.token_ids
        assert torch.allclose(torch.tensor(a.log_probs + b.log_probs), torch.tensor(unbroken.log_probs), atol=1e-4)


def test_a_request_may_have_its_own_limit(name, make_engine):
    engine, params = make_engine(name), SamplingParams(n=2, max_new_tokens=9, ignore_eos=True)
    prompts = make_prompts([9, 4])
    unlimited = engine.generate(prompts, params, step=1)
    limited = [dataclasses.replace(prompt, max_new_tokens=cap) for prompt, cap in zip(prompts, (3, 20), strict=True)]
    completions = engine.generate(limited, params, step=1)
    assert [len(c.token_ids) for c in completions] == [3, 3, 9, 9]
    assert [c.token_ids for c in completions] == [
        c.token_ids[: len(f.token_ids)] for c, f in zip(unlimited, completions, strict=True)
    ]
    assert {c.finish_reason for c in completions} == {"length"}


def test_aborted_samples_do_not_come_back(name, make_engine):
    prompts, params = make_prompts(LENGTHS), SamplingParams(n=2, max_new_tokens=10, ignore_eos=True)
    engine = make_engine(name, max_num_seqs=4)
    expected = tokens_of(engine.generate(prompts, params, step=1))
    generation = engine.open(params, step=1, keep=True)
    for prompt in prompts:
        generation.add(prompt)
    generation.abort([(1, 0), (99, 0)])
    ended = generation.poll()
    dropped = {(1, 0), *[(o, s) for o in (2, 4) for s in (0, 1) if (o, s) not in tokens_of(ended)]}
    generation.abort(dropped)
    generation.abort([ended[0].key])
    with pytest.raises(ModelError, match="cannot continue"):
        generation.add(TurnRequest(*ended[0].key, (1,)))
    beside = (ended[0].ordinal, 7)
    generation.add(PromptRequest(beside[0], (5, 6), beside[1], num_samples=1))
    while polled := generation.poll():
        ended += polled
    generation.close()
    polled = tokens_of(ended)
    assert len(polled.pop(beside)) == 10
    assert polled == {key: tokens for key, tokens in expected.items() if key not in dropped}


def test_only_samples_that_wait_for_a_turn_continue(name, make_engine):
    engine, [prompt] = make_engine(name), make_prompts([4])
    generation = engine.open(SamplingParams(max_new_tokens=3), step=0)
    generation.add(prompt)
    with pytest.raises(ModelError, match="running or kept already"):
        generation.add(prompt)
    assert len(generation.poll()) == 1
    with pytest.raises(ModelError, match="Sample 0 of prompt 0 cannot continue"):
        generation.add(TurnRequest(0, 0, (1,)))
    generation.close()
    generation = engine.open(SamplingParams(max_new_tokens=3), step=0, keep=True)
    generation.add(prompt)
    assert len(generation.poll()) == 1
    with pytest.raises(ModelError, match="token id 999"):
        generation.add(TurnRequest(0, 0, (999,)))
    generation.add(TurnRequest(0, 0, ()))
    assert len(generation.poll()) == 1
    generation.close()


@pytest.mark.slow
def test_greedy_equals_generate_on_smollm2(make_engine, name):
    """Needs the converted SmolLM2 (see `verl convert`); VERL_SMOLLM2 names its folder."""
    folder = os.environ.get("VERL_SMOLLM2", "")
    if not Path(folder, "config.json").is_file():
        pytest.skip("VERL_SMOLLM2 names no model folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="verl", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    texts = ["What is 3 + 4?", "Name the capital of France and one river that flows through it.", "Hi"]
    chats = [[{"role": "user", "content": t}] for t in texts]
    prompts = [
        PromptRequest(i, tuple(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)))
        for i, c in enumerate(chats)
    ]
    params = SamplingParams(n=2, temperature=0, max_new_tokens=32)
    for c in make_engine(name, module=module).generate(prompts, params, step=0):
        assert c.token_ids == hf_greedy(plain, prompts[c.ordinal], 32)
