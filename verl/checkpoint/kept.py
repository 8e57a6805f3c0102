"""Which checkpoints lie in a run folder, which of them are whole, and which go."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from pathlib import Path

from verl.checkpoint.files import find_damage, is_there, remove_tree, rename
from verl.errors import CheckpointError

log = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"

_NAME = re.compile(r"global_step_(0|[1-9]\d*)")
_LEFTOVER = re.compile(r"\.(global_step_\d+)\.(tmp|old|removed)-\d+")
_LATEST_LEFTOVER = re.compile(rf"\.{re.escape(LATEST)}\.\d+\.tmp")

Signature = tuple[tuple[str, int, int, int], ...]


def step_of(name: str) -> int | None:
    """N of a name global_step_N, or None."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def candidates(root: Path) -> list[int]:
    """Steps of everything named `root`/global_step_N, newest first; whether it is complete, or a folder at all, is another
    question."""
    steps = [step_of(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted((step for step in steps if step is not None), reverse=True)


def newest_complete(root: Path, advice: str) -> Path | None:
    """The newest checkpoint under `root` that verifies, with a warning for each newer one that does not; None when there
    has been none. Raises CheckpointError, with `advice`, when all are damaged or gone."""
    try:
        steps = candidates(root)
        reasons = _gone(root, steps)
    except OSError as error:
        raise CheckpointError(
            f"The folder {root} cannot be read ({error.strerror}). Check its disk and rights, and run the same command again."
        ) from error
    for step in steps:
        path = root / f"global_step_{step}"
        damage = find_damage(path)
        if damage is None:
            if reasons:
                log.warning("Going on from %s instead.", path)
            return path
        log.warning("The checkpoint %s is damaged and not used: %s.", path, damage)
        reasons.append(f"global_step_{step}: {damage}")
    if reasons:
        raise CheckpointError(f"No checkpoint in {root} is complete ({'; '.join(reasons[:3])}). {advice}")
    return None


def _gone(root: Path, steps: list[int]) -> list[str]:
    """The checkpoint that was saved last, where it is neither there nor set aside: somebody took it away, and a run that
    starts afresh without a word would hide that."""
    try:
        newest = int((root / LATEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    if newest in steps or (steps and newest < steps[0]) or any(root.glob(f"superseded_*_global_step_{newest}")):
        return []
    log.warning("%s names step %d, and there is no global_step_%d beside it.", root / LATEST, newest, newest)
    return [f"global_step_{newest}: {LATEST} names it, and it is gone"]


def set_aside_later(root: Path, step: int) -> None:
    """Steps of a run only grow: a later checkpoint is of an earlier run that was started anew or from before it, and must
    not be taken for this run's newest."""
    for later in candidates(root):
        if later > step:
            aside = root / f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_global_step_{later}"
            rename(root / f"global_step_{later}", aside)
            log.warning("global_step_%d is of an earlier run than this one; it is now %s.", later, aside)


def clean_up(root: Path) -> None:
    """Remove what killed saves and deletions left behind. What cannot be removed now is tried again at the next start."""
    try:
        leftovers = sorted(root.iterdir()) if root.is_dir() else []
        for path in leftovers:
            match = _LEFTOVER.fullmatch(path.name)
            if match is not None and match.group(2) == "old" and not is_there(root / match.group(1)):
                rename(path, root / match.group(1))  # stopped between the two renames: what was there before is back
            elif match is not None or _LATEST_LEFTOVER.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    remove_tree(path)
    except OSError as error:
        log.warning("What an unfinished save left in %s was not removed: %s.", root, error)


class Retention:
    """Keeps the newest `keep` whole checkpoints under `root`; None keeps all."""

    def __init__(self, root: Path, keep: int | None):
        self.root = root
        self.keep = keep
        self._looked_at: dict[int, tuple[Signature, bool]] = {}  # by step: as it was then, and whether it was whole

    def apply(self, newest: int) -> None:
        """Delete whole checkpoints beyond the newest `keep`, counted on the disk. Never `newest`, which has just been
        verified, and only once those that stay have been read whole: a damaged one does not count as kept. A failure is
        logged, because the run does not depend on it."""
        if self.keep is None:
            return
        try:
            self._looked_at[newest] = _signature(self.root / f"global_step_{newest}"), True
            kept = 0
            for step in candidates(self.root):
                if kept < self.keep:
                    kept += step == newest or self._is_whole(step)
                elif find_damage(self.root / f"global_step_{step}", sizes_only=True) is None:
                    self._remove(step)
        except OSError as error:
            log.warning("Old checkpoints in %s were not removed: %s.", self.root, error)

    def _is_whole(self, step: int) -> bool:
        """Read every byte, once for as long as the files stay as they are."""
        path = self.root / f"global_step_{step}"
        signature, known = _signature(path), self._looked_at.get(step)
        if known is not None and known[0] == signature:
            return known[1]
        damage = find_damage(path)
        if damage is not None:
            log.warning("The checkpoint %s is damaged and does not count as kept: %s.", path, damage)
        self._looked_at[step] = signature, damage is None
        return damage is None

    def _remove(self, step: int) -> None:
        doomed = self.root / f".global_step_{step}.removed-{os.getpid()}"
        try:
            rename(self.root / f"global_step_{step}", doomed)  # from here on it is no checkpoint, however far this gets
            remove_tree(doomed)
        except OSError as error:
            log.warning("The old checkpoint global_step_%d in %s was not removed: %s.", step, self.root, error)


def _signature(folder: Path) -> Signature:
    """What changes with any change of a file that is not made behind the file system's back."""
    found = [(path.relative_to(folder).as_posix(), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found)
