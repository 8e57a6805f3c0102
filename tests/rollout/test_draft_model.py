"""A draft model follows samples, and a run with drafts is never much slower than one without."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.conftest import make_prompts
from verl.config.sections.rollout import SpeculativeConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.models.tiny import make_tiny_model
from verl.rollout.native import scheduler
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.drafts import drafter as drafts
from verl.rollout.native.drafts import model as draft_model
from verl.rollout.native.drafts.model import DraftModel
from verl.rollout.native.host_backend import HostBackend

pytestmark = pytest.mark.skipif(kernels() is None, reason="the decoding kernels are not compiled for this processor")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Draft models: the policy's weights, and other weights."""
    folder = tmp_path_factory.mktemp("drafts")
    return {name: make_tiny_model(folder / name, "llama", seed) for name, seed in (("right", 0), ("wrong", 5))}


def test_logits_follow_the_text_whatever_was_guessed_before(folders):
    def opened():
        module = AutoModelForCausalLM.from_pretrained(folders["right"], attn_implementation="verl", dtype=torch.float32)
        return DraftModel(module, 264, 1.0)

    def logits_of(model, name, text):
        missing = model.follow(name, len(text), lambda start: text[start:])
        return model.logits([name]).clone(), missing

    model, text = opened(), list(range(3, 40))
    assert logits_of(model, "a", text)[1] == 37
    for token in (50, 51, 52):
        model.push("a", token)
        model.logits(["a"])
    text += [50, 51, 99]  # the last guess was wrong
    logits, missing = logits_of(model, "a", text)
    assert missing == 1
    torch.testing.assert_close(logits, logits_of(opened(), "b", text)[0], rtol=1e-4, atol=1e-4)
    model.follow("b", 5, lambda start: text[start:5])
    model.follow("a", 41, lambda start: [*text, 7][start:])
    both = model.logits(["b", "a"])
    expected = [logits_of(opened(), "c", tokens)[0] for tokens in (text[:5], [*text, 7])]
    torch.testing.assert_close(both, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_the_sample_that_was_used_longest_ago_gives_up_its_slot(folders, monkeypatch):
    monkeypatch.setattr(draft_model, "MOST_SAMPLES", 2)
    module = AutoModelForCausalLM.from_pretrained(folders["right"], attn_implementation="verl", dtype=torch.float32)
    model = DraftModel(module, 264, 1.0)
    for name, missing in (("a", 4), ("b", 4), ("a", 1), ("c", 4), ("a", 1), ("b", 4)):
        assert model.follow(name, 4, lambda start: [1, 2, 3, 4][start:]) == missing
        model.logits([name])


@pytest.mark.parametrize("kind", ["right", "wrong"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_are_the_bits_without_drafts(kind, temperature, folders, make_engine, load, monkeypatch):
    monkeypatch.setattr(drafts.Drafter, "_depth", lambda self, num_drafted, num_missing, now: 3)
    monkeypatch.setattr(drafts.Drafter, "_best_count", lambda self, certainties, now: len(certainties))
    prompts = make_prompts([3, 20, 7])
    params = SamplingParams(n=2, max_new_tokens=40, temperature=temperature, seed=5)
    results = []
    for methods in ([], ["model"]):
        speculative = SpeculativeConfig(methods=methods, model_path=str(folders[kind]))
        engine = make_engine(
            "native", module=load("llama"), max_num_seqs=3, batch_invariant="require", speculative=speculative
        )
        results.append([(c.token_ids, c.log_probs) for c in engine.generate(prompts, params, step=3)])
    assert results[0] == results[1]
    assert engine.stats()["num_drafts"] > 0


class Clock(SimpleNamespace):
    """A clock that only computation moves."""

    now = 0.0

    def perf_counter(self):
        return self.now


def bound_by_bytes(num_tokens):
    return max(num_tokens, 8) + 8


def bound_by_sums(num_tokens):
    return 1 + num_tokens


def simulated_s(make_engine, module, monkeypatch, speculative, rows, costs, share, params):
    """Simulated seconds and decode steps of a generation, when a step takes `costs` of its tokens."""
    clock, step, logits = Clock(), HostBackend.step, DraftModel.logits

    def timed_step(self, chunks):
        clock.now += costs(len(self.rows.inputs().rows) + sum(c.end - c.start for _, c in chunks))
        return step(self, chunks)

    def timed_logits(self, names):
        clock.now += share * costs(sum(len(s.text) - s.num_stored for s in map(self._samples.get, names)))
        return logits(self, names)

    with monkeypatch.context() as patched:
        patched.setattr(drafts, "time", clock)
        patched.setattr(scheduler, "time", clock)
        patched.setattr(HostBackend, "step", timed_step)
        patched.setattr(DraftModel, "logits", timed_logits)
        engine = make_engine(
            "native", module=module, max_num_seqs=rows, batch_invariant="require", speculative=speculative
        )
        if engine._drafts is not None and engine._drafts.model is not None:
            engine._drafts.model.share = share
        engine.generate(make_prompts([9] * 3 * rows), params, step=1)
    return clock.now, engine.stats()["num_decode_steps"]


@pytest.mark.parametrize("costs", [bound_by_bytes, bound_by_sums])
@pytest.mark.parametrize(
    ("rows", "share"),
    [(4, 0.3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0.5), (2, 0.1), (16, 0.1)))],
)
@pytest.mark.parametrize("methods", [["ngram", "history"], ["model"], ["ngram", "model"]])
def test_drafts_that_are_wrong_cost_at_most_a_fiftieth(
    methods, rows, share, costs, folders, make_engine, load, monkeypatch
):
    params = SamplingParams(n=1, max_new_tokens=250, temperature=1.0, seed=5, ignore_eos=True)
    ways = [SpeculativeConfig(), SpeculativeConfig(methods=methods, model_path=str(folders["wrong"]))]
    plain, drafted = (
        simulated_s(make_engine, load("llama"), monkeypatch, way, rows, costs, share, params)[0] for way in ways
    )
    assert drafted / plain <= 1.02


@pytest.mark.parametrize(("rows", "share", "gain"), [(1, 0.05, 2.0), (2, 0.1, 1.6), (4, 0.1, 1.1), (64, 0.1, 0.99)])
def test_drafts_that_are_right_save_time_where_tokens_cost_little(
    rows, share, gain, folders, make_engine, load, monkeypatch
):
    params = SamplingParams(n=1, max_new_tokens=100, temperature=1.0, seed=5, ignore_eos=True)
    ways = [SpeculativeConfig(), SpeculativeConfig(methods=["model"], model_path=str(folders["right"]))]
    plain, drafted = (
        simulated_s(make_engine, load("llama"), monkeypatch, way, rows, bound_by_bytes, share, params)[0]
        for way in ways
    )
    assert plain / drafted >= gain


def test_a_draft_model_with_other_tokens_is_refused(folders, make_engine, load, tmp_path):
    folder = make_tiny_model(tmp_path / "other")
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    assert '"a":' in text
    assert '"b":' in text
    file.write_text(text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":'), encoding="utf-8")
    speculative = SpeculativeConfig(methods=["model"], model_path=str(folder))
    with pytest.raises(
        ConfigError, match=r"splits text into other tokens than the policy: 6 of the policy's 259 differ"
    ):
        make_engine("native", module=load("llama"), batch_invariant="require", speculative=speculative)


def test_a_draft_model_that_only_its_modules_compute_is_refused(tmp_path):
    module = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model", "bloom"))
    with pytest.raises(
        ConfigError, match="model_path names a BloomForCausalLM, which the decoding kernels of a CPU do not"
    ):
        DraftModel(module, 264, 1.0)
