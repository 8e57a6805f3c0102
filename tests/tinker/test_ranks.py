"""Models of the service that several ranks train together: the steps of one device."""

import pytest

from tests.engines.ranks import results_once

pytest.importorskip("tinker", reason="the extra tinker is not installed")

LIMITS = {"float64": 1e-11, "float32": 2e-4, "bfloat16": 1.2}  # of the error on one device


FLOAT64 = ["adapters_float64", "all_weights_float64"]
SHORTER = ["adapters_float32", "adapters_bfloat16", "all_weights_bfloat16"]


@pytest.mark.parametrize("name", [*FLOAT64, *(pytest.param(name, marks=pytest.mark.slow) for name in SHORTER)])
def test_ranks_take_the_steps_of_one_device(name, tmp_path_factory, worker_id):
    dtype = name.rpartition("_")[2]
    measured = results_once("tests.tinker.rank_checks", 2, tmp_path_factory, worker_id, names=dtype)[f"check_{name}"]
    limit = LIMITS[dtype]
    assert measured.pop("log_probs") < max(limit, 1e-6)  # they are float32
    assert max(measured.values()) < limit, measured
