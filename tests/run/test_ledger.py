"""The ledger of real runs: it agrees with what trained, and a run that is broken off and resumed has the same one."""

import json
import shutil
import sqlite3

import pytest

from tests.run.test_resume import weights
from verl.errors import CheckpointError
from verl.tracking.ledger.reader import Ledger
from verl.tracking.ledger.tracker import ResponseLengths

AHEAD = ("actor_rollout_ref.rollout.prefetch_num=2", "actor_rollout_ref.rollout.partial_rollout=True")
SLOW_REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(int.from_bytes(os.urandom(2), "big") / 65535 * {longest})
    return {{"score": sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)}}
"""


def steps(last, save=1):
    return f"trainer.total_training_steps={last}", f"trainer.save_freq={save}"


def ledger_of(run):
    with Ledger.open(run.folder) as ledger:
        return ledger.counts(), ledger.multiset_of_trained(), ledger.offset()


def test_the_ledger_has_what_trained(tiny_run):
    run = tiny_run(*steps(2))
    for step in (1, 2):
        rows = run.samples_of(step)
        with Ledger.open(run.folder) as ledger:
            samples = ledger.trained(step)
        assert [(s.ordinal, s.sample) for s in samples] == [(row["ordinal"], row["sample_index"]) for row in rows]
        for sample, row in zip(samples, rows, strict=True):
            assert sample.tokens.tolist() == row["response_ids"]
            assert sample.log_probs.tolist() == row["log_probs"]
            assert (sample.reward, sample.parts) == (row["score"], row["reward_parts"])
            assert set(sample.token_versions) == {row["weight_version"]}
            assert (sample.finish_reason, sample.error) == (row["finish_reason"], None)
    saved = json.loads((run.folder / "global_step_2/trainer_state.json").read_text())
    counts, _, offset = ledger_of(run)
    assert (counts.trained, counts.pending, counts.twice) == (32, 0, 0)
    assert saved["samples"] == {"run": saved["samples"]["run"], **vars(offset)}
    assert "next_ordinal" not in saved  # there is one cursor
    assert run.rows[-1]["training/next_ordinal"] == offset.cursor == 8
    assert not (run.folder / "global_step_2/samples").exists()  # nothing was open


def without_checkpoints_after(step, folder):
    """As if the run had been killed before it saved more; its ledger knows more."""
    for newer in folder.glob("global_step_*"):
        if int(newer.name.split("_")[-1]) > step:
            shutil.rmtree(newer)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_resumed_run_has_the_ledger_of_the_unbroken_one(tiny_run, ends_after, around):
    """Samples made ahead and in parts: the queue is filled from the ledger, and from the checkpoint when that is lost. The
    second epoch begins with the prompts of long responses in the first."""
    expected = []
    around(ResponseLengths, "of", lambda of, *args: expected.append(of(*args).tolist()) or of(*args))
    ahead = (*AHEAD, "data.train_max_samples=8")
    unbroken = tiny_run(*ahead, *steps(5), folder="unbroken")
    *_, last = begun = [lengths for lengths in expected if any(lengths)]
    ends_after(3)
    broken = tiny_run(*ahead, *steps(5), folder="broken")
    without_checkpoints_after(2, broken.folder)
    expected.clear()
    resumed = tiny_run(*ahead, *steps(5), folder="broken")
    assert len(begun) == 2
    assert [lengths for lengths in expected if any(lengths)] == [last]
    assert ledger_of(resumed)[1:] == ledger_of(unbroken)[1:]
    assert weights(resumed, 5) == weights(unbroken, 5)
    assert resumed.repeatable == unbroken.repeatable
    without_checkpoints_after(2, broken.folder)
    (broken.folder / "ledger.sqlite").unlink()
    expected.clear()
    lost = tiny_run(*ahead, *steps(5), folder="broken")
    assert [lengths for lengths in expected if any(lengths)] == [last]
    assert weights(lost, 5) == weights(unbroken, 5)
    counts, _, offset = ledger_of(lost)
    assert offset == ledger_of(unbroken)[2]
    assert (counts.before, counts.trained) == (32, 48)


def test_a_ledger_that_disagrees_stops_the_run_before_it_trains(tiny_run):
    run = tiny_run(*steps(1))
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        db.execute("UPDATE steps SET cursor = 8")
    db.close()
    with pytest.raises(CheckpointError, match="does not agree with the checkpoint"):
        tiny_run(*steps(2))
    (run.folder / "ledger.sqlite").rename(run.folder / "away.sqlite")  # as the message says
    assert tiny_run(*steps(2)).rows[-1]["training/next_ordinal"] == 8


def test_the_order_in_which_scores_arrive_changes_nothing(tiny_run, tmp_path):
    """Four workers, and delays that differ from run to run: the same weights, bit for bit."""
    runs = []
    for name, longest in (("at once", 0.0), ("late", 0.03)):
        reward = tmp_path / f"{name.replace(' ', '_')}.py"
        reward.write_text(SLOW_REWARD.format(longest=longest))
        changes = (f"reward.custom_reward_function.path={reward}", "reward.num_workers=4", "reward.debug=False")
        run = tiny_run(*changes, *steps(2, save=2), folder=name)
        runs.append((weights(run, 2), ledger_of(run)[1:], [row["actor/pg_loss"] for row in run.training_rows()]))
    assert runs[0] == runs[1]
