"""Readable rows of a batch: one dict per sample, for samples/ and the trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.data_proto.batch_metrics import scored_rows
from verl.data_proto.media import images_in, row_media_of
from verl.data_proto.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

# per-row columns that are copied under the same name, if present
_COPIED = (
    "uid",
    "data_source",
    "finish_reason",
    "reward_parts",
    "reward_error",
    "ordinal",
    "sample_index",
    "weight_version",
)
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
    """One dict per row of `batch`: prompt and response as text and token ids, log-probs per response token, score (None where
    there is no usable one), reward parts, weight version, finish reason, small pictures of its images, and other columns that
    are present. The response text has no special tokens, as the scorer gets it."""
    tensors, objects = batch.batch, batch.non_tensor_batch
    attention = tensors["attention_mask"].bool()
    width = tensors["responses"].shape[1]
    lengths = attention[:, attention.shape[1] - width :].sum(dim=1).tolist()
    prompt_masks = attention[:, : attention.shape[1] - width]
    prompt_ids = [ids[mask].tolist() for ids, mask in zip(tensors["prompts"], prompt_masks, strict=True)]
    response_ids = [ids[:n].tolist() for ids, n in zip(tensors["responses"], lengths, strict=True)]
    prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=False)
    responses = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    copied = {name: _column(batch, name) for name in _COPIED}
    per_token = {name: tensors[column].tolist() for name, column in _PER_TOKEN.items() if column in tensors.keys()}
    media = row_media_of(batch)
    scored = scored_rows(batch).tolist()
    scores = tensors["token_level_scores"].sum(dim=1).tolist() if "token_level_scores" in tensors.keys() else None
    rows = []
    for i, length in enumerate(lengths):
        row = {name: values[i] for name, values in copied.items() if values is not None}
        row |= {"prompt": prompts[i], "response": responses[i]}
        if media is not None and (images := images_in(media[i])):
            row["images"] = [small for own in images for small in own.thumbnails]
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


def _token_values(columns: dict[str, list[Any]], version: object) -> dict[str, list[object]]:
    """Remove columns without information: a mask of all tokens, token versions equal to the sample's, and values that were
    computed for no token. NaN becomes None."""
    if set(columns.get("token_versions", ())) <= {version}:
        columns.pop("token_versions", None)
    if all(columns.get("response_mask", ())):
        columns.pop("response_mask", None)
    for name in ("train_log_probs", "entropy"):
        values = [None if value != value else value for value in columns.pop(name, ())]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


def _column(batch: DataProto, name: str) -> list[Any] | None:
    if name in batch.non_tensor_batch:
        return list(batch.non_tensor_batch[name])
    return batch.batch[name].tolist() if name in batch.batch.keys() else None
