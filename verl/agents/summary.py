"""Summary of a run's episodes and tool calls, and transcripts, from the journal in its folder."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.agents.journal import EPISODE, FOLDER, TOOL, read
from verl.foreign_text import clean, printable

MAX_STEPS = 20  # the last ones; only their files are read
NUM_TOOLS = 5  # named, the most frequent ones


def records(folder: Path) -> list[dict[str, object]]:
    """The records of the last steps, oldest first; [] for a run without agents."""
    files = sorted((folder / FOLDER).glob("step_*.jsonl"))
    steps = sorted({file.name.partition(".")[0] for file in files})[-MAX_STEPS:]
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
    for name, count in names.most_common(NUM_TOOLS):
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
        for message in record.get("messages") or []:
            yield f"[{clean(message.get('role', ''), 20)}] {printable(str(message.get('content') or ''))}"
            for call in message.get("tool_calls") or []:
                function = call.get("function") or {}
                yield f"    calls {clean(function.get('name', ''), 60)}({clean(function.get('arguments', ''), 500)})"
