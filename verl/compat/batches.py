"""Functions over a complete batch: response mask, KL in the reward, advantages, rollout correction, token balancing
(`verl.trainer.ppo.ray_trainer`, `verl.trainer.ppo.rollout_corr_helper`, `verl.utils.seqlen_balancing`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from verl.algorithms import kl
from verl.algorithms.advantages import compute_advantage as estimate
from verl.algorithms.correction import CORRECTION_SETTINGS, rollout_correction
from verl.algorithms.correction.diagnostics import gap_metrics
from verl.algorithms.filters import pf_ppo_indices
from verl.algorithms.user_functions import ConfigView
from verl.compat.core_algos import settings_of
from verl.config.rejection import REJECTION_KEYS, rejection_rules
from verl.data_proto.metrics import metric_values
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.parallel.balance import pack_by_tokens, partition_by_cost

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.config.sections.algorithm import RolloutCorrectionConfig

log = logging.getLogger(__name__)
CORRECTED = threading.Event()  # the script of the run has called the correction, or was warned


def compute_response_mask(data: DataProto) -> Tensor:
    """The response part of `attention_mask`, [batch, response]."""
    return cast("Tensor", data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :])


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Add the column `token_level_rewards` = token_level_scores - beta KL(old_log_probs, ref_log_prob), and update `kl_ctrl`
    by the mean KL. Returns the batch and the metrics actor/reward_kl_penalty and actor/reward_kl_penalty_coeff."""
    columns, beta = data.batch, kl_ctrl.value
    mask = columns["response_mask"] if "response_mask" in columns.keys() else compute_response_mask(data)
    columns["token_level_rewards"], mean = kl.apply_kl_penalty(
        columns["token_level_scores"],
        columns["old_log_probs"],
        columns["ref_log_prob"],
        mask,
        beta=beta,
        kind=kl_penalty,
    )
    kl_ctrl.update(current_kl=mean.item(), n_steps=int(mask.bool().any(-1).sum()))
    return data, {"actor/reward_kl_penalty": mean.item(), "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: object = None,
) -> DataProto:
    """Add the columns `advantages` and `returns` of the estimator, from token_level_rewards, response_mask (made if absent)
    and its other inputs; groups are equal values of `uid`. `config` is the section `algorithm`; its `use_pf_ppo` resamples
    the rows by score (gae only). Raises ConfigError as the estimator does."""
    columns = data.batch
    if "response_mask" not in columns.keys():
        columns["response_mask"] = compute_response_mask(data)
    section = ConfigView(config, {})
    settings = {**settings_of(config), "gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    inputs = {**data.non_tensor_batch, **{str(name): columns[name] for name in columns.keys()}}
    if section.get("gdpo_reward_keys"):
        inputs["reward_parts"] = _reward_parts(data, settings["gdpo_reward_keys"])
    columns["advantages"], columns["returns"] = estimate(str(adv_estimator), inputs, config=config, **settings)
    if str(adv_estimator) == "gae" and section.get("use_pf_ppo"):
        rule = ConfigView(section.get("pf_ppo"), {})
        scores = columns["token_level_rewards"].sum(-1)
        return data.select_idxs(pf_ppo_indices(scores, rule.get("reweight_method", "pow"), rule.get("weight_pow", 2.0)))
    return data


def _reward_parts(data: DataProto, keys: Any) -> list[dict[str, object]]:
    """The reward components of each row: the column reward_parts, or one column per name."""
    if "reward_parts" in data.non_tensor_batch:
        return list(data.non_tensor_batch["reward_parts"])
    names = [key for key in keys if key in data.non_tensor_batch]
    return [{name: data.non_tensor_batch[name][row] for name in names} for row in range(len(data))]


def warn_uncorrected(section: RolloutCorrectionConfig, batch: DataProto) -> None:
    """Warn, once in a run, that a fit of a script trains on a batch without the correction of its config."""
    chosen = {name: vars(section)[name] for name in ("rollout_is", "rollout_rs") if vars(section)[name]}
    if not chosen or section.bypass_mode or CORRECTED.is_set() or "rollout_is_weights" in batch.batch.keys():
        return
    CORRECTED.set()
    log.warning(
        "algorithm.rollout_correction.%s has no effect: this fit does not call compute_rollout_correction_and_add_to_batch. "
        "Call it before the update, or set the key to null.",
        ", ".join(f"{name}={value}" for name, value in chosen.items()),
    )


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, **settings: Any
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(a batch with the column rollout_is_weights, or None without `rollout_is`; the mask without rejected tokens; metrics
    rollout_corr/*). `settings` are the keys of algorithm.rollout_correction. Raises ConfigError."""
    CORRECTED.set()
    rules = rejection_rules(*(settings.pop(name, None) for name in REJECTION_KEYS))
    settings["rollout_rs"], settings["rollout_rs_threshold"] = rules
    correction = rollout_correction(old_log_prob, rollout_log_prob, response_mask, **settings)
    weights = None if correction.weights is None else DataProto.from_dict({"rollout_is_weights": correction.weights})
    return weights, correction.response_mask, metric_values(correction.metrics)


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: object
) -> tuple[DataProto, dict[str, float]]:
    """Put `rollout_is_weights` (with `rollout_is`) and the `response_mask` without rejected tokens into the batch; it has
    old_log_probs, rollout_log_probs and response_mask. Returns the batch and metrics rollout_corr/*."""
    section, columns = ConfigView(rollout_corr_config, {}), batch.batch
    settings = {
        name: section.get(name) for name in (*CORRECTION_SETTINGS, *REJECTION_KEYS[2:]) if section.get(name) is not None
    }
    weights, columns["response_mask"], metrics = compute_rollout_correction_and_rejection_mask(
        columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"], **settings
    )
    return (batch if weights is None else batch.union(weights)), metrics


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """kl, k3_kl, perplexities and chi2 between trainer and sampler; {} without the sampler's log-probs."""
    if rollout_log_prob is None:
        return {}
    return metric_values(gap_metrics(old_log_prob, rollout_log_prob, response_mask.bool()))


def apply_bypass_mode(batch: DataProto, rollout_corr_config: object = None, policy_loss_config: Any = None) -> None:
    """Use the sampler's log-probs as the old policy's: `old_log_probs` become `rollout_log_probs`, and
    `policy_loss_config` selects the loss `bypass_mode` with these settings. Raises ConfigError without rollout_log_probs."""
    if "rollout_log_probs" not in batch.batch.keys():
        raise ConfigError(
            "bypass_mode needs the column rollout_log_probs, which the batch lacks. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if policy_loss_config is None:
        return
    from omegaconf import OmegaConf, open_dict

    if OmegaConf.is_config(policy_loss_config):
        with open_dict(policy_loss_config):
            policy_loss_config["rollout_correction"] = rollout_corr_config
    else:
        policy_loss_config["rollout_correction"] = rollout_corr_config
    policy_loss_config["loss_mode"] = "bypass_mode"


apply_rollout_correction = apply_bypass_mode


def calculate_workload(seqlen_list: Sequence[int] | Tensor) -> Tensor:
    """Relative cost of sequences by their lengths s: 24576 s + s^2, the products of a layer and its attention in a model of 7
    billion weights."""
    lengths = seqlen_list if isinstance(seqlen_list, Tensor) else torch.as_tensor(seqlen_list)
    return 24576 * lengths + lengths**2


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[object], k_partitions: int
) -> list[list[int]]:
    """Rows in `k_partitions` lists of nearly equal cost; rows of one `uid` stay together."""
    groups: dict[object, list[int]] = {}
    for row, uid in enumerate(uid_list):
        groups.setdefault(uid, []).append(row)
    costs = [int(calculate_workload([seqlen_list[row] for row in rows]).sum()) for rows in groups.values()]
    members = list(groups.values())
    return [sorted(row for g in part for row in members[g]) for part in partition_by_cost(costs, k_partitions, False)]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Rows in `k_partitions` lists of nearly equal sums; see `partition_by_cost`."""
    return partition_by_cost(seqlen_list, k_partitions, equal_size)


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens per rank before and after balancing: `prefix`/{min, max, minmax_diff, balanced_min, balanced_max, mean}."""
    size = -(-len(seqlen_list) // len(partitions))
    in_order = [sum(seqlen_list[start : start + size]) for start in range(0, len(seqlen_list), size)]
    balanced = [sum(seqlen_list[row] for row in part) for part in partitions]
    return {
        f"{prefix}/min": min(in_order),
        f"{prefix}/max": max(in_order),
        f"{prefix}/minmax_diff": max(in_order) - min(in_order),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(seqlen_list) / len(partitions),
    }


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """(micro-batches, rows of each) of `batch`. Its column attention_mask [batch, sequence] counts the tokens. Unlike in
    other releases no micro-batch exceeds `max_token_len`: raises ValueError when a single row does."""
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    if max(lengths) > max_token_len:
        raise ValueError(
            f"A row of {max(lengths)} tokens exceeds max_token_len={max_token_len}; raise max_token_len to at least that."
        )
    rows = pack_by_tokens(lengths, max_token_len)
    num_batches = max(len(rows), min_num_micro_batch or 1)
    if num_batches_divided_by:
        num_batches = -(-num_batches // num_batches_divided_by) * num_batches_divided_by
    rows = _split_to(rows, num_batches)
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


def _split_to(parts: list[list[int]], num_parts: int) -> list[list[int]]:
    """At least `num_parts` lists of the same rows, made by halving the longest one again and again.

    Raises ValueError when there are fewer rows than that.
    """
    if num_parts > sum(map(len, parts)):
        raise ValueError(f"{sum(map(len, parts))} rows cannot fill {num_parts} parts.")
    parts = [list(rows) for rows in parts]
    while len(parts) < num_parts:
        longest = max(parts, key=len)
        half = len(longest) // 2
        parts.append(longest[half:])
        del longest[half:]
    return sorted(parts)
