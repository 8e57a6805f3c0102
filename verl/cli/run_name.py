"""The run folder of a command that names none: checkpoints/TASK-TIME-SETTINGS, found again by the same command."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config import LoadedConfig, PPOConfig, PreferenceConfig, RunConfig
from verl.config.diff import settings_of_work

_NAMES = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")


def with_run_folder(loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
    """`loaded` with a run folder and an experiment name, unless its user has given one or a launcher starts several processes,
    whose clocks may differ. The newest folder of the same task and settings is taken again, so that the run resumes; keys of
    `trainer` and sizes may differ."""
    if any(name in loaded.settings for name in _NAMES) or "RANK" in os.environ:
        return loaded
    trainer = loaded.config.trainer
    work = {key: value for key, value in settings_of_work(loaded).items() if not key.startswith("trainer.")}
    digest = hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:6]
    task = _task(loaded)
    earlier = sorted(Path("checkpoints").glob(f"{task}-*-{digest}")) if trainer.resume_mode == "auto" else []
    folder = earlier[-1] if earlier else Path("checkpoints", f"{task}-{time.strftime('%Y%m%d-%H%M%S')}-{digest}")
    named = replace(trainer, default_local_dir=str(folder), experiment_name=folder.name)
    origins = loaded.origins | dict.fromkeys(
        ("trainer.default_local_dir", "trainer.experiment_name"), "named by the run"
    )
    return replace(loaded, config=replace(loaded.config, trainer=named), origins=origins)


def _task(loaded: LoadedConfig[RunConfig]) -> str:
    """The algorithm, as far as it is a name."""
    config = loaded.config
    if isinstance(config, PPOConfig):
        program = config.algorithm.program
        name = str(config.algorithm.adv_estimator) if program == loaded.schema.name else program
    elif isinstance(config, PreferenceConfig):
        name = str(config.preference.loss)
    else:
        name = loaded.schema.name
    return name if name.replace("_", "").isalnum() else loaded.schema.name
