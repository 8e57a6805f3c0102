"""The forward that a GPU trains with, on a CPU: the tests of the fused passes (test_cpu_decoder.py), with it in their place."""

import weakref

import pytest
import torch

from tests.engines.memory import kept_bytes
from tests.models.test_cpu_decoder import (
    PLANNED,
    bfloat16_results,
    columns_of,
    folder_of,  # noqa: F401 - a fixture, as the next two
    fused_decoder_in_float64,  # noqa: F401
    gradients_with,
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
from verl.models.decoder import autograd
from verl.models.decoder.kept import HostInputs
from verl.models.forward import computed_by, hidden_states, packed_outputs, straight_decoder
from verl.models.load import load_causal_lm
from verl.models.packing import pack_rows
from verl.models.tiny import make_tiny_model


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


@pytest.mark.parametrize("family", PLANNED)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_of_a_layer_is_as_planned(tmp_path, family, recompute):
    num_bytes, planned = kept_and_planned(tmp_path, family, recompute)
    assert num_bytes == pytest.approx(planned, rel=0.02)


class LateStream:
    """In place of CopyStream: a copy is made when its end is waited for, from memory that may be freed."""

    def __init__(self):
        self.events, self.pending = [], []

    def copy(self, target, source):
        number = sum(event.startswith("copy") for event in self.events)
        self.events.append(f"copy {number}")
        place = source.storage_offset(), source.size(), source.stride()
        self.pending.append((number, target, weakref.ref(source.untyped_storage()), place))
        return number

    def wait(self, end):
        self.events.append(f"wait {end}")
        while self.pending and self.pending[0][0] <= end:
            _, target, memory, place = self.pending.pop(0)
            assert memory() is not None, "the source of a copy was freed before the end of the copy"
            target.copy_(target.new_empty(0).set_(memory(), *place))


def gradients_of_layers_on_the_host(folder, stream, monkeypatch):
    """Of a model of four layers, whose inputs `stream` moves; None: they stay."""
    monkeypatch.setattr(autograd, "copy_stream", lambda device: stream)
    torch.manual_seed(0)
    module = load_causal_lm(folder, dtype=torch.float32)
    module.offloads_inputs = True
    return gradients_with(module, pack_rows(columns_of(5, [2, 2])), "full")


def test_inputs_on_the_host_change_no_bit(tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path, "qwen3", num_hidden_layers=4)
    expected, stream = gradients_of_layers_on_the_host(folder, None, monkeypatch), LateStream()
    monkeypatch.setattr(HostInputs, "_idle", [])

    def noted(self, number, layer, x, compute=autograd._AutogradPass._summed):
        stream.events.append(f"layer {number}")
        return compute(self, number, layer, x)

    monkeypatch.setattr(autograd._AutogradPass, "_summed", noted)
    for repetition in range(2):
        gradients = gradients_of_layers_on_the_host(folder, stream, monkeypatch)
        assert all(torch.equal(expected[name], gradient) for name, gradient in gradients.items())
        assert len(HostInputs._idle) == 1, "the second forward takes the buffers of the first"
        to_host = "copy 0, layer 0, wait 0, copy 1, layer 1, wait 1, copy 2, layer 2, wait 2, layer 3"
        back = "copy 3, layer 3, wait 3, copy 4, layer 2, wait 4, copy 5, layer 1, wait 5, layer 0"
        assert repetition or ", ".join(stream.events) == f"{to_host}, {back}"
    assert not stream.pending


def test_the_device_holds_no_inputs_of_more_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(autograd, "copy_stream", lambda device: LateStream())
    packed, sizes = pack_rows(columns_of(5, [3, 3])), {}
    for num_layers in (2, 4):
        folder = make_tiny_model(tmp_path / str(num_layers), "llama", num_hidden_layers=num_layers)
        module = load_causal_lm(folder, dtype=torch.float32, gradient_checkpointing=True).train()
        module.offloads_inputs = True
        hidden_states(module, packed)
        sizes[num_layers] = kept_bytes(lambda module=module: hidden_states(module, packed))
    assert sizes[2] == sizes[4]


def test_bfloat16_is_as_good_as_the_module_over_all_values(pair):  # noqa: F811
    """Rounding of another order may favour either forward in the few values of a norm."""
    ours, theirs, exact = (torch.cat([x.flatten() for x in r.values()]) for r in bfloat16_results(pair))
    assert relative(ours, exact) < 1.1 * relative(theirs, exact)
