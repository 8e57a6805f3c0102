"""Episodes that the run folder has: the ledger's tokens with the records of the journal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl.agents.episode import EpisodeResult, EpisodeTask
from verl.agents.journal import EPISODE, FOLDER, PART, read
from verl.agents.results import untrained
from verl.data_proto.media import Media, MediaSpan
from verl.data_proto.trajectory import Segment, Trajectory


def recorded(
    folder: Path, ledger: Sequence[Trajectory], *, step: int, split: str, limit: int, images: Callable[[str], Media]
) -> list[EpisodeResult]:
    """The episodes of `ledger`, completed from the journal: prompts, rewards, errors, inputs of the reward function, images.
    They began in `step`; `folder` is the run folder; `images` reads an image by its digest. Raises LookupError when an episode
    is not recorded."""
    newest = {}
    for file in sorted((folder / FOLDER).glob(f"step_{step:06d}.rank*.jsonl")):
        for record in read(file):
            if record["kind"] in (EPISODE, PART) and record.get("split") == split:
                newest[record["episode"], record["kind"]] = record
    results = []
    for one in ledger:
        task = EpisodeTask(one.ordinal, one.sample, step, split, tuple(one.prompt_ids), {}, limit, len(one.prompt_ids))
        kind = PART if one.can_resume(limit) else EPISODE
        if (task.name, kind) not in newest:
            raise LookupError(f"The folder {FOLDER} of the run has no record of the episode {task.name} of step {step}")
        record = newest[task.name, kind]
        media = tuple(MediaSpan(start, length, images(name)) for start, length, name in record.get("media") or ())
        trajectory = replace(one, prompt_ids=tuple(record.get("prompt_ids") or one.prompt_ids), media=media)
        if record.get("error") is not None:
            trajectory = untrained(trajectory)
        more = {name: record[name] for name in ("reward", "extra", "num_turns", "metrics", "error") if name in record}
        dtype = next((s.log_probs.dtype for s in one.segments if s.log_probs is not None), np.dtype(np.float32))
        branches = [_unpacked(branch, one, dtype, images) for branch in record.get("branches") or ()]
        results.append(EpisodeResult(task, trajectory, **more, branches=branches))
    return results


def packed_branch(one: Trajectory) -> dict[str, object]:
    """A further conversation as the journal has it."""
    segments = [
        [s.token_ids.tolist(), None if s.log_probs is None else s.log_probs.tolist(), s.weight_version]
        for s in one.segments
    ]
    media = [[s.start, s.length, s.media.digest] for s in one.media]
    return {"prompt_ids": list(one.prompt_ids), "segments": segments, "media": media}


def _unpacked(
    record: Mapping[str, Any], owner: Trajectory, dtype: np.dtype[Any], images: Callable[[str], Media]
) -> Trajectory:
    segments = [
        Segment(np.asarray(ids, np.int32), None, version, "environment")
        if log_probs is None
        else Segment(np.asarray(ids, np.int32), np.asarray(log_probs, dtype), version)
        for ids, log_probs, version in record["segments"]
    ]
    media = tuple(MediaSpan(start, length, images(name)) for start, length, name in record["media"])
    return Trajectory(owner.ordinal, owner.sample, tuple(record["prompt_ids"]), segments, "stop", media=media)
