"""`verl.utils.checkpoint.checkpoint_manager`: the newest checkpoint of a folder, and whether a machine on loan ends soon."""

from __future__ import annotations

import logging
import os
import time

from verl.checkpoint.retention import LATEST

log = logging.getLogger(__name__)

# clusters that lend machines for a time say in one of these when it ends, in seconds since 1970
_EXPIRATIONS = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file that names the newest checkpoint of a run folder."""
    return os.path.join(root_path, LATEST)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder of the newest checkpoint of the run folder `path`; None where there is none."""
    if path is None:
        return None
    tracker = get_checkpoint_tracker_filename(path)
    if not os.path.exists(tracker):
        log.info("There is no checkpoint in %s.", path)
        return None
    with open(tracker, encoding="utf-8") as file:
        found = os.path.join(path, directory_format.format(int(file.read())))
    if not os.path.isdir(found):
        log.warning("%s names the checkpoint %s, which is not there.", tracker, found)
        return None
    return found


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether this machine's loan ends before another step and another save fit, all in seconds. False where the
    environment names no end, and before the first step (`max_steps_duration` 0)."""
    for name in _EXPIRATIONS:
        try:
            remaining = float(os.environ.get(name, "")) - time.time()
        except ValueError:
            continue
        needed = max_steps_duration + save_ckpt_duration + redundant_time
        return max_steps_duration > 0 and 0 < remaining <= needed
    return False
