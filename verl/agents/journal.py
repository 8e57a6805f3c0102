"""Results of tools and transcripts of episodes, one JSON line each, written as they come: `episodes/step_000003.rank0.jsonl`.

A step that is taken again after a kill samples the same tokens, so its calls are the same. Their results are read from here and
the tools are not called a second time. A result belongs to (split, prompt, sample, number of the call) and to a digest of the
call and of all tokens before it: if those differ, it is not used.

A checkpoint with samples ahead of training needs their records. They are on the disk before the generation returns, so before
any checkpoint that has its samples.
"""

import hashlib
import json
import os
import statistics
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.foreign_text import clean, printable
from verl.regular_files import sync_folder

FOLDER = "episodes"
TOOL, EPISODE, PART = "tool", "episode", "part"  # a part: an episode that paused
MAX_TEXT = 20_000  # characters of a message in a transcript
_MAX_STEPS = 20  # the last ones; a summary reads only their files
_NUM_TOOLS = 5  # named in a summary, the most frequent ones


class Journal:
    """The journal of one rank in `folder`; without a folder nothing is written or found."""

    def __init__(self, folder: Path | None, rank: int = 0):
        self.folder, self.rank = folder, rank
        self._step: int | None = None
        self._found: dict[tuple[str, str, int, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._file: Any = None

    def begin(self, step: int) -> None:
        """Record the results of `step` from now on, and load the results that are recorded already."""
        if self.folder is None or step == self._step:
            return
        self.close()
        self._step, self._found = step, {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.folder.glob(f"step_{step:06d}.rank*.jsonl")):
            for record in read(file):
                if record["kind"] == TOOL:
                    self._found[record["split"], record["episode"], record["call"], record["digest"]] = record
        file = self.folder / f"step_{step:06d}.rank{self.rank}.jsonl"
        is_new = not file.exists()
        self._file = file.open("ab")
        if is_new:
            sync_folder(self.folder)
            sync_folder(self.folder.parent)

    def result(self, split: str, episode: str, call: int, digest: str) -> dict[str, Any] | None:
        return self._found.get((split, episode, call, digest))

    def write(self, kind: str, **fields: Any) -> bool:
        """Append a record; it outlives a kill of this process as soon as this returns. Whether there is a file for it."""
        if self._file is None:
            return False
        line = json.dumps({"kind": kind, **fields}, ensure_ascii=True, default=str) + "\n"
        with self._lock:
            self._file.write(line.encode())
            self._file.flush()
            if kind == TOOL:  # for an episode that is taken again in this process
                self._found[fields["split"], fields["episode"], fields["call"], fields["digest"]] = fields
        return True

    def sync(self) -> None:
        """Return when all records of the step are on the disk and outlive a loss of power. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._step = None, None


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file; a last line that a kill has cut is left out."""
    records = []
    for line in file.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            records.append(record)
    return records


def call_digest(name: str, arguments: str, context: str) -> str:
    """Digest of a call and of what came before it."""
    return hashlib.blake2b(json.dumps([name, arguments, context]).encode(), digest_size=12).hexdigest()


def records(folder: Path) -> list[dict[str, object]]:
    """The records of the last steps, oldest first; [] for a run without agents."""
    files = sorted((folder / FOLDER).glob("step_*.jsonl"))
    steps = sorted({file.name.partition(".")[0] for file in files})[-_MAX_STEPS:]
    return [record for file in files if file.name.partition(".")[0] in steps for record in read(file)]


def summary(entries: list[dict[str, Any]]) -> list[str]:
    """Sentences about turns, tools and failures; [] without episodes."""
    episodes = [record for record in entries if record["kind"] == EPISODE]
    if not episodes:
        return []
    turns = [float(e.get("num_turns") or 0) for e in episodes if not e.get("error")]
    lines = [
        f"episodes of the last steps: {len(episodes)}"
        + (f", {statistics.fmean(turns):.1f} turns each" if turns else "")
    ]
    if reasons := Counter(clean(e["error"], 120) for e in episodes if e.get("error")):
        why, count = reasons.most_common(1)[0]
        lines[0] += f", {sum(reasons.values())} failed (most often, {count} times: {why})"
    results = [
        record["result"] for record in entries if record["kind"] == TOOL and isinstance(record.get("result"), dict)
    ]
    if results:
        lines.append("tool calls: " + "; ".join(_tools(results)))
    return lines


def _tools(results: list[dict[str, Any]]) -> Iterator[str]:
    names = Counter(clean(result.get("name", ""), 40) for result in results)
    for name, count in names.most_common(_NUM_TOOLS):
        tool_results = [result for result in results if clean(result.get("name", ""), 40) == name]
        failed = sum(result.get("error") is not None for result in tool_results)
        seconds = [float(result.get("seconds") or 0.0) for result in tool_results]
        yield (
            f"{name} {count} times, {failed / count:.0%} failed, {1000 * statistics.median(seconds):.3g} ms "
            f"(longest {1000 * max(seconds):.3g} ms)"
        )


def transcripts(entries: list[dict[str, Any]], count: int) -> Iterator[str]:
    for record in [record for record in entries if record["kind"] == EPISODE][-count:]:
        end = f"failed: {clean(record['error'], 200)}" if record.get("error") else f"{record.get('num_turns')} turns"
        yield f"── {clean(record.get('episode', ''), 60)}, {end}"
        yield from _spoken(record.get("messages") or [])
        for number, messages in enumerate(record.get("conversations") or [], 2):
            yield f"── its conversation {number}" + ("" if record.get("branches") else ", which does not train")
            yield from _spoken(messages)


def _spoken(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield f"[{clean(message.get('role', ''), 20)}] {printable(str(message.get('content') or ''))}"
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            yield f"    calls {clean(function.get('name', ''), 60)}({clean(function.get('arguments', ''), 500)})"
