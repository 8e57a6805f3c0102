"""Dithered bfloat16 weights equal the weights of one device in every layout: FSDP, tensor and expert parallel,
replicas, and the weights sent to vLLM and HTTP services."""

import json

import pytest

from tests.engines.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_has_the_weights_of_one_device(num_ranks, tmp_path):
    run_ranks("tests.reshard.rounding_checks", num_ranks, tmp_path)
    results = json.loads((tmp_path / f"results-{num_ranks}.json").read_text())
    assert results.keys() == (
        {"check_fsdp_and_tensor"}
        if num_ranks == 4
        else {"check_fsdp", "check_fsdp_of_odd_sizes", "check_tensor", "check_experts"}
    )
    for name, figures in results.items():  # in two steps at a rate of 0.01 everything shows, of every rank's sample
        assert 0.95 < figures["visible"] < 1.05, name
        assert abs(figures["visible"] - figures["of_one"]) < 0.05, name
