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
    """critic/*, response_length/*, prompt_length/*, and of episodes num_turns/*, tool_call_counts/* and
    timing_s/agent_loop/* of the rows that trained.

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
    found |= count_metrics(batch, "num_turns", "__num_turns__")
    found |= count_metrics(batch, "tool_call_counts", "tool_call_counts")
    found |= _episode_times(batch, prompts, responses)
    return {name: float(value) for name, value in found.items()}


def count_metrics(batch: DataProto, name: str, column: str) -> dict[str, float]:
    """{name}/min, max and mean of an object column of numbers; {} where it is absent."""
    if column not in batch.non_tensor_batch:
        return {}
    counts = np.asarray(batch.non_tensor_batch[column], dtype=np.float64)
    return {
        f"{name}/min": float(counts.min()),
        f"{name}/max": float(counts.max()),
        f"{name}/mean": float(counts.mean()),
    }


def _episode_times(batch: DataProto, prompts: torch.Tensor, responses: torch.Tensor) -> dict[str, float]:
    """Seconds that episodes waited for the policy and for tools and scored themselves, and the episode that took longest."""
    times = batch.non_tensor_batch.get("episode_times")
    if times is None:
        return {}
    parts = ("generate_sequences", "tool_calls", "compute_score")
    seconds = np.array([[float(own.get(part, 0.0)) for part in parts] for own in times])
    found: dict[str, float] = {}
    slowest = int(seconds.sum(axis=1).argmax())
    for number, part in enumerate(parts):
        values, name = seconds[:, number], f"timing_s/agent_loop/{part}"
        found |= {f"{name}/min": values.min(), f"{name}/max": values.max(), f"{name}/mean": values.mean()}
        found[f"timing_s/agent_loop/slowest/{part}"] = values[slowest]
    found["timing_s/agent_loop/slowest/prompt_length"] = float(prompts[slowest])
    found["timing_s/agent_loop/slowest/response_length"] = float(responses[slowest])
    return found


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
