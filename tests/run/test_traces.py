"""Traces of torch.profiler: of chosen steps, by the ranks of roles with profiler.enable."""

import json

import pytest
import torch

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ((f"{ACTOR}.profiler.enable=True", "global_profiler.steps=[2]"), {"step_2_rank_0.json"}),
        (
            (f"{ACTOR}.profiler.enable=True", f"{ACTOR}.profiler.all_ranks=True", "trainer.profile_steps=[1,2]"),
            {"step_1_rank_0.json", "step_2_rank_0.json"},
        ),
        (
            (
                f"+{ACTOR}.profiler.ranks=[0,7]",
                f"{ACTOR}.profiler.enable=True",
                "global_profiler.steps=[1,2,5]",
                "global_profiler.profile_continuous_steps=True",
                "global_profiler.tool=nsys",
            ),
            {"step_1_rank_0.json"},
        ),
        ((f"+{ACTOR}.profiler.ranks=[1]", f"{ACTOR}.profiler.enable=True", "global_profiler.steps=[1]"), set()),
        (("global_profiler.steps=[1]",), set()),
    ],
    ids=["a step", "all ranks", "neighbours", "another rank", "no role"],
)
def test_the_chosen_steps_write_traces(tiny_run, tmp_path, changes, names):
    folder = tmp_path / "traces"
    tiny_run(*changes, f"global_profiler.save_path={folder}")
    assert {path.name for path in folder.glob("*")} == names
    for name in names:
        events = json.loads((folder / name).read_text())["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)


def test_a_trace_of_memory_is_of_a_gpu(tiny_run, tmp_path, caplog):
    """Without one, a warning says so, and the trace of operations is written."""
    folder = tmp_path / "traces"
    keys = (f"{ACTOR}.profiler.enable=True", "global_profiler.steps=[1]", "global_profiler.tool=torch_memory")
    tiny_run(*keys, f"global_profiler.save_path={folder}")
    names = {path.name for path in folder.glob("*")}
    if torch.cuda.is_available():
        assert names == {"step_1_rank_0.json", "step_1_rank_0_memory.pickle"}
    else:
        assert names == {"step_1_rank_0.json"}
        assert "no snapshot of memory, since this process has no CUDA GPU" in caplog.text
