"""benchmarks/soak.py: the conclusions from readings and, as a slow test, a short run."""

import json
import math
import random

import psutil
import pytest
import soak
from soak import Watched, fitted, name_of, points_of, slope_of, steps_at, stretches, time_of_steps

from verl.config import load_config

ROWS = [{"step": n, "time": 100 + 0.1 * n, "timing_s/step": 0.08, "timing_s/gen": 0.05} for n in range(1, 2001)]


def readings(slope_mb, noise_mb=0.0):
    """Twice a second for the whole run: `slope_mb` per 1,000 steps after a steep beginning."""
    draw = random.Random(3)
    rows = []
    for i in range(420):
        now = 98 + 0.5 * i
        step = (now - 100) * 10
        steep = 100 * min(max(step, 0) / 300, 1)
        memory = 300 + steep + slope_mb * step / 1000 + noise_mb * draw.gauss(0, 1)
        rows.append((now, int(memory * 1e6), 40))
    return rows


def test_steps_between_two_rows():
    rows = [{"step": 1, "time": 10.0}, {"step": 2, "time": 12.0}, {"step": 4, "time": 16.0}]
    steps = steps_at([9.0, 10.0, 11.0, 14.0, 16.5], rows)
    assert [f for f in steps if not math.isnan(f)] == [1.0, 1.5, 3.0]
    assert math.isnan(steps[0])
    assert math.isnan(steps[4])


@pytest.mark.parametrize("slope_mb", [0.0, 0.5, 5.0])
def test_the_slope_after_the_warm_up(slope_mb):
    clean = slope_of(readings(slope_mb), ROWS, of=1, scale=1e-6)
    assert clean.per_thousand == pytest.approx(slope_mb, abs=0.01)
    noisy = slope_of(readings(slope_mb, noise_mb=2.0), ROWS, of=1, scale=1e-6)
    assert abs(noisy.per_thousand - slope_mb) < 2 * noisy.error
    assert 0.1 < noisy.error < 2
    assert slope_of(readings(slope_mb), ROWS, of=2).per_thousand == 0


def test_a_process_that_came_late_has_no_slope():
    assert slope_of(readings(0.0)[300:], ROWS, of=1) is None
    assert slope_of([], ROWS, of=1) is None


def test_a_line_and_its_error_by_hand():
    line = fitted([(0.0, 0.0), (1.0, 2.0), (2.0, 1.0)])
    assert line.per_thousand == pytest.approx(0.5)
    assert line.error == pytest.approx(2 * math.sqrt(1.5 / 1 / 2))
    assert fitted([(0.0, 1.0), (1.0, 1.0)]) is None
    assert stretches([(float(i), 1.0) for i in range(40)])[0] == (0.5, 1.0)
    assert points_of(readings(0.0), ROWS, 1)[0][0] >= 500


def test_processes_have_names():
    known = {}
    for pid, (command, is_root, expected) in enumerate(
        [
            (["python", "-m", "verl", "train"], True, "first process"),
            (["python", "-m", "verl train"], False, "training"),
            (["python", "-m", "verl.rewards.worker", "3"], False, "reward worker"),
            (["python", "-m", "verl.rewards.worker", "4"], False, "reward worker #2"),
            (["git"], False, "other"),
        ]
    ):
        name = name_of(command, is_root, known)
        assert name == expected
        known[pid] = Watched(name, psutil.Process())


def test_where_the_time_goes():
    lines = {name: (ms, share) for name, ms, share in time_of_steps(ROWS)}
    assert lines["whole step"] == ("100.0", "100%")
    assert lines["gen"] == ("50.0", "50%")
    assert lines["between the spans"] == ("30.0", "30%")
    assert lines["records, after the step"] == ("20.0", "20%")


def test_the_keys_of_the_run(tmp_path):
    arguments = soak._parse(["--steps", "100", "--set", "trainer.save_freq=7", "--ranks", "2"])
    config = load_config(soak.overrides(arguments, tmp_path)).config
    assert (config.trainer.save_freq, config.trainer.total_training_steps) == (7, 100)
    with pytest.raises(SystemExit):
        soak._parse(["--steps", "10"])


@pytest.mark.slow
def test_a_short_run_is_flat(tmp_path):
    """`python -m pytest tests/benchmarks/test_soak.py -m slow`: 400 steps."""
    assert soak.main(["--steps", "400", "--limit", "20", "--json", str(tmp_path / "r.json")]) == 0
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert results["left"] == []
    assert len([s for s in results["slopes"].values() if s]) >= 2
