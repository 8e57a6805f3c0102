"""New weights reach real copies by plan as they do when they are gathered (update_checks.py; all checks in one launch)."""

import pytest

from tests.engines.ranks import results_once
from tests.reshard.update_checks import DENSE, MIXTURES


@pytest.fixture(scope="module")
def results(tmp_path_factory, worker_id):
    return results_once("tests.reshard.update_checks", 2, tmp_path_factory, worker_id)


@pytest.mark.parametrize("family", DENSE)
def test_dense_families(results, family):
    """Full replicas get the weights that the other rank trains; divided ones get only the parts that lie elsewhere."""
    copies, divided, same = results["check_dense_families"][family]
    assert copies > divided > 0 == same


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures(results, family):
    assert all(sent > 0 for sent in results["check_mixtures"][family])


def test_an_untied_output_projection_in_bfloat16(results):
    assert results["check_untied_bfloat16"]["sent"] > 0


def test_what_no_plan_serves(results):
    assert "check_what_no_plan_serves" in results, "both ranks continue without a plan"


def test_only_adapters_travel(results):
    """Full replicas, which both ranks have in one memory, lack half of the adapters. In divided ones a rank lacks only
    the adapters that lie elsewhere."""
    sent = {name: part / full_bytes for name, (part, full_bytes) in results["check_adapters"].items()}
    assert sent["copies"] == 0.5
    assert 0 < sent["divided"] < 1
    assert sent["same"] == 0


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            "check_parameter_that_nobody_trains",
            "Weight sync is missing parameter extra; the rollout model would keep its old value",
        ),
        ("check_parameter_that_nobody_takes", "model.norm.weight trains and is no parameter of the rollout model"),
        ("check_adapters_that_nobody_takes", "model.layers.1.mlp.down_proj.weight trains and is no parameter"),
    ],
)
def test_names_that_one_side_lacks(results, check, words):
    first, second = results[check]["messages"]
    assert first == second
    assert words in first
