"""benchmarks/gpu/sizes.py runs through all of its parts with a tiny model, and with the packages that it names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import sizes
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]

# packages that a machine with a GPU need not have
ABSENT = ("omegaconf", "ray", "vllm", "trl", "rich", "psutil", "pyarrow", "peft", "datasets", "matplotlib")

WITHOUT = f"""
import importlib.machinery, runpy, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
sys.argv = ["sizes.py", "--quick", "--json", sys.argv[1]]
runpy.run_path({str(ROOT / "benchmarks" / "gpu" / "sizes.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_all_parts_run_with_the_packages_that_it_names(tmp_path):
    out = tmp_path / "out.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    values = json.loads(out.read_text())
    assert not [name for name in values if name.endswith(": error")]
    assert values["fp32 greedy tokens that differ from generate"] == 0
    for name in ("decode, 4 rows", "GRPO, step"):
        assert values[name] > 0


def test_counted_flops_are_those_that_pytorch_counts():
    """The needed FLOPs of a step without sharing (one sample a prompt), against a count of the operations of a plain
    forward."""
    module = sizes.build("tiny", torch.device("cpu"))
    shape = sizes.Shape(3, 1, 10, 6, (1,), 64, 1)
    with sizes.plain(module, "eager") as reference, torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference(input_ids=torch.zeros(3, 15, dtype=torch.int64), use_cache=False, logits_to_keep=6)
    config = module.config
    # the eager form computes the pairs that the mask hides, too
    per_pair = 4 * config.hidden_size * config.num_hidden_layers
    hidden_pairs = 3 * (15 * 15 - 15 * 16 / 2)
    rotary = 3 * 2 * 15 * config.hidden_size // config.num_attention_heads // 2  # frequencies times positions
    counted = counter.get_total_flops() - per_pair * hidden_pairs
    assert abs(sizes.forward_flops(module, shape) - counted) <= 3 * rotary
