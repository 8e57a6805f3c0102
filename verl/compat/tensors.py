"""Functions over tensors: `verl.utils.torch_functional`, `verl.utils.attention_utils`, `verl.utils.torch_dtypes`."""

import math
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.algorithms import masked


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum under a true `mask`, over `axis` or everything."""
    return masked.masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean under a true `mask`, over `axis` or everything; an empty mask gives 0."""
    return masked.masked_mean(values, mask, axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance under a true `mask`; fewer than two tokens give 0."""
    if unbiased:
        return masked.masked_var(values, mask)
    return masked.masked_mean((values - masked.masked_mean(values, mask)).square(), mask)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to variance 1 over the mask and, with `shift_mean`, to mean 0; 0 outside of the mask."""
    whitened = masked.masked_whiten(values, mask)
    if shift_mean:
        return whitened
    return torch.where(mask.bool(), whitened + masked.masked_mean(values, mask), 0.0)


def get_response_mask(response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    """1 up to the first of `eos_token`, which is included, and 0 behind it. [batch, response]"""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    return (ends.cumsum(dim=1) - ends == 0).to(dtype)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[labels]: [..., vocabulary] and [...] -> [...]. Training avoids the full logits, see
    verl.models.log_probs."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    return torch.clamp(x, tensor_min, tensor_max)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """[batch, sequence] -> [batch, at least max_seq_len]; a longer batch is returned unchanged."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """(token ids, attention mask) [1, max_length] of a text. `truncation` of a longer one: error, left, right or middle."""
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if len(ids) > max_length:
        if truncation not in ("left", "right", "middle"):
            raise ValueError(
                f"The prompt has {len(ids)} tokens, more than max_length={max_length}. Raise it, or cut it."
            )
        first = {"left": 0, "right": max_length}.get(truncation, max_length // 2)
        ids = ids[:first] + ids[len(ids) - (max_length - first) :]
    columns = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)
    ids_and_mask = zip(columns, (pad_token_id, 0), strict=True)
    padded, mask = (pad_sequence_to_length(column, max_length, value, left_pad) for column, value in ids_and_mask)
    return padded, mask


# -- learning-rate schedules of a script's own optimizer; runs use verl.models.optim -----------------------------------


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
) -> LambdaLR:
    """Linear warm-up from `init_lr_ratio` (default: `min_lr_ratio`) to 1, then cosine decay by the completed share p of the
    other steps: max(min, cos(2 pi num_cycles p) (1 - min) / 2 + (1 + min) / 2)."""
    least = 0.0 if min_lr_ratio is None else min_lr_ratio
    first = least if init_lr_ratio is None else init_lr_ratio

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return first + (1 - first) * step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(least, math.cos(2 * math.pi * num_cycles * progress) * (1 - least) / 2 + (1 + least) / 2)

    return LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear warm-up from 0 to 1, then 1."""
    return LambdaLR(optimizer, lambda step: min(1.0, step / max(1, num_warmup_steps)), last_epoch)


# -- padding, with the return values of FlashAttention's `bert_padding` --------------------------------------------------


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """`x[indices]`, with its gradient: [rows, ...] and [count] -> [count, ...]."""
    return x[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The unmasked tokens in one row: [batch, sequence, ...] and [batch, sequence] -> (tokens [count, ...], indices
    [count] into batch x sequence, int32 cumulative lengths [batch + 1], longest row, int32 lengths [batch])."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    ends = lengths.new_zeros(len(lengths) + 1)
    ends[1:] = lengths.cumsum(0)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, ends, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Inverse of `unpad_input`: [count, ...] -> [batch, seqlen, ...], zeros elsewhere."""
    flat = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return cast("torch.Tensor", flat.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen)))


# -- dtypes ----------------------------------------------------------------------------------------------------------------

_SPELLINGS: dict[torch.dtype, tuple[Any, ...]] = {
    torch.float16: (16, "16", "fp16", "float16", torch.float16),
    torch.float32: (32, "32", "fp32", "float32", torch.float32),
    torch.bfloat16: ("bf16", "bfloat16", torch.bfloat16),
}
_SHORT = {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}


class PrecisionType:
    """Names of dtypes as constants, and the torch dtype of each spelling."""

    HALF = "16"
    FLOAT = "32"
    FULL = "64"
    BFLOAT = "bf16"
    MIXED = "mixed"

    @staticmethod
    def supported_types() -> list[str]:
        return [PrecisionType.HALF, PrecisionType.FLOAT, PrecisionType.FULL, PrecisionType.BFLOAT, PrecisionType.MIXED]

    @staticmethod
    def supported_type(precision: object) -> bool:
        return precision in PrecisionType.supported_types()

    @staticmethod
    def is_fp16(precision: object) -> bool:
        return precision in _SPELLINGS[torch.float16]

    @staticmethod
    def is_fp32(precision: object) -> bool:
        return precision in _SPELLINGS[torch.float32]

    @staticmethod
    def is_bf16(precision: object) -> bool:
        return precision in _SPELLINGS[torch.bfloat16]

    @staticmethod
    def to_dtype(precision: object) -> torch.dtype:
        """The torch dtype of a spelling: 16, "fp16", "bf16", "float32", a dtype, ... Raises RuntimeError for another."""
        for dtype, spellings in _SPELLINGS.items():
            if precision in spellings:
                return dtype
        raise RuntimeError(f"{precision!r} is not a precision; write fp32, bf16 or fp16.")

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """ "fp16", "fp32" or "bf16". Raises RuntimeError for another dtype."""
        if precision not in _SHORT:
            raise RuntimeError(f"{precision!r} has no short name; only float32, bfloat16 and float16 have one.")
        return _SHORT[precision]


def as_torch_index(index: object, device: torch.device | str | None = None) -> torch.Tensor:
    """Groups as int64 [n]: whole numbers as they are, other labels numbered in their order."""
    labels = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index).reshape(-1)
    try:
        numbers = labels.astype(np.int64)
        is_whole = bool((numbers == labels.astype(np.float64)).all())
    except (TypeError, ValueError):
        is_whole = False
    if not is_whole:
        numbers = np.unique(labels.astype(str), return_inverse=True)[1]
    return torch.from_numpy(numbers).long().to(device or "cpu")


def group_mean_std(
    scores: torch.Tensor, gidx: torch.Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, standard deviation, count) of `scores` by group, float32 [groups]. A variance is at least `eps`; a group of one
    has mean 0 and deviation 1."""
    scores, gidx = scores.reshape(-1).float().to(device or scores.device), gidx.reshape(-1).to(device or scores.device)
    count = torch.bincount(gidx).float()
    mean = torch.bincount(gidx, weights=scores).float() / count.clamp(min=1)
    squares = torch.bincount(gidx, weights=(scores - mean[gidx]) ** 2).float()
    std = (squares / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    return mean.masked_fill(count <= 1, 0.0), std.masked_fill(count <= 1, 1.0), count
