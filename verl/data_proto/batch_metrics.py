"""Metrics of a finished step, under the names of existing releases.

Every metric over rows takes its rows from `RowSets`: a batch also has rows of failed episodes, with a placeholder
instead of a response, and rows with a failed scorer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.data_proto.span_column import SpanColumn
from verl.data_proto.stored_column import blocks, row_arrays

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

MAX_PARTS = 256  # parts of the reward that are averaged, the most frequent ones: the model's text may name some

_BLOCK = 1 << 16  # tokens
_FEWEST_PROMPTS = 4  # that tell one answer to everything from the one right answer to a prompt

# spans with their time per token: gen works on response tokens, every further span on all
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")


@dataclass(frozen=True)
class RowSets:
    """Rows of a batch, each [batch] bool. sampled: with a response of the policy (not of an episode that failed). answered: of
    these, with a token in it. scored: of these, with a usable score. prompts, responses: tokens of each row, int64 [batch]."""

    sampled: torch.Tensor
    answered: torch.Tensor
    scored: torch.Tensor
    prompts: torch.Tensor
    responses: torch.Tensor

    @classmethod
    def of(cls, batch: DataProto) -> RowSets:
        """Without the columns episode_error and is_scored all rows are sampled and scored."""
        errors = batch.non_tensor_batch.get("episode_error")
        sampled = torch.tensor([error is None for error in (errors if errors is not None else [None] * len(batch))])
        prompts, responses = _lengths(batch)
        answered = sampled & (responses > 0)
        return cls(sampled, answered, answered & scored_rows(batch), prompts, responses)


def scored_rows(batch: DataProto) -> torch.Tensor:
    """Rows that the reward has not marked as without a usable score, [batch] bool."""
    columns = batch.batch
    return columns["is_scored"] if "is_scored" in columns.keys() else torch.ones(len(batch), dtype=torch.bool)


def data_metrics(
    batch: DataProto, *, max_prompt_length: int, max_response_length: int, use_critic: bool | None = None
) -> dict[str, float]:
    """critic/*, response_length/*, prompt_length/*, reward/{part}/mean, and of episodes num_turns/*, tool_call_counts/* and
    timing_s/agent_loop/*.

    Scores, rewards and parts are over scored rows, advantages, returns and values over trained tokens. Lengths and counts are
    over sampled rows, response_length_non_aborted over answered ones. response/aborted_ratio and the times of episodes are over
    all rows. Metrics without their columns are left out; `use_critic` None means: if there are values.
    """
    columns, rows = batch.batch, RowSets.of(batch)
    mask, prompts, responses = columns["response_mask"].bool(), rows.prompts, rows.responses
    metrics: dict[str, float] = {}
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if column in columns.keys():
            metrics |= _spread(f"critic/{name}", columns[column].sum(dim=-1)[rows.scored])
    spreads: dict[int, dict[str, float]] = {}  # by tensor: without a critic, advantages are the returns
    for name in ("advantages", "returns"):
        if name in columns.keys():
            place = id(columns[name])
            spreads[place] = spreads.get(place) or _spread_of_tokens(columns[name], mask)
            metrics |= {f"critic/{name}/{part}": value for part, value in spreads[place].items()}
    if {"values", "returns"} <= set(columns.keys()) if use_critic is None else use_critic:
        values, returns = chosen_values(columns["values"], mask), chosen_values(columns["returns"], mask)
        metrics |= _spread("critic/values", values)
        # 1: the critic knows the returns; 0: it knows no more than their mean
        unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = 1.0 - float(unexplained)
    cut = _cut(batch, responses, max_response_length)
    for name, some in (("response_length", rows.sampled), ("response_length_non_aborted", rows.answered)):
        metrics |= _length_metrics(name, responses[some], cut[some])
    metrics["response/aborted_ratio"] = float((~rows.answered).double().mean())
    metrics |= _length_metrics("prompt_length", prompts[rows.sampled], prompts[rows.sampled] >= max_prompt_length)
    metrics |= _part_means(batch, rows.scored)
    metrics |= count_metrics(batch, "num_turns", "__num_turns__")
    metrics |= count_metrics(batch, "tool_call_counts", "tool_call_counts")
    metrics |= _episode_times(batch, prompts, responses)
    return {name: float(value) for name, value in metrics.items()}


def variety_metrics(batch: DataProto) -> dict[str, float]:
    """response/distinct_ratio: different responses, as a share of the answered rows. response/most_frequent_ratio: the share of
    the response that comes most often; left out of a batch of few different prompts. Tool output is part of a response."""
    rows, columns = RowSets.of(batch), batch.batch
    if not (num_answered := int(rows.answered.sum())):
        return {}
    counts, different_prompts = Counter[int](), set[int]()
    prompts, responses = row_arrays(columns["prompts"]), row_arrays(columns["responses"])
    for row in rows.answered.nonzero()[:, 0].tolist():
        counts[hash(responses[row][: int(rows.responses[row])].tobytes())] += 1
        different_prompts.add(hash(prompts[row][prompts[row].size - int(rows.prompts[row]) :].tobytes()))
    metrics = {"response/distinct_ratio": len(counts) / num_answered}
    if len(different_prompts) >= _FEWEST_PROMPTS:
        metrics["response/most_frequent_ratio"] = max(counts.values()) / num_answered
    return metrics


def _part_means(batch: DataProto, scored: torch.Tensor) -> dict[str, float]:
    """reward/{part}/mean: the mean of each number that the reward function returned, over the `scored` rows [batch] that have
    it."""
    if "reward_parts" not in batch.non_tensor_batch:
        return {}
    parts = number_parts(batch.non_tensor_batch["reward_parts"][scored.numpy()])
    return {f"reward/{name}/mean": float(np.nanmean(values)) for name, values in parts.items()}


def number_parts(parts: Sequence[Mapping[str, object]]) -> dict[str, np.ndarray]:
    """The parts of rewards that are numbers, float64 [rows] by name, NaN if a row has none; the MAX_PARTS most frequent."""
    names = Counter(name for row in parts for name, value in row.items() if isinstance(value, (int, float)))
    return {
        name: np.array([v if isinstance(v := row.get(name), (int, float)) else np.nan for row in parts], np.float64)
        for name, _ in names.most_common(MAX_PARTS)
    }


def count_metrics(batch: DataProto, name: str, column: str) -> dict[str, float]:
    """{name}/min, max and mean of an object column of numbers over the sampled rows; {} without the column."""
    if column not in batch.non_tensor_batch:
        return {}
    counts = torch.from_numpy(np.asarray(batch.non_tensor_batch[column], dtype=np.float64))
    return _spread(name, counts[RowSets.of(batch).sampled])


def _episode_times(batch: DataProto, prompts: torch.Tensor, responses: torch.Tensor) -> dict[str, float]:
    """Seconds that episodes waited for the policy and for tools and scored themselves, and the times and lengths of the slowest
    episode. Failed episodes are included."""
    times = batch.non_tensor_batch.get("episode_times")
    if times is None:
        return {}
    parts = ("generate_sequences", "tool_calls", "compute_score")
    seconds = np.array([[float(episode.get(part, 0.0)) for part in parts] for episode in times])
    metrics: dict[str, float] = {}
    slowest = int(seconds.sum(axis=1).argmax())
    for number, part in enumerate(parts):
        values, name = seconds[:, number], f"timing_s/agent_loop/{part}"
        metrics |= {f"{name}/min": values.min(), f"{name}/max": values.max(), f"{name}/mean": values.mean()}
        metrics[f"timing_s/agent_loop/slowest/{part}"] = values[slowest]
    metrics["timing_s/agent_loop/slowest/prompt_length"] = float(prompts[slowest])
    metrics["timing_s/agent_loop/slowest/response_length"] = float(responses[slowest])
    return metrics


def span_tokens(batch: DataProto) -> dict[str, int]:
    """Tokens that a span works on, if its work grows with tokens: the tokens of all responses, or of all rows."""
    prompts, responses = _lengths(batch)
    num_responses = int(responses.sum())
    num_all = num_responses + int(prompts.sum())
    return {**dict.fromkeys(_PER_RESPONSE_TOKEN, num_responses), **dict.fromkeys(_PER_TOKEN, num_all)}


def _lengths(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each prompt and of each response (tool output included), int64 [batch]."""
    attention = batch.batch["attention_mask"].bool()
    width = batch.batch["responses"].shape[-1]
    return count_true(attention, slice(-width)), count_true(attention, slice(-width, None))


def is_in_memory(column: torch.Tensor) -> bool:
    """Whether numpy reads the values in place; else they lie on a device, or would be made."""
    return column.is_cpu and not isinstance(column, SpanColumn)


def count_true(mask: torch.Tensor, places: slice = slice(None)) -> torch.Tensor:
    """`mask[:, places].sum(dim=-1)` of a bool matrix; on the CPU by numpy, in a tenth of torch's time."""
    return torch.from_numpy(mask.numpy()[:, places].sum(axis=-1)) if is_in_memory(mask) else mask[:, places].sum(dim=-1)


def any_true(mask: torch.Tensor) -> torch.Tensor:
    """`mask.any(dim=-1)` of a bool matrix; on the CPU by numpy, in a fiftieth of torch's time."""
    return torch.from_numpy(mask.numpy().any(axis=-1)) if is_in_memory(mask) else mask.any(dim=-1)


def chosen_values(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values[mask]`; of float32 on the CPU by numpy, in a third of torch's time."""
    if not is_in_memory(values) or values.dtype not in (torch.float32, torch.float64):
        return values[mask]
    return torch.from_numpy(values.detach().numpy()[mask.numpy()])


def _spread_of_tokens(values: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Mean, max and min of `values[mask]`, in blocks of rows that stay in the cache."""
    rows, parts = max(1, _BLOCK // mask.shape[1]), []
    for block in zip(blocks(values, rows), blocks(mask, rows), strict=True):
        chosen_tensor = chosen_values(*block).cpu()
        chosen = (chosen_tensor.float() if chosen_tensor.dtype.itemsize < 4 else chosen_tensor).numpy()
        if chosen.size:
            parts.append((chosen.sum(dtype=np.float64), chosen.size, chosen.max(), chosen.min()))
    if not parts:
        return {}
    sums, sizes, highest, lowest = map(np.array, zip(*parts, strict=True))
    return {"mean": sums.sum() / sizes.sum(), "max": highest.max(), "min": lowest.min()}


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean(dtype=torch.float64)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _cut(batch: DataProto, lengths: torch.Tensor, limit: int) -> torch.Tensor:
    """Whether each response was cut at the limit, bool [batch]. A response that ended by itself is complete at any length.
    Without finish_reason, every response at the limit counts as cut."""
    is_full, reasons = lengths >= limit, batch.non_tensor_batch.get("finish_reason")
    if reasons is None:
        return is_full
    return is_full & is_full.new_tensor([reason != "stop" for reason in reasons])


def _length_metrics(name: str, lengths: torch.Tensor, cut: torch.Tensor) -> dict[str, float]:
    if lengths.numel() == 0:
        return {}
    return {**_spread(name, lengths), f"{name}/clip_ratio": float(cut.double().mean())}
