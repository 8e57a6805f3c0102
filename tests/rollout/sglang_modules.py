"""As much of SGLang as verl/rollout/http/in_sglang.py imports, for tests in a process without it, and a model in its form.

inside = import_inside(monkeypatch)      # the module in_sglang
"""

import importlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from verl.models.quantized import fp8_blocks

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FOREIGN_TOKEN = 3  # of SGLang's sampler


class Sampler:
    """SGLang's."""

    def forward(self, output, info, return_logprob, top_logprobs, token_ids, positions):
        assert info.sampling_seed is None, "not of SGLang's form"
        output.next_token_logprobs = torch.full((len(output.next_token_logits),), -3.0)
        output.next_token_logits.fill_(0)  # SGLang computes in place
        return torch.full((len(positions),), FOREIGN_TOKEN)


class WeightUpdater:
    def update_weights_from_ipc(self, request):
        return False, "IPC weight update failed: ImportError"


def import_inside(monkeypatch):
    sampler = {"Sampler": Sampler, "register_sampler_backend": lambda name, factory: None}
    group = SimpleNamespace(world_size=1)
    cache = {"process_weights_after_loading": lambda method, layer: None}
    for path, names in {
        "layers.quantization.kv_cache": {"BaseKVCacheMethod": type("BaseKVCacheMethod", (), cache)},
        "layers.sampler": sampler,
        "model_executor.model_runner_components.weight_updater": {"WeightUpdater": WeightUpdater},
        "runtime_context": {"get_parallel": lambda: SimpleNamespace(tp_group=group)},
        "sampling.sampling_batch_info": {"SamplingBatchInfo": type("SamplingBatchInfo", (), {})},
    }.items():
        module = ModuleType(f"sglang.srt.{path}")
        vars(module).update(names)
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "verl.rollout.http.in_sglang", raising=False)
    inside = importlib.import_module("verl.rollout.http.in_sglang")
    monkeypatch.setitem(sys.modules, "verl.rollout.http.in_sglang", inside)  # let go of at the end
    return inside


class FusedModel(nn.Module):
    """The weights of a Llama `module` as SGLang has them: fused, and loaded by their names in files. Unknown names are passed
    over. The value of the weight `loses` is not taken. With `fp8` projections are levels, with scales of their blocks."""

    def __init__(self, module, loses="", fp8=False):
        super().__init__()
        self.loses, self._places = loses, {}
        stored = dict(module.named_parameters())
        if fp8:
            for name in [name for name in stored if "_proj." in name]:
                level, scale = fp8_blocks(stored[name].detach())
                stored |= {name: level, f"{name}_scale_inv": scale}
                if name.endswith("k_proj.weight"):
                    cache = f"{name.removesuffix('k_proj.weight')}attn"
                    stored |= {f"{cache}.{scale}": torch.zeros(()) for scale in ("k_scale", "v_scale")}
        for name, parameter in stored.items():
            *path, last, kind = name.split(".")
            fused, parts = next(((f, p) for f, p in FUSED.items() if last in p), (last, (last,)))
            held = ".".join([*path, fused, kind])
            if kind in ("k_scale", "v_scale"):
                self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.tensor(1.0), requires_grad=False))
                continue
            sizes = [stored[".".join([*path, part, kind])].shape for part in parts]
            first = sum(size[0] for size in sizes[: parts.index(last)])
            self._places[name] = (held, slice(first, first + len(parameter)))
            if parts.index(last) == 0:
                shape = (sum(size[0] for size in sizes), *parameter.shape[1:])
                empty = torch.zeros(shape, dtype=parameter.dtype)
                self.register_parameter(held.replace(".", "/"), nn.Parameter(empty, requires_grad=False))
                getattr(self, held.replace(".", "/")).weight_loader = partial(self._load_part, held)

    def named_parameters(self, *args, **more):
        return ((name.replace("/", "."), p) for name, p in super().named_parameters(*args, **more))

    def _load_part(self, held, parameter, tensor, part=None):
        """The loader of a parameter: `part` is q, k or v, or a number."""
        *path, fused, kind = held.split(".")
        parts = FUSED.get(fused, (fused,))
        name = parts[0 if part is None else "qkv".index(part) if isinstance(part, str) else part]
        self._store([(".".join([*path, name, kind]), tensor)])

    def load_weights(self, weights):
        self._store((name, tensor) for name, tensor in weights if "_scale" not in name)

    def _store(self, weights):
        held = dict(self.named_parameters())
        for name, tensor in weights:
            if name in self._places and name != self.loses:
                fused, rows = self._places[name]
                assert held[fused].dtype == tensor.dtype, "SGLang would convert it without a scale"
                held[fused].data[rows] = tensor
