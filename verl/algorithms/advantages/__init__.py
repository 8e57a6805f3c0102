"""Advantage estimators: `fn(token_level_rewards, response_mask, *, ...) -> (advantages, returns)`, [batch, response].

The keyword arguments of an estimator are exactly the columns and settings that it reads; `requires` and
`compute_advantage` use that signature. An argument has the name of its column, but for `index`, the column `uid`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algorithms.advantages.turns import turn_numbers
from verl.algorithms.groups import RowGroups, by_player, without_missing
from verl.algorithms.user_functions import ConfigView
from verl.data_proto.columns import COLUMNS
from verl.data_proto.merge import object_array
from verl.data_proto.stored_column import copied
from verl.errors import ConfigError
from verl.families import ADVANTAGES

F = TypeVar("F", bound=Callable[..., object])


_COLUMN_OF = {"index": "uid"}
COLUMN_ARGUMENTS = (
    "token_level_rewards",
    "response_mask",
    "index",
    "values",
    "reward_baselines",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
    "reward_parts",
    "turn_ids",
    "responses",
)

SETTINGS = (
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "gdpo_reward_keys",
    "gdpo_reward_weights",
    "step_advantage_w",
)  # of a run
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def register_adv_est(name: object) -> Callable[[F], F]:
    """Decorator: register an estimator under `name` (a string or an enum member).

    It is called by keyword with the arguments of its signature, `config` (the `algorithm` section) among them; with
    **kwargs it gets every column and setting.
    """
    return ADVANTAGES.register(str(getattr(name, "value", name)))


def requires(name: str) -> set[str]:
    """Columns that the estimator requires, by column name. Raises ConfigError for an unknown estimator, and for an
    argument that no batch has.

    'values' needs a critic, 'reward_baselines' greedy samples, 'sum_pi_squared' that output of the actor.
    """
    parameters = inspect.signature(ADVANTAGES.get(name)).parameters
    needed = {p.name for p in parameters.values() if p.default is p.empty and p.kind not in _ANY}
    readable = {*COLUMN_ARGUMENTS, *SETTINGS, "config"}
    for argument in sorted(needed - readable):
        raise _missing(name, argument, readable)
    return {_COLUMN_OF.get(argument, argument) for argument in needed.intersection(COLUMN_ARGUMENTS)}


def compute_advantage(
    name: str,
    columns: Mapping[str, Any],
    *,
    config: object = None,
    estimator: Callable[..., Any] | None = None,
    **settings: object,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of the estimator `name`, each [batch, response]; `estimator` replaces the registry's function.

    `columns` are by column name (the groups as `uid`, else `index`; None counts as absent). `settings` are gamma, lam,
    norm_adv_by_std_in_grpo, handle_zero_tail, gdpo_reward_keys, gdpo_reward_weights, step_advantage_w; an estimator gets the
    settings that it reads. Without a column turn_ids, turns are the runs of trained tokens. Raises ConfigError when the
    estimator is unknown, when a column that it needs is missing, or when a user's estimator returns something else.
    """
    estimator = estimator or ADVANTAGES.get(name)
    available = {a: _column(columns, a) for a in COLUMN_ARGUMENTS}
    available = {argument: column for argument, column in available.items() if column is not None}
    rewards = available.get("token_level_rewards")
    is_ours = getattr(estimator, "__module__", "").startswith(__name__)
    if not is_ours:
        available = {argument: copied(column) for argument, column in available.items()}
    if rewards is not None and "response_mask" in available and not is_ours:
        # users' functions compute with the mask, and torch does not subtract booleans
        available["response_mask"] = available["response_mask"].to(rewards.dtype)
    if "index" in available and columns.get("episode_extra") is not None:
        available["index"] = object_array(by_player(available["index"], columns["episode_extra"]))
    parameters = inspect.signature(estimator).parameters
    is_scored = columns.get("is_scored")
    if is_scored is not None and not bool(is_scored.all()):
        available = _without_missing(available, is_scored, settings, compares="index" in parameters)
        if rewards is not None and not available["response_mask"].any():
            return torch.zeros_like(rewards), torch.zeros_like(rewards)
    available = {**settings, **available, "config": ConfigView(config, {})}
    if "turn_ids" in parameters and "response_mask" in available:
        available.setdefault("turn_ids", turn_numbers(available["response_mask"]))
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    chosen = {k: v for k, v in available.items() if takes_all or k in parameters}
    for p in parameters.values():
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in chosen:
            raise _missing(name, p.name, available)
    return _checked(name, estimator(**chosen), rewards)


def _without_missing(
    available: Mapping[str, Any], is_scored: Tensor, settings: Mapping[str, Any], *, compares: bool
) -> dict[str, Any]:
    """The columns for an estimator: rows without a score train nothing and are compared with none. An estimator that `compares`
    rows trains nothing on a row that has lost every other row of its group: its own score would be its advantage."""
    columns, trains = dict(available), is_scored
    if "index" in columns:
        groups = RowGroups.of(columns["index"], is_scored)
        columns["index"] = object_array(without_missing(columns["index"], is_scored))
        if compares:
            trains = is_scored & (groups.is_single | ~RowGroups.of(columns["index"], is_scored).is_single)
    columns["response_mask"] = columns["response_mask"] * trains[:, None]
    if "reward_parts" in columns and not isinstance(columns["reward_parts"], Mapping):
        none = dict.fromkeys(settings.get("gdpo_reward_keys") or (), 0.0)
        rows = zip(columns["reward_parts"], is_scored.tolist(), strict=True)
        columns["reward_parts"] = [parts if has_score else none for parts, has_score in rows]
    return columns


def _column(columns: Mapping[str, object], argument: str) -> Any:
    # a data file may have its own column `index`, so that `uid` takes precedence
    values = columns.get(_COLUMN_OF.get(argument, argument))
    return columns.get(argument) if values is None else values


def _missing(name: str, argument: str, available: Iterable[str]) -> ConfigError:
    column = _COLUMN_OF.get(argument, argument)
    row = COLUMNS.get(column)
    what = f"the column '{column}' ({row.meaning}; made by: {row.producer})" if row else f"'{argument}'"
    return ConfigError(
        f"The advantage estimator '{name}' needs {what}, which this batch does not have. "
        f"An estimator can take {', '.join(sorted(available))}."
    )


def _checked(name: str, pair: object, rewards: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = None if rewards is None else rewards.shape
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(getattr(x, "shape", None) == shape for x in pair)):
        raise ConfigError(
            f"The advantage estimator '{name}' must return (advantages, returns), "
            f"two tensors of shape {tuple(shape or ())}."
        )
    return pair
