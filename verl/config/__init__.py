"""The config tree: typed sections, loading from YAML and overrides, and the checks that need no model and no data.

Importing this package needs neither torch nor OmegaConf.
"""

from verl.config.actor import ActorConfig, CheckpointConfig, PolicyLossConfig, RefConfig
from verl.config.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLCtrlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from verl.config.critic import CriticConfig
from verl.config.data import CustomClassConfig, DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.fsdp import FSDPConfig, MixedPrecisionConfig
from verl.config.guards import GuardsConfig
from verl.config.load import load_config
from verl.config.loaded import LoadedConfig
from verl.config.megatron import MegatronConfig
from verl.config.model import ModelConfig
from verl.config.optim import OptimConfig
from verl.config.reward import (
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardManagerConfig,
    RewardModelConfig,
    SandboxFusionConfig,
)
from verl.config.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, ValKwargsConfig
from verl.config.services import GlobalProfilerConfig, RayKwargsConfig, SkipConfig, TransferQueueConfig
from verl.config.trainer import TrainerConfig
from verl.config.tree import ActorRolloutRefConfig, VerlConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CustomClassConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "DistillationConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "GlobalProfilerConfig",
    "GuardsConfig",
    "KLCtrlConfig",
    "LoadedConfig",
    "MegatronConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "PFPPOConfig",
    "PolicyLossConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RewardConfig",
    "RewardManagerConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SandboxFusionConfig",
    "SkipConfig",
    "TrainerConfig",
    "TransferQueueConfig",
    "ValKwargsConfig",
    "VerlConfig",
    "load_config",
]
