"""Config root of supervised fine-tuning (`verl sft`): the keys of `sft_trainer_engine.yaml`, and our own."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.active_keys import SHARED_CONDITIONS
from verl.config.derived_defaults import SFT_FOLLOWS, derive_sft
from verl.config.keys import Section, section, used
from verl.config.rules.sections import SECTION_RULES
from verl.config.schema import Problem, Schema, error
from verl.config.sections.actor import CheckpointConfig
from verl.config.sections.data import SFTDataConfig
from verl.config.sections.fsdp import SFTEngineConfig
from verl.config.sections.model import OptimConfig, SFTModelConfig
from verl.config.sections.trainer import RayKwargsConfig, SFTTrainerConfig


@dataclass(frozen=True)
class SFTLossConfig(Section):
    loss: str = used(
        "nll",
        "loss of a token: nll (-log p), or dft (-p log p with p held fixed, arXiv 2508.05629)",
        choices=("nll", "dft"),
    )


@dataclass(frozen=True)
class SFTConfig(Section):
    """The configuration of a supervised fine-tuning run."""

    data: SFTDataConfig = section(SFTDataConfig, "training and validation rows")
    model: SFTModelConfig = section(SFTModelConfig, "the model")
    engine: SFTEngineConfig = section(SFTEngineConfig, "training engine")
    optim: OptimConfig = section(OptimConfig, "optimizer", defaults={"lr": 1e-3})
    sft: SFTLossConfig = section(SFTLossConfig, "the loss")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "parts of a checkpoint")
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "length, logging, saving, devices")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray")


def _check_rows(c: SFTConfig, set_keys: set[str]) -> Iterator[Problem]:
    if (c.data.prompt_key is None) != (c.data.response_key is None):
        yield error(
            "data.prompt_key", "data.prompt_key and data.response_key name two columns of one format. Set both."
        )
    if c.data.row_format == "prompt_response" and c.data.prompt_key is None:
        yield error("data.row_format", "data.row_format=prompt_response needs data.prompt_key and data.response_key.")


_OTHER_ENGINES = ("megatron", "veomni", "automodel", "torchtitan")  # each brings an optimizer of that name

SFT = Schema(
    name="sft",
    root=SFTConfig,
    command="verl sft",
    title="Supervised fine-tuning (`verl sft`)",
    config_names={"sft_trainer_engine": "", "sft_trainer": "fsdp_sft_trainer"},
    config_prefixes=("sft",),
    conditions=SHARED_CONDITIONS,
    rules=(_check_rows,),
    section_rules=SECTION_RULES,
    follows=SFT_FOLLOWS,
    derive=derive_sft,
    group_choices={
        "engine": {"fsdp": {"engine.strategy": "fsdp"}, **{e: {"engine.strategy": e} for e in _OTHER_ENGINES}},
        "optim": {"fsdp": {}, **{e: {"engine.strategy": e} for e in _OTHER_ENGINES}},
        "model": {"hf_model": {}},
    },
)
