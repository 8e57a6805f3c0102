"""The run folder that a training function of Python returns."""

import re
from pathlib import Path

from verl.distributions import require_part
from verl.errors import CheckpointError
from verl.tracking.run_folder import require_run_folder

_STEP = re.compile(r"global_step_([0-9]{1,15})")


def newest_model(folder: Path) -> Path | None:
    """Hugging Face folder of the newest checkpoint of a run folder, or of the checkpoint `folder`; None without one."""
    for role in ("actor", "model"):
        if _STEP.fullmatch(folder.name) and (saved := folder / role / "huggingface").is_dir():
            return saved
        if newest := max(folder.glob(f"global_step_*/{role}/huggingface"), key=_step_of, default=None):
            return newest
    return None


class TrainedRun:
    """A run folder and its model. `verl.Run` of verl-page, its subclass, also reads metrics and samples. Raises ConfigError for
    another folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        require_run_folder(self.folder)

    @property
    def model_path(self) -> Path:
        """Hugging Face folder of the trained model in the newest checkpoint. Raises CheckpointError without one."""
        if newest := newest_model(self.folder):
            return newest
        raise CheckpointError(
            f"{self.folder} has no checkpoint with a model. Set trainer.save_freq, or call Trainer.save()."
        )

    def __getattr__(self, name: str) -> object:
        if not name.startswith("_"):
            require_part("verl.page", f"Run.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _step_of(folder: Path) -> int:
    """The step of `global_step_N/actor/huggingface`; 0 for another name."""
    match = _STEP.fullmatch(folder.parts[-3])
    return int(match[1]) if match else 0
