"""Stages of the user's own in the program that `verl train` runs."""

import pytest

from verl.errors import ConfigError, DataError
from verl.programs.stages import Stages

pytestmark = pytest.mark.seed("A5")

STAGES = '''
from verl.programs.stages import Stage

def even_rows(batch, step):
    return batch.select_idxs([i for i, row in enumerate(batch.batch["row_index"].tolist()) if row % 2 == 0])

def nothing(batch, step):
    return batch.select_idxs([])

def twice(batch, step):
    return type(batch).concat([batch, batch])

def raises(batch, step):
    raise KeyError("no such column")

class Zero(Stage):
    def credited(self, batch, step):
        batch.batch["advantages"].zero_()
        return batch

class Count(Stage):
    """Counts its calls, and those of all runs before."""

    def __init__(self, limit):
        self.limit, self.calls = limit, 0

    def scored(self, batch, step):
        self.calls += 1
        assert self.calls <= self.limit, f"call {self.calls}"
        return batch

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("stages") / "stages.py"
    path.write_text(STAGES)
    return path


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_filter_is_refilled(tiny_run, file, ahead):
    """Prompts that a stage leaves out are replaced, so every step trains four groups."""
    run = tiny_run(f"algorithm.stages=[{file}:even_rows]", f"actor_rollout_ref.rollout.prefetch_num={ahead}")
    for row in run.training_rows():
        assert row["training/filter_groups/num_groups_kept"] >= 4
        assert row["training/filter_groups/num_gen_batches"] > 1
    assert len(run.samples_of(1) + run.samples_of(2)) == 2 * 4 * 4


def test_credit_is_changed(tiny_run, file):
    run = tiny_run(f"algorithm.stages=[{file}:Zero]")
    assert [row["actor/grad_norm"] for row in run.training_rows()] == [0.0, 0.0]


def test_state_is_resumed(tiny_run, file):
    """The second half of the run counts on from the first."""
    stages = "algorithm.stages=[{path: '%s:Count', limit: %d}]"
    tiny_run(stages % (file, 2), "trainer.save_freq=1")
    with pytest.raises(ConfigError, match="call 3"):
        tiny_run(stages % (file, 2), "trainer.save_freq=1", "trainer.total_training_steps=4")
    tiny_run(stages % (file, 4), "trainer.save_freq=1", "trainer.total_training_steps=4")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nothing", DataError, "left by algorithm.stages"),
        ("twice", ConfigError, "rows that it was not given"),
        ("raises", ConfigError, r"raises failed in step 1 \(scored\): KeyError"),
    ],
)
def test_a_wrong_stage_is_named(tiny_run, file, name, error, words):
    with pytest.raises(error, match=words):
        tiny_run(f"algorithm.stages=[{file}:{name}]", "algorithm.filter_groups.max_num_gen_batches=2")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("missing", "has no 'missing'"),
        ("Count", "cannot be made: TypeError"),
        ("STAGES", "has no"),
        ("Stage", "neither"),
    ],
)
def test_what_cannot_be_made_is_refused(file, entry, words):
    entries = [7] if entry == "Stage" else [f"{file}:{entry}"]
    with pytest.raises(ConfigError, match=words):
        Stages(entries)
