"""benchmarks/hybrid_3d.py: its sides are settings of the config, and two ranks fill its table."""

import pytest
from hybrid_3d import ALONE, PLAIN, SIDES, _parse, fill, main
from report import Report

from verl.config import FSDPConfig
from verl.engines.hybrid_3d import Dimensions

pytestmark = pytest.mark.seed("C5", "C7", "G4")


def test_the_sides_are_one_dimension_each_and_all():
    dimensions = {name: Dimensions.of(FSDPConfig(**keys)) for name, keys in SIDES.items()}
    assert dimensions[PLAIN] == dimensions["prefetch"] == Dimensions()
    changed = [
        [d for d in vars(Dimensions()) if vars(dimensions[n])[d] != vars(Dimensions())[d]] for n in list(SIDES)[2:]
    ]
    assert changed == [["layer_per_group"], ["chunk_tokens"], ["batch_group_size"], list(vars(Dimensions()))]


def rank(seconds, waits, loss=2.0, peak=10**6):
    return {"seconds": seconds, "waits": waits, "sent": 10**6, "loss": loss, "peak": peak}


def test_what_is_hidden_and_what_differs(capsys):
    ranks = []
    for slower in (0.0, 0.1):
        sides = {name: rank([1.0 + slower] * 3, [0.5] * 3) for name in SIDES}
        sides["batch: groups of 4"] = rank([0.7] * 3, [0.125] * 3) | {"sent": 10**6 // 4}
        sides |= {"prefetch": rank([0.85] * 3, [0.2] * 3), ALONE: rank([0.6] * 3, [0.0] * 3)}
        ranks.append(sides)
    report = Report("a")
    assert fill(report, ranks)
    assert report.results[PLAIN]["hidden"] == pytest.approx(0.0)
    assert report.results["prefetch"]["hidden"] == pytest.approx(0.6)
    assert report.results["batch: groups of 4"]["hidden"] == 0.0  # a quarter of the bytes, none of them hidden
    assert report.results["prefetch"]["times_plain"] == pytest.approx(1.1 / 0.85)
    ranks[1]["all three"]["loss"] = 2.1
    assert not fill(Report("a"), ranks)


@pytest.mark.parametrize("words", [["--hidden", "100"], ["--ranks", "1"], ["--tokens", "8"], ["--rounds", "0"]])
def test_sizes_that_make_no_sense(words, capsys):
    with pytest.raises(SystemExit):
        _parse(words)


@pytest.mark.slow
def test_two_ranks(tmp_path, capsys):
    sizes = ["--hidden", "64", "--layers", "2", "--tokens", "32", "--micro-batches", "4", "--rounds", "2"]
    assert main([*sizes, "--json", str(tmp_path / "found.json")]) == 0
    assert "Losses agree." in capsys.readouterr().out
