"""The local runtime: every role in this process, on one device. A breakpoint works anywhere."""

from __future__ import annotations

from typing import Any

from verl.data_proto.future import Finished
from verl.parallel.device import resolve_device
from verl.parallel.dispatch import CallPlan
from verl.roles.api import Roles, SpecSource, Value
from verl.runtime.rank import RankContext, check_meshes
from verl.runtime.rank_workers import RankWorkers
from verl.runtime.role_groups import make_groups
from verl.runtime.worker_group import WorkerGroup


class LocalRuntime:
    """See verl.runtime.api.Runtime. After `build_roles`, `workers` holds the workers of the roles."""

    name = "local"
    rank = 0
    is_rank_zero = True

    def __init__(self, source: SpecSource):
        self.source = source
        self.workers: RankWorkers | None = None
        specs = source.specs()
        check_meshes(specs, specs.place(1))

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        """See Runtime. The rollout engine generates with the trained module itself: there is one copy of the weights."""
        specs = self.source.specs(train=train)
        device = resolve_device(specs.run.device)
        context = RankContext(specs, specs.place(1), 0, device, total_steps, data_sources)
        workers = self.workers = RankWorkers(context, None)
        return make_groups(context, self._run, workers.facts(), workers.weights, self.close)

    def any(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Value, /) -> Value:
        return value

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()

    def _run(self, group: WorkerGroup, method: str, plan: CallPlan, blocking: bool) -> Any:
        call = plan.calls[0]
        assert self.workers is not None
        assert call is not None
        value = plan.collect([self.workers.call(group.name, method, *call)])
        return value if blocking else Finished(value)
