"""Drafts change the number of steps and no bit of a sample."""

import copy
import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.tiny import make_model_with_head
from tests.rollout import test_trainer_bits
from tests.rollout.conftest import make_prompts
from tests.rollout.simulated import weight_transfer
from tests.rollout.test_cpu_kernels import DTYPES
from tests.rollout.test_mixed_adapters import adapted, engine_of, requests
from tests.slow import each_value
from verl.config import RolloutConfig, load_config
from verl.config.checks import check_config
from verl.config.sections.rollout import KVCacheConfig, SpeculativeConfig
from verl.data_proto.samples import PromptRequest, SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.models.decoder.weights import DenseDecoder
from verl.models.further_heads import FurtherHead
from verl.models.tiny import make_tiny_model
from verl.rollout.native.batch import BatchRows
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.drafts import drafter as drafts
from verl.rollout.native.drafts.costs import Acceptance, DraftMemory, StepCosts
from verl.rollout.native.drafts.texts import Guess, History, TextIndex
from verl.rollout.vllm import settings as vllm_settings

pytestmark = pytest.mark.skipif(kernels() is None, reason="the decoding kernels are not compiled for this processor")
FILE = "model.safetensors"
BOTH = SpeculativeConfig(methods=["ngram", "history"])
FULL = KVCacheConfig(enable_paged_attention=True, max_tokens=256)  # samples are preempted
PAGED = KVCacheConfig(enable_paged_attention=True)
LENGTHS = [3, 20, 7, 33]
PARAMS = SamplingParams(n=3, max_new_tokens=40, temperature=1.0, seed=5)
RULES = {
    "eos": {},
    "tokens": {"stop_token_ids": (7, 30, 99, 120)},
    "strings": {"stop": ("e", "42")},
    "limit": {"ignore_eos": True},
    "top_k": {"top_k": 20, "temperature": 0.7},
    "top_p": {"top_p": 0.8, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
}


class Tries(dict):
    """Texts of samples, and the drafts of an engine that tries all of them."""

    speculative = BOTH


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory):
    """A model with the weights of the tiny policies, in int8 a little different."""
    return make_tiny_model(tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory):
    """head_folder(family) -> a tiny model with a head for further tokens."""
    folder = tmp_path_factory.mktemp("heads")
    return functools.cache(lambda family: str(make_model_with_head(folder / family, family)))


@pytest.fixture(params=["texts", "model", "both", "head"])
def tries_all(request, monkeypatch, draft_folder, head_folder):
    """Drafts that are tried whatever they cost: some are the sample's tokens, some are not."""
    draw, truth = random.Random(0), Tries()
    if request.param != "texts":
        methods = ["model"] if request.param == "model" else ["ngram", "mtp" if request.param == "head" else "model"]
        truth.speculative = SpeculativeConfig(methods=methods, model_path=str(draft_folder))
        monkeypatch.setattr(drafts.Drafter, "_depth", lambda self, num_drafted, num_missing, now: draw.randrange(4))

    def guess(self, name, end):
        if draw.random() < 0.1 or request.param == "model":
            return None
        text = truth.get((tuple(self._prompt), name[1]), ())
        at = len(self._texts[name]) + (len(end) - len(self.end(name)))
        is_right = at < len(text) and draw.random() < 0.8
        return Guess(text[at] if is_right else draw.randrange(250), 4, 1.0)

    def head_of(module, setting):
        head = FurtherHead(module, head_folder(module.config.model_type))
        return head.requires_grad_(False)

    monkeypatch.setattr(FurtherHead, "of", head_of)
    monkeypatch.setattr(TextIndex, "guess", guess)
    monkeypatch.setattr(drafts.Drafter, "_best_count", lambda self, certainties, now: len(certainties))
    monkeypatch.setattr(drafts, "_MOST_LEAST", 1e9)
    monkeypatch.setattr(StepCosts, "of", lambda self, num_tokens: 1.0)
    return truth


def samples(engine, prompts, params, step=3):
    done = engine.generate(prompts, params, step=step)
    return [(c.token_ids, c.log_probs, c.finish_reason) for c in done], engine.stats()


def pair(make_engine, module, tries, **config):
    """The engine without and with drafts."""
    config = {"max_num_seqs": 5, "batch_invariant": "require", "module": module, **config}
    return [make_engine("native", **config, speculative=way) for way in (SpeculativeConfig(), tries.speculative)]


def know(truth, prompts, plain, n):
    truth |= {(p.token_ids, i): plain[k * n + i][0] for k, p in enumerate(prompts) for i in range(n)}


@pytest.mark.parametrize(
    ("family", "dtype", "n", "rule", "cache"),
    each_value(["llama", "mistral", "qwen3"], DTYPES, [3, 1], list(RULES), [FULL, PAGED, KVCacheConfig()]),
)
def test_samples_are_the_bits_without_drafts(family, dtype, n, rule, cache, make_engine, load, tries_all):
    plain, drafted = pair(make_engine, copy.deepcopy(load(family)).to(dtype), tries_all, kv_cache_config=cache)
    prompts, params = make_prompts(LENGTHS), replace(PARAMS, **{"n": n, **RULES[rule]})
    expected, stats = samples(plain, prompts, params)
    know(tries_all, prompts, expected, n)
    ours, with_drafts = samples(drafted, prompts, params)
    assert ours == expected
    assert with_drafts["num_drafts"] > with_drafts["num_accepted_drafts"] > 0
    assert with_drafts["num_decode_steps"] < stats["num_decode_steps"]
    assert with_drafts.get("num_preempted", 0) > 0 or cache is not FULL or rule != "limit" or n == 1


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, "int8"), (torch.bfloat16, "auto")])
def test_parts_of_a_response_that_keep_their_keys(dtype, stored, make_engine, load, tries_all):
    prompts, first, limit = make_prompts(LENGTHS), 9, 40
    params = replace(PARAMS, ignore_eos=True)

    def parts(engine):
        engine.trains, engine.resumes_below = True, limit
        begun = engine.generate(prompts, replace(params, max_new_tokens=first), step=1)
        engine.publish(1)
        again = [
            PromptRequest(c.ordinal, (*prompts[c.ordinal].token_ids, *c.token_ids), c.sample, first, 1, limit - first)
            for c in begun
        ]
        again = [replace(request, random_step=1) for request in again]
        ended, stats = samples(engine, again, params, step=2)
        assert stats["num_prompt_tokens_computed"] == len(again)  # the last token of each part
        return begun, ended, stats

    keeps = {"keep_partial_kv_cache": True, "kv_cache_dtype": stored}
    plain, drafted = pair(make_engine, copy.deepcopy(load("llama")).to(dtype), tries_all, **keeps)
    begun, expected, stats = parts(plain)
    responses = [(begun[i].token_ids + expected[i][0],) for i in range(len(begun))]
    know(tries_all, prompts, responses, params.n)
    begun_again, ended, with_drafts = parts(drafted)
    assert [c.token_ids for c in begun_again] == [c.token_ids for c in begun]
    assert ended == expected
    assert 0 < with_drafts["num_accepted_drafts"] < with_drafts["num_drafts"]


@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_turns_of_episodes(stored, make_engine, load, tries_all):
    params, answer = replace(PARAMS, n=2, max_new_tokens=24), (5, 6, 7)

    def turns(engine):
        generation, texts = engine.open(params, step=1, keep=True), {}
        for prompt in make_prompts(LENGTHS):
            generation.add(prompt)
        while ended := generation.poll():
            for done in ended:
                text = texts.setdefault(done.key, [])
                text.append((done.token_ids, done.log_probs))
                if len(text) < 3:
                    generation.add(TurnRequest(*done.key, answer))
        return texts, generation.close()

    plain, drafted = pair(make_engine, load("llama"), tries_all, kv_cache_dtype=stored)
    expected, stats = turns(plain)
    for (ordinal, sample), parts in expected.items():
        response = [token for ids, _ in parts for token in (*ids, *answer)]
        tries_all[make_prompts(LENGTHS)[ordinal].token_ids, sample] = response
    ours, with_drafts = turns(drafted)
    assert ours == expected
    assert with_drafts["num_accepted_drafts"] > 0
    assert with_drafts["num_decode_steps"] < stats["num_decode_steps"]


def test_samples_of_several_adapters(make_engine, load, tries_all):
    module = adapted(load("llama"))
    engines = [
        engine_of(make_engine, module, batch_invariant="require", speculative=speculative)
        for speculative in (SpeculativeConfig(), tries_all.speculative)
    ]
    params = replace(PARAMS, n=2)
    expected, _ = samples(engines[0], requests(), params)
    know(tries_all, requests(), expected, 2)
    ours, stats = samples(engines[1], requests(), params)
    assert ours == expected
    assert 0 < stats["num_accepted_drafts"] < stats["num_drafts"]


def test_activations_are_recorded_of_right_drafts_only(make_engine, tmp_path, tries_all):
    model = test_trainer_bits.load(tmp_path, "llama", {})
    if not kernels().equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    for speculative in (SpeculativeConfig(), tries_all.speculative):
        columns, store = test_trainer_bits.recorded_samples(model, make_engine, 10**8, speculative=speculative)
        texts = zip(columns["responses"], columns["response_mask"].bool(), strict=True)
        know(tries_all, make_prompts(LENGTHS), [(text[mask].tolist(),) for text, mask in texts], 3)
        used = np.unique(np.concatenate(list(store._slots.values())))
        assert len(store.free) + len(used) == store.capacity
        reused, share = test_trainer_bits.gradients_of(model, columns)
        assert (share, store.fails) == (1.0, False)
        store.version = -1
        computed, _ = test_trainer_bits.gradients_of(model, columns)
        assert [name for name, x in computed.items() if not torch.equal(x, reused[name])] == []


def test_aborted_samples_leave_the_others_their_bits(make_engine, load, tries_all):
    def others(engine):
        generation, ended = engine.open(PARAMS, step=1), []
        for prompt in make_prompts(LENGTHS):
            generation.add(prompt)
        while done := generation.poll():
            ended += [(c.key, c.token_ids, c.log_probs) for c in done if c.ordinal]
            generation.abort([(0, 0), (0, 1), (0, 2)])
        generation.close()
        return sorted(ended)

    plain, drafted = pair(make_engine, load("llama"), tries_all)
    assert others(drafted) == others(plain)


@pytest.mark.parametrize("methods", [["ngram"], ["history"], ["ngram", "history"]])
def test_earlier_responses_save_steps_where_they_may_be_read(methods, make_engine, load, monkeypatch):
    monkeypatch.setattr(StepCosts, "note", lambda *measured: None)  # sizes cost what the formula says
    engine = make_engine("native", module=load("llama"), batch_invariant="require", max_num_seqs=2,
                         speculative=SpeculativeConfig(methods=methods))  # fmt: skip
    prompts, params = make_prompts(LENGTHS), replace(PARAMS, n=1)
    first, again = samples(engine, prompts, params), samples(engine, prompts, params)
    assert again[0] == first[0]
    if "history" in methods:
        assert again[1]["num_accepted_drafts"] > 0.8 * again[1]["num_drafts"] > 0
        assert again[1]["num_decode_steps"] < 0.6 * first[1]["num_decode_steps"]
        assert again[1]["saved_step_share"] > 0.4
    else:
        assert again[1]["num_decode_steps"] == first[1]["num_decode_steps"]


def test_a_place_that_matches_more_tokens_has_more_votes():
    index = TextIndex([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3, 5], ngram=True, history=True)
    index.extend("own", [9, 2, 3])
    assert index.guess("own", index.end("own")) == Guess(5, 3, 12 / 16)  # 8 votes of 9 2 3, 4 each of 8 2 3 and 1 2 3
    assert index.guess("own", [7, 7]) is None
    index.extend("other", [7, 7, 4])
    assert index.guess("own", [7, 7]) == Guess(4, 2, 1.0)


def test_a_text_may_be_left_out():
    for ngram, expected in ((True, 3), (False, 4)):
        index = TextIndex([1, 2, 3], ngram=ngram, history=not ngram)
        index.extend("own", [1, 2])
        index.extend("other", [1, 2, 4])
        assert index.guess("own", [1, 2]).token == expected


def test_the_history_is_bounded_and_keeps_the_prompts_in_use():
    history = History(20_000)
    for ordinal in range(40):
        history.add([ordinal], (ordinal, 0), range(200))
        history.add([7], (7, ordinal), range(10))
    assert history.num_bytes <= 20_000
    assert len(history.of([7])) == 16
    assert history.of([39])
    assert not history.of([3])
    history.add([7], (7, 39), range(50))  # a later turn of a sample
    assert len(history.of([7])[-1][1]) == 50
    assert len(history.of([7])) == 16
    assert History(0).add([1], (1, 0), [1, 2]) is None


def rows_of(count):
    rows = BatchRows(8)
    rows.end = count
    return drafts.Drafter(DraftMemory(BOTH), rows, PARAMS)


def test_more_tokens_are_tried_where_they_cost_little():
    drafter, costs = rows_of(64), StepCosts()
    for tokens, seconds in ((8, 0.017), (16, 0.023), (32, 0.038), (64, 0.073), (128, 0.133)):
        for _ in range(20):
            costs.note(tokens, seconds)
    drafter._costs = costs
    assert drafter._best_count([0.85] * 64, costs.of(64)) == 0
    for count, certainties, chosen in ((2, [0.7] * 2 + [0.4] * 2 + [0.1] * 2, 6), (8, [0.3] * 8, 0), (4, [0.5] * 4, 4)):
        drafter = rows_of(count)
        drafter._costs = costs
        assert drafter._best_count(certainties, costs.of(count)) == chosen
    for _ in range(200):
        costs.note(128, 0.075)  # a device on which rows cost nothing
    assert rows_of(64)._best_count([0.85] * 64, costs.of(64)) == 0  # as the formula of a CPU says
    drafter._rows.end = 64
    assert drafter._best_count([0.85] * 64, costs.of(64)) > 32


def test_one_slow_step_is_not_believed():
    costs = StepCosts()
    for _ in range(20):
        costs.note(2, 0.017)
    costs.note(2, 5.0)
    assert costs.of(2) < 0.022
    costs.note(9, 5.0)
    assert costs.of(9) < 0.07
    for _ in range(2000):
        costs.note(2, 0.017)
    assert costs.of(9) == pytest.approx(0.018, rel=0.2)  # forgotten


def test_a_row_whose_guesses_fail_is_trusted_less():
    acceptance, guess = Acceptance(), Guess(1, 4, 1.0)
    row = drafts._Row(TextIndex([1], ngram=True, history=True), (0, 0))
    before = row.certainty(acceptance, guess)
    row.num_expected += 8
    assert row.certainty(acceptance, guess) == pytest.approx(before / 3)
    for _ in range(400):
        acceptance.note(guess, True)
    assert acceptance.of(guess) > 0.95


@pytest.mark.parametrize(
    ("settings", "fix"),
    [({"family": "gemma2"}, r"\[\]\."), ({"batch_invariant": "off"}, r"\[\], or .*batch_invariant=auto")],
)
def test_drafts_that_could_change_samples_are_refused(settings, fix, make_engine):
    """The guarantee is named as a fix where it can be kept."""
    with pytest.raises(ConfigError, match=f"speculative.methods=.* would change samples: .*Set it to {fix}"):
        make_engine("native", speculative=BOTH, **settings)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ngram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ("model", {"method": "draft_model", "model": "a/small-model"}),
        ("mtp", {"method": "mtp"}),
    ],
)
def test_vllm_gets_its_own_settings(method, expected, load, tmp_path):
    drafts = SpeculativeConfig(methods=[method], num_speculative_tokens=5, model_path="a/small-model")
    config = RolloutConfig(speculative=drafts, enforce_eager=True)
    path = make_tiny_model(tmp_path / "model")
    on_gpu = replace(weight_transfer(str(path)), device=torch.device("cuda"))
    if method == "mtp":
        with pytest.raises(ConfigError, match=r"has no heads that predict further tokens\. Set .*methods=\[ngram\]"):
            vllm_settings.make_setup(config, on_gpu, load("llama"), eos_token_ids=(1,), vocab_size=300)
        save_file({**load_file(path / FILE), "mtp.fc.weight": torch.ones(1)}, path / FILE, metadata={"format": "pt"})
    setup = vllm_settings.make_setup(config, on_gpu, load("llama"), eos_token_ids=(1,), vocab_size=300)
    assert setup.llm["speculative_config"] == {**expected, "num_speculative_tokens": 5}
    with pytest.raises(ConfigError, match="vLLM takes no drafts with verl's sampler on a CPU"):
        vllm_settings.make_setup(config, weight_transfer(), load("llama"), eos_token_ids=(1,), vocab_size=300)
    keys = ("name=vllm", f"speculative.methods=[{method}]", "speculative.model_path=a/small-model")
    keys = [f"actor_rollout_ref.rollout.{key}" for key in keys]
    problems = check_config(load_config(keys, check=False))
    assert any("samples may differ from a run without drafts" in problem.sentence for problem in problems)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rollout.name=hf"], "needs a rollout engine that verifies drafts of several tokens in a step: native, vllm"),
        (
            ["rollout.name=vllm", "rollout.speculative.methods=[history]"],
            "needs a rollout engine that drafts from earlier responses: native",
        ),
        (
            ["rollout.name=vllm", "rollout.speculative.methods=[ngram,mtp]"],
            "needs a rollout engine that drafts in several ways at once: native",
        ),
        (["rollout.speculative.methods=[model]"], "model.* needs .*model_path, a folder or hub name of a model with"),
        (["rollout.speculative.methods=[ngram,eagle]"], "methods=.*eagle.* is not one of ngram, history"),
        (["rollout.speculative.num_speculative_tokens=0"], "num_speculative_tokens=0 must be between 1 and 63"),
    ],
)
def test_keys_are_checked(keys, message):
    keys = ["rollout.speculative.methods=[ngram]", "rollout.speculative.num_speculative_tokens=3", *keys]
    with pytest.raises(ConfigError, match=message):
        load_config([f"actor_rollout_ref.{key}" for key in keys])
