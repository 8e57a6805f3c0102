"""What the ledger is told of a batch: its columns (verl/data_proto/columns.py) as records of verl/tracking/ledger/book.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verl.tracking.ledger.book import Key, Piece, Prompt, Scored

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto


def prompt_digest(token_ids: Sequence[int]) -> str:
    """By which a prompt is known again."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=8).hexdigest()


class Order(Protocol):
    """The order of a run's prompts."""

    def row(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of a prompt."""
        ...


def issued_prompts(prompts: DataProto, order: Order) -> list[Prompt]:
    """The prompts of a batch from the loader, one row each."""
    columns = prompts.batch
    return [
        Prompt(ordinal, order.row(ordinal)[0], row, prompt_digest(ids))
        for ordinal, row, ids in zip(
            columns["ordinal"].tolist(),
            columns["row_index"].tolist(),
            prompts.non_tensor_batch["prompt_token_ids"],
            strict=True,
        )
    ]


def pieces_of(ordinals: Sequence[int], rows: DataProto, num_known: Callable[[Key], int]) -> list[Piece]:
    """What the rollout's columns `rows`, one for each of `ordinals`, have beyond the tokens that are known already."""
    columns, pieces = rows.batch, []
    width = columns["responses"].shape[1]
    lengths = columns["attention_mask"][:, -width:].sum(dim=1).tolist()
    tokens = columns["responses"].numpy().astype("<i4")
    log_probs = columns["rollout_log_probs"].numpy()
    samples, versions, ranks = (columns[n].tolist() for n in ("sample_index", "weight_version", "rollout_rank"))
    reasons = rows.non_tensor_batch["finish_reason"]
    for i, (ordinal, sample) in enumerate(zip(ordinals, samples, strict=True)):
        new = slice(num_known((ordinal, sample)), lengths[i])
        piece = Piece(ordinal, sample, tokens[i, new], log_probs[i, new], versions[i], str(reasons[i]), ranks[i])
        pieces.append(piece)
    return pieces


def scores_of(batch: DataProto) -> list[Scored]:
    """The reward's columns of a batch."""
    objects = batch.non_tensor_batch
    rewards = batch.batch["token_level_scores"].double().sum(dim=1).tolist()
    found = zip(keys_of(batch), rewards, objects["reward_parts"], objects["reward_error"], strict=True)
    return [Scored(*key, reward, dict(parts or {}), error) for key, reward, parts, error in found]


def keys_of(batch: DataProto) -> list[Key]:
    """(ordinal, sample) of every row."""
    columns = batch.batch
    return list(zip(columns["ordinal"].tolist(), columns["sample_index"].tolist(), strict=True))
