"""Norms of the tiny models' modules in float64 for float64 models: `actor_rollout_ref.model.external_lib` of runs.

The modules round to float32 there, in an order that depends on the number of rows, which hides differences under comparison.
"""

import os

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

SWITCH = "VERL_TEST_WIDE_NORMS"  # set in processes that serve only one test


def normed(self, x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * scaled.to(x.dtype)


def widen(patch):
    for norm in (LlamaRMSNorm, Qwen2VLRMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm):
        patch.setattr(norm, "forward", normed)


if SWITCH in os.environ:
    widen(pytest.MonkeyPatch())
