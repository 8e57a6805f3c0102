"""The measured process of vLLM's CPU build, at its best settings: a separate engine process, bound to every core, eager.

Runs in vLLM's own environment, where verl is not installed.
"""

from __future__ import annotations

import os
import time
from typing import Any

import vllm
from child import serve
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams, TokensPrompt
from workload import Workload


class VllmChild:
    def __init__(self) -> None:
        self.work: Workload | None = None
        self.engine: Any = None
        self.prompts: list[list[int]] = []

    def build(self, work: dict[str, Any]) -> dict[str, Any]:
        self.work = Workload.from_json(work)
        self.engine = LLM(
            self.work.model,
            dtype=self.work.dtype,
            enforce_eager=True,
            max_model_len=self.work.prompt_tokens + self.work.response_tokens + 1,
            max_num_seqs=max(self.work.num_sequences, 8),
            seed=self.work.seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(self.work.model)
        self.prompts = tokenizer(list(self.work.prompts), add_special_tokens=False)["input_ids"]
        names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "OMP_WAIT_POLICY")
        return {
            "versions": {"vllm": vllm.__version__},
            "parameter_dtype": str(self.engine.model_config.dtype).removeprefix("torch."),
            **{n: os.environ.get(n) for n in names},
        }

    def generate(self, step: int) -> dict[str, Any]:
        """All samples of a step's prompts; the clock runs from token ids to token ids."""
        work = self.work
        assert work is not None, "build comes first"
        chosen = self.prompts[step * work.num_prompts : (step + 1) * work.num_prompts]
        requests = [TokensPrompt(prompt_token_ids=ids) for ids in chosen]
        params = SamplingParams(
            n=work.num_samples, temperature=work.temperature, max_tokens=work.response_tokens, ignore_eos=True
        )
        started = time.perf_counter()
        outputs = self.engine.generate(requests, params, use_tqdm=False)
        samples = [list(sample.token_ids) for output in outputs for sample in output.outputs]
        seconds = time.perf_counter() - started
        return {
            "generate_s": seconds,
            "lengths": sorted({len(row) for row in samples}),
            "num_sequences": len(samples),
        }


if __name__ == "__main__":  # the engine's process imports this file again
    child = VllmChild()
    serve({"build": child.build, "generate": child.generate})
