"""Token balancing over ranks and micro-batches: `verl.utils.seqlen_balancing`; see verl/parallel/balance.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl.parallel.balance import imbalance, pack_by_tokens, partition_by_cost, split_to

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from verl.data_proto.proto import DataProto


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Rows in `k_partitions` lists of nearly equal sums; see `partition_by_cost`."""
    return partition_by_cost(seqlen_list, k_partitions, equal_size)


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens per rank before and after balancing: `prefix`/{min, max, minmax_diff, balanced_min, balanced_max, mean}."""
    return {f"{prefix}/{name}": value for name, value in imbalance(seqlen_list, partitions).items()}


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """(micro-batches, rows of each) of `batch`, whose column attention_mask [batch, sequence] counts the tokens.

    Unlike in other releases no micro-batch exceeds `max_token_len`. Raises ValueError when a single row does.
    """
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    if max(lengths) > max_token_len:
        raise ValueError(
            f"A row of {max(lengths)} tokens exceeds max_token_len={max_token_len}; raise max_token_len to at least that."
        )
    rows = pack_by_tokens(lengths, max_token_len)
    num_batches = max(len(rows), min_num_micro_batch or 1)
    if num_batches_divided_by:
        num_batches = -(-num_batches // num_batches_divided_by) * num_batches_divided_by
    rows = split_to(rows, num_batches)
    return [batch[part] for part in rows], rows


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    reverse = [0] * len(idx_map)
    for place, row in enumerate(idx_map):
        reverse[row] = place
    return reverse


def prepare_dynamic_batch(data: DataProto, max_token_len: int) -> tuple[list[DataProto], list[list[int]]]:
    """(micro-batches, rows of each) of a DataProto; `restore_dynamic_batch` is the inverse."""
    assert data.batch is not None
    _, rows = rearrange_micro_batches(data.batch, max_token_len)
    return [data.select_idxs(part) for part in rows], rows


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Joined results of the micro-batches, [batch, ...], in the original order of the rows."""
    return data[get_reverse_idx([row for part in batch_idx_list for row in part])]
