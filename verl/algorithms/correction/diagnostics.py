"""Metrics of the mismatch between trainer and sampler."""

import torch
from torch import Tensor

from verl.algorithms.correction.weights import LOG_RATIO_LIMIT, parse_is_threshold, ratios
from verl.algorithms.masked import masked_mean, masked_sum, token_mean
from verl.data_proto.metrics import Metric
from verl.data_proto.stored_column import blocks

_BLOCK = 1 << 15  # tokens


def extremes(name: str, values: Tensor) -> dict[str, Metric]:
    """The metrics `name`_max and `name`_min; {} without values."""
    return {f"{name}_max": Metric.max(values.max()), f"{name}_min": Metric.min(values.min())} if values.numel() else {}


def gap_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Divergences of the sampler from the training policy, on the sampler's tokens [batch, response].

    kl: mean of -log rho, estimating KL(sampler || trainer).  k3_kl: mean of rho - 1 - log rho.  training_log_ppl:
    mean over rows of -mean_t(log-prob), training_ppl: mean over rows of its exp; rollout_*: the same of the sampler.
    log_ppl_diff: training_log_ppl - rollout_log_ppl of a row (mean, absolute mean, max, min).  ppl_ratio: mean of its
    exp.  chi2_token: mean of rho^2 - 1.  chi2_seq: mean over rows of (prod_t rho)^2 - 1. Rows without tokens do not
    count.
    """
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rows = mask.any(-1)
    training = -masked_mean(old_log_prob, mask, -1)
    rollout = -masked_mean(rollout_log_prob, mask, -1)
    difference = training - rollout
    sequence = masked_sum(log_ratio, mask, -1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "kl": token_mean(-log_ratio, mask),
        "k3_kl": token_mean(log_ratio.exp() - 1 - log_ratio, mask),
        "training_ppl": token_mean(training.exp(), rows),
        "training_log_ppl": token_mean(training, rows),
        "rollout_ppl": token_mean(rollout.exp(), rows),
        "rollout_log_ppl": token_mean(rollout, rows),
        "log_ppl_diff": token_mean(difference, rows),
        "log_ppl_abs_diff": token_mean(difference.abs(), rows),
        **extremes("log_ppl_diff", difference[rows]),
        "ppl_ratio": token_mean(difference.exp(), rows),
        "chi2_token": token_mean((2 * log_ratio).exp() - 1, mask),
        "chi2_seq": token_mean((2 * sequence).exp() - 1, rows),
    }


def weight_metrics(
    log_ratio: Tensor, weights: Tensor, mask: Tensor, level: str, threshold: float | str
) -> dict[str, Metric]:
    """rollout_is_*: mean, max, min and the fractions outside the thresholds are of the ratios before truncation; std
    and eff_sample_size, (mean w)^2 / mean w^2, are of the weights that multiply the loss. rollout_is_seq_*: of each
    row's mean ratio. Without a lower threshold, 1 / threshold stands for it."""
    low, high = parse_is_threshold(threshold)
    low = 1 / high if low is None else low
    raw = ratios(log_ratio, mask, level).expand_as(mask)
    mean_weight = masked_mean(weights, mask)
    variance = masked_mean((weights - mean_weight).square(), mask)
    second_moment = masked_mean(weights.square(), mask).clamp(min=1e-20)
    count, rows = mask.sum(), mask.any(-1)
    row_means = masked_mean(raw, mask, -1)
    name = "rollout_is"
    return {
        f"{name}_mean": token_mean(raw, mask),
        **extremes(name, raw[mask]),
        f"{name}_std": Metric.mean(variance.sqrt(), count),
        f"{name}_eff_sample_size": Metric.mean(mean_weight.square() / second_moment, count),
        f"{name}_ratio_fraction_high": token_mean(raw > high, mask),
        f"{name}_ratio_fraction_low": token_mean(raw < low, mask),
        f"{name}_seq_mean": token_mean(row_means, rows),
        f"{name}_seq_std": Metric.mean(row_means[rows].std() if int(rows.sum()) > 1 else 0.0, rows.sum()),
        **extremes(f"{name}_seq", row_means[rows]),
        f"{name}_seq_fraction_high": token_mean(row_means > high, rows),
        f"{name}_seq_fraction_low": token_mean(row_means < low, rows),
    }


def rollout_gap_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor | None = None
) -> dict[str, Metric]:
    """training/rollout_*: how far the probabilities of the sampled tokens are from the sampler's. Tensors of one shape.

    rollout_probs_diff_{max,mean,std} of |p - p_sampler| over tokens (std over tokens, unbiased),
    rollout_probs_diff_valid (1 when there is a token to compare, else 0 and nothing more),
    rollout_actor_probs_pearson_corr.
    """
    if response_mask is not None:
        log_probs, rollout_log_probs = log_probs[response_mask.bool()], rollout_log_probs[response_mask.bool()]
    trained, sampled = log_probs.detach().flatten(), rollout_log_probs.detach().flatten()
    num_tokens = trained.numel()
    if num_tokens == 0:
        return {"training/rollout_probs_diff_valid": Metric.min(0.0)}
    first = torch.stack([trained[0], sampled[0]]).cpu().double().exp()
    # sums of what is left after the first token, so that constants have no variance; a block stays in the cache
    origin = torch.stack([first[0], first[1], (first[0] - first[1]).abs()])[:, None]
    sums, products, highest = origin.new_zeros(3), origin.new_zeros(3, 3), origin.new_zeros(())
    values = origin.new_empty(3, _BLOCK)  # one for all blocks: freed memory of tensors has holes
    for block in zip(blocks(trained, _BLOCK), blocks(sampled, _BLOCK), strict=True):
        if (count := len(block[0])) != values.shape[1]:
            values = origin.new_empty(3, count)
        for row, log_p in zip(values, block, strict=False):
            row.copy_(log_p)
        torch.sub(*values[:2].exp_(), out=values[2]).abs_()
        highest = torch.maximum(highest, values[2].amax())
        values -= origin
        sums += values.sum(dim=1)
        products += values @ values.T
    centered = products - sums.outer(sums) / num_tokens
    variances = centered.diagonal().clamp(min=0.0)
    norm = (variances[0] * variances[1]).sqrt()
    metrics = {
        "training/rollout_probs_diff_valid": Metric.min(1.0),
        "training/rollout_probs_diff_max": Metric.max(highest),
        "training/rollout_probs_diff_mean": Metric.mean(origin[2, 0] + sums[2] / num_tokens, num_tokens),
        "training/rollout_probs_diff_std": Metric.mean((variances[2] / max(num_tokens - 1, 1)).sqrt(), num_tokens),
    }
    if bool(norm > 0):  # constant probabilities have no correlation
        metrics["training/rollout_actor_probs_pearson_corr"] = Metric.mean(centered[0, 1] / norm, num_tokens)
    return metrics
