"""The share of a GPU's peak that an update uses, by hand."""

import pytest
import torch

from tests.roles.test_skipping import SILENT, make_actor, make_batch, make_config, make_engine
from verl.data_proto.metrics import merge_metrics
from verl.data_proto.proto import DataProto
from verl.models.shapes import ModelShape
from verl.models.tiny import make_tiny_model
from verl.parallel import device
from verl.parallel.balance import TokenCost
from verl.roles import updates
from verl.roles.updates import Utilization


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_engine(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=32, head_dim=8))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A4000", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device.peak_flops(torch.device("cuda", 0)) == peak
    assert device.peak_flops(torch.device("cpu")) is None


def test_computed_rows_count_with_their_prompts(engine, monkeypatch):
    """Forward and backward are six operations a weight and token, and attention's for causal sequences."""
    monkeypatch.setattr(updates, "peak_flops", lambda device: 1e9)
    config = engine.module.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    layer = hidden * config.head_dim * (2 * heads + 2 * config.num_key_value_heads) + 3 * hidden * inner
    weights = config.num_hidden_layers * layer + config.vocab_size * hidden
    assert ModelShape.from_config(config).active_parameters == pytest.approx(weights, rel=0.01)  # and norms
    batch, rows = make_batch(), [1, 4, 6]
    lengths = batch.batch["attention_mask"].sum(1)[rows].tolist()
    pairs = sum(length * length for length in lengths) * heads * config.head_dim * config.num_hidden_layers
    counter = Utilization.of(engine.module, torch.device("cpu"), 2)
    counter.add(batch, rows)
    (metric,) = counter.take("actor", 4.0).values()
    assert metric.value == pytest.approx((6 * weights * sum(lengths) + 6 * pairs) / (2 * 1e9 * 4.0), rel=0.01)
    assert counter.take("actor", 1.0)["perf/mfu/actor"].value == 0


def test_an_update_reports_its_utilization(engine):
    class Observed(Utilization):
        def take(self, role, seconds):
            self.operations = self._num_operations
            return super().take(role, seconds)

    role, batch = make_actor(engine, make_config()), make_batch()
    assert "perf/mfu/actor" not in role.update(batch, 1).metrics(), "the peak of a CPU is not known"
    counter = role._utilization = Observed(TokenCost(1.0, 0.0), 1e6)
    metrics = role.update(batch, 2).metrics()
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    assert counter.operations == 3 * sum(length for row, length in enumerate(lengths) if row not in SILENT)
    assert 0 < metrics["perf/mfu/actor"].value


def test_ranks_report_their_mean():
    """Weighted by their seconds."""
    parts = []
    for operations, seconds in ((6.0, 1.0), (3.0, 3.0)):
        counter = Utilization(TokenCost(operations / 3, 0.0), 1.0)
        counter.add(DataProto.from_dict({"attention_mask": torch.ones(1, 1)}), [0])
        parts.append(counter.take("actor", seconds))
    assert merge_metrics(parts)["perf/mfu/actor"].value == (6 + 3) / 4
