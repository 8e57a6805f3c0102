"""The group that ends last, over ranks."""

from verl.data_proto.metrics import merge_metrics, metric_values
from verl.data_proto.trajectory import Segment, Trajectory
from verl.roles import rollout as group_ends


def test_the_last_group_of_all_ranks(monkeypatch):
    """Two ranks with ten prompts of two samples each; a sample ends each second, and on rank 1 later ones."""
    clock = iter(range(100))
    monkeypatch.setattr(group_ends.time, "perf_counter", lambda: next(clock))
    parts = []
    for rank, pause in enumerate((0, 5)):
        ends = group_ends.GroupEnds()
        for number in range(20):
            if number == 18:
                [next(clock) for _ in range(pause)]
            tokens = [1] * (number + 1)
            ends.note(Trajectory(100 * rank + number // 2, number % 2, (1,), [Segment(tokens, tokens, 0, "policy")]))
        parts.append(ends.metrics())
    metrics = metric_values(merge_metrics(parts))
    assert (metrics["last_group/prompt"], metrics["last_group/tokens"]) == (109, 20)
    assert (metrics["last_group/ended_s"], metrics["last_group/others_ended_s"]) == (25, 18)
    assert group_ends.GroupEnds().metrics() == {}
