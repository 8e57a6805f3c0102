"""The functions of `verl.trainer.ppo.ray_trainer` over a batch: response mask, KL in the reward, advantages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms import kl
from verl.algorithms.advantages import compute_advantage as estimate
from verl.algorithms.filters import pf_ppo_indices
from verl.algorithms.older_contract import settings_of
from verl.algorithms.user_functions import ConfigView
from verl.data_proto.proto import DataProto


def compute_response_mask(data: DataProto) -> Tensor:
    """The response part of `attention_mask`, [batch, response]."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Add the column `token_level_rewards` = token_level_scores - beta KL(old_log_probs, ref_log_prob), and tell `kl_ctrl`
    the mean KL. Returns the batch and the metrics actor/reward_kl_penalty and actor/reward_kl_penalty_coeff."""
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
    kl_ctrl.update(current_kl=mean.item(), n_steps=len(data))
    return data, {"actor/reward_kl_penalty": mean.item(), "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Add the columns `advantages` and `returns` of the estimator, from token_level_rewards, response_mask (made where it is
    absent) and what else it reads; groups are the column `uid`. `config` is the section `algorithm`. With `use_pf_ppo` in it,
    rows are drawn anew by their score (for gae). Raises ConfigError as the estimator does."""
    columns = data.batch
    if "response_mask" not in columns.keys():
        columns["response_mask"] = compute_response_mask(data)
    section = ConfigView(config, {})
    settings = {**settings_of(config), "gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    given = {**data.non_tensor_batch, **{str(name): columns[name] for name in columns.keys()}}
    if section.get("gdpo_reward_keys"):
        given["reward_parts"] = _reward_parts(data, settings["gdpo_reward_keys"])
    columns["advantages"], columns["returns"] = estimate(str(adv_estimator), given, config=config, **settings)
    if str(adv_estimator) == "gae" and section.get("use_pf_ppo"):
        rule = ConfigView(section.get("pf_ppo"), {})
        scores = columns["token_level_rewards"].sum(-1)
        return data.select_idxs(pf_ppo_indices(scores, rule.get("reweight_method", "pow"), rule.get("weight_pow", 2.0)))
    return data


def _reward_parts(data: DataProto, keys: Any) -> list[dict[str, Any]]:
    """What each row's reward function returned: the column reward_parts, or a column for each name."""
    if "reward_parts" in data.non_tensor_batch:
        return list(data.non_tensor_batch["reward_parts"])
    names = [key for key in keys if key in data.non_tensor_batch]
    return [{name: data.non_tensor_batch[name][row] for name in names} for row in range(len(data))]
