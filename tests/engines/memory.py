"""Peak memory of a function above the memory held before, from the allocations of tensors on the CPU."""

import itertools

import torch


def peak_bytes(run):
    """(what `run()` returns, bytes)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return result, max(itertools.accumulate(sizes), default=0)
