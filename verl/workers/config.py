"""Import path of the section classes; they live in verl.config."""

from verl.compat.sections import (
    ActorConfig,
    CriticConfig,
    HFModelConfig,
    PolicyLossConfig,
    RolloutConfig,
)
from verl.compat.sections import ActorConfig as FSDPActorConfig
from verl.compat.sections import CriticConfig as FSDPCriticConfig
from verl.compat.sections import FSDPConfig as FSDPEngineConfig
from verl.compat.sections import OptimConfig as FSDPOptimizerConfig
from verl.compat.sections import OptimConfig as OptimizerConfig

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "RolloutConfig",
]
