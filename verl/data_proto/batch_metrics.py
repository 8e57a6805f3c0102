"""Metrics of a finished step, under the names of existing releases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from verl.data_proto.proto import DataProto

# spans whose time is shown per token: gen works on response tokens, the others on all
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")


def data_metrics(
    batch: DataProto, *, max_prompt_length: int, max_response_length: int, use_critic: bool | None = None
) -> dict[str, float]:
    """critic/*, response_length/*, prompt_length/*, num_turns/* and tool_call_counts/* of the rows that trained.

    Rows without a response token (aborted) count in the ratios and lengths, but not in score and rewards. Metrics whose
    columns are absent are left out; `use_critic` None means: if there are values.
    """
    columns = batch.batch
    mask = columns["response_mask"].bool()
    prompts, responses = _lengths(batch)
    alive = responses > 0
    found: dict[str, float] = {}
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if column in columns.keys():
            found |= _spread(f"critic/{name}", columns[column].sum(dim=-1)[alive])
    for name in ("advantages", "returns"):
        if name in columns.keys():
            found |= _spread(f"critic/{name}", columns[name][mask])
    if {"values", "returns"} <= set(columns.keys()) if use_critic is None else use_critic:
        values, returns = columns["values"][mask], columns["returns"][mask]
        found |= _spread("critic/values", values)
        # 1: the critic knows the returns; 0: it knows no more than their mean
        unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
        found["critic/vf_explained_var"] = 1.0 - float(unexplained)
    found |= _length_metrics("response_length", responses, max_response_length)
    found |= _length_metrics("response_length_non_aborted", responses[alive], max_response_length)
    found["response/aborted_ratio"] = float((~alive).double().mean())
    found |= _length_metrics("prompt_length", prompts, max_prompt_length)
    for name, column in (("num_turns", "__num_turns__"), ("tool_call_counts", "tool_call_counts")):
        if column in batch.non_tensor_batch:
            counts = np.asarray(batch.non_tensor_batch[column], dtype=np.float64)
            found |= {f"{name}/min": counts.min(), f"{name}/max": counts.max(), f"{name}/mean": counts.mean()}
    return {name: float(value) for name, value in found.items()}


def span_tokens(batch: DataProto) -> dict[str, int]:
    """Tokens that a span works on, for the spans whose work grows with tokens: those of all responses, or of all rows."""
    prompts, responses = _lengths(batch)
    num_responses = int(responses.sum())
    num_all = num_responses + int(prompts.sum())
    return {**dict.fromkeys(_PER_RESPONSE_TOKEN, num_responses), **dict.fromkeys(_PER_TOKEN, num_all)}


def _lengths(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each prompt and of each response (tool output included), int64 [batch]."""
    attention = batch.batch["attention_mask"].bool()
    width = batch.batch["responses"].shape[-1]
    return attention[:, :-width].sum(dim=-1), attention[:, -width:].sum(dim=-1)


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _length_metrics(name: str, lengths: torch.Tensor, limit: int) -> dict[str, float]:
    if lengths.numel() == 0:
        return {}
    return {**_spread(name, lengths), f"{name}/clip_ratio": float((lengths >= limit).double().mean())}
