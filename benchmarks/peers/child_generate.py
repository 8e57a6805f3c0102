"""The measured processes of other engines: Hugging Face `generate` with the prompts as one batch, and vLLM's CPU build.

vLLM runs in its own environment, where verl is not installed, at its best settings: a separate engine process, bound to every
core, eager. Clocks run from token ids to token ids.
"""

import os
import time
from typing import Any

import transformers
from child import serve
from workload import Workload


class HuggingFace:
    """The model as `from_pretrained` gives it; every sample has the full length."""

    def __init__(self, work: Workload):
        import torch

        self.work = work
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(work.model)
        dtype = getattr(torch, work.dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.facts = {
            "versions": {"transformers": transformers.__version__},
            "attention": self.model.config._attn_implementation,
            "parameter_dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
        }

    def generate(self, step: int) -> tuple[float, list[list[int]]]:
        """Seconds and token ids of all samples of a step's prompts, in one call."""
        ids = self._ids(step).repeat_interleave(self.work.num_samples, dim=0)
        started = time.perf_counter()
        output = self._generate(ids, do_sample=True, temperature=self.work.temperature, top_k=0, top_p=1.0)
        rows = output[:, ids.shape[1] :].tolist()
        return time.perf_counter() - started, rows

    def _ids(self, step: int) -> Any:
        texts = list(self.work.of_step(step))
        return self.tokenizer(texts, add_special_tokens=False, return_tensors="pt")["input_ids"]

    def _generate(self, ids: Any, **settings: Any) -> Any:
        settings |= {"max_new_tokens": self.work.response_tokens, "pad_token_id": self.tokenizer.pad_token_id or 0}
        return self.model.generate(ids, attention_mask=ids.new_ones(ids.shape), **settings)


class Vllm:
    def __init__(self, work: Workload, settings: dict[str, Any]):
        import vllm

        self.work, self.vllm = work, vllm
        self.engine = vllm.LLM(
            work.model,
            dtype=work.dtype,
            enforce_eager=True,
            max_model_len=work.prompt_tokens + work.response_tokens + 1,
            max_num_seqs=max(work.num_sequences, 8),
            seed=work.seed,
            **settings,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(work.model)
        self.prompts = tokenizer(list(work.prompts), add_special_tokens=False)["input_ids"]
        names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "OMP_WAIT_POLICY")
        self.facts = {
            "versions": {"vllm": vllm.__version__},
            "parameter_dtype": str(self.engine.model_config.dtype).removeprefix("torch."),
            **{name: os.environ.get(name) for name in names},
        }

    def generate(self, step: int) -> tuple[float, list[list[int]]]:
        """Seconds and token ids of all samples of a step's prompts."""
        work, vllm = self.work, self.vllm
        chosen = self.prompts[step * work.num_prompts : (step + 1) * work.num_prompts]
        requests = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in chosen]
        params = vllm.SamplingParams(
            n=work.num_samples, temperature=work.temperature, max_tokens=work.response_tokens, ignore_eos=True
        )
        started = time.perf_counter()
        outputs = self.engine.generate(requests, params, use_tqdm=False)
        rows = [list(sample.token_ids) for output in outputs for sample in output.outputs]
        return time.perf_counter() - started, rows


class Child:
    """Commands of the parent, by name."""

    def build(self, engine: str, work: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        workload = Workload.from_json(work)
        self.side: Any = Vllm(workload, settings) if engine == "vllm" else HuggingFace(workload)
        return self.side.facts

    def generate(self, step: int) -> dict[str, Any]:
        seconds, rows = self.side.generate(step)
        return {"generate_s": seconds, "lengths": sorted({len(row) for row in rows}), "num_sequences": len(rows)}


if __name__ == "__main__":  # vLLM's engine process imports this file again
    child = Child()
    serve({name: getattr(child, name) for name in ("build", "generate")})
