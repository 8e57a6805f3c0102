"""Peak memory of a function above the memory held before, from the allocations of tensors on the CPU."""

import itertools

import torch


def peak_bytes(run):
    """(what `run()` returns, bytes)"""
    result, sizes = _allocations(run)
    return result, max(itertools.accumulate(sizes), default=0)


def kept_bytes(run):
    """Bytes of tensors that live on with the result of `run`."""
    return sum(_allocations(run)[1])


def _allocations(run):
    """(what `run()` returns, bytes of each allocation, less than 0 if memory is freed)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return result, [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
