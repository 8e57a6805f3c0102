"""A dataflow written as a chain, as the single-controller API has it."""

import pytest
import torch

from tests.house.source import ROOT
from tests.parallel.batches import make_batch, rows_of
from tests.run import conftest as runs
from tests.run.conftest import train_run
from tests.runtime.test_group import Doubler, loop_runner
from verl.compat.dataflow import Controller
from verl.errors import ConfigError
from verl.parallel.mesh import Mesh
from verl.roles.api import Roles
from verl.runtime.worker_group import WorkerGroup

pytestmark = pytest.mark.seed("A4")
tiny_task, tiny_overrides, tiny_run = runs.tiny_task, runs.tiny_overrides, runs.tiny_run


@pytest.fixture
def groups():
    def group(size):
        return WorkerGroup("doubler", Doubler, Mesh.flat(range(size)), loop_runner([Doubler() for _ in range(size)]))

    return {"rollout_group": group(3), "update_group": group(2)}


def test_as_written(groups):
    """The chain of the programming model, with stages as functions."""
    calls = []
    prompts = make_batch(5)

    def responses(group, batch):
        return group.double(batch)

    def experience(batch):
        calls.append(rows_of(batch))
        return batch

    def advantages(batch):
        batch.batch["advantage"] = batch.batch["twice"] - batch.batch["twice"].double().mean()
        return batch

    def updates(group, batch):
        return group.add(1, batch)

    controller = Controller(**groups)
    data_flow = (
        controller
        .broadcast(prompts)
        .scatter(responses, worker_group="rollout_group")
        .gather(experience)
        .all_reduce(advantages)
        .scatter(updates, worker_group="update_group")
    )  # fmt: skip
    assert calls == [], "nothing runs before sync"
    assert data_flow.sync() == [6, 6]
    assert calls == [[0, 1, 2, 3, 4]]
    assert data_flow.sync() == [6, 6], "a chain can run again"


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 10), ("mean", 5), ("min", 3), ("max", 7)])
def test_all_reduce_reduces_the_results_of_all_ranks(reduction, expected):
    chain = Controller().broadcast(
        [{"count": 3, "rows": torch.tensor([3, 7])}, {"count": 7, "rows": torch.tensor([3, 3])}]
    )
    reduced = chain.all_reduce(reduction).sync()
    assert reduced["count"] == expected
    assert reduced["rows"].tolist() == {"sum": [6, 10], "mean": [3, 5], "min": [3, 3], "max": [3, 7]}[reduction]
    with pytest.raises(ConfigError, match="no reduction 'summ'; did you mean 'sum'"):
        Controller().all_reduce("summ")


def test_a_stage_by_name_and_a_source_that_is_a_function(groups):
    flow = Controller(**groups).broadcast(lambda: make_batch(3)).scatter("double", worker_group="rollout_group")
    assert flow.sync().batch["twice"].tolist() == [0, 2, 4]


def test_groups_of_a_run():
    class Handle:
        def generate(self, batch):
            return batch

    roles = Roles(rollout=Handle())
    batch = make_batch(2)
    assert Controller(roles).broadcast(batch).scatter("generate", worker_group="rollout_group").sync() is batch
    with pytest.raises(ConfigError, match="no worker group 'update_group'; did you mean 'rollout_group'"):
        Controller(roles).scatter("update", worker_group="update_group")
    assert torch.equal(batch.batch["row"], torch.arange(2))


def test_a_program_written_as_a_chain_is_the_program(tiny_run, tiny_overrides, tmp_path):
    """Checkpoints, guards and metrics equal `verl train`'s."""
    saved = ("trainer.save_freq=1", "trainer.guards.grad_norm.limit=100")
    plain = tiny_run(*saved, folder="plain")
    chained = train_run(tmp_path / "chain", tiny_overrides, saved, f"{ROOT}/examples/dataflow_chain.py:Chained")
    assert chained.repeatable == plain.repeatable
    assert (chained.folder / "global_step_2" / "actor").is_dir()
