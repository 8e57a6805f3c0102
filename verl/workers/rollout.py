"""The rollout role: prompts in, padded columns out; each sample is handed to the scorer the moment it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams, ScoreRequest
from verl.rollout.api import RolloutEngine

ScoreStream = Callable[[ScoreRequest], None]


class RolloutWorker:
    """`score_stream` receives a ScoreRequest for every sample as it ends, while others are still being generated."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        params: SamplingParams,
        *,
        max_prompt_length: int,
        free_cache: bool,
        score_stream: ScoreStream | None = None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.params = params
        self.max_prompt_length = max_prompt_length
        self.free_cache = free_cache
        self.score_stream = score_stream

    @property
    def exact_log_probs(self) -> bool:
        """Whether sampled log-probs equal the training forward's to rounding: same weights in float32 or better."""
        module = getattr(self.engine, "module", None)
        return module is not None and next(module.parameters()).dtype in (torch.float32, torch.float64)

    def generate(
        self, prompts: DataProto, *, step: int, split: str = "train", params: SamplingParams | None = None
    ) -> DataProto:
        """`params.n` rows per prompt (samples of a prompt adjacent) with the columns that the table names under rollout,
        and the prompts' own columns repeated."""
        params = params or self.params
        ordinals = prompts.batch["ordinal"].tolist()
        requests = [
            PromptRequest(ordinal, tuple(ids))
            for ordinal, ids in zip(ordinals, prompts.non_tensor_batch["prompt_token_ids"], strict=True)
        ]
        position = {ordinal: i for i, ordinal in enumerate(ordinals)}

        def on_finish(completion: Completion) -> None:
            if self.score_stream is not None:
                self.score_stream(self._score_request(prompts, position[completion.ordinal], completion, split))

        completions = self.engine.generate(requests, params, step=step, on_finish=on_finish)
        rows = prompts.repeat(params.n, interleave=True)
        return rows.union(self._columns(requests, completions, split, params.max_new_tokens))

    def publish(self, version: int) -> None:
        """The weights changed; samples made from now on carry `version`."""
        self.engine.publish(version)

    def end_generation(self) -> dict[str, float]:
        """Free the cache if configured; returns the engine's figures of the last `generate`."""
        stats = dict(self.engine.stats())
        if self.free_cache:
            self.engine.release()
        return stats

    def greedy(self, n: int = 1) -> SamplingParams:
        return replace(self.params, n=n, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

    def _score_request(self, prompts: DataProto, row: int, completion: Completion, split: str) -> ScoreRequest:
        objects = prompts.non_tensor_batch
        extra = dict(objects["extra_info"][row] or {}) if "extra_info" in objects else {}
        ground_truth = (objects["reward_model"][row] or {}).get("ground_truth") if "reward_model" in objects else None
        return ScoreRequest(
            key=sample_key(split, completion.ordinal, completion.sample),
            data_source=str(objects["data_source"][row]),
            solution_str=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            ground_truth=ground_truth,
            extra_info=extra,
            response_length=len(completion.token_ids),
        )

    def _columns(
        self, requests: list[PromptRequest], completions: list[Completion], split: str, max_new_tokens: int
    ) -> DataProto:
        by_ordinal = {r.ordinal: r.token_ids for r in requests}
        prompt_ids = [by_ordinal[c.ordinal] for c in completions]
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        prompts, prompt_mask = pad_rows(prompt_ids, pad, self.max_prompt_length, left=True)
        responses, response_mask = pad_rows([c.token_ids for c in completions], pad, max_new_tokens, left=False)
        log_probs, _ = pad_rows([c.log_probs for c in completions], 0.0, max_new_tokens, left=False)
        return DataProto.from_dict(
            tensors={
                "prompts": prompts,
                "prompt_mask": prompt_mask,
                "responses": responses,
                "response_mask": response_mask,
                "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
                "rollout_log_probs": log_probs,
                "sample_index": torch.tensor([c.sample for c in completions]),
                "weight_version": torch.tensor([c.weight_version for c in completions]),
            },
            non_tensors={
                "finish_reason": np.array([c.finish_reason for c in completions], dtype=object),
                "sample_key": np.array([sample_key(split, c.ordinal, c.sample) for c in completions], dtype=object),
            },
        )


def sample_key(split: str, ordinal: int, sample: int) -> str:
    """Name of a sample, unique while it is being scored."""
    return f"{split}/{ordinal}/{sample}"


def pad_rows(rows: list[Any], fill: float, width: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, mask), both [batch, width]; `left` pads on the left. Integers give int64, floats float32.

    The width is a limit of the config, not the longest row, so that batches of one run can be joined.
    """
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    values = torch.full((len(rows), width), fill, dtype=dtype)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        values[i, where] = torch.tensor(row, dtype=dtype)
        mask[i, where] = True
    return values, mask
