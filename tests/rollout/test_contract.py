"""What every rollout engine promises. One row per engine; a new engine adds its name to ROWS."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from tests.rollout.conftest import EOS, FAMILIES, make_prompts
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import ConfigError, ModelError, NumericsError
from verl.rollout.api import RolloutEngine

ROWS = ["native", "hf"]
LENGTHS = [3, 20, 7, 40, 1, 20]

pytestmark = pytest.mark.parametrize("name", ROWS)


def tokens_of(completions):
    return {(c.ordinal, c.sample): c.token_ids for c in completions}


@functools.cache
def hf_greedy(module, prompt, num_tokens, eos=None):
    """The continuation by real `generate`, of one prompt alone."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_token_for_token(name, family, load, make_engine):
    engine = make_engine(name, family, max_num_seqs=5, max_num_batched_tokens=24)
    prompts = make_prompts(LENGTHS)
    for n in (1, 2):
        params = SamplingParams(n=n, temperature=0, max_new_tokens=20, ignore_eos=True)
        completions = engine.generate(prompts, params, step=0)
        for i, prompt in enumerate(prompts):
            expected = hf_greedy(load(family, "eager"), prompt, 20)
            for c in completions[i * n : (i + 1) * n]:
                assert c.token_ids == expected
                assert torch.allclose(
                    torch.tensor(c.log_probs), hf_log_probs(load(family, "eager"), prompt, c.token_ids), atol=1e-4
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_equal_a_plain_forward(name, family, load, make_engine):
    engine = make_engine(name, family, max_num_seqs=7, max_num_batched_tokens=32)
    prompts = make_prompts(LENGTHS, seed=2)
    params = SamplingParams(n=3, temperature=0.7, top_p=0.95, max_new_tokens=20)
    for c in engine.generate(prompts, params, step=3):
        expected = hf_log_probs(load(family, "eager"), prompts[c.ordinal], c.token_ids, 0.7)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


def test_samples_are_the_native_ones(name, make_engine):
    """The draw is a function of (seed, step, ordinal, sample, weights): not of the engine."""
    prompts = make_prompts(LENGTHS)
    params = SamplingParams(n=2, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, max_new_tokens=16)
    drawn = make_engine(name, max_num_seqs=12).generate(prompts, params, step=5)
    assert tokens_of(drawn) == tokens_of(make_engine("native").generate(prompts, params, step=5))


@pytest.mark.parametrize(("slots", "budget"), [(1, 8192), (3, 16), (64, 1), (64, 8192)])
def test_a_sample_does_not_depend_on_the_batch(name, slots, budget, make_engine):
    prompts = make_prompts(LENGTHS)
    params = SamplingParams(n=3, temperature=1.0, max_new_tokens=12)
    whole = tokens_of(make_engine(name).generate(prompts, params, step=1))
    engine = make_engine(name, max_num_seqs=slots, max_num_batched_tokens=budget)
    assert tokens_of(engine.generate(prompts[::-1], params, step=1)) == whole
    assert tokens_of(engine.generate(prompts[2:4], params, step=1)).items() <= whole.items()


def test_seed_step_and_sample_matter(name, make_engine):
    engine, prompts = make_engine(name), make_prompts([9, 9])
    params = SamplingParams(n=4, max_new_tokens=12)
    first = engine.generate(prompts, params, step=1)
    assert tokens_of(engine.generate(prompts, params, step=1)) == tokens_of(first)
    assert tokens_of(engine.generate(prompts, params, step=2)) != tokens_of(first)
    assert tokens_of(engine.generate(prompts, dataclasses.replace(params, seed=7), step=1)) != tokens_of(first)
    assert len({tuple(c.token_ids) for c in first}) == len(first)


def test_order_and_shape_of_the_result(name, make_engine):
    prompts = [PromptRequest(n, p.token_ids) for n, p in zip((9, 4, 6), make_prompts([5, 30, 2]), strict=True)]
    engine = make_engine(name, max_num_seqs=4)
    assert isinstance(engine, RolloutEngine)
    engine.publish(17)
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
    engine, seen = make_engine(name, max_num_seqs=30), []
    completions = engine.generate(
        make_prompts([12, 5, 30]), SamplingParams(n=8, max_new_tokens=60), step=1, on_finish=seen.append
    )
    key = lambda c: (c.ordinal, c.sample)  # noqa: E731
    assert sorted(map(key, seen)) == sorted(map(key, completions))
    assert all(any(c is s for s in seen) for c in completions)
    lengths = [len(c.token_ids) for c in seen]
    assert min(lengths) < max(lengths)
    assert lengths == sorted(lengths)  # all began together


def test_an_error_in_on_finish_comes_out_and_the_engine_lives_on(name, make_engine):
    engine, prompts, params = make_engine(name), make_prompts([4, 6]), SamplingParams(n=2, max_new_tokens=5)

    def fail(completion: Completion) -> None:
        raise KeyError(completion.ordinal)

    expected = tokens_of(engine.generate(prompts, params, step=1))
    with pytest.raises(KeyError):
        engine.generate(prompts, params, step=1, on_finish=fail)
    assert tokens_of(engine.generate(prompts, params, step=1)) == expected


def test_stop_token_ids_and_ignore_eos(name, make_engine):
    engine, prompts = make_engine(name), make_prompts(LENGTHS)
    params = SamplingParams(n=2, max_new_tokens=40, ignore_eos=True)
    free = engine.generate(prompts, params, step=1)
    assert all(len(c.token_ids) == 40 and c.finish_reason == "length" for c in free)
    stop = free[0].token_ids[4]
    for c, whole in zip(
        engine.generate(prompts, dataclasses.replace(params, stop_token_ids=(stop,)), step=1), free, strict=True
    ):
        at = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 40
        assert c.token_ids == whole.token_ids[:at]
        assert c.finish_reason == ("stop" if stop in whole.token_ids else "length")
    for c, whole in zip(
        engine.generate(prompts, dataclasses.replace(params, ignore_eos=False), step=1), free, strict=True
    ):
        at = whole.token_ids.index(EOS) + 1 if EOS in whole.token_ids else 40
        assert c.token_ids == whole.token_ids[:at]


def test_stop_strings_end_with_the_token_that_completes_them(name, make_engine, tokenizer):
    engine, prompts = make_engine(name), make_prompts(LENGTHS)
    params = SamplingParams(n=2, temperature=0.9, max_new_tokens=40, ignore_eos=True)
    free = engine.generate(prompts, params, step=1)

    def readable(ids, start):
        pairs = (tokenizer.decode(ids[t : t + 2]) for t in range(start, 39))
        return next(text for text in pairs if "\ufffd" not in text)

    stops = (readable(free[0].token_ids, 10), readable(free[5].token_ids, 20), "never, ever")
    stopped = engine.generate(prompts, dataclasses.replace(params, stop=stops), step=1)
    for c, whole in zip(stopped, free, strict=True):
        ends = (t for t in range(1, 41) if any(s in tokenizer.decode(whole.token_ids[:t]) for s in stops))
        end = next(ends, None)
        assert c.token_ids == whole.token_ids[: end or 40]
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
    import copy

    module = copy.deepcopy(load("llama"))
    engine, prompts = make_engine(name, module=module), make_prompts([10, 4])
    params = SamplingParams(n=2, max_new_tokens=8)
    before = engine.generate(prompts, params, step=1)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.1)  # in place, as an optimizer does
    engine.publish(1)
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
    used.generate(make_prompts([60] * 9, seed=9), SamplingParams(n=3, max_new_tokens=50), step=0)
    for a, b in zip(used.generate(prompts, params, step=1), fresh.generate(prompts, params, step=1), strict=True):
        assert (a.token_ids, a.log_probs) == (b.token_ids, b.log_probs)


def test_the_module_is_given_back_as_it_was(name, load, make_engine):
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
    import copy

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
    assert stats["num_prompt_tokens_computed"] == sum(LENGTHS) * (1 if name == "native" else 3)
    assert stats["num_generated_tokens"] == sum(len(c.token_ids) for c in completions)
    assert stats["max_running"] == 8
    assert stats["seconds"] > 0
    assert stats["num_decode_steps"] >= 8
    assert stats["kv_cache_bytes"] > 0 or name == "hf"


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
def test_errors_before_any_token_is_made(name, case, make_engine):
    prompts, config, params, error, words = BAD[case]
    seen = []
    with pytest.raises(error, match=words):
        make_engine(name, **config).generate(prompts, SamplingParams(**params), step=0, on_finish=seen.append)
    assert not seen


def test_prompt_and_response_may_fill_the_model(name, make_engine):
    [c] = make_engine(name, max_model_len=16).generate(
        [PromptRequest(0, (1,) * 8)], SamplingParams(max_new_tokens=8, ignore_eos=True), step=0
    )
    assert len(c.token_ids) == 8


def test_weights_that_are_not_finite_are_said_so(name, load, make_engine):
    import copy

    module = copy.deepcopy(load("llama"))
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan
    engine = make_engine(name, module=module)
    with pytest.raises(NumericsError, match="Sample 0 of prompt 5 .* weight version 0"):
        engine.generate([PromptRequest(5, (1, 2))], SamplingParams(max_new_tokens=4), step=0)
    with torch.no_grad():
        module.model.norm.weight[0] = 1.0
    assert engine.generate([PromptRequest(5, (1, 2))], SamplingParams(max_new_tokens=4), step=0)


@pytest.mark.slow
def test_greedy_equals_generate_on_smollm2(name):
    """Needs the converted SmolLM2 (see `verl convert`); VERL_SMOLLM2 names its folder."""
    import os

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.config import RolloutConfig
    from verl.rollout.api import ENGINES

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
    engine = ENGINES.get(name)(module, tokenizer, RolloutConfig(), eos_token_ids=[2], pad_token_id=2)
    for c in engine.generate(prompts, SamplingParams(n=2, temperature=0, max_new_tokens=32), step=0):
        assert c.token_ids == hf_greedy(plain, prompts[c.ordinal], 32, eos=2)
