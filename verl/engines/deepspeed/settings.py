"""The configuration that DeepSpeed gets."""

from __future__ import annotations

from typing import Any

from verl.config.sections.deepspeed import DECIDED, OFFLOADS, DeepSpeedConfig, contradictions, read_ds_config
from verl.errors import ConfigError


def ds_config(section: DeepSpeedConfig, *, bfloat16: bool, clip_grad: float, optimizer: str) -> dict[str, Any]:
    """The configuration that DeepSpeed gets: the file's content with the keys of the run. `optimizer` is the class that
    steps. Raises ConfigError if the two contradict each other; "auto" in the file agrees with everything."""
    settings = read_ds_config(section.config)
    problem = next(contradictions(section, settings, bfloat16=bfloat16, clip_grad=clip_grad, optimizer=optimizer), None)
    if problem:
        raise ConfigError(f"deepspeed.config={section.config}: {problem}")
    stage = section.stage()
    zero = {k: v for k, v in settings.get("zero_optimization", {}).items() if v != "auto"}
    for name in OFFLOADS:
        device = (zero.pop(name, None) or {}).get("device", "none")
        if getattr(section, name) or device == "cpu":
            zero[name] = {"device": "cpu", "pin_memory": False}
    if stage == 3:
        # small parameters would stay undivided on every device, and weights that are sent must lie as the plan says
        zero.setdefault("stage3_param_persistence_threshold", 0)
    rest = {k: v for k, v in settings.items() if k not in (*DECIDED, "optimizer", "zero_optimization", "fp16", "bf16")}
    return {
        "steps_per_print": 1 << 40,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        **{k: v for k, v in rest.items() if v != "auto"},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,  # any number above 1: some buffers exist only then
        "gradient_clipping": clip_grad,
        "zero_optimization": {**zero, "stage": stage},
        **({"bf16": {"enabled": True, "check_grad_overflow": True}} if bfloat16 else {}),
    }
