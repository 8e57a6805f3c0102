"""Readable rows of a batch: one dict per sample, for samples/ and the trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.data_proto.batch_metrics import scored_rows
from verl.data_proto.extras import row_media_of
from verl.data_proto.media import images_in
from verl.data_proto.stored_column import row_arrays
from verl.data_proto.token_values import add_observed, compared_log_probs, token_places
from verl.data_proto.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

_DECODED_ROWS, _TOKENS = 256, 1 << 15  # with their values in memory at once

# per-row columns that are copied under the same name, if present
_COPIED = "uid data_source finish_reason reward_parts reward_error ordinal sample_index weight_version".split()
# per-token columns, cut to the response: row name -> column name
_PER_TOKEN = {
    "log_probs": "rollout_log_probs",
    "old_log_probs": "old_log_probs",
    "train_log_probs": "train_log_probs",
    "ref_log_probs": "ref_log_prob",
    "entropy": "entropys",
    "advantages": "advantages",
    "token_versions": "token_weight_version",
    "response_mask": "response_mask",
    "teacher_ids": "candidate_ids",
    "teacher_log_probs": "teacher_top_log_probs",
}


def sample_rows(batch: DataProto, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """One dict per row of `batch`: prompt and response as text and token ids, log-probs per response token, score (None if
    there is no usable one), reward parts, weight version, finish reason, small pictures of its images, and other columns that
    are present. Values of tokens are arrays, mostly views of the columns. The response text has no special tokens, as the
    scorer gets it."""
    tensors, objects = batch.batch, batch.non_tensor_batch
    attention = tensors["attention_mask"].bool()
    width = tensors["responses"].shape[1]
    lengths = attention[:, attention.shape[1] - width :].sum(dim=1).tolist()
    prompt_masks = attention[:, : attention.shape[1] - width]
    prompt_ids = [ids[mask] for ids, mask in zip(row_arrays(tensors["prompts"]), prompt_masks.numpy(), strict=True)]
    response_ids = [ids[:n] for ids, n in zip(row_arrays(tensors["responses"]), lengths, strict=True)]
    prompts = _decoded(tokenizer, prompt_ids, skip_special_tokens=False)
    responses = _decoded(tokenizer, response_ids, skip_special_tokens=True)
    copied = {name: _column(batch, name) for name in _COPIED}
    names = {name: column for name, column in _PER_TOKEN.items() if column in tensors.keys()}
    per_token = {name: row_arrays(tensors[column], lengths) for name, column in names.items()}
    media = row_media_of(batch)
    scored = scored_rows(batch).tolist()
    scores = tensors["token_level_scores"].sum(dim=1).tolist() if "token_level_scores" in tensors.keys() else None
    rows = []
    for i, length in enumerate(lengths):
        row = {name: values[i] for name, values in copied.items() if values is not None}
        row |= {"prompt": prompts[i], "response": responses[i]}
        if media is not None and (images := images_in(media[i])):
            row["images"] = [small for media_item in images for small in media_item.thumbnails]
        if "reward_model" in objects:
            row["ground_truth"] = (objects["reward_model"][i] or {}).get("ground_truth")
        if scores is not None:
            row["score"] = scores[i] if scored[i] else None
        row |= {"prompt_ids": prompt_ids[i], "response_ids": response_ids[i]}
        row |= _token_values(
            {name: values[i][:length] for name, values in per_token.items()}, row.get("weight_version")
        )
        if "teacher_ids" in row:
            # such rows can train another student, see docs/distillation.md
            row |= {name: objects[name][i] for name in ("raw_prompt", "reward_model") if name in objects}
        rows.append(row)
    return rows


def from_first_trained(rows: list[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """`sample_rows` of given texts, in which the response begins at the first token that trains. In the batch it begins where
    rows differ, so that their common beginning is computed once."""
    for row in rows:
        start = int(np.argmax(row["response_mask"])) if "response_mask" in row else 0  # 0 also if nothing trains
        if start:
            row["prompt_ids"] = np.concatenate([row["prompt_ids"], row["response_ids"][:start]])
            row |= {name: row[name][start:] for name in ("response_ids", *_PER_TOKEN) if name in row}
            if row["response_mask"].all():
                del row["response_mask"]
            row["prompt"] = tokenizer.decode(row["prompt_ids"].tolist(), skip_special_tokens=False)
            row["response"] = tokenizer.decode(row["response_ids"].tolist(), skip_special_tokens=True)
    return rows


def observed_rows(
    batch: DataProto, observed: Sequence[torch.Tensor], tokenizer: Tokenizer
) -> Iterator[dict[str, object]]:
    """`sample_rows` with the values of `add_observed`; some rows are in memory at a time."""
    places = token_places(batch, observed[2:4] if compared_log_probs(observed) else ())
    num_rows = max(1, min(_DECODED_ROWS, _TOKENS // batch.batch["responses"].shape[1]))
    for at in range(0, len(batch), num_rows):
        part = slice(at, at + num_rows)
        yield from sample_rows(add_observed(batch.slice(at, part.stop), observed, places[:, part]), tokenizer)


def _decoded(tokenizer: Tokenizer, rows: list[np.ndarray], skip_special_tokens: bool) -> list[str]:
    """The text of each row of ids; a part of the rows is in memory as Python integers at once."""
    parts = (rows[start : start + _DECODED_ROWS] for start in range(0, len(rows), _DECODED_ROWS))
    return [
        text
        for part in parts
        for text in tokenizer.batch_decode([ids.tolist() for ids in part], skip_special_tokens=skip_special_tokens)
    ]


def _token_values(columns: dict[str, np.ndarray], version: object) -> dict[str, np.ndarray]:
    """Remove columns without information: a mask of all tokens, token versions equal to the sample's, and values that were
    computed for no token (NaN)."""
    says_nothing: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "token_versions": lambda values: values == version,
        "response_mask": lambda values: values,
        "train_log_probs": np.isnan,
        "entropy": np.isnan,
    }
    return {n: v for n, v in columns.items() if n not in says_nothing or not np.all(says_nothing[n](v))}


def _column(batch: DataProto, name: str) -> list[object] | None:
    if name in batch.non_tensor_batch:
        return list(batch.non_tensor_batch[name])
    return batch.batch[name].tolist() if name in batch.batch.keys() else None
