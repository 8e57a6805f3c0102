"""The table of recommended plans in docs/planner.md is what the search says today."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from verl.planner import Cluster, Dataflow, Lengths, Workload, known_shape, search
from verl.planner.request import _SPACES
from verl.planner.search import Rules

PAGE = Path(__file__).resolve().parents[2] / "docs/planner.md"


def row_of(model: str, devices: str) -> str:
    shape, num_devices = known_shape(model), int(devices)
    is_large = shape.is_mixture or shape.num_parameters > 4e10
    rules = Rules(space=replace(_SPACES["megatron" if is_large else "fsdp"], replica_in_node=True))
    if is_large:  # process groups of Megatron span a run
        rules = replace(rules, placements=((("actor", "reference"),),))
    prompts, samples = (128, 16) if shape.num_parameters > 5e11 else (512, 8)
    work = Workload(num_prompts=prompts, samples=samples, prompt_mean=300, response=Lengths.of(mean=1000, longest=4096))
    plan = search(Dataflow.ppo(shape, None, shape), Cluster.of("h100_sxm", num_devices), work, rules)[0]
    actor = plan.option("actor")
    fullest = max(sum(o.resident for o in group) + max(o.peak for o in group) for group in plan.options)
    cells = [model, num_devices, actor.layout.text(), actor.rollout.text()]
    cells += [f"{number:.0f}" for number in (fullest / 1e9, plan.stages[0], plan.stages[-1], plan.step_s)]
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.slow
def test_recommended_plans_match_the_search():
    rows = re.findall(r"^\| [\w.-]+ \| \d+ \| (?:dp|tp) .*$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 20
    current = [row_of(*re.match(r"\| ([\w.-]+) \| (\d+)", row).groups()) for row in rows]
    assert rows == current, "\n".join(["write:", *current])
