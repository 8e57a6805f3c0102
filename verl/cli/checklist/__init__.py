"""Checks of `verl check`, one file per topic. Each check yields lines and may raise VerlError."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from verl.cli.report import Line, fail, passed
from verl.config import FSDPConfig, LoadedConfig, ModelConfig
from verl.config.active_keys import runs_on_several_devices
from verl.data.order import prompts_per_generation
from verl.errors import ConfigError, FewRowsError

if TYPE_CHECKING:
    import torch

    from verl.data.check import DataReport
    from verl.models.shapes import ModelShape


NUM_CHARACTERS = 300  # of the text of a row


@dataclass
class Subject:
    """The config, and results of earlier checks (None before them, or if they failed)."""

    loaded: LoadedConfig[Any]
    tokenizer: Any = None
    policy: ModelShape | None = None
    critic: ModelShape | None = None
    data: DataReport | None = None
    num_rows: int | None = None  # rows that train

    @property
    def config(self) -> Any:
        """The root section of the program's config."""
        return self.loaded.config

    @property
    def model(self) -> ModelConfig:
        """The section of the trained model."""
        section = self.config.actor_rollout_ref if self.loaded.schema.name == "ppo" else self.config
        return cast("ModelConfig", section.model)

    @property
    def engine(self) -> FSDPConfig:
        """The section of the training engine."""
        config, is_ppo = self.config, self.loaded.schema.name == "ppo"
        return cast("FSDPConfig", config.actor_rollout_ref.actor.fsdp_config if is_ppo else config.engine)

    @property
    def device(self) -> torch.device | None:
        """The device of the run; None if it is a GPU of another machine. Raises ConfigError."""
        from verl.parallel.device import resolve_device, visible_devices

        name = self.config.trainer.device
        is_elsewhere = runs_on_several_devices(self.config) and name.startswith("cuda") and not visible_devices()
        return None if is_elsewhere else resolve_device(name)

    @property
    def num_steps(self) -> int | None:
        """Steps of the run; None while the number of rows is unknown."""
        trainer, num_steps = self.config.trainer, self.config.trainer.total_training_steps
        if num_steps or self.num_rows is None:
            return None if num_steps is None else int(num_steps)
        size = (
            prompts_per_generation(self.config)
            if self.loaded.schema.name == "ppo"
            else self.config.data.train_batch_size
        )
        return int(trainer.total_epochs * max(1, self.num_rows // size))


def no_rows(subject: Subject, name: str, key: str) -> Line:
    """The line of an empty set of files: a run cannot train without it."""
    needed = name == "training" and not subject.config.trainer.val_only
    return Line("fail" if needed else "info", f"no {name} rows: {key} is empty")


def steps_line(subject: Subject, num_rows: int, unit: str) -> Line:
    """The steps of a run on `num_rows` usable rows. Sets them in `subject`."""
    from verl.run.facts import about_steps, with_facts

    subject.num_rows = num_rows
    try:
        subject.loaded = with_facts(subject.loaded, num_rows) or subject.loaded
    except ConfigError as error:
        return fail(str(error))
    size = subject.config.data.train_batch_size
    if num_rows < size:
        return fail(str(FewRowsError(num_rows, size)))
    num_steps = subject.num_steps or 0
    return passed(f"{num_steps:,} steps of {size} {unit}{about_steps(num_steps, num_rows, subject.config)}")


def beginning(text: str) -> str:
    """The first characters of a text."""
    return text if len(text) <= NUM_CHARACTERS else text[:NUM_CHARACTERS] + "..."


def unusable_rows(problems: Sequence[str], num_more: int, name: str) -> Iterator[Line]:
    """A line for each described row of a set of files that cannot be used, and one for the number of further rows."""
    yield from map(fail, problems)
    if num_more:
        yield fail(f"{num_more:,} more {name} rows cannot be used")
