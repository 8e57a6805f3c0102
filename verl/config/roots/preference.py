"""Config root of preference optimization (`verl preference`, `verl dpo|kto|orpo|simpo|cpo`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.active_keys import (
    DIVERGENCE_LOSSES,
    LABELLED_LOSSES,
    PREFERENCE_CONDITIONS,
    SHARED_CONDITIONS,
    uses_reference_policy,
)
from verl.config.derived_defaults import SFT_FOLLOWS, derive_sft
from verl.config.keys import OURS, Section, section, used
from verl.config.rules.sections import SECTION_RULES
from verl.config.schema import Condition, Problem, Schema, error
from verl.config.sections.actor import CheckpointConfig
from verl.config.sections.algorithm import PreferenceLossConfig
from verl.config.sections.data import PreferenceDataConfig
from verl.config.sections.fsdp import SFTEngineConfig
from verl.config.sections.model import OptimConfig, RowsModelConfig
from verl.config.sections.trainer import RayKwargsConfig, SFTTrainerConfig
from verl.families import PREFERENCE_LOSSES


@dataclass(frozen=True)
class ReferenceConfig(Section):
    """The policy that losses compare with."""

    model_path: str | None = used(
        None, "folder or hub name of another reference than the model at the start of the run", path=True
    )
    precompute: bool = used(
        True,
        "compute the reference's log-probabilities once, before the first step, and keep them in the run folder; False: in "
        "each step, by a second model in memory (with new adapters by the model without them)",
        when="ref.sync_steps=0",
    )
    sync_steps: int = used(
        0, "steps after which the reference moves towards the policy (TR-DPO, arXiv 2404.09656); 0: never", ge=0
    )
    mixup_alpha: float = used(
        0.6, "share of the policy in the new reference: ref <- a policy + (1 - a) ref", when="syncs", gt=0, le=1
    )


@dataclass(frozen=True)
class PreferenceConfig(Section):
    """The configuration of a run of preference optimization."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "training and validation rows")
    model: RowsModelConfig = section(RowsModelConfig, "the policy")
    engine: SFTEngineConfig = section(SFTEngineConfig, "training engine")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    preference: PreferenceLossConfig = section(PreferenceLossConfig, "the loss", strict=OURS)
    ref: ReferenceConfig = section(
        ReferenceConfig, "the policy that the loss compares with", when="reference", strict=OURS
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig, "parts of a checkpoint")
    trainer: SFTTrainerConfig = section(
        SFTTrainerConfig,
        "length, logging, saving, devices",
        defaults={
            "project_name": "preferences",
            "total_epochs": 1,
            "default_local_dir": "checkpoints/preferences/test",
        },
    )
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray")


def has_reference_role(root: PreferenceConfig) -> bool:
    """Whether the reference is a separate model or the policy without adapters, and not the policy before its first step."""
    ref = root.ref
    is_separate = bool(ref.model_path or ref.sync_steps or not ref.precompute)
    return is_separate and uses_reference_policy(root)


CONDITIONS = {
    **SHARED_CONDITIONS,
    **PREFERENCE_CONDITIONS,
    "reference": Condition(
        lambda root, node: uses_reference_policy(root), "this preference.loss has no reference", "choose another loss"
    ),
}


def _check_loss(c: PreferenceConfig, set_keys: set[str]) -> Iterator[Problem]:
    key, loss, chosen = "preference.loss", c.preference, c.preference.losses
    if c.ref.sync_steps and c.model.lora_rank:
        yield error(
            "ref.sync_steps",
            "ref.sync_steps moves whole weights, and model.lora_rank trains adapters. Set one of them to 0.",
        )
    if not chosen:
        yield error(key, f"{key} is an empty list; name a loss.")
    labelled = [name for name in chosen if name in LABELLED_LOSSES]
    if labelled and len(labelled) < len(chosen):
        yield error(
            key, f"{key}: {labelled[0]} is a loss of labelled completions, the others are of pairs. Choose one kind."
        )
    if len(loss.weights) != len(chosen):
        yield error(
            "preference.loss_weights",
            f"preference.loss_weights has {len(loss.weights)} weights for {len(chosen)} losses. Give one for each.",
        )
    if "exo_pair" in chosen and loss.label_smoothing == 0:
        yield error(key, f"{key}=exo_pair needs preference.label_smoothing above 0; its paper has 1e-3.")
    fixed = [n for n in chosen if n in PREFERENCE_LOSSES.built_in and n not in (*DIVERGENCE_LOSSES, "sft")]
    if fixed and loss.f_divergence != "reverse_kl":
        yield error(
            "preference.f_divergence",
            f"preference.f_divergence={loss.f_divergence} does not act on {fixed[0]}. Remove it, or choose among "
            f"{', '.join(DIVERGENCE_LOSSES)}.",
        )
    if "kto" in chosen and c.data.train_batch_size < 2:
        yield error(
            "data.train_batch_size",
            "kto compares completions with completions of other prompts; set data.train_batch_size above 1.",
        )


PREFERENCE = Schema(
    name="preference",
    root=PreferenceConfig,
    command="verl preference",
    title="Preference optimization (`verl preference`)",
    config_names={"preference_trainer": ""},
    config_prefixes=("preference", "dpo", "kto", "orpo", "simpo", "cpo"),
    conditions=CONDITIONS,
    rules=(_check_loss,),
    section_rules=SECTION_RULES,
    follows=SFT_FOLLOWS,
    derive=derive_sft,
)
