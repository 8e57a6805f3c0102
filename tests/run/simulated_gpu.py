"""Numbers on the CPU that say they are on cuda:0. An operator that mixes them with others fails as it does on a GPU.

`python -m tests.run.simulated_gpu FOLDER CASES`, with the JSON {"base": overrides, "changes": [overrides, ...]}, makes two
steps of each case on the CPU and on the simulated GPU, and prints what differs after the first. "waits" in place of "changes"
prints where the host waits for the GPU between micro-batches, and "offload" what differs after the second step with optimizer
and masters in host memory.
simulated_gpu.cpp is loaded before torch.

Not simulated: streams, NCCL, flash kernels, graphs, compiled parts, memory.
"""

import contextlib
import json
import math
import sys
from collections import Counter
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
    "get_device_name": lambda *args: "simulated",
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
        note_wait("tolist")
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
    if waits(name, args, kwargs, bool(here)):
        note_wait(name)
    device = kwargs.get("device")
    stays = bool(here) if device is None else torch.device(device).type == "cuda"
    check(name, args, kwargs, tensors, bool(here), stays)
    if stays and device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, OnGPU) else x, (args, kwargs))
    if name == "aten::mm" and func._overloadname.startswith("dtype"):  # only a GPU has it
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


WAITS = Counter()  # between micro-batches, by place and operator
# with a result on the host, or of a shape that the values decide
READING = {"aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_unique2", "aten::unique_dim",
           "aten::unique_consecutive", "aten::equal", "aten::_local_scalar_dense"}  # fmt: skip


def waits(name, args, kwargs, has_gpu):
    """Whether the host waits for what the GPU has yet to do. A copy from memory that is not pinned does so too."""
    if name in ("aten::_to_copy", "aten::copy_"):
        source, non_blocking = args[name == "aten::copy_"], kwargs.get("non_blocking", len(args) > 2 and args[2])
        to_gpu = torch.device(kwargs.get("device") or source.device).type == "cuda"
        to_gpu = isinstance(args[0], OnGPU) if name == "aten::copy_" else to_gpu
        return isinstance(source, OnGPU) != to_gpu and not (to_gpu and non_blocking)
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        return any(isinstance(x, OnGPU) and x.dtype == torch.bool for x in args[1])
    if name == "aten::repeat_interleave":
        return has_gpu and kwargs.get("output_size") is None
    return has_gpu and name in READING


def note_wait(name):
    """Count a wait between the first and the last micro-batch of a mini-batch."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    if any(function == "_sum_gradients" for *_, function in frames):
        file, line = next((file.rpartition("/verl/")[2], line) for file, line, _ in frames if "/verl/" in file)
        WAITS[f"{file}:{line} {name.removeprefix('aten::')}"] += 1


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


def run_on(device, folder, base, changes):
    """A run of the overrides `base` and `changes`."""
    from tests.run.conftest import train_run

    with simulated_gpu() if device == "cuda" else contextlib.nullcontext():
        return train_run(folder, base, (f"trainer.device={device}", *changes))


def differing(runs, step):
    """The metrics of a step that differ between two runs."""
    from tests.run.conftest import CLOCKED

    rows = [{k: v for k, v in run.rows[step].items() if not k.startswith((*CLOCKED, "rollout/"))} for run in runs]
    return {k: (v, rows[1].get(k)) for k, v in rows[0].items() if not near(v, rows[1].get(k))}


def waits_of_micro_batches(folder, base, changes):
    """Waits of the host between micro-batches, by place, with their number."""
    WAITS.clear()
    run_on("cuda", folder, base, changes)
    return dict(WAITS)


def offloaded(folder, base, changes):
    """The metrics of the second step that differ with masters, gradients and moments in host memory."""
    from verl.models.optim import MasterOptimizer

    num_steps, keys = 0, ("param_offload", "optimizer_offload")

    def checked(self, *args, step=MasterOptimizer.step):
        nonlocal num_steps
        tensors = [x for master in self.masters.values() for x in (master, master.grad)]
        result = step(self, *args)
        tensors += [x for slots in self.optimizer.state.values() for x in slots.values() if x.dim()]
        assert not any(isinstance(x, OnGPU) for x in tensors)
        num_steps += 1
        return result

    plain = run_on("cuda", folder / "plain", base, changes)
    offload = [f"actor_rollout_ref.actor.fsdp_config.{key}=True" for key in keys]
    with mock.patch.object(MasterOptimizer, "step", checked):
        runs = plain, run_on("cuda", folder / "offload", base, [*changes, *offload])
    assert num_steps > 0
    return differing(runs, 1)


def near(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5)
    return a == b


if __name__ == "__main__":
    task = json.loads(sys.argv[2])
    (base, scratch), answers = (task["base"], Path(sys.argv[1])), {}
    for number, case in enumerate(task.get("changes", [])):
        runs = [run_on(device, scratch / f"{number}-{device}", base, case) for device in ("cpu", "cuda")]
        answers[str(case)] = differing(runs, 0)
    for name, function in (("waits", waits_of_micro_batches), ("offload", offloaded)):
        answers |= {
            str(case): function(scratch / name / str(i), base, case) for i, case in enumerate(task.get(name, []))
        }
    print(json.dumps(answers))
