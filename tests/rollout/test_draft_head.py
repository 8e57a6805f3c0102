"""The policy's head for further tokens guesses behind samples, follows its training, and changes no bit of a sample."""

from dataclasses import replace

import pytest
import torch

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine as make_trainer
from tests.engines.tiny import make_model_with_head
from tests.models.reference import make_columns
from tests.rollout.conftest import make_prompts
from verl.config import RolloutConfig, load_config
from verl.config.sections.model import MTPConfig
from verl.config.sections.rollout import SpeculativeConfig
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.engines.api import MicroBatching
from verl.errors import ConfigError, ModelError
from verl.models.forward import decoder_states
from verl.models.further_heads import FurtherHead
from verl.models.load import load_causal_lm
from verl.models.packing import pack_rows
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.drafts import drafter as drafts
from verl.rollout.native.drafts.costs import StepCosts
from verl.rollout.native.drafts.head import DraftHead
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.torch.forward import DenseForward

pytestmark = pytest.mark.skipif(kernels() is None, reason="the decoding kernels are not compiled for this processor")
MTP = SpeculativeConfig(methods=["mtp"], num_speculative_tokens=3)
PARAMS = SamplingParams(n=2, max_new_tokens=40, temperature=0.0, seed=5, ignore_eos=True)
LENGTHS = [3, 20, 7]


@pytest.fixture(params=["qwen2", "qwen3"])
def folder(request, tmp_path):
    return make_model_with_head(tmp_path / "model", request.param)


@pytest.fixture
def tries_all(monkeypatch):
    """Three guesses of each row in each step, whatever they cost."""
    monkeypatch.setattr(drafts.Drafter, "_depth", lambda self, num_drafted, num_missing, now: 3)
    monkeypatch.setattr(drafts.Drafter, "_best_count", lambda self, certainties, now: len(certainties))
    monkeypatch.setattr(drafts, "_MOST_LEAST", 1e9)
    monkeypatch.setattr(StepCosts, "of", lambda self, num_tokens: 1.0)


def rollout_of(module, speculative=MTP, **config):
    config = RolloutConfig(**{"max_num_seqs": 4, "batch_invariant": "require", "speculative": speculative, **config})
    return NativeRollout(module, None, config, eos_token_ids=[258])


def samples(engine, params=PARAMS, step=1):
    done = engine.generate(make_prompts(LENGTHS), params, step=step)
    return [(c.token_ids, c.log_probs) for c in done]


def batch_of(prompts, responses):
    return DataProto.from_dict(make_columns(prompts, responses))


def packed_of(text):
    """A text, whose last token is an input too."""
    batch = batch_of([text[:1]], [[*text[1:], 0]]).batch
    return pack_rows(batch, share_prompts=False, device=torch.device("cpu"))


def reference(module, head, text):
    """Logits of the head behind each pair of a text, by torch: of the token after the next."""
    with torch.no_grad():
        return module.get_output_embeddings()(head(module, packed_of(text)))


def states_of(module, text):
    """The policy's states of a text before the final norm, by transformers' modules."""
    captured, decoder = [], module.get_decoder()
    hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0][0]))
    with torch.no_grad():
        decoder_states(decoder, packed_of(text))
    hook.remove()
    return captured[0]


@pytest.mark.parametrize("ends", [[37], [5, 6, 9, 37]])
def test_logits_are_those_that_train(ends, folder):
    """Also of a text that grows, behind guesses that were wrong."""
    module = load_causal_lm(folder, dtype=torch.float32).requires_grad_(False)
    model, text = DraftHead(module), list(range(3, 40))
    policy = DenseForward.of(module, prepack=True)
    model.open(policy)
    states, num_seen = states_of(module, text), 0
    expected = reference(module, FurtherHead.of(module, ""), text)
    for end in ends:
        model.see("a", num_seen, states[num_seen : end - 1])
        assert model.follow("a", end, lambda start, end=end: text[start:end]) == end - 1 - max(0, num_seen)
        num_seen = end - 1
        logits = model.logits(["a"])
        torch.testing.assert_close(logits[0], expected[end - 2], rtol=1e-4, atol=1e-4)
        for guess in (50, 51):
            model.push("a", guess)
            model.logits(["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_head_is_accepted_more_often_and_changes_no_sample(dtype, folder, tries_all):
    """Greedy samples of a random policy repeat; the head learns them."""
    module = load_causal_lm(folder, dtype=torch.float32).to(dtype).requires_grad_(False)
    expected = samples(rollout_of(module, SpeculativeConfig()))
    engine, head = rollout_of(module), FurtherHead.of(module, "")
    assert samples(engine) == expected
    before = engine.stats()
    optimizer = torch.optim.AdamW(head.requires_grad_(True).parameters(), lr=3e-3)
    prompts = [list(p.token_ids) for p in make_prompts(LENGTHS) for _ in range(PARAMS.n)]
    texts = batch_of(prompts, [tokens for tokens, _ in expected])
    for _ in range(40):
        head.loss(module, texts, int(texts.batch["response_mask"].sum()))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert samples(engine) == expected
    after = engine.stats()
    assert after["num_accepted_drafts"] > 2 * before["num_accepted_drafts"] + 50
    assert after["num_decode_steps"] < 0.7 * before["num_decode_steps"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_of_a_trained_policy_follows_it(dtype, folder, tries_all):
    trainer = make_trainer(folder, dtype=dtype, model={"mtp": MTPConfig(enable=True, enable_train=True)})
    module, params = trainer.module, replace(PARAMS, temperature=1.0)
    engine, plain = rollout_of(module), rollout_of(module, SpeculativeConfig())
    assert engine._drafts.model._head is trainer._further
    for step in range(2):
        expected = samples(plain, params, step)
        assert samples(engine, params, step) == expected
        assert engine.stats()["num_drafts"] > 0
        text = list(range(3, 30))
        model = engine._drafts.model
        model.open(engine.dense())
        model.see("a", 0, states_of(module, text)[:-1])
        model.follow("a", len(text), lambda start: text[start:])
        logits = reference(module, trainer._further, text)[-2].float()
        torch.testing.assert_close(model.logits(["a"])[0], logits, rtol=0, atol=1e-4 if dtype == "float32" else 0.1)
        trainer.train_batch(make_batch(step), policy_loss, ("log_probs", "entropy"), MicroBatching(max_rows=2), 1.2)
        engine.publish(step + 1)
        plain.publish(step + 1)


def test_some_of_many_samples_have_states(folder, tries_all, monkeypatch):
    monkeypatch.setattr("verl.rollout.native.drafts.head.MOST_SAMPLES", 1)
    module, params = load_causal_lm(folder, dtype=torch.float32), replace(PARAMS, n=3)
    expected = samples(rollout_of(module, SpeculativeConfig(), max_num_seqs=9), params)
    engine = rollout_of(module, max_num_seqs=9)
    assert samples(engine, params) == expected
    assert 0 < engine.stats()["num_drafts"] < 3 * 9 * PARAMS.max_new_tokens


def test_what_is_refused(tiny_llama, tmp_path):
    module = load_causal_lm(tiny_llama, dtype=torch.float32)
    with pytest.raises(
        ModelError, match=r"has no heads that predict further tokens.*Set .*methods=\[ngram\], or choose"
    ):
        rollout_of(module)
    mixture = load_causal_lm(make_model_with_head(tmp_path / "mixture", "qwen3_moe"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"\[mtp\] needs a dense model.*Choose ngram and history"):
        DraftHead(mixture)
    keys = ["rollout.speculative.methods=[model,mtp]", "rollout.speculative.model_path=a"]
    with pytest.raises(ConfigError, match="guess at the same places"):
        load_config([f"actor_rollout_ref.{key}" for key in keys])
