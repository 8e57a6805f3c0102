"""Numbers of one step of the GPU report, in a file that is complete after each number."""

import json
import os
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DEVICE = "GPU_REPORT_RESULTS", "GPU_REPORT_DEVICE"  # environment variables that the runner sets


class Results:
    """`numbers`: name -> [value, unit]. Without a file they are only printed."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[Any]] = {}
        self._file = Path(os.environ[RESULTS]) if RESULTS in os.environ else None

    def add(self, name: str, value: float | str | bool, unit: str = "", verdict: str = "") -> None:
        """Print the number and write the file again; a step that is killed later leaves it."""
        self.numbers[name] = [value, unit]
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        print(f"  {name:<72} {text} {unit}{verdict}", flush=True)
        if self._file is not None:
            new_file = self._file.with_suffix(".tmp")
            new_file.write_text(json.dumps(self.numbers), encoding="utf-8")
            os.replace(new_file, self._file)

    def fail(self, part: str, error: BaseException) -> None:
        """Record that `part` ended with `error`, and print where it was raised."""
        traceback.print_exception(error)
        self.add(f"{part}: error", f"{type(error).__name__}: {error}"[:300])


def device_type() -> str:
    """Device type of this process: the runner's setting, otherwise CUDA if available, else the CPU."""
    import torch

    return os.environ.get(DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")


def report_device() -> Any:
    """The torch.device of this process, with its index as engines expect it."""
    import torch

    return torch.device("cuda", 0) if device_type() == "cuda" else torch.device("cpu")
