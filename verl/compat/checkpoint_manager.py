"""The base class of checkpoint managers that scripts write themselves: `verl.utils.checkpoint.checkpoint_manager`. Runs save by
verl/checkpoint/."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl.algorithms.user_functions import ConfigView
from verl.compat.files import local_mkdir_safe

_CONTENTS = ("model", "optimizer", "extra")


class BaseCheckpointManager:
    """Holds what a checkpoint has, and reads the section `checkpoint`: `save_contents` and `load_contents`, each of model,
    optimizer, extra and hf_model, and `save_lora_only`. Subclasses define `save_checkpoint` and `load_checkpoint`."""

    def __init__(
        self,
        model: object,
        optimizer: object = None,
        lr_scheduler: object = None,
        processing_class: object = None,
        checkpoint_config: object = None,
    ):
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.processing_class, self.checkpoint_config = processing_class, checkpoint_config
        section = ConfigView(checkpoint_config, {})
        self.checkpoint_save_contents = list(section.get("save_contents") or _CONTENTS)
        self.checkpoint_load_contents = list(section.get("load_contents") or _CONTENTS)
        self.should_save_lora_only = bool(section.get("save_lora_only"))
        for name in (*_CONTENTS, "hf_model"):
            setattr(self, f"should_save_{name}", name in self.checkpoint_save_contents)
            setattr(self, f"should_load_{name}", name in self.checkpoint_load_contents)

    @staticmethod
    def is_lora_only_state_dict(state_dict: Mapping[str, object] | None) -> bool:
        """Whether all names of a state are adapters'; False for an empty one."""
        return bool(state_dict) and all("lora_" in name or ".adapter_" in name for name in state_dict or ())

    def save_checkpoint(self, local_path: str, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{type(self).__name__} defines no save_checkpoint.")

    def load_checkpoint(self, local_path: str, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{type(self).__name__} defines no load_checkpoint.")

    @staticmethod
    def local_mkdir(path: str) -> str:
        """Make a folder with its parents; its absolute path."""
        return local_mkdir_safe(path)

    def remove_previous_save_local_path(self, path: str | Iterable[str]) -> None:
        """Remove older folders of checkpoints, as far as they are there."""
        for folder in [path] if isinstance(path, str) else path:
            shutil.rmtree(Path(folder).absolute(), ignore_errors=True)
