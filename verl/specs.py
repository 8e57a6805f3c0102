"""Declarations of generation, agents, rewards, and of the run itself.

A program builds them from the config (verl/programs/specs.py). Runtimes, roles, agents and engines read them, and know neither
the config tree nor the names in it. Models are declared by RoleSpec (verl/roles/api.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config import DataConfig, ModelConfig, RayKwargsConfig, RewardConfig, RolloutConfig


@dataclass(frozen=True)
class AgentSpec:
    """Episodes in place of single responses. `limits` has the limits of sandboxed tools and commands. Only loops written for
    other releases read `config`, the user's config."""

    rollout: RolloutConfig
    data: DataConfig
    limits: RewardConfig
    config: object


@dataclass(frozen=True)
class RolloutSpec:
    """Generation with the weights of the role "actor", or of `model`'s files if nothing trains. `section` has sampling,
    lengths, and the engine with its settings. `dtype`: the compute dtype of the weights, as the config spells it; `rounding`:
    how wider weights become it (fsdp_config.master_rounding). `devices_key`: the keys that say on how many devices it runs,
    with their values, for errors."""

    section: RolloutConfig
    model: ModelConfig
    dtype: str
    rounding: str
    agents: AgentSpec | None
    devices_key: str


@dataclass(frozen=True)
class RewardSpec:
    """Scores of responses of at most `max_response_length` tokens, decoded by the tokenizer of `model`.

    `parts` names the numbers of a sample that the algorithm reads in addition to its score. `needs_answer`, `turn_rewards`: see
    RewardWorker. `only_built_in`: episodes bring their rewards, so a data source without a built-in scorer is no error.
    """

    section: RewardConfig
    model: ModelConfig
    max_response_length: int
    parts: tuple[str, ...]
    needs_answer: bool
    turn_rewards: bool
    only_built_in: bool


@dataclass(frozen=True)
class RunSpec:
    """Facts that all roles of a run share. `folder` is the run folder, `log_folder` has a log file of each rank.

    A process has `start_timeout_s` to start and to find the other processes. A call on a worker may take `call_timeout_s`, a
    collective `collective_timeout_s`. `pools`: devices of the training node and of the rollout node, if each is one node; else
    ().
    """

    folder: Path
    log_folder: Path
    device: str
    deterministic: bool
    start_timeout_s: float
    call_timeout_s: float
    collective_timeout_s: float
    ray: RayKwargsConfig
    pools: tuple[int, ...]
