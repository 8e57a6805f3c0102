"""Config root of reinforcement learning (`verl train`): PPO, GRPO and their family."""

from dataclasses import dataclass

from verl.config.active_keys import PPO_CONDITIONS
from verl.config.derived_defaults import ELSEWHERE, PPO_FOLLOWS, derive_ppo
from verl.config.keys import Section, section, used
from verl.config.rules.ppo import RULES
from verl.config.rules.sections import SECTION_RULES
from verl.config.schema import Schema
from verl.config.sections.actor import ActorConfig, CriticConfig, RefConfig
from verl.config.sections.algorithm import AlgorithmConfig, OnlineConfig, PreferenceLossConfig, RejectionConfig
from verl.config.sections.data import DataConfig
from verl.config.sections.distillation import DistillationConfig
from verl.config.sections.model import ModelConfig
from verl.config.sections.reward import RewardConfig
from verl.config.sections.rollout import RolloutConfig
from verl.config.sections.trainer import GlobalProfilerConfig, PPOTrainerConfig, RayKwargsConfig

_ONLINE = "algorithm.program=online_dpo"


@dataclass(frozen=True)
class ActorRolloutRefConfig(Section):
    model: ModelConfig = section(ModelConfig, "the model")
    actor: ActorConfig = section(ActorConfig, "the policy being trained")
    rollout: RolloutConfig = section(RolloutConfig, "generation of samples")
    ref: RefConfig = section(RefConfig, "the frozen policy that KL terms compare with", when="reference")
    hybrid_engine: bool = used(True, "training and rollout share devices and weights")
    nccl_timeout: int = used(600, "deadline of collectives in seconds", sizing=True)


@dataclass(frozen=True)
class PPOConfig(Section):
    """The configuration of a reinforcement-learning run."""

    data: DataConfig = section(DataConfig, "training and validation rows")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "policy, reference policy and rollout")
    critic: CriticConfig = section(CriticConfig, "the value model", when="critic")
    reward: RewardConfig = section(RewardConfig, "scores of responses")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "advantages, KL, corrections, filters")
    rejection: RejectionConfig = section(RejectionConfig, "samples that rejection sampling keeps", when="rejection")
    distillation: DistillationConfig = section(
        DistillationConfig, "learning from a teacher", when="distillation.enabled"
    )
    online: OnlineConfig = section(OnlineConfig, "pairs of online preference optimization", when=_ONLINE)
    preference: PreferenceLossConfig = section(
        PreferenceLossConfig, "the loss of online preference optimization", when=_ONLINE
    )
    trainer: PPOTrainerConfig = section(PPOTrainerConfig, "length, logging, saving, devices")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray")
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig, "traces of chosen steps")
    model_engine: str = used("dp", "family of training engines: dp (PyTorch-native)")


# first word of an option of the Hydra groups actor, ref and critic -> the strategy that it chooses
ENGINES = {"dp": None, "fsdp": None, "megatron": "megatron", **{engine: engine for engine in ELSEWHERE}}

PPO = Schema(
    name="ppo",
    root=PPOConfig,
    command="verl train",
    title="Reinforcement learning (`verl train`)",
    config_names={
        "ppo_trainer": "",
        "_generated_ppo_trainer": "",
        "ppo_megatron_trainer": "ppo_megatron_trainer",
        "_generated_ppo_megatron_trainer": "ppo_megatron_trainer",
    },
    config_prefixes=("ppo", "grpo", "distill"),
    conditions=PPO_CONDITIONS,
    rules=RULES,
    section_rules=SECTION_RULES,
    follows=PPO_FOLLOWS,
    derive=derive_ppo,
    group_choices={
        role: {f"{engine}_{role}": {} if strategy is None else {key: strategy} for engine, strategy in ENGINES.items()}
        for role, key in (
            ("actor", "actor_rollout_ref.actor.strategy"),
            ("ref", "actor_rollout_ref.ref.strategy"),
            ("critic", "critic.strategy"),
        )
    },
)
