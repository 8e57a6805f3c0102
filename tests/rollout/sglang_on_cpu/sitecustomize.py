"""Read by each Python process that has this folder on its PYTHONPATH: SGLang can be imported without a GPU's packages.

SGLang imports packages of kernels and pictures even if nothing of them runs. An absent one of ABSENT becomes
a module with every name, and no name does anything. Its LoRA asks for pinned memory, which needs a GPU's driver: it gets
usual memory. Its products in fp8 need a GPU or AMX: verl's emulation takes their place, in float32 too.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types

ABSENT = ("torchvision", "torchaudio", "sgl_kernel", "flashinfer", "decord")


class Nothing:
    """It can be called, read, iterated and inherited from."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return Nothing()

    def __getattr__(self, name):
        return name_of_nothing(name)

    def __iter__(self):
        return iter(())

    def __mro_entries__(self, bases):
        return (object,)


def name_of_nothing(name):
    if name.startswith("__"):  # Python and its libraries look for these
        raise AttributeError(name)
    return Nothing()


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, after the finders of installed packages."""

    def find_spec(self, name, path=None, target=None):
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__version__, module.__getattr__ = [], "0.0", name_of_nothing
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Absent())


class Emulated(importlib.abc.MetaPathFinder):
    """Asked first: changes SGLang's module of fp8 once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "sglang.srt.layers.quantization.fp8":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            module._is_cpu, module.dispatch_w8a8_block_fp8_linear = False, lambda **settings: product_in_fp8
            module.Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])

        spec.loader.exec_module = changed
        return spec


def product_in_fp8(input, weight, block_size, weight_scale, input_scale=None, bias=None):
    from verl.models.quantized import on_grid

    scale = weight_scale.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
    scale = scale[: weight.shape[0], : weight.shape[1]]
    return torch.nn.functional.linear(on_grid(input, "fp8"), weight.float() * scale, bias)


def unpinned(make):
    return functools.wraps(make)(lambda *args, pin_memory=False, **more: make(*args, **more))


if "VERL_OWN_SGLANG" in os.environ:  # in the server, not in the run that starts it
    import torch

    sys.meta_path.insert(0, Emulated())
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor
