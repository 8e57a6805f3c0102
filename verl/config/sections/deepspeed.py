"""`*.deepspeed`: the DeepSpeed training engine."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, used
from verl.errors import ConfigError
from verl.regular_files import read_user_text

STAGES = (0, 1, 2, 3)
_DEFAULT_STAGE = 2
DECIDED = {  # by keys of the run with another meaning than DeepSpeed's: only "auto" can stand in a file
    "train_batch_size": "the mini-batch size",
    "train_micro_batch_size_per_gpu": "the micro-batch size",
    "gradient_accumulation_steps": "mini-batch and micro-batch size",
    "scheduler": "the keys of optim",
}
OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class DeepSpeedConfig(Section):
    zero_stage: int | None = used(
        None,
        "what devices share: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too; null: config's, else 2",
        choices=(None, *STAGES),
    )
    offload_optimizer: bool = used(False, "keep masters and optimizer state on the CPU, and step there", sizing=True)
    offload_param: bool = used(False, "with stage 3: keep parameters on the CPU between uses", sizing=True)
    config: str | None = used(
        None, "a DeepSpeed configuration (JSON) that is merged with the keys of the run", path=True
    )

    def stage(self) -> int:
        """The stage of ZeRO. Raises ConfigError for a file that cannot be read."""
        if self.zero_stage is not None:
            return self.zero_stage
        stage = read_ds_config(self.config).get("zero_optimization", {}).get("stage", "auto")
        return stage if stage in STAGES else _DEFAULT_STAGE

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Axes of the mesh: with stage 3 all devices share one copy of the parameters."""
        shard = num_ranks if self.stage() == 3 else 1
        return {"replicate": num_ranks // shard, "shard": shard}

    def describe(self) -> str:
        """The sharding policy, for the header of a run."""
        offloaded = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        return ", ".join([f"ZeRO {self.stage()}", *(f"offload of {name}" for name, on in offloaded.items() if on)])


def read_ds_config(path: str | None) -> dict[str, Any]:
    """The DeepSpeed configuration in `path`; {} for None. Raises ConfigError."""
    if path is None:
        return {}
    text = read_user_text(path, "The file deepspeed.config", fix="Name a JSON file.")
    try:
        settings = json.loads(text)
    except ValueError as caught:
        raise ConfigError(f"deepspeed.config={path} is not JSON: {caught}. Correct the file.") from caught
    if not isinstance(settings, dict):
        raise ConfigError(f"deepspeed.config={path} holds no mapping. Name a DeepSpeed configuration.")
    return settings


def contradictions(
    section: DeepSpeedConfig, values: Mapping[str, Any], *, bfloat16: bool | None, clip_grad: float, optimizer: str
) -> Iterator[str]:
    """Sentences about values of the file that the run's keys contradict. `bfloat16` None: not known yet."""
    zero = values.get("zero_optimization", {})
    stage, in_file = section.zero_stage, zero.get("stage", "auto")
    if in_file not in ("auto", *STAGES):
        yield f"zero_optimization.stage={in_file} is none of 0, 1, 2, 3. Correct it."
    elif stage is not None and in_file not in ("auto", stage):
        yield f"zero_optimization.stage={in_file} contradicts deepspeed.zero_stage={stage}. Remove one of the two."
    for name in OFFLOADS:
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            yield f"zero_optimization.{name}.device={device} is not available; use cpu."
    if section.offload_param and section.stage() != 3:
        yield f"offload_param needs ZeRO stage 3, and this is stage {section.stage()}. Set deepspeed.zero_stage=3."
    if _on(values, "fp16") is True:
        yield "fp16 is not available, since it needs loss scaling. Set bf16, or compute in float32."
    if bfloat16 is not None and _on(values, "bf16") not in (None, "auto", bfloat16):
        yield (
            f"bf16.enabled={_on(values, 'bf16')} contradicts fsdp_config.dtype={'bfloat16' if bfloat16 else 'float32'}. "
            "Remove one of the two."
        )
    if values.get("gradient_clipping", "auto") not in ("auto", clip_grad):
        yield f"gradient_clipping={values['gradient_clipping']} contradicts optim.clip_grad={clip_grad}. Remove it."
    kind = (values.get("optimizer") or {}).get("type", "auto")
    if kind not in ("auto", optimizer):
        yield f"optimizer.type={kind} contradicts optim.optimizer={optimizer}. Remove the section optimizer."
    fixed = {k: v for k, v in (values.get("optimizer") or {}).get("params", {}).items() if v != "auto"}
    if fixed:
        yield f"optimizer.params.{next(iter(fixed))} is set by the keys of optim. Remove the section optimizer."
    for name, decider in DECIDED.items():
        if values.get(name, "auto") != "auto" and not _is_auto(values[name]):
            yield f'{name} is decided by {decider}. Remove it, or write "auto".'


def _on(values: Mapping[str, Any], name: str) -> Any:
    return (values.get(name) or {}).get("enabled")


def _is_auto(value: object) -> bool:
    """Whether every value of a section is "auto"."""
    return isinstance(value, dict) and all(v == "auto" for v in (value.get("params") or {}).values())
