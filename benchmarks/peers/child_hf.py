"""The measured process of Hugging Face `generate`: the model as `from_pretrained` gives it, prompts as one batch."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from child import serve
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import Workload


class GenerateChild:
    def __init__(self) -> None:
        self.work: Workload | None = None
        self.model: Any = None
        self.tokenizer: Any = None

    def build(self, work: dict[str, Any]) -> dict[str, Any]:
        self.work = Workload.from_json(work)
        self.tokenizer = AutoTokenizer.from_pretrained(self.work.model)
        dtype = getattr(torch, self.work.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(self.work.model, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None  # every sample has the full length
        return {
            "versions": {"transformers": transformers.__version__},
            "attention": self.model.config._attn_implementation,
            "parameter_dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
        }

    def generate(self, step: int) -> dict[str, Any]:
        """All samples of a step's prompts in one call; the clock runs from token ids to token ids."""
        work = self._work
        ids = self._ids(step).repeat_interleave(work.num_samples, dim=0)
        started = time.perf_counter()
        rows = self._generate(ids, do_sample=True, temperature=work.temperature, top_k=0, top_p=1.0).tolist()
        seconds = time.perf_counter() - started
        return {
            "generate_s": seconds,
            "lengths": sorted({len(row) for row in rows}),
            "num_sequences": len(rows),
        }

    def greedy(self, step: int) -> dict[str, Any]:
        """One greedy sample of each prompt of a step, with how close the best two tokens ever were."""
        output = self._generate(self._ids(step), do_sample=False, output_scores=True, return_dict_in_generate=True)
        tokens = output.sequences[:, -len(output.scores) :].tolist()
        gaps = [(top[:, 0] - top[:, 1]).tolist() for top in (s.float().topk(2).values for s in output.scores)]
        return {"tokens": tokens, "gaps": [list(row) for row in zip(*gaps, strict=True)]}

    @property
    def _work(self) -> Workload:
        assert self.work is not None, "build comes first"
        return self.work

    def _ids(self, step: int) -> torch.Tensor:
        texts = list(self._work.of_step(step))
        return torch.tensor(self.tokenizer(texts, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _generate(self, ids: torch.Tensor, **settings: Any) -> Any:
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._work.response_tokens,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            **settings,
        )
        return output if settings.get("return_dict_in_generate") else output[:, ids.shape[1] :]


if __name__ == "__main__":
    child = GenerateChild()
    serve({"build": child.build, "generate": child.generate, "greedy": child.greedy})
