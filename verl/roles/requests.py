"""A sample as the reward function sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.data_proto.proto import DataProto
from verl.data_proto.samples import ScoreRequest


def sample_key(split: str, ordinal: int, sample: int) -> str:
    """Name of a sample, unique while it is being scored."""
    return f"{split}/{ordinal}/{sample}"


def score_request(rows: DataProto, row: int, key: str, token_ids: Sequence[int], tokenizer: Any) -> ScoreRequest:
    """The request for a response of `token_ids` to the prompt of `row`; data_source, reward_model and extra_info are object
    columns of `rows`."""
    objects = rows.non_tensor_batch
    extra = dict(objects["extra_info"][row] or {}) if "extra_info" in objects else {}
    ground_truth = (objects["reward_model"][row] or {}).get("ground_truth") if "reward_model" in objects else None
    return ScoreRequest(
        key=key,
        data_source=str(objects["data_source"][row]),
        solution_str=tokenizer.decode(token_ids, skip_special_tokens=True),
        ground_truth=ground_truth,
        extra_info=extra,
        response_length=len(token_ids),
    )
