"""Megatron-core on a CPU over gloo, for tests and small runs: names of torch and Megatron that stand for a GPU, replaced while
the engine computes. Nothing of it is used on a GPU.

torch.cuda        current_device is "cpu"; synchronize, empty_cache, nvtx ranges, streams and events do nothing; random state
                  is the CPU's
torch functions   a device "cuda" or a number is "cpu", pin_memory is off
torch.Tensor      cuda returns the tensor, record_stream does nothing, type() has the name of a CUDA tensor
megatron.core     random state of the tensor parallel tracker; counts of tokens per expert as numpy arrays; gathers and sums of
                  unequal parts, which gloo has not; shapes sent between stages without waiting for the other side
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from verl.models.parallel.collectives import gather_rows


class _DeviceIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _Nothing:
    """A stream or an event: every method returns it."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: self


@contextlib.contextmanager
def cpu_as_device() -> Iterator[None]:
    """Inside, Megatron-core computes on the CPU. May be nested."""
    replaced = []
    for owner, name, value in _replacements():
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
    try:
        with _DeviceIsCpu():
            yield
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


def _replacements() -> Iterator[tuple[object, str, object]]:
    from verl.engines.megatron.library import P2PCommunicator, mappings
    from verl.engines.megatron.library import random_tracker as tracker
    from verl.engines.megatron.library import token_dispatcher as dispatcher

    cuda, nothing = torch.cuda, _Nothing()
    quiet = {name: lambda *args, **kwargs: None for name in ("synchronize", "empty_cache")}
    streams = {name: lambda *args, **kwargs: nothing for name in ("current_stream", "default_stream")}
    states = {
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    kinds = {"Stream": _Nothing, "Event": _Nothing, "stream": lambda stream: contextlib.nullcontext()}
    for name, value in {"current_device": lambda: "cpu", **quiet, **streams, **states, **kinds}.items():
        yield cuda, name, value
    for name in ("range_push", "range_pop"):
        yield cuda.nvtx, name, lambda *args: None
    plain = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        type_name = plain(self, *args, **kwargs)
        is_name = isinstance(type_name, str) and not type_name.startswith("torch.cuda")
        return type_name.replace("torch.", "torch.cuda.", 1) if is_name else type_name

    yield torch.Tensor, "type", cuda_type
    yield torch.Tensor, "cuda", lambda self, *args, **kwargs: self
    yield torch.Tensor, "record_stream", lambda self, stream: None
    yield tracker, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    yield tracker, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()

    def counts(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    yield dispatcher, "maybe_move_tensor_to_cpu", counts
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def unequal_gather(x: torch.Tensor, group: Any = None, sizes: Any = None, *rest: Any, **named: Any) -> object:
        sizes = named.pop("output_split_sizes", sizes)
        return gather(x, group, None, *rest, **named) if sizes is None else gather_rows(x, list(sizes), group)

    def unequal_scatter(
        x: torch.Tensor, group: Any = None, sizes: Any = None, *rest: object, **named: object
    ) -> object:
        sizes = named.pop("input_split_sizes", sizes)
        if sizes is None:
            return scatter(x, group, None, *rest, **named)
        dist.all_reduce(total := x.contiguous().clone(), group=group)
        return total.narrow(0, sum(sizes[: group.rank()]), sizes[group.rank()]).clone()

    yield mappings, "_gather_along_first_dim", unequal_gather
    yield mappings, "_reduce_scatter_along_first_dim", unequal_scatter
    yield P2PCommunicator, "_communicate_shapes", _exchange_shapes


def _exchange_shapes(
    self: Any, send_next: torch.Tensor | None, send_prev: torch.Tensor | None, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """Wait only for the received shapes. A send over gloo ends when the other side receives. Between interleaved stages the
    other side may first wait for the tensor of this one."""
    # the last call's shapes were received before its tensors, and the tensors were waited for
    for work in self.__dict__.pop("shapes_sent", ()):
        work.wait()
    ranks = (self.prev_rank, self.next_rank)
    sent = [
        dist.isend(torch.tensor(tensor.shape), rank, self.pp_group)
        for tensor, rank in zip((send_prev, send_next), ranks, strict=True)
        if tensor is not None
    ]
    shapes = [torch.zeros(3, dtype=torch.int64) for _ in ranks]
    works = [
        dist.irecv(shape, rank, self.pp_group)
        for shape, rank, receives in zip(shapes, ranks, (recv_prev, recv_next), strict=True)
        if receives
    ]
    for work in filter(None, works):
        work.wait()
    self.shapes_sent = [work for work in sent if work is not None]
    return shapes[0].tolist(), shapes[1].tolist()
