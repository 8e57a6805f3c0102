"""Weights that change while samples are generated: which weights made which token, equal bits, losses, resumes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.test_async import Later
from tests.run.test_resume import weights
from verl.errors import ConfigError
from verl.programs.ppo import PPO
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.runtime import local
from verl.runtime.local import LocalRuntime
from verl.tracking.ledger.reader import Ledger

pytestmark = pytest.mark.seed("D2")

ROLLOUT = "actor_rollout_ref.rollout"
AHEAD, STEPS = 3, 6
# lengths of 1 to 24 tokens, and few slots: samples of several batches pause in them
LONG_TAILED = (
    f"{ROLLOUT}.prefetch_num={AHEAD}",
    f"{ROLLOUT}.max_num_seqs=6",
    f"{ROLLOUT}.stop_token_ids={list(range(60))}",
    "data.max_response_length=24",
    f"trainer.total_training_steps={STEPS}",
)
IN_FLIGHT = (*LONG_TAILED, f"{ROLLOUT}.in_flight_updates=True")
KEEP, AGAIN = (f"{ROLLOUT}.in_flight_keys={name}" for name in ("kept", "computed_again"))
BOTH = pytest.mark.parametrize("keys", [KEEP, AGAIN], ids=["kept", "computed again"])


def of_samples(batch, name):
    """A column's values at the tokens of each sample."""
    columns = batch.batch
    return [row[mask].tolist() for row, mask in zip(columns[name], columns["response_mask"], strict=True)]


def test_each_token_has_its_version_in_batch_and_ledger(tiny_run, batches):
    run, spans = tiny_run(*IN_FLIGHT), set()
    for step, batch in enumerate(batches, 1):
        versions = of_samples(batch, "token_weight_version")
        for sample in versions:
            assert sample == sorted(sample)
            assert step - 1 - AHEAD <= sample[0] <= sample[-1] <= step - 1
            spans.add(sample[-1] - sample[0])
        with Ledger.open(run.folder) as ledger:
            recorded = [sample.token_versions.tolist() for sample in ledger.trained(step)]
        assert recorded == versions
    assert max(spans) >= 2  # within a response
    ages = [row["training/off_policy/trajectory_staleness/max"] for row in run.training_rows()]
    assert ages == [min(step, AHEAD) for step in range(STEPS)]


def test_a_generation_goes_on_until_the_next_batch_is_complete(tiny_run):
    """And as long as each slot has a sample: fewer decode steps than of whole batches, whose slots wait for the longest."""

    def num_steps(*settings, folder):
        return sum(row.get("rollout/num_decode_steps", 0) for row in tiny_run(*settings, folder=folder).training_rows())

    assert num_steps(*IN_FLIGHT, folder="in flight") < num_steps(*LONG_TAILED, folder="whole")


@BOTH
def test_without_learning_samples_equal_unbroken_ones(tiny_run, batches, keys):
    still = ("actor_rollout_ref.actor.optim.lr=1e-30",)
    for folder, settings in (("whole", LONG_TAILED), ("in flight", (*IN_FLIGHT, keys))):
        tiny_run(*settings, *still, folder=folder)
    names = ("responses", "rollout_log_probs")
    unbroken, paused = (
        [[of_samples(b, name) for name in names] for b in part] for part in (batches[:STEPS], batches[STEPS:])
    )
    assert paused == unbroken


@BOTH
def test_a_resumed_run_equals_the_unbroken_one(tiny_run, shared_run, tiny_overrides, ends_after, keys):
    settings = (*IN_FLIGHT, keys, "trainer.save_freq=2")
    unbroken = shared_run(tiny_overrides, *settings)
    ends_after(3)
    tiny_run(*settings, folder="broken")
    resumed = tiny_run(*settings, folder="broken")
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed, STEPS) == weights(unbroken, STEPS)


def test_a_slow_rollout_changes_no_sample(tiny_run, shared_run, tiny_overrides, monkeypatch):
    settings = (*IN_FLIGHT, KEEP, "trainer.save_freq=2")
    in_time = shared_run(tiny_overrides, *settings)
    monkeypatch.setattr(local, "Finished", Later)
    late = tiny_run(*settings)
    assert late.repeatable == in_time.repeatable
    assert weights(late, STEPS) == weights(in_time, STEPS)


@BOTH
def test_log_probs_and_loss_are_the_mathematics_in_float64(tiny_run, tiny_llama, batches, around, keys):
    """A token's sampled log-prob is of the weights of its version, over keys of earlier versions if they are kept. The loss
    weighs it by the current policy."""
    copies, runtimes = {}, []

    def update(original, self, result, step):
        module = runtimes[-1].workers.models["actor"].engine.module
        copies[step - 1] = {name: p.detach().double() for name, p in module.named_parameters()}
        original(self, result, step)

    around(LocalRuntime, "build_roles", lambda build, self, **more: runtimes.append(self) or build(self, **more))
    around(PPO, "update", update)
    rows = tiny_run(*IN_FLIGHT, keys).training_rows()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).double().eval()

    @torch.no_grad()
    def log_probs(prompt, response, versions):
        """Of `response`: each part by the weights of its version."""
        ids, parts, cache, start = torch.tensor([*prompt, *response]), [], None, 0
        for version in dict.fromkeys(versions):
            end = len(prompt) + len(versions) - versions[::-1].index(version) - 1  # tokens before the part's last one
            model.load_state_dict(copies[version], strict=False)
            begin = 0 if cache is None or keys == AGAIN else start
            output = model(ids[None, begin:end], past_key_values=cache if begin else None, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits[0, max(start, len(prompt) - 1) - begin :])
            start = end
        return torch.cat(parts).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    for step in (5, 6):
        columns, total, count = batches[step - 1].batch, 0.0, 0
        prompts = [row[mask].tolist() for row, mask in zip(columns["prompts"], columns["prompt_mask"], strict=True)]
        by_sample = (
            of_samples(batches[step - 1], n) for n in ("responses", "token_weight_version", "rollout_log_probs")
        )
        scores = columns["token_level_scores"].double().sum(dim=1).reshape(-1, 4)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).reshape(-1)
        for prompt, response, versions, sampled, advantage in zip(prompts, *by_sample, advantages, strict=True):
            expected = log_probs(prompt, response, versions)
            torch.testing.assert_close(torch.tensor(sampled).double(), expected, atol=2e-5, rtol=0)
            ratio = (log_probs(prompt, response, [step - 1] * len(response)) - expected).exp()
            total -= float((advantage * ratio.clamp(max=2)).sum())
            count += len(response)
        assert any(len(set(versions)) > 1 for versions in of_samples(batches[step - 1], "token_weight_version"))
        assert rows[step - 1]["actor/pg_loss"] == pytest.approx(total / count, abs=2e-5)


def test_a_model_that_another_engine_generates_is_refused_before_it_starts(tiny_run, monkeypatch):
    monkeypatch.setattr(NativeRollout, "for_module", lambda module: HFRollout)
    with pytest.raises(ConfigError, match="generated by HFRollout, which cannot pause"):
        tiny_run(*IN_FLIGHT)
