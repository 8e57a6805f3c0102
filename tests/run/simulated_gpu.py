"""Numbers on the CPU that say they are on cuda:0. An operator that mixes them with others fails as it does on a GPU.

`python -m tests.run.simulated_gpu FOLDER CASES`, with the JSON {"base": overrides, "changes": [overrides, ...]}, makes two
steps of each case on the CPU and on the simulated GPU, and prints what differs after the first.
simulated_gpu.cpp is loaded before torch.

Not simulated: streams, NCCL, flash kernels, graphs, compiled parts, memory.
"""

import contextlib
import json
import math
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
# these take tensors of both devices: copies, and indexing by indices from the host
MAY_MIX = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}
CALLS = {  # of torch.cuda
    "synchronize": lambda *args: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *args: None,
    "mem_get_info": lambda *args: (1 << 33, 1 << 34),
    "memory_reserved": lambda *args: 0,
    "memory_allocated": lambda *args: 0,
    "max_memory_allocated": lambda *args: 0,
    "max_memory_reserved": lambda *args: 0,
    "reset_peak_memory_stats": lambda *args: None,
    "get_device_capability": lambda *args: (9, 0),
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "set_device": lambda *args: None,
    "_lazy_init": lambda: None,
}


class OnGPU(torch.Tensor):
    """`inner` has the numbers."""

    @staticmethod
    def __new__(cls, inner):
        wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, new):
        assert isinstance(new, OnGPU), "a tensor on the GPU is given memory of the host"
        torch.Tensor.data.__set__(self, new)
        self.inner = new.inner

    def tolist(self):
        return self.inner.tolist()

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def __deepcopy__(self, memo):
        copied = OnGPU(self.inner.clone()).requires_grad_(self.requires_grad)
        copied._is_param = getattr(self, "_is_param", False)
        return copied


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """An operator on the numbers, after a look at the devices."""
    name = func._schema.name
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    here = {id(x.inner): x for x in tensors if isinstance(x, OnGPU)}
    device = kwargs.get("device")
    stays = bool(here) if device is None else torch.device(device).type == "cuda"
    check(name, args, kwargs, tensors, bool(here), stays)
    if stays and device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, OnGPU) else x, (args, kwargs))
    if name == "aten::mm" and func._overloadname.startswith("dtype"):  # which only a GPU has
        a, b, dtype = inner_args
        out = torch.mm(a.to(dtype), b.to(dtype), **inner_kwargs)
    elif name == "aten::_fused_sdp_choice":
        return 0
    else:
        out = func(*inner_args, **inner_kwargs)
    if name == "aten::copy_":
        return args[0]
    if not stays:
        return out.clone() if name == "aten::_to_copy" and here and out is inner_args[0] else out

    def back(x):
        if not isinstance(x, torch.Tensor):
            return x
        return here[id(x)] if id(x) in here else OnGPU(x)  # a tensor written in place is returned as the same object

    return tree_map(back, out)


def check(name, args, kwargs, tensors, has_gpu, stays):
    on_host = [x for x in tensors if not isinstance(x, OnGPU) and x.device.type == "cpu"]
    if has_gpu and name not in MAY_MIX and any(x.dim() for x in on_host):
        raise RuntimeError(f"{name} mixes devices: {[(str(x.device), tuple(x.shape)) for x in tensors]}")
    if name.startswith("aten::index") and name in MAY_MIX and has_gpu and not isinstance(args[0], OnGPU):
        raise RuntimeError(f"{name} looks into a tensor of the host by numbers on the GPU")
    if name == "aten::index_put_" and has_gpu and args[2].dim() and not isinstance(args[2], OnGPU):
        raise RuntimeError(f"{name} puts numbers of the host into a tensor on the GPU")
    generator = kwargs.get("generator")
    if stays and generator is not None and generator.device.type != "cuda":
        raise RuntimeError(f"{name} on the GPU uses a generator of the host")


@contextlib.contextmanager
def simulated_gpu():
    with contextlib.ExitStack() as stack:
        torch.__future__.set_swap_module_params_on_conversion(True)  # tied parameters stay one
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the CPU, and moved
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        for name, call in CALLS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, call))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self, *args: self))
        stack.enter_context(Mode())
        yield


def differing(name, base, changes):
    """The metrics of the first step that differ between CPU and GPU."""
    from tests.run.conftest import CLOCKED, train_run

    rows = []
    for device, context in (("cpu", contextlib.nullcontext()), ("cuda", simulated_gpu())):
        with context:
            run = train_run(Path(base[0]) / f"{name}-{device}", base[1:], (f"trainer.device={device}", *changes))
        rows.append({k: v for k, v in run.rows[0].items() if not k.startswith((*CLOCKED, "rollout/"))})
    return {k: (v, rows[1].get(k)) for k, v in rows[0].items() if not near(v, rows[1].get(k))}


def near(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5)
    return a == b


if __name__ == "__main__":
    task = json.loads(sys.argv[2])
    gaps = {str(c): differing(str(i), [sys.argv[1], *task["base"]], c) for i, c in enumerate(task["changes"])}
    print(json.dumps(gaps))
