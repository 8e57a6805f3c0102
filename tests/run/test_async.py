"""Samples made ahead of training: which weights made what, what trains when, that nothing is too old, and resuming."""

import json
import math

import numpy as np
import pytest
import torch

from tests.run.test_resume import weights
from tests.slow import slow
from verl.data_proto.future import Finished
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, InterruptedRun
from verl.programs.collect import rollout_metrics
from verl.programs.ppo import PPO
from verl.programs.ppo_async import age_metrics
from verl.programs.rollout_queue import expected_tokens
from verl.roles.rollout import RolloutWorker
from verl.rollout.native.engine import NativeRollout
from verl.run.loop import StopRequested
from verl.runtime import local
from verl.runtime.local import LocalRuntime
from verl.tracking.ledger.reader import Ledger

pytestmark = pytest.mark.seed("D2")

PREFETCH = "actor_rollout_ref.rollout.prefetch_num"
PARTIAL = "actor_rollout_ref.rollout.partial_rollout=True"
OLDER_KEYS = "actor_rollout_ref.rollout.keep_partial_kv_cache=True"
STALENESS = "training/off_policy/trajectory_staleness"
STEPS = "trainer.total_training_steps=5"


@pytest.fixture
def in_parts(shared_run, tiny_overrides):
    """A run of five steps with samples made two ahead, in parts."""
    return shared_run(tiny_overrides, f"{PREFETCH}=2", PARTIAL, STEPS, "trainer.save_freq=1")


class Later(Finished):
    waited = False

    def ready(self):
        return self.waited

    def get(self):
        self.__dict__["waited"] = True
        return self.value


def tokens(batch):
    columns = batch.batch
    return [row[mask].tolist() for row, mask in zip(columns["responses"], columns["response_mask"], strict=True)]


@pytest.mark.parametrize("ahead", [slow(1), slow(2), 3])
def test_a_sample_is_as_old_as_the_queue_is_long_and_weighed_by_default(tiny_run, batches, ahead):
    rows = tiny_run(f"{PREFETCH}={ahead}", STEPS).training_rows()
    for step, (row, batch) in enumerate(zip(rows, batches, strict=True), 1):
        made_by = max(step - 1 - ahead, 0)
        assert set(batch.batch["weight_version"].tolist()) == {made_by}
        assert row[f"{STALENESS}/max"] == row[f"{STALENESS}/min"] == step - 1 - made_by <= ahead
        assert row["training/rollout_queue/qsize"] == min(ahead, len(rows) - step) + 1
        assert row["training/off_policy/evicted_samples"] == 0
        prompts_of_step = set(range(4 * (step - 1), 4 * step))  # each prompt once, in order
        assert set(batch.batch["ordinal"].tolist()) == prompts_of_step
        assert math.isfinite(row["actor/pg_loss"])
        assert "rollout_is_weights" in batch.batch.keys()
    last = batches[-1]
    mask = last.batch["response_mask"]
    ratio = (last.batch["old_log_probs"] - last.batch["rollout_log_probs"])[mask].exp()
    torch.testing.assert_close(last.batch["rollout_is_weights"][mask], ratio.clamp(max=2.0), rtol=1e-4, atol=1e-5)
    assert (ratio - 1).abs().max() > 1e-3  # the policy has moved since
    assert rows[-1]["rollout_corr/kl"] != 0


def test_the_user_decides_about_the_correction(tiny_run, batches):
    tiny_run(f"{PREFETCH}=1", "algorithm.rollout_correction.bypass_mode=True")
    assert all("rollout_is_weights" not in b.batch.keys() for b in batches)


def test_without_learning_samples_do_not_depend_on_the_queue(tiny_run, batches):
    """Weights that stay: whole, in parts, and however far ahead, the same tokens."""
    still = ("actor_rollout_ref.actor.optim.lr=1e-30", STEPS, "data.max_response_length=7")
    tiny_run(f"{PREFETCH}=2", *still, folder="whole")
    sampled = [tokens(b) for b in batches]
    batches.clear()
    for name, keys in (("parts", (PARTIAL,)), ("kept", (PARTIAL, OLDER_KEYS))):
        tiny_run(f"{PREFETCH}=2", *keys, *still, folder=name)
        assert [tokens(b) for b in batches] == sampled
        batches.clear()


def test_parts_of_a_response_are_made_by_newer_and_newer_weights(tiny_run, batches):
    rows = tiny_run(f"{PREFETCH}=2", PARTIAL, STEPS, "actor_rollout_ref.rollout.ignore_eos=True").training_rows()
    for step, batch in enumerate(batches, 1):
        begun = max(step - 1 - 2, 0)
        parts = [min(begun + part, step - 1) for part in range(3)]  # the first batches began together
        expected = [version for version, size in zip(parts, (1, 3, 2), strict=True) for _ in range(size)]
        assert batch.batch["token_weight_version"].tolist() == [expected] * len(batch)
        assert set(batch.batch["weight_version"].tolist()) == {begun}
    assert rows[-1]["training/off_policy/trajectory_spans/max"] == 2
    assert rows[-1][f"{STALENESS}/max"] == 2


def test_generation_has_ended_whenever_something_trains(tiny_run, around):
    """The KV cache is freed then, and the training weights are checked to be unchanged; also where the first batch is
    finished in the step that trains on it."""
    order = []
    words = {"generation": (NativeRollout, "open"), "end": (RolloutWorker, "end_generation"), "update": (PPO, "update")}
    for word, place in words.items():
        around(*place, lambda original, *args, word=word, **more: order.append(word) or original(*args, **more))
    tiny_run(f"{PREFETCH}=2", PARTIAL, "trainer.total_training_steps=4")
    steps = " ".join(order).split(" update")
    once = " generation end"
    assert steps == [(2 * once).lstrip(), 2 * once, once, once, ""]  # new and unfinished samples side by side


def test_sampled_log_probs_of_parts_match_their_weights(tiny_run, batches, around):
    """Each part's log-probs equal a forward pass under the version that made it."""
    copies, runtimes = {}, []

    def update(original, self, result, step):
        if not copies:
            copies[0] = module_copy()
        original(self, result, step)
        copies[self.weight_version] = module_copy()

    def module_copy():
        module = runtimes[-1].workers.models["actor"].engine.module
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    around(LocalRuntime, "build_roles", lambda build, self, **more: runtimes.append(self) or build(self, **more))
    around(PPO, "update", update)
    tiny_run(f"{PREFETCH}=1", PARTIAL, "trainer.total_training_steps=3", "actor_rollout_ref.rollout.ignore_eos=True")
    batch, actor = batches[-1], runtimes[-1].workers.models["actor"]
    sampled = batch.batch["rollout_log_probs"]
    for version, size in ((1, 1), (2, 5)):
        with torch.no_grad():
            for name, parameter in actor.engine.module.named_parameters():
                parameter.copy_(copies[version][name])
        ours = actor.forward(batch, {"log_probs": "ours"}).batch["ours"]
        at_version = batch.batch["token_weight_version"] == version
        assert at_version.sum() == len(batch) * size
        torch.testing.assert_close(sampled[at_version], ours[at_version], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("partial", [slow(False), True, "kept"])
def test_a_resumed_run_equals_the_unbroken_one(tiny_run, shared_run, tiny_overrides, ends_after, partial):
    """The queue is part of the checkpoint: what older weights made cannot be made again. Keys and values are not part of it,
    so no step behind a checkpoint reads any."""
    parts, keeps_kv = f"actor_rollout_ref.rollout.partial_rollout={partial is not False}", partial == "kept"
    settings = (f"{PREFETCH}=2", parts, f"trainer.save_freq={1 + keeps_kv}", *([OLDER_KEYS] if keeps_kv else []))
    unbroken = shared_run(tiny_overrides, *settings[:2], STEPS, *settings[2:])
    ends_after(3)
    tiny_run(*settings, STEPS, folder="broken")
    resumed = tiny_run(*settings, STEPS, folder="broken")
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed, 5) == weights(unbroken, 5)
    assert (resumed.folder / f"global_step_{3 - keeps_kv}/samples/ledger.sqlite").is_file()
    if keeps_kv:
        computed = [row["rollout/num_prompt_tokens_computed"] for row in unbroken.training_rows()]
        assert computed[1] < computed[2] > computed[3]


def test_a_step_that_was_abandoned_is_taken_again_alike(tiny_run, in_parts, around):
    settings = (f"{PREFETCH}=2", PARTIAL, STEPS, "trainer.save_freq=5")

    def stop_in_step_3(original, self, result):
        if result.batch.batch["ordinal"].min() == 8 and not stopped:
            stopped.append(True)
            raise StopRequested
        original(self, result)

    stopped = []
    around(PPO, "annotate", stop_in_step_3)
    with pytest.raises(InterruptedRun, match="after step 2"):
        tiny_run(*settings, folder="broken")
    resumed = tiny_run(*settings, folder="broken")
    assert stopped
    for ours, theirs in zip(resumed.repeatable, in_parts.repeatable, strict=True):
        differing = {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)}
        assert all(k.startswith("rollout/") for k in differing), differing  # metrics of what this process generated
    assert weights(resumed, 5) == weights(in_parts, 5)


def test_nothing_is_generated_that_does_not_train(tiny_run, batches):
    """Three steps of 4 prompts x 4 samples, then three more of the same run."""
    for last, generated in ((3, 48), (6, 96)):
        run = tiny_run(f"{PREFETCH}=2", f"trainer.total_training_steps={last}", "trainer.save_freq=3")
        with Ledger.open(run.folder) as ledger:
            counts = ledger.counts()
        assert (counts.trained, counts.pending) == (generated, 0)
    assert run.rows[-1]["training/rollout_queue/qsize"] == 1


def test_an_epoch_bounds_the_queue(tiny_run):
    run = tiny_run(f"{PREFETCH}=3", PARTIAL, "trainer.total_training_steps=null", "trainer.total_epochs=1")
    assert len(run.training_rows()) == 6
    with Ledger.open(run.folder) as ledger:
        assert (ledger.counts().trained, ledger.counts().pending) == (96, 0)


def test_samples_beyond_the_bound_never_train(tiny_run, batches, ends_after):
    """A queue that was filled for a wide bound, gone on with under a narrow one: prompts stay, old samples go."""
    ends_after(3)
    tiny_run(f"{PREFETCH}=4", "trainer.total_training_steps=8", "trainer.save_freq=3", folder="narrowed")
    batches.clear()
    narrow = (f"{PREFETCH}=1", "trainer.v1.sampler.max_off_policy_threshold=1")
    rows = tiny_run(*narrow, "trainer.total_training_steps=6", folder="narrowed").training_rows()[3:]
    assert [row["training/off_policy/evicted_samples"] for row in rows] == [16, 16, 16]
    assert all(row[f"{STALENESS}/max"] <= 1 for row in rows)
    for step, batch in enumerate(batches, 4):
        assert set(batch.batch["ordinal"].tolist()) == set(range(4 * (step - 1), 4 * step))


def test_a_queue_of_another_run_is_made_anew(tiny_run, batches, caplog, ends_after):
    ends_after(2)
    tiny_run(f"{PREFETCH}=2", "trainer.total_training_steps=4", "trainer.save_freq=2", folder="changed")
    batches.clear()
    tiny_run(f"{PREFETCH}=2", "trainer.total_training_steps=3", "data.max_response_length=5", folder="changed")
    assert "sampled again" in caplog.text
    assert batches[0].batch["responses"].shape[1] == 5


def test_filters_refill_from_the_queue(tiny_run, batches):
    tiny_run(f"{PREFETCH}=1", "algorithm.filter_groups.enable=True", "data.gen_batch_size=6", STEPS)
    for batch in batches:
        assert len(set(batch.non_tensor_batch["uid"])) == 4
    ordinals = [o for b in batches for o in sorted(set(b.batch["ordinal"].tolist()))]
    assert len(ordinals) == len(set(ordinals))


@pytest.mark.parametrize("estimator", ["remax", "gae"])
def test_other_estimators_train_ahead_too(tiny_run, tiny_llama, estimator):
    extra = [f"critic.model.path={tiny_llama}"] if estimator == "gae" else []
    rows = tiny_run(f"{PREFETCH}=1", f"algorithm.adv_estimator={estimator}", *extra).training_rows()
    assert all(math.isfinite(row["actor/pg_loss"]) for row in rows)


@pytest.mark.parametrize("mode", [slow("colocate_async"), "separate_async"])
def test_the_trainer_modes_of_scripts_choose_it(tiny_run, mode):
    rows = tiny_run(f"trainer.v1.trainer_mode={mode}", f"trainer.v1.{mode}.num_warmup_batches=2", STEPS).training_rows()
    assert rows[-1][f"{STALENESS}/max"] == 2


SYNC = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ((f"{PREFETCH}=2", "trainer.v1.sampler.max_off_policy_threshold=1"), "max_off_policy_threshold=1"),
        (SYNC, "parameter_sync_step=4 needs a rollout on separate devices"),
        ((*SYNC, "trainer.v1.sampler.max_off_policy_threshold=3"), "samples up to 4 weight versions old, more than"),
    ],
    ids=["more ahead than the bound", "a sync every few steps", "older than the bound"],
)
def test_a_queue_that_cannot_be_is_refused(tiny_run, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        tiny_run(*settings)


def test_more_is_expected_of_what_longer_ones_had_beyond():
    expected = expected_tokens(np.array([10, 30, 50]), np.array([4, 20, 36, 60]), 20)
    assert expected.tolist() == pytest.approx([(10 + 20 + 20) / 3, (6 + 20) / 2, 10])
    # nothing says how long the second is
    assert expected_tokens(np.array([5, 70]), np.array([60]), 20).tolist() == [20, 20]
    assert expected_tokens(np.array([5]), np.array([], dtype=int), 20).tolist() == [20]


def test_ages_count_versions():
    batch = DataProto.from_dict(
        {
            "response_mask": torch.tensor([[True, True], [True, False]]),
            "weight_version": torch.tensor([3, 5]),
            "token_weight_version": torch.tensor([[3, 4], [5, 9]]),
        }
    )
    ages = {k.removeprefix("training/off_policy/trajectory_"): m.value for k, m in age_metrics(batch, 6).items()}
    assert ages == {
        "staleness/mean": 2.0, "staleness/max": 3.0, "staleness/min": 1.0,
        "spans/mean": 0.5, "spans/max": 1.0, "spans/min": 0.0,
    }  # fmt: skip


def test_a_slow_rollout_changes_no_sample(tiny_run, in_parts, monkeypatch):
    """Answers that come late, as from separate devices: the same samples train in the same steps."""
    monkeypatch.setattr(local, "Finished", Later)
    late = tiny_run(f"{PREFETCH}=2", PARTIAL, STEPS, "trainer.save_freq=5")
    assert late.repeatable == in_parts.repeatable
    assert weights(late, 5) == weights(in_parts, 5)
    assert json.loads((in_parts.folder / "timeline.jsonl").read_text().splitlines()[0])["of"] == 5


def test_counts_and_seconds_of_two_generations_are_added():
    first = {"num_tokens": Metric.sum(3.0), "seconds": Metric.max(1.0), "num_replicas": Metric.sum(2.0)}
    second = {"num_tokens": Metric.sum(4.0), "seconds": Metric.max(2.0), "num_replicas": Metric.sum(2.0)}
    values = {name: metric.value for name, metric in rollout_metrics(first, second).items()}
    assert values == {"rollout/num_tokens": 7.0, "rollout/seconds": 3.0, "rollout/num_replicas": 2.0}
