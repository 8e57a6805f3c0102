"""Plans carried out by four processes (transport_checks.py); all checks in one launch, since starting costs more."""

import pytest

from tests.engines.ranks import results_once


@pytest.fixture(scope="module")
def results(tmp_path_factory, worker_id):
    return results_once("tests.reshard.transport_checks", 4, tmp_path_factory, worker_id)


def test_layout_pairs(results):
    """Each rank has checked that its values arrived and that it sent exactly the plan's bytes."""
    pairs = results["check_layout_pairs"]
    assert len(pairs) == 8
    assert pairs.pop("same")["sent"] == 0
    assert all(pair["sent"] > 0 < pair["peak"] for pair in pairs.values())


def test_memory_is_written_again_at_each_update(results):
    assert results["check_many_updates_through_memory"]["updates"] == 6


def test_weights_move_into_memory_as_they_lie(results):
    assert "check_weights_move_together" in results


def test_ranks_with_the_same_weights_have_them_once(results):
    assert "check_ranks_that_are_alike" in results


def test_what_ranks_share_is_looked_at_once(results):
    for name, messages in results["check_who_looks_at_what_ranks_share"].items():
        assert len(messages) == 1
        assert f"for {name} at" in messages[0]


def test_ranks_that_do_not_train(results):
    first, second = results["check_other_ranks"]["sent"]
    assert first == pytest.approx(second, rel=0.05)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("LosesABucket", "does not hold what rank"),
        ("SwapsTwo", "for model.layers.1.self_attn.k_proj.weight"),
        ("ForgetsWhatItKeeps", "does not hold what it trained"),
        ("FlipsABit", "does not hold what rank"),
    ],
)
@pytest.mark.parametrize("way", ["messages", "memory"])
def test_an_error_names_the_place_where_it_went_wrong(results, fault, way, words):
    message = results["check_faults"][f"{fault}, {way}"]
    assert "rank 2" in message
    assert words in message
    assert "must not be used" in message


def test_tensors_that_do_not_fit_their_layout(results):
    misshapen, missing = results["check_missing_and_misshapen"]
    assert "should fill [32] of model.norm.weight, but its tensor is [31]" in misshapen
    assert "k_proj.weight, which is not there" in missing


@pytest.mark.parametrize("engine", ["dense", "replicated", "expert"])
def test_training_engines_hold_what_their_layout_says(results, engine):
    assert results[f"check_{engine}_engine"]["sent"] > 0


def test_a_write_that_nobody_announced(results):
    message = results["check_faults"]["WritesInTheWrongPlace, memory"]
    assert "rank 2 does not hold what it trained for model.norm.weight" in message
