"""`verl.Run`: a run as data frames."""

import sys

import pytest

import verl
from tests.page.folders import make_run
from verl.errors import CheckpointError, ConfigError, MissingExtraError


@pytest.fixture
def run(tmp_path):
    return verl.Run(make_run(tmp_path / "run"))


class TestFrames:
    @pytest.fixture(autouse=True)
    def needs_pandas(self):
        pytest.importorskip("pandas", reason="data frames need pandas (the extra `scripts`)")

    def test_metrics(self, run):
        frame = run.metrics()
        assert list(frame.index) == [1, 2, 3]
        assert frame["actor/grad_norm"].tolist() == pytest.approx([1, 1 / 2, 1 / 3])

    def test_samples(self, run):
        assert len(run.samples()) == 48
        assert set(run.samples(step=2)["ordinal"]) == {4, 5, 6, 7}
        assert run.samples(step=9).empty

    def test_timeline(self, run):
        assert run.timeline().loc[2, "rollout"] == 1.0

    def test_ledger(self, run):
        with pytest.raises(CheckpointError, match="There is no sample ledger"):
            run.ledger()


def test_the_model_is_of_the_newest_checkpoint_not_of_a_renamed_copy(run):
    for name in ("global_step_9", "global_step_10", "global_step_10_before_the_change", "global_step_12.old"):
        (run.folder / name / "actor/huggingface").mkdir(parents=True)
    assert run.model_path == run.folder / "global_step_10/actor/huggingface"


def test_summary_and_displays(run):
    summary = run.summary()
    assert (summary["status"], summary["step"], summary["total_steps"]) == ("stopped", 3, 10)
    assert summary["metrics"]["critic/score/mean"] == 0.5
    assert summary["bottleneck"] == "rollout-bound"
    assert "stopped at step 3" in repr(run)
    assert "<svg" in run._repr_html_()


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        verl.Run(tmp_path)


def test_without_pandas(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pandas>=2.2'"):
        run.metrics()
