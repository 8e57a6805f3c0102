"""The config tree: typed sections, loading from YAML and overrides, and the checks that need no model and no data.

Importing this package needs neither torch nor OmegaConf.
"""

from verl.config.load import load_config, with_fitting_defaults
from verl.config.loaded import LoadedConfig
from verl.config.roots import (
    PPO,
    PREFERENCE,
    RM,
    SCHEMAS,
    SFT,
    GivenRowsConfig,
    PPOConfig,
    PreferenceConfig,
    RunConfig,
    SFTConfig,
    full_key,
    schema_of,
)
from verl.config.schema import Schema
from verl.config.sections.actor import ActorConfig, CheckpointConfig, CriticConfig, PolicyLossConfig
from verl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from verl.config.sections.data import DataConfig
from verl.config.sections.fsdp import FSDPConfig
from verl.config.sections.model import ModelConfig, OptimConfig, RowsModelConfig, SFTModelConfig
from verl.config.sections.reward import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig, RewardModelConfig
from verl.config.sections.rollout import RolloutConfig
from verl.config.sections.trainer import RayKwargsConfig, StepGuardsConfig, TrainerConfig

__all__ = [
    "PPO", "PREFERENCE", "RM", "SCHEMAS", "SFT", "ActorConfig", "AlgorithmConfig", "CheckpointConfig",
    "CriticConfig", "CustomRewardFunctionConfig", "DataConfig", "FSDPConfig", "GivenRowsConfig", "LoadedConfig",
    "ModelConfig", "OptimConfig", "PPOConfig", "PolicyLossConfig", "PreferenceConfig", "RayKwargsConfig",
    "RewardConfig", "RewardManagerConfig", "RewardModelConfig", "RolloutConfig", "RolloutCorrectionConfig",
    "RowsModelConfig", "RunConfig", "SFTConfig", "SFTModelConfig", "Schema", "StepGuardsConfig", "TrainerConfig", "full_key",
    "load_config", "schema_of", "with_fitting_defaults",
]  # fmt: skip
