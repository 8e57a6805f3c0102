"""A run with references to large tensors on its driver, as on Ray, equals the run that holds them."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.runtime.conftest import PPO, assert_same, train_here
from verl.data_proto.future import Finished
from verl.data_proto.media import StoredTensors
from verl.parallel.serialize import StoredBuffers, decode, encode
from verl.runtime.local import LocalRuntime

AHEAD = ["actor_rollout_ref.rollout.prefetch_num=1", "actor_rollout_ref.rollout.partial_rollout=True"]
RUNS = {
    "PPO": PPO,
    "parts of responses, ahead": AHEAD,
    "group filter": ["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=remax"],
}


@dataclass
class Store:
    """Answers by number, in arrays that refuse writes."""

    objects: dict[int, list] = field(default_factory=dict)
    num_sent: int = 0  # references that calls have sent

    def run(self, runtime, group, method, plan, blocking):
        """In place of LocalRuntime._run."""
        document, sent = encode(tuple(plan.calls[0]), StoredBuffers())
        self.num_sent += sum(isinstance(buffer, int) for buffer in sent)
        read = [b if isinstance(b, np.ndarray) else StoredTensors(b, self.objects.get, dict) for b in sent]
        answer = runtime.workers.call(group.name, method, *decode(document, StoredBuffers(read)))
        document, buffers = encode(answer, StoredBuffers(is_answer=True))
        for buffer in buffers:
            buffer.setflags(write=False)
        number = len(self.objects)
        self.objects[number] = [document, *buffers]
        value = plan.collect([decode(document, StoredBuffers(buffers, number))])
        return value if blocking else Finished(value)


@pytest.mark.parametrize("name", RUNS)
def test_equals_a_run_that_holds_its_columns(jobs, monkeypatch, name):
    changes, store = [*RUNS[name], "trainer.total_training_steps=2"], Store()
    reference = train_here(jobs, f"{name[:3]}_held", *changes)
    monkeypatch.setattr("verl.parallel.serialize._STORED_BYTES", 1)
    monkeypatch.setattr(LocalRuntime, "_run", lambda runtime, *call: store.run(runtime, *call))
    assert_same(train_here(jobs, f"{name[:3]}_stored", *changes), reference, rel=0)
    assert store.num_sent > 30
