"""Megatron's process groups, which live in the process, and the context of its computations."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verl.engines.groups import shared_group
from verl.errors import ConfigError
from verl.parallel.serialize import from_bytes, to_bytes

_engines: weakref.WeakSet[object] = weakref.WeakSet()  # engines that use the process groups


def computing(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The context of calls of Megatron-core on `device`."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    from verl.engines.megatron.cpu import cpu_as_device

    return cpu_as_device()


def use_groups(engine: object, num_ranks: int, sizes: dict[str, int | None], timeout_s: float | None) -> None:
    """Make Megatron's process groups, on the first `num_ranks` of the default group together; they live in the process. Raises
    ConfigError if another engine of the process uses them in other sizes."""
    from verl.engines.megatron.library import parallel_state, random_tracker

    sizes, is_other_run = {**sizes, "devices": num_ranks}, bool(_world) and _world[0] is not dist.group.WORLD
    if parallel_state.model_parallel_is_initialized() and (sizes != _sizes or is_other_run):
        gc.collect()
        if _engines and not is_other_run:
            raise ConfigError(
                f"Roles with strategy=megatron share their process groups, and ask for {sizes} and {_sizes}. Give their "
                "sections megatron the same sizes, or the smaller one strategy=fsdp2."
            )
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        arguments = {name: size for name, size in sizes.items() if name != "devices"}
        with _shared_groups(num_ranks, timeout_s):
            parallel_state.initialize_model_parallel(**arguments, create_gloo_process_groups=False)
        group = shared_group(range(num_ranks), timeout_s, among_them=num_ranks < dist.get_world_size())
        state = torch.get_rng_state()
        # for trackers that must exist and are not used: nothing here is random
        random_tracker.model_parallel_cuda_manual_seed(0)
        torch.set_rng_state(state)
        _sizes.clear()
        _sizes.update(sizes)
        _world[:] = [dist.group.WORLD, group]
    _engines.add(engine)


def all_ranks() -> Any:
    """The process group of all ranks of Megatron's groups."""
    return _world[1]


@contextlib.contextmanager
def _shared_groups(num_ranks: int, timeout_s: float | None) -> Iterator[None]:
    """Inside, Megatron makes one group for each set of ranks, and the default group seems to have `num_ranks` ranks."""
    from verl.engines.megatron.library import parallel_state

    create_group, whole_size = parallel_state.create_group, dist.get_world_size
    only_first = num_ranks < whole_size()
    try:
        parallel_state.create_group = lambda ranks, *_, **__: shared_group(ranks, timeout_s, among_them=only_first)
        dist.get_world_size = lambda group=None: num_ranks if group is None else whole_size(group)
        yield
    finally:
        parallel_state.create_group, dist.get_world_size = create_group, whole_size


def broadcast_value(value: object, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """The value of rank `source` (of the default group) on every rank of `group`; `None` is the default group. The values are
    of the types in verl.parallel.serialize."""
    sent = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([sent.numel()], device=device)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        sent = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(sent, source, group=group)
    return from_bytes(sent.cpu().numpy().tobytes())


_sizes: dict[str, int | None] = {}
_world: list[object] = []  # the default group at the time when they were made, and the group of their ranks
