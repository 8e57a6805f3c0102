"""Random ragged float64 batches, and the ways to change a batch that must not change a result."""

import math

import torch

PAD_VALUES = {"token_level_rewards": 0.0, "response_mask": False, "turn_ids": -1, "responses": 0}


def ragged_mask(generator, batch, width, holes):
    """Rows of 1..width tokens, right-padded; `holes` takes some tokens out of the middle, never all."""
    lengths = torch.randint(1, width + 1, (batch,), generator=generator)
    lengths[0] = width
    mask = torch.arange(width)[None] < lengths[:, None]
    if holes:
        dropped = torch.rand(batch, width, generator=generator) < 0.3
        dropped[:, 0] = False
        mask = mask & ~dropped
    return mask


def advantage_columns(seed, *, holes=True, singles=True):
    """Every column that an estimator may ask for; rewards lie on trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    uids = ["a", "b", "a", "a", "c", "b", "a"] if singles else ["a", "b", "a", "a", "c", "b", "c"]
    batch, width = len(uids), 6
    mask = ragged_mask(generator, batch, width, holes)
    noise = lambda: torch.randn(batch, width, generator=generator, dtype=torch.float64)  # noqa: E731
    probs = torch.rand(batch, width, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    rewards = torch.where(mask & (noise() > 0), noise(), 0.0)
    columns = {
        "uid": uids,
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": noise(),
        "reward_baselines": noise()[torch.arange(batch), 0],
        "old_log_probs": probs.log(),
        "sum_pi_squared": probs.square() + 0.5 * (1 - probs).square(),
        "rollout_is_weights": torch.exp(0.3 * noise()),
        "reward_parts": {"x": noise()[:, 0], "y": noise()[:, 1]},
    }
    begins = torch.rand(batch, width, generator=generator) < 0.3  # a turn, also right behind another one
    begins = mask & (begins | ~torch.nn.functional.pad(mask[:, :-1], (1, 0)))
    columns["turn_ids"] = torch.where(mask, begins.cumsum(1) - 1, -1)
    # few tokens, so that states are met again
    columns["responses"] = torch.randint(0, 2, (batch, width), generator=generator)
    return columns


def policy_inputs(seed, *, batch=5, width=6, holes=True, spread=0.4):
    """(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, batch, width, holes)
    noise = lambda: torch.randn(batch, width, generator=generator, dtype=torch.float64)  # noqa: E731
    old = torch.log(torch.rand(batch, width, generator=generator, dtype=torch.float64) * 0.8 + 0.1)
    new = (old + spread * noise()).clamp(max=-1e-3)
    weights = torch.exp(0.3 * noise())
    zero = torch.zeros_like(old)
    return tuple(torch.where(mask, x, zero) for x in (old, new, noise())) + (mask, torch.where(mask, weights, zero))


def map_columns(columns, fn):
    """`fn(name, tensor)` on each tensor column, reward parts included."""
    mapped = {}
    for name, value in columns.items():
        if name == "reward_parts":
            mapped[name] = {k: fn(k, v) for k, v in value.items()}
        else:
            mapped[name] = fn(name, value) if isinstance(value, torch.Tensor) else value
    return mapped


def widen(tensor, fill, num=3):
    """More columns on the right of a [batch, response] tensor."""
    if tensor.dim() != 2:
        return tensor
    return torch.cat([tensor, torch.full((tensor.shape[0], num), fill, dtype=tensor.dtype)], dim=1)


def insert_observations(tensor, positions, num, fill):
    """`num` columns before position positions[i] of row i."""
    rows = []
    for row, at in zip(tensor, positions, strict=True):
        rows.append(torch.cat([row[:at], torch.full((num,), fill, dtype=tensor.dtype), row[at:]]))
    return torch.stack(rows)


def remove_observations(tensor, positions, num):
    return torch.stack([torch.cat([r[:at], r[at + num :]]) for r, at in zip(tensor, positions, strict=True)])


def close(a, b, tolerance=1e-10):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    gap = float((a - b).abs().max()) if a.numel() else 0.0
    assert math.isfinite(gap), "not finite"
    assert gap <= tolerance * max(1.0, float(b.abs().max())), gap
