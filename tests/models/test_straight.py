"""The forward that a GPU trains with, on a CPU: the tests of the fused passes (test_cpu_decoder.py), with it in their place."""

import pytest
import torch

from tests.models.test_cpu_decoder import (
    bfloat16_results,
    columns_of,
    folder_of,  # noqa: F401 - a fixture, as the next two
    fused_decoder_in_float64,  # noqa: F401
    kept_and_planned,
    pair,  # noqa: F401
    relative,
    test_a_padding_token_that_stands_in_a_row_learns,  # noqa: F401 - these run here again
    test_adapters,  # noqa: F401
    test_adapters_with_selective_checkpointing,  # noqa: F401
    test_checkpointing_changes_no_bit,  # noqa: F401
    test_equals_the_module_in_float64,  # noqa: F401
    test_float32_is_close_to_the_module,  # noqa: F401
    test_frozen_parameters_get_no_gradient,  # noqa: F401
    test_value_model,  # noqa: F401
)
from verl.models import forward
from verl.models.forward import computed_by, packed_outputs, straight_decoder
from verl.models.packing import pack_rows


@pytest.fixture(autouse=True)
def straight(monkeypatch):
    monkeypatch.setattr(forward, "_FUSED_DEVICES", ())
    monkeypatch.setattr(forward, "_STRAIGHT_DEVICES", ("cpu",))


def test_it_computes_what_these_tests_compare(pair, monkeypatch):  # noqa: F811
    calls, states = [], forward.straight_states
    monkeypatch.setattr(forward, "straight_states", lambda *args: calls.append(args) or states(*args))
    module, other = pair("qwen3")
    packed_outputs(module, pack_rows(columns_of(1, [2])), ("log_probs",))
    assert len(calls) == 1
    packed_outputs(other, pack_rows(columns_of(1, [2])), ("log_probs",))
    assert len(calls) == 1, "the other module computes by itself"
    cpu = torch.device("cpu")
    assert "sampler" in computed_by(module, cpu)
    monkeypatch.setattr(forward, "_STRAIGHT_DEVICES", ("cuda",))
    assert straight_decoder(module, cpu) is None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_of_a_layer_is_as_planned(tmp_path, family, recompute):
    num_bytes, planned = kept_and_planned(tmp_path, family, recompute)
    assert num_bytes == pytest.approx(planned, rel=0.02)


def test_bfloat16_is_as_good_as_the_module_over_all_values(pair):  # noqa: F811
    """Rounding of another order may favour either forward in the few values of a norm."""
    ours, theirs, exact = (torch.cat([x.flatten() for x in r.values()]) for r in bfloat16_results(pair))
    assert relative(ours, exact) < 1.1 * relative(theirs, exact)
