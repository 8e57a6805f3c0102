"""Kernels of one decode step, as a GPU would launch them; counted on a CPU.

`python -m tests.rollout.counted_launches` prints the counts. A Triton kernel and an operation of torch count once each, views
and memory nothing.
"""

import json
import os
import tempfile
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.plain_attention import PLAIN
from tests.rollout.conftest import make_prompts
from verl.config import RolloutConfig
from verl.data_proto.samples import SamplingParams
from verl.models.tiny import make_tiny_model
from verl.rollout.native.cuda.forward import StraightForward
from verl.rollout.native.engine import NativeRollout

# memory and views start no kernel
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "_reshape_alias", "detach",
         "promote_types")  # fmt: skip
NUM_LAYERS, ROWS, VOCABULARY = 24, 40, 4120  # the depth of Qwen2.5-0.5B
# ops of a step that launch more Triton kernels than one; tests/models/test_kernels.py counts them
KERNELS = {"attend_decode": 2, "sample_unfiltered": 2}


class Launches(TorchDispatchMode):
    """Counts the kernels of operations that run inside, and the reads of tensors as large as [ROWS, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.names, self.reads, self.paused = Counter(), Counter(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not (self.paused or views or name in _FREE):
            self.names[name] += KERNELS.get(name, 1)
            for x in torch.utils._pytree.tree_leaves((args, kwargs or {})):
                if isinstance(x, torch.Tensor) and x.numel() >= ROWS * VOCABULARY and x.shape[0] == ROWS:
                    self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def count(n=4, **sampling):
    """Launches of a decode step of ROWS rows, `n` samples a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoModelForCausalLM

        shape = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCABULARY}
        path = make_tiny_model(folder, "qwen2", **shape)
        module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=torch.bfloat16).eval()
    config = RolloutConfig(max_num_seqs=ROWS, enforce_eager=True)
    engine = NativeRollout(module, None, config, eos_token_ids=[], device_kernel=PLAIN)
    engine.device.fits, launches = StraightForward.reads, Launches()
    by_torch = mock.patch.dict(os.environ, VERL_CPU_ISA="none")  # as on a GPU, not by the sampler for processors
    with by_torch, torch.no_grad():
        engine.generate(make_prompts([9] * (ROWS // n)), SamplingParams(n=n, max_new_tokens=6, **sampling), step=1)
        with launches:
            engine.device.stores.launch(ROWS, ROWS // n if n > 1 else 0, ROWS, 6)
    return launches


if __name__ == "__main__":
    counted = count()
    print(json.dumps({"launches": sum(counted.names.values()), "names": counted.names}))
    print(json.dumps({"reads": sum(counted.reads.values()), "of": counted.reads}))
