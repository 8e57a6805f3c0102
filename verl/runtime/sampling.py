"""How the config draws samples, and a batch of them drawn by a rollout role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl.config import RolloutConfig
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.runtime.worker_group import wait


def sampling_params(config: RolloutConfig, *, validation: bool = False) -> SamplingParams:
    """The training or the validation draw of `config`; validation without do_sample is greedy."""
    stops: dict[str, Any] = {
        "stop": tuple(config.stop),
        "stop_token_ids": tuple(config.stop_token_ids),
        "ignore_eos": config.ignore_eos,
        "seed": config.seed,
    }
    if not validation:
        temperature = config.temperature if config.do_sample else 0.0
        return SamplingParams(
            n=config.n, temperature=temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            max_new_tokens=config.response_length, **stops,
        )  # fmt: skip
    val = config.val_kwargs
    return SamplingParams(
        n=val.n, temperature=val.temperature if val.do_sample else 0.0, top_p=val.top_p, top_k=val.top_k, min_p=val.min_p,
        max_new_tokens=val.max_new_tokens or config.response_length, **stops,
    )  # fmt: skip


def greedy(params: SamplingParams, n: int = 1) -> SamplingParams:
    """The most likely token at each position, under the same limits."""
    return replace(params, n=n, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)


def draw(rollout: Any, prompts: DataProto, params: SamplingParams, *, step: int, split: str = "train") -> DataProto:
    """`params.n` rows per prompt, samples of a prompt adjacent: the rollout's columns beside the prompts' own."""
    found = wait(rollout.generate(prompts, step=step, split=split, params=params))
    return prompts.repeat(params.n, interleave=True).union(found)
