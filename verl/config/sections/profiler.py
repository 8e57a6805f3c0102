"""`global_profiler`, and `profiler` of each role: traces of torch.profiler."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.keys import Section, used


@dataclass(frozen=True)
class GlobalProfilerConfig(Section):
    steps: list[int] | None = used(None, "steps of which the ranks of a role with profiler.enable=True write a trace")
    profile_continuous_steps: bool = used(False, "one trace for neighbouring steps")
    save_path: str = used("outputs/profile", "folder of the traces step_N_rank_R.json, which Perfetto opens", path=True)


@dataclass(frozen=True)
class ProfilerConfig(Section):
    enable: bool = used(False, "trace the ranks of this role in global_profiler.steps")
    all_ranks: bool = used(False, "all ranks of the role write a trace, in place of `ranks`")
    ranks: list[int] = used([], "ranks of the role that write a trace; []: the first one")
