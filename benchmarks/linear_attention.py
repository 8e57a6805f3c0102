"""Qwen3.5's text model of 20 million random parameters: packed batches and native generation against transformers' own.

    python -m benchmarks.linear_attention

Prints seconds, the least of three: a forward with its backward over 8 prompts of 96 tokens with 4 responses each of up to 160
tokens, packed and padded; and 32 samples of 96 tokens by the native engine and by transformers' `generate`.
"""

import tempfile
import time
from typing import Any

import torch

from tests.models.reference import make_columns
from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.packing import pack_rows
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout

SIZES: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
SAMPLING = SamplingParams(n=4, max_new_tokens=96, ignore_eos=True)


def least(function):
    times = []
    for _ in range(3):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def main():
    folder, draws = make_tiny_model(tempfile.mkdtemp(), "qwen3_5_text", **SIZES), torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 250, (8, 96), generator=draws).tolist()
    lengths = torch.randint(16, 161, (32,), generator=draws).tolist()
    responses = [torch.randint(0, 250, (n,), generator=draws).tolist() for n in lengths]
    packed = pack_rows(make_columns([p for p in prompts for _ in range(4)], responses))
    requests = [PromptRequest(number, tuple(prompt)) for number, prompt in enumerate(prompts)]
    for attention in (None, "sdpa"):
        module = load_causal_lm(folder, override_config={"attn_implementation": attention} if attention else None)
        step = least(lambda: packed_outputs(module, packed, ("log_probs",))["log_probs"].sum().backward())  # noqa: B023
        engine = (HFRollout if attention else NativeRollout)(
            module, make_tokenizer(), RolloutConfig(), eos_token_ids=[258]
        )
        sampling = least(lambda: engine.generate(requests, SAMPLING, step=0))  # noqa: B023
        print(f"{attention or 'packed'}: forward and backward {step:.2f} s, generation {sampling:.2f} s")


if __name__ == "__main__":
    main()
