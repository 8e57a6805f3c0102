"""Operations of one decode step, as a GPU would launch them; on a CPU, with the plain attention kernel.

`python -m tests.rollout.counted_launches` in any commit's tree (this file copied there) prints the counts of that tree.
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
from verl.rollout.cuda import backend, fused
from verl.rollout.cuda.forward import StraightForward
from verl.rollout.native.engine import NativeRollout

# memory and views, which start no kernel
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "_reshape_alias", "detach",
         "promote_types")  # fmt: skip
NUM_LAYERS, ROWS, VOCABULARY = 24, 40, 4120  # the depth of Qwen2.5-0.5B


class Launches(TorchDispatchMode):
    """Counts the operations that run inside, and the reads of tensors as large as [ROWS, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.names, self.reads, self.paused = Counter(), Counter(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not (self.paused or views or name in _FREE):
            self.names[name] += 1
            for x in torch.utils._pytree.tree_leaves((args, kwargs or {})):
                if isinstance(x, torch.Tensor) and x.numel() >= ROWS * VOCABULARY and x.shape[0] == ROWS:
                    self.reads[name] += 1
        return func(*args, **(kwargs or {}))

    def once(self, name, function):
        """`function`, counted as one launch called `name`."""

        def call(*args, **kwargs):
            if self.paused:
                return function(*args, **kwargs)
            self.names[name] += 1
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return call


def count(compiled, **sampling):
    """Launches of a decode step of ROWS rows, 4 samples a prompt. `compiled`: a part that torch.compile fuses counts once."""
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoModelForCausalLM

        shape = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCABULARY}
        path = make_tiny_model(folder, "qwen2", **shape)
        module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=torch.bfloat16).eval()
    launches = Launches()
    kernel = PLAIN._replace(forward=launches.once("attention", PLAIN.forward))
    engine = NativeRollout(
        module, None, RolloutConfig(max_num_seqs=ROWS, enforce_eager=True), eos_token_ids=[], device_kernel=kernel
    )
    engine.device.fits = StraightForward.reads
    parts = fused.Parts(*(launches.once(f.__name__, f) if compiled else f for f in fused._FUNCTIONS))
    by_torch = mock.patch.dict(os.environ, VERL_CPU_ISA="none")  # as on a GPU, not by the sampler for processors
    with by_torch, mock.patch.object(backend, "parts", return_value=parts), torch.no_grad():
        engine.generate(make_prompts([9] * (ROWS // 4)), SamplingParams(n=4, max_new_tokens=6, **sampling), step=1)
        launches.names.clear()
        with launches:
            engine.device.stores.launch(ROWS, ROWS // 4, ROWS)
    return launches


if __name__ == "__main__":
    for fuses in (False, True):
        counted = count(fuses)
        print(json.dumps({"compiled": fuses, "launches": sum(counted.names.values()), "names": counted.names}))
        print(json.dumps({"reads": sum(counted.reads.values()), "of": counted.reads}))
