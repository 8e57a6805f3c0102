"""The config tree: typed sections, loading from YAML and overrides, and the checks that need no model and no data.

Importing this package needs neither torch nor OmegaConf.
"""

from verl.config.load import load_config
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
    RMConfig,
    RunConfig,
    SFTConfig,
    full_key,
    schema_of,
)
from verl.config.roots.ppo import ActorRolloutRefConfig
from verl.config.schema import Problem, Schema
from verl.config.sections.actor import ActorConfig, CheckpointConfig, CriticConfig, PolicyLossConfig, RefConfig
from verl.config.sections.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLCtrlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from verl.config.sections.data import CustomClassConfig, DataConfig, PreferenceDataConfig, SFTDataConfig, TextDataConfig
from verl.config.sections.fsdp import FSDPConfig, MixedPrecisionConfig, SFTEngineConfig
from verl.config.sections.model import ModelConfig, OptimConfig, SFTModelConfig
from verl.config.sections.reward import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig, RewardModelConfig
from verl.config.sections.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, ValKwargsConfig
from verl.config.sections.trainer import (
    GuardsConfig,
    PPOTrainerConfig,
    RayKwargsConfig,
    SFTTrainerConfig,
    StepGuardsConfig,
    TrainerConfig,
)

__all__ = [
    "PPO", "PREFERENCE", "RM", "SCHEMAS", "SFT", "ActorConfig", "ActorRolloutRefConfig", "AgentConfig",
    "AlgorithmConfig", "CheckpointConfig", "CriticConfig", "CustomClassConfig", "CustomRewardFunctionConfig",
    "DataConfig", "FSDPConfig", "FilterGroupsConfig", "GivenRowsConfig", "GuardsConfig", "KLCtrlConfig",
    "LoadedConfig", "MixedPrecisionConfig", "ModelConfig", "MultiTurnConfig", "OptimConfig", "PFPPOConfig",
    "PPOConfig", "PPOTrainerConfig", "PolicyLossConfig", "PreferenceConfig", "PreferenceDataConfig", "Problem",
    "RMConfig", "RayKwargsConfig", "RefConfig", "RewardConfig", "RewardManagerConfig", "RewardModelConfig",
    "RolloutConfig", "RolloutCorrectionConfig", "RunConfig", "SFTConfig", "SFTDataConfig", "SFTEngineConfig",
    "SFTModelConfig", "SFTTrainerConfig", "Schema", "StepGuardsConfig", "TextDataConfig", "TrainerConfig",
    "ValKwargsConfig", "full_key", "load_config", "schema_of",
]  # fmt: skip
