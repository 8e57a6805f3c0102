"""Counter-based random numbers: each is a function of its purpose, so neither the order and the batch of the
calls nor restarts change it.

The generator chains the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants of its variant 13 by Stafford) over
the counters, in the manner of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". One number per token.
"""

import torch

from verl.models.ops.table import op

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN_SIGNED = _signed(_GOLDEN)
_MULTIPLIERS_SIGNED = tuple(_signed(m) for m in _MULTIPLIERS)


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> _SHIFTS[2])


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts keep the sign: mask it off


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value + _GOLDEN_SIGNED
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS_SIGNED, strict=True):
        value = (value ^ _shift_right(value, shift)) * multiplier
    return value ^ _shift_right(value, _SHIFTS[2])


def sample_keys(seed: int, step: int, ordinals: torch.Tensor, samples: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """One int64 key per sample, from `ordinals` and `samples` (int64 [n]); the part of the key that its tokens share."""
    base = 0
    for counter in (seed, step, stream):
        base = _mix_int(base ^ (counter & _MASK))
    return _mix(_mix(ordinals ^ _signed(base)) ^ samples)


@op(triton="draws:launch_uniforms_at")
def uniforms_at(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The uniform of each key at its position: float64 [n], strictly between 0 and 1 (52 bits)."""
    bits = _shift_right(_mix(keys ^ _mix(positions)), 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def uniforms(
    seed: int, step: int, ordinals: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor, stream: int = 0
) -> torch.Tensor:
    """float64 [n] in (0, 1), keyed by (seed, step, stream, ordinal, sample, position); the last three are int64 [n].

    Elementwise on the device of its arguments, without a host synchronisation.
    """
    return uniforms_at(sample_keys(seed, step, ordinals, samples, stream), positions)
