"""Imports of heavy packages, each in a separate process: `probes PACKAGE` prints facts of PACKAGE as one line of JSON."""

import importlib
import json
import sys
import time
from typing import Any


def torch_facts() -> dict[str, object]:
    """Version, build, devices and speed of torch."""
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": getattr(torch.version, "hip", None),
        "num_threads": torch.get_num_threads(),
        "cuda_available": torch.cuda.is_available(),
        "devices": [],
    }
    for i in range(torch.cuda.device_count() if facts["cuda_available"] else 0):
        p = torch.cuda.get_device_properties(i)
        facts["devices"].append({"name": p.name, "memory_bytes": p.total_memory, "capability": [p.major, p.minor]})
    try:
        from verl.models.ops.linear import Matmul

        facts["bf16"] = "widened" if Matmul(torch.bfloat16, torch.device("cpu")).widens else "native"
    except ImportError:  # another package has its own probe
        pass
    facts["mps_available"] = bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available())
    facts["gflops"] = {}
    for name in ("float32", "bfloat16"):
        a = torch.ones(768, 768, dtype=getattr(torch, name))
        a @ a
        start = time.perf_counter()
        for _ in range(4):
            a @ a
        facts["gflops"][name] = 4 * 2 * 768**3 / (time.perf_counter() - start) / 1e9
    return facts


def transformers_facts() -> dict[str, object]:
    """The version of transformers, if its models can be imported."""
    import transformers
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    return {"version": transformers.__version__}


def decoder_facts() -> dict[str, object]:
    """State of the compiled kernels for decoding."""
    from verl.rollout.native.compiled.library import state

    return dict(state())


PROBES = {"torch": torch_facts, "transformers": transformers_facts, "decoder": decoder_facts}

if __name__ == "__main__":
    name = sys.argv[1]
    facts = PROBES[name]() if name in PROBES else {"version": importlib.import_module(name).__version__}
    sys.stdout.write(json.dumps(facts) + "\n")
