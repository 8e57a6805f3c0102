"""Validation metrics: names of reward parts, samples without a score, and the labels of greedy validation."""

import json

import numpy as np
import pytest
import torch

from tests.letters_task import write_reward
from tests.run.test_resume import weights
from verl.data_proto.batch_metrics import data_metrics
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.errors import RewardError
from verl.page.index import SampleIndex
from verl.programs.collect import Validator, _scores, _summarise

NUM_ROWS = 4
SOURCES = ["math", "math", "math/greedy", "other"]


def scored_batch(parts, errors=(None,) * NUM_ROWS, is_scored=(True,) * NUM_ROWS):
    """Four samples of the score 0.25, each with `parts`."""
    mask = torch.ones(NUM_ROWS, 2, dtype=torch.bool)
    return DataProto.from_dict(
        {
            "responses": torch.zeros(NUM_ROWS, 2, dtype=torch.long),
            "attention_mask": torch.ones(NUM_ROWS, 4, dtype=torch.bool),
            "response_mask": mask,
            "token_level_scores": torch.tensor([[0.0, 0.25]]).repeat(NUM_ROWS, 1),
            "is_scored": torch.tensor(is_scored),
        },
        {
            "data_source": object_array(SOURCES),
            "uid": object_array([str(row) for row in range(NUM_ROWS)]),
            "reward_parts": object_array([dict(parts) for _ in range(NUM_ROWS)]),
            "reward_error": object_array(errors),
        },
    )


def metrics_of(batch):
    metrics = _summarise(batch, _scores(batch), "") | _summarise(batch, _scores(batch), "/greedy")
    return metrics | data_metrics(batch, max_prompt_length=2, max_response_length=2)


def test_a_part_of_any_name_changes_no_other_metric():
    """Two samples a prompt with different scores, so that there are metrics of their spread too; math comes last, so that its
    parts would replace metrics of math/greedy."""

    def metrics_with(parts):
        batch = DataProto.concat([scored_batch(parts)] * 2)
        batch.batch["token_level_scores"][NUM_ROWS:] *= 3
        return metrics_of(batch.select_idxs(np.arange(2 * NUM_ROWS)[::-1].copy()))

    built_in = metrics_with({})
    assert built_in["val-core/math/reward/mean@2"] == 0.5
    names = set("reward score length num_turns response_length val greedy reward_part parts/reward".split())
    for metric in built_in:
        words = metric.split("/")
        names |= {"/".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    for chosen in [*({name} for name in names), names]:
        metrics = metrics_with(dict.fromkeys(chosen, 100.0))
        assert {name: metrics[name] for name in built_in} == built_in, chosen
        part_values = {value for name, value in metrics.items() if name not in built_in}
        assert 100.0 in part_values, chosen
        assert part_values <= {0.0, 100.0}, chosen  # spread and mean


def test_a_part_called_acc_is_the_core_variable_and_the_reward_remains():
    metrics = metrics_of(scored_batch({"acc": 1.0, "reward": 100.0}))
    assert metrics["val-core/math/acc/mean@1"] == 1.0
    assert metrics["val-aux/math/reward/mean@1"] == 0.25
    assert metrics["val-aux/math/reward_part/mean@1"] == 100.0


def test_parts_are_averaged_in_training_over_the_rows_that_have_them():
    batch = scored_batch({"form": 1.0}, is_scored=(True, True, True, False))
    batch.non_tensor_batch["reward_parts"][:] = object_array(
        [{"form": 1.0, "text": "a"}, {"form": 0.0, "rare": True}, {}, {"form": 50.0}]
    )
    metrics = data_metrics(batch, max_prompt_length=2, max_response_length=2)
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/form/mean": 0.5,
        "reward/rare/mean": 1.0,
    }


def test_samples_without_a_score_are_missing_in_validation():
    errors = ("failed", None, None, None)
    metrics = metrics_of(scored_batch({"acc": 1.0}, errors, is_scored=(False, True, True, True)))
    assert metrics["val-aux/math/reward/mean@1"] == 0.25
    batch = scored_batch({}, errors, is_scored=(True,) * NUM_ROWS)  # reward.default_score
    batch.non_tensor_batch["reward_parts"][1:] = object_array([{"acc": 1.0}] * 3)
    assert metrics_of(batch)["val-core/math/acc/mean@1"] == (0.25 + 1.0) / 2
    assert np.isnan(_scores(scored_batch({}, errors, is_scored=(False, True, True, True)))[0])


def test_both_validations_count_their_samples_without_a_score():
    batch, validator = scored_batch({}, is_scored=(False, True, True, True)), Validator.__new__(Validator)
    sampled, greedy = (
        validator._summarised(batch, 1, mean, suffix)
        for mean, suffix in (("val/reward", ""), ("val/greedy", "/greedy"))
    )
    assert (sampled["val/num_unscored"], greedy["val/num_unscored/greedy"]) == (1, 1)
    assert not any("unscored" in name for name in validator._summarised(scored_batch({}), 1, "val/reward"))


FAILING = "raise ValueError('judge down')"


@pytest.mark.parametrize("before", [True, False])
def test_a_run_in_which_nothing_can_be_scored_stops(tiny_run, tmp_path, before):
    first = "Validation" if before else "Step 1"
    with pytest.raises(RewardError, match=f"{first}: none of the .* could be scored.*judge down"):
        tiny_run(write_reward(tmp_path, FAILING), f"trainer.val_before_train={before}")


def test_failed_scores_are_left_out_of_their_group(tiny_run, tmp_path):
    """Each sample with an even number of letters fails; the others score the same, so that nothing trains."""
    fails = write_reward(tmp_path, f"if len(solution_str) % 2:\n    return 1.0\n{FAILING}")
    settings = (fails, "trainer.total_training_steps=1", "trainer.val_before_train=False")
    run = tiny_run(*settings)
    (row,) = run.training_rows()
    samples = run.samples_of()
    failed = [sample for sample in samples if sample["reward_error"]]
    assert 0 < len(failed) < len(samples)
    assert row["critic/score/mean"] == row["critic/score/min"] == 1.0
    assert row["critic/advantages/max"] == row["critic/advantages/min"] == 0.0
    assert all(not any(sample["response_mask"]) for sample in failed)
    assert all((sample["score"] is None) == (sample in failed) for sample in samples)
    index = SampleIndex(run.folder, tmp_path)
    index.update()
    ((stats,),) = index.statistics().values()
    assert (stats["mean"], stats["low"], stats["high"], stats["without_signal"]) == (1.0, 1.0, 1.0, 1.0)
    default = tiny_run(*settings, "reward.default_score=0", folder="default")
    assert default.training_rows()[0]["critic/advantages/max"] > 0


def test_a_step_without_any_score_is_left_out(tiny_run, tmp_path):
    """The judge is down for the 16 samples of step 2."""
    calls = "calls = compute_score.__dict__.setdefault('calls', [])\ncalls.append(1)\n"
    fails = f"{calls}if not 16 < len(calls) <= 32:\n    return len(solution_str) % 3\n{FAILING}"
    run = tiny_run(
        write_reward(tmp_path, fails), "trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.save_freq=1",
        "data.val_files=null",
    )  # fmt: skip
    rows = run.training_rows()
    assert [row.get("training/skipped_batches", 0) for row in rows] == [0, 1, 0]
    assert "critic/score/mean" not in rows[1]
    assert weights(run, 1) == weights(run, 2) != weights(run, 3)


@pytest.mark.parametrize("greedy", [True, False])
def test_held_out_curves_are_named_as_they_are_decoded(tiny_run, greedy):
    temperature = f"actor_rollout_ref.rollout.val_kwargs.temperature={0 if greedy else 1}"
    run = tiny_run("trainer.total_training_steps=1", temperature)
    curves = json.loads((run.folder / "curves.json").read_text())["mean reward"]
    expected = {"val/reward": "held-out, greedy"} if greedy else {"val/reward": "held-out, sampled"}
    assert {**expected, "critic/score/mean": "training"}.items() <= curves.items()
    assert ("val/greedy" in curves) == (not greedy)
