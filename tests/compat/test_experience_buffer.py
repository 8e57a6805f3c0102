"""The buffer that users name: sizes, ages, priorities, replays, and a separate process."""

from collections import Counter

import numpy as np
import psutil
import pytest
import torch

from verl import ExperienceBuffer
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DataError, WorkerLostError

pytestmark = [pytest.mark.seed("A7"), pytest.mark.usefixtures("forked_engines")]


def rows(*names, n=2):
    """`n` rows of each group."""
    uid = np.repeat(np.array(names, dtype=object), n)
    numbers = torch.arange(len(uid))
    return DataProto.from_dict({"number": numbers, "responses": numbers[:, None] + torch.zeros(3)}, {"uid": uid})


def names(batch):
    return list(batch.non_tensor_batch["uid"])


@pytest.fixture(params=["driver", "process"])
def make(request):
    buffers = []

    def buffer(*args, **kwargs):
        buffers.append(ExperienceBuffer(*args, place=request.param, **kwargs))
        return buffers[-1]

    yield buffer
    for one in buffers:
        one.close()


def test_groups_come_out_as_they_went_in(make):
    buffer = make()
    assert buffer.qsize() == 0
    assert buffer.put(rows("b"), version=1) == buffer.put(rows("a", "c"), version=0) == 0
    assert buffer.qsize() == 3
    first = buffer.sample(2, version=1)
    assert names(first) == ["a", "a", "c", "c"]
    assert torch.equal(first.batch["responses"], rows("a", "c").batch["responses"])
    assert buffer.qsize() == 1
    with pytest.raises(DataError, match=r"sample\(2\) was asked of a buffer that holds 1 groups"):
        buffer.sample(2, version=1)


def test_full_and_old():
    buffer = ExperienceBuffer(max_groups=3, max_age=1)
    assert buffer.put(rows("a", "b"), version=0) == 0
    assert buffer.put(rows("c", "d", n=1), version=1) == 1
    assert names(buffer.sample(1, version=1, order="newest", remove=False)) == ["d"]
    assert buffer.qsize() == 3
    with pytest.raises(DataError, match="holds 2 groups of at most 1 versions before 2"):
        buffer.sample(3, version=2)
    assert names(buffer.sample(2, version=2)) == ["c", "d"]


def test_chances_follow_priorities_and_repeat():
    def drawn(order):
        buffer = ExperienceBuffer(seed=5)
        buffer.put(rows("a", "b", "c", n=1), version=0, priority=[6.0, 3.0, 1.0])
        return [names(buffer.sample(1, version=0, order=order, remove=False))[0] for _ in range(2000)]

    by_priority, uniform = Counter(drawn("priority")), Counter(drawn("uniform"))
    assert [by_priority[name] / 2000 for name in "abc"] == pytest.approx([0.6, 0.3, 0.1], abs=0.04)
    assert [uniform[name] / 2000 for name in "abc"] == pytest.approx([1 / 3] * 3, abs=0.04)
    assert drawn("priority") == drawn("priority")


def test_a_draw_repeats_no_group_and_both_places_agree_until_the_process_is_lost():
    draws = []
    for place in ("driver", "process"):
        with ExperienceBuffer(place=place, seed=1) as buffer:
            buffer.put(rows(*"abcdef", n=1), version=0)
            draws.append([names(buffer.sample(4, version=0, order="uniform", remove=False)) for _ in range(3)])
            if place == "process":
                process = psutil.Process(buffer._process.pid)
                process.kill()
                with pytest.raises(WorkerLostError, match="The experience buffer process .* was ended by SIGKILL"):
                    buffer.qsize()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert draws[0] == draws[1]
    assert all(len(set(draw)) == 4 for draw in draws[0])


def test_a_group_has_the_largest_priority_of_its_rows():
    buffer = ExperienceBuffer()
    buffer.put(rows("a", "b"), version=0, priority=[1e-9, 1e-9, 1e-9, 1e9])
    assert names(buffer.sample(1, version=0, order="priority")) == ["b", "b"]


def test_rows_without_the_column_are_groups_of_one():
    buffer = ExperienceBuffer(by="prompt")
    buffer.put(rows("a"), version=0)
    assert buffer.qsize() == 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ExperienceBuffer(max_groups=0), ConfigError, "max_groups=0.* would hold nothing"),
        (lambda: ExperienceBuffer(place="node"), ConfigError, "'driver' or in a separate 'process'"),
        (lambda: ExperienceBuffer().sample(1, version=0, order="best"), ConfigError, "the orders are oldest, newest"),
        (lambda: ExperienceBuffer().put(rows("a"), version=0, priority=[1.0]), DataError, "1 priorities for 2 rows"),
        (lambda: ExperienceBuffer().put(rows("a"), version=0, priority=[1.0, 0.0]), DataError, "one above 0 for each"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_loop_of_ones_own(tiny_llama):
    """Controller, rollout, update and buffer: samples of two versions train, weighted by their priority."""
    from verl.worker import ActorRolloutRefWorker

    overrides = [
        "actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_response_length=4", "data.max_prompt_length=64",
    ]  # fmt: skip
    with ActorRolloutRefWorker(str(tiny_llama), overrides=overrides) as worker, ExperienceBuffer(max_age=1) as buffer:
        for version in (0, 1):
            batch = worker.generate_sequences([f"{version} + 2?", "3 + 4?"], n=2)
            batch.non_tensor_batch["uid"] = np.repeat(np.array([f"{version}a", f"{version}b"], dtype=object), 2)
            batch.union(worker.compute_log_prob(batch)).union(worker.compute_ref_log_prob(batch))
            mask = batch.batch["response_mask"]
            batch.batch["advantages"] = torch.where(mask, torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None], 0.0)
            buffer.put(batch, version=version, priority=batch.batch["advantages"].abs().amax(dim=1))
            sampled = buffer.sample(1 + version, version=version, order="priority")
            assert worker.update_actor(sampled).metrics()["actor/grad_norm"] is not None
        assert buffer.qsize() == 1
