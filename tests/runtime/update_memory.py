"""An `external_lib` that adds the metric actor/peak_bytes: the most memory that an optimizer step holds on a rank."""

import tests.runtime.wide_norms  # noqa: F401 - the other runs import it too
from tests.engines.memory import peak_bytes
from verl.data_proto.metrics import Metric
from verl.engines.fsdp import FSDPEngine

_train_batch = FSDPEngine.train_batch


def train_batch(self, *args, **kwargs):
    metrics, peak = peak_bytes(lambda: _train_batch(self, *args, **kwargs))
    return {**metrics, "peak_bytes": Metric.max(float(peak))}


FSDPEngine.train_batch = train_batch
