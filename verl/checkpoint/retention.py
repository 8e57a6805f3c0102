"""The checkpoints in a run folder: their list, the newest complete one, cleanup after kills, and retention."""

import contextlib
import logging
import math
import os
import re
import time
from pathlib import Path

from verl.checkpoint.files import remove_tree
from verl.errors import CheckpointError
from verl.manifest import find_damage, is_there, rename
from verl.regular_files import read_text

log = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
_MAX_DIGITS = 32

_NAME = re.compile(r"global_step_(0|[1-9][0-9]*)")  # \d has the digits of other scripts too
_LEFTOVER = re.compile(r"\.(global_step_\d+)\.(tmp|old|removed)-\d+")
_LATEST_LEFTOVER = re.compile(rf"\.{re.escape(LATEST)}\.\d+\.tmp")

Signature = tuple[tuple[str, int, int, int], ...]


def step_of(name: str) -> int | None:
    """N of a name global_step_N, or None."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def candidates(root: Path) -> list[int]:
    """Steps of everything named `root`/global_step_N, newest first, complete or not."""
    steps = [step_of(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted((step for step in steps if step is not None), reverse=True)


def newest_complete(root: Path, advice: str, max_bytes: float = math.inf) -> Path | None:
    """The newest checkpoint under `root` without damage that `find_damage` sees, with a warning for each newer, damaged one;
    None if none was ever saved. Raises CheckpointError, with `advice`, when all are damaged or missing."""
    try:
        steps = candidates(root)
        reasons = missing_newest(root, steps)
    except OSError as error:
        raise CheckpointError(
            f"The folder {root} cannot be read ({error.strerror}). Check its disk and permissions, then run the same command "
            "again."
        ) from error
    for reason in reasons:
        log.warning("In %s %s.", root, reason)
    for step in steps:
        path = root / f"global_step_{step}"
        damage = find_damage(path, max_bytes=max_bytes)
        if damage is None:
            if reasons:
                log.warning("Resuming from %s instead.", path)
            return path
        log.warning("The checkpoint %s is damaged and not used: %s.", path, damage)
        reasons.append(f"global_step_{step}: {damage}")
    if reasons:
        raise CheckpointError(f"No checkpoint in {root} is complete ({'; '.join(reasons[:3])}). {advice}")
    return None


def missing_newest(root: Path, steps: list[int]) -> list[str]:
    """The last checkpoint that was saved, if it is neither among `steps` nor set aside, as a reason not to take another one
    in silence: it was removed."""
    try:
        newest = int(read_text(root / LATEST, _MAX_DIGITS))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    if newest in steps or (steps and newest < steps[0]) or any(root.glob(f"superseded_*_global_step_{newest}")):
        return []
    return [f"{LATEST} names step {newest}, and there is no global_step_{newest}"]


def set_aside_later(root: Path, step: int) -> None:
    """`set_aside` of checkpoints of later steps. Steps of a run only grow, so they are of an earlier run that was started over
    or rewound, and must not be mistaken for this run's newest."""
    for later in candidates(root):
        if later > step:
            set_aside(root / f"global_step_{later}", later)


def set_aside(path: Path, step: int) -> None:
    """Rename a checkpoint that an earlier run, or another program, has written."""
    aside = path.with_name(f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_global_step_{step}")
    rename(path, aside)
    log.warning("global_step_%d is of an earlier run than this one; it is now %s.", step, aside)


def clean_up(root: Path) -> None:
    """Remove the remains of killed saves and deletions. A failure is logged, and the next start tries again."""
    try:
        leftovers = sorted(root.iterdir()) if root.is_dir() else []
        for path in leftovers:
            match = _LEFTOVER.fullmatch(path.name)
            if match is not None and match.group(2) == "old" and not is_there(root / match.group(1)):
                rename(path, root / match.group(1))  # killed between the two renames: restore the old checkpoint
            elif match is not None or _LATEST_LEFTOVER.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    remove_tree(path)
    except OSError as error:
        log.warning("The remains of an unfinished save in %s were not removed: %s.", root, error)


class Retention:
    """Keeps the newest `keep` complete checkpoints under `root`; None keeps all."""

    def __init__(self, root: Path, keep: int | None):
        self.root = root
        self.keep = keep
        self._verified: dict[
            int, tuple[Signature, bool]
        ] = {}  # by step: signature when read, and whether it was complete

    def apply(self, newest: int) -> None:
        """Delete complete checkpoints beyond the newest `keep` on the disk, but never `newest`: it was just verified. Those
        that stay are read first: a damaged one does not count. A failure is logged; the run does not depend on it."""
        if self.keep is None:
            return
        try:
            self._verified[newest] = _signature(self.root / f"global_step_{newest}"), True
            num_kept = 0
            for step in candidates(self.root):
                if num_kept < self.keep:
                    num_kept += step == newest or self._is_complete(step)
                elif find_damage(self.root / f"global_step_{step}", max_bytes=0) is None:
                    self._remove(step)
        except OSError as error:
            log.warning("Old checkpoints in %s were not removed: %s.", self.root, error)

    def _is_complete(self, step: int) -> bool:
        """Read every byte, once as long as the files do not change."""
        path = self.root / f"global_step_{step}"
        signature, verified = _signature(path), self._verified.get(step)
        if verified is not None and verified[0] == signature:
            return verified[1]
        damage = find_damage(path)
        if damage is not None:
            log.warning("The checkpoint %s is damaged and does not count as kept: %s.", path, damage)
        self._verified[step] = signature, damage is None
        return damage is None

    def _remove(self, step: int) -> None:
        doomed = self.root / f".global_step_{step}.removed-{os.getpid()}"
        try:
            rename(self.root / f"global_step_{step}", doomed)  # no longer a checkpoint, even if the removal is killed
            remove_tree(doomed)
        except OSError as error:
            log.warning("The old checkpoint global_step_%d in %s was not removed: %s.", step, self.root, error)


def _signature(folder: Path) -> Signature:
    """Names, sizes, times and inodes of all files; changes with every write through the file system."""
    files = [(path.relative_to(folder).as_posix(), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in files)
