"""Config root of reward models (`verl rm`)."""

from dataclasses import dataclass

from verl.config.active_keys import SHARED_CONDITIONS
from verl.config.derived_defaults import SFT_FOLLOWS, derive_sft
from verl.config.keys import Section, section, used
from verl.config.rules.sections import SECTION_RULES
from verl.config.schema import Condition, Schema
from verl.config.sections.actor import CheckpointConfig
from verl.config.sections.data import PreferenceDataConfig
from verl.config.sections.fsdp import SFTEngineConfig
from verl.config.sections.model import OptimConfig, RowsModelConfig
from verl.config.sections.trainer import RayKwargsConfig, SFTTrainerConfig

PAIR_LOSSES = ("sigmoid", "logexp")


@dataclass(frozen=True)
class RMDataConfig(PreferenceDataConfig):
    """`data` of reward models: pairs, rated completions, or solutions with a label for each step."""

    rating_key: str = used("rating", "field that holds the rating of a completion", when="rates")
    steps_key: str = used("completions", "field that holds the steps of a solution", when="labels_steps")
    labels_key: str = used("labels", "field that says for each step whether it is right", when="labels_steps")


@dataclass(frozen=True)
class RMLossConfig(Section):
    loss: str = used(
        "sigmoid",
        "sigmoid (Bradley-Terry, less the row's margin), logexp (without margins), regression (squared distance to a rating), "
        "or process (cross-entropy of the label of each step)",
        choices=(*PAIR_LOSSES, "regression", "process"),
    )
    center_rewards_coefficient: float = used(
        0.0,
        "weight of the squared sum of a pair's scores, which keeps scores around 0; 0.01 is usual",
        when="pairs",
        ge=0,
    )
    step_separator: str = used("\n", "text that ends each step", when="labels_steps")
    train_on_last_step_only: bool = used(False, "train only the label of the last step", when="labels_steps")


@dataclass(frozen=True)
class RMConfig(Section):
    """The configuration of a run that trains a reward model."""

    data: RMDataConfig = section(RMDataConfig, "training and validation rows")
    model: RowsModelConfig = section(
        RowsModelConfig, "the model that gets a scalar head, or a reward model to continue"
    )
    engine: SFTEngineConfig = section(SFTEngineConfig, "training engine")
    optim: OptimConfig = section(OptimConfig, "optimizer", defaults={"lr": 1e-5})
    rm: RMLossConfig = section(RMLossConfig, "the loss")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "parts of a checkpoint")
    trainer: SFTTrainerConfig = section(
        SFTTrainerConfig,
        "length, logging, saving, devices",
        defaults={
            "project_name": "reward-model",
            "experiment_name": "rm",
            "default_local_dir": "checkpoints/reward-model/rm",
            "total_epochs": 1,
        },
    )
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray")


def _loss_is(*names: str) -> Condition:
    return Condition(
        lambda root, node: root.rm.loss in names, f"rm.loss is not {' or '.join(names)}", f"set rm.loss={names[0]}"
    )


RM = Schema(
    name="rm",
    root=RMConfig,
    command="verl rm",
    title="Reward models (`verl rm`)",
    config_names={"rm_trainer": ""},
    config_prefixes=("rm",),
    conditions={
        **SHARED_CONDITIONS,
        "pairs": _loss_is(*PAIR_LOSSES),
        "rates": _loss_is("regression"),
        "labels_steps": _loss_is("process"),
    },
    section_rules=SECTION_RULES,
    follows=SFT_FOLLOWS,
    derive=derive_sft,
)
