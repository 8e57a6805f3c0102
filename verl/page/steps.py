"""Context of the pages of a step: its groups or pairs, one group, one sample."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verl.page.index import IndexedSample, SampleIndex
from verl.page.life import episode_of, life_of
from verl.page.plan import parts_of_bar
from verl.page.reader import RunReader
from verl.page.summaries import deviation, last_message, text_of
from verl.page.text import diff_words, tokens_of, whole_number
from verl.tracking.files import Json, Row, is_number
from verl.tracking.pictures import FOLDER as IMAGES
from verl.tracking.pictures import stored_images

PER_PAGE = 60  # groups
_LEVELS = 10
_HEAD = 240  # samples shown of a file that is not indexed yet
PHASES = {  # span -> phase; a bar has its colour
    "gen": "rollout", "gen_max": "rollout", "rollout_wait": "rollout", "reward": "reward", "old_log_prob": "training",
    "update_actor": "training", "ref": "training", "teacher": "training", "values": "training", "update_critic": "training",
    "adv": "training", "update": "training", "reference": "training", "update_weights": "communication",
    "testing": "validation", "save_checkpoint": "saving", "batch": "data",
}  # fmt: skip
_GROUP_SORTS = {  # name -> label, a value that a group of the step must have, and the sort key
    "spread": ("spread of rewards", "mean", lambda group: -group["spread"]),
    "mean": (
        "mean reward, lowest first", "mean", lambda group: math.inf if group["mean"] is None else group["mean"]
    ),
    "gap": ("sampler against trainer", "gap", lambda group: -(group["gap"] or 0)),
    "length": ("longest", "length", lambda group: -group["length"]),
    "order": ("order of the batch", "line", lambda group: group["line"]),
}  # fmt: skip
_SHOWN_APART = {
    "prompt", "response", "prompt_ids", "response_ids", "log_probs", "old_log_probs", "train_log_probs", "advantages",
    "entropy", "response_mask", "ref_log_probs", "token_versions", "teacher_ids", "teacher_log_probs", "reward_parts",
    "reward_error", "messages", "score", "ground_truth", "images",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A step of a split."""

    run: RunReader
    index: SampleIndex
    split: str
    step: int

    @property
    def path(self) -> str:
        return f"/run/{self.run.key}/{self.split}/{self.step}"

    @property
    def title(self) -> str:
        names = {"train": "step", "val": "validation after step", "val-greedy": "greedy validation after step"}
        return f"{names.get(self.split, self.split)} {self.step}"

    def neighbours(self) -> tuple[str | None, str | None]:
        """Paths of the step before and after."""
        steps = self.index.steps(self.split)
        before = max((step for step in steps if step < self.step), default=None)
        after = min((step for step in steps if step > self.step), default=None)
        base = f"/run/{self.run.key}/{self.split}"
        return (None if before is None else f"{base}/{before}", None if after is None else f"{base}/{after}")

    def others(self) -> list[Place]:
        """The places of the same step in other splits."""
        splits = (split for split in self.index.splits() if split != self.split)
        return [replace(self, split=split) for split in splits if self.index.file(split, self.step) is not None]

    def file_row(self) -> sqlite3.Row | None:
        rows = self.index.rows("SELECT * FROM files WHERE split = ? AND step = ?", self.split, self.step)
        return rows[0] if rows else None

    def samples(self, unit: str | None = None) -> list[IndexedSample]:
        """The indexed samples of the step or of one unit, in the order of the file.

        Of a file that is not indexed yet they are the first ones, read from it.
        """
        rows = self.index.rows(
            "SELECT samples.* FROM samples JOIN files ON files.id = file WHERE split = ? AND step = ? "
            "AND (? IS NULL OR unit = ?) ORDER BY line",
            *(self.split, self.step, unit, unit),
        )
        if rows or self.index.is_complete(self.split, self.step):
            return list(rows)
        return [row for row in self.index.head(self.split, self.step, _HEAD) if unit in (None, row["unit"])]

    def units(self) -> list[str]:
        """The units of the step, in the order of the file."""
        return list(dict.fromkeys(row["unit"] for row in self.samples()))

    def texts(self, row: IndexedSample) -> tuple[str, str]:
        """The last message of the prompt and the start of the response of a sample."""
        if "prompt" in row.keys():  # read from the file
            return last_message(row["prompt"][-1500:]), row["response"][:400]
        rows = self.index.rows("SELECT prompt, response FROM shown WHERE id = ?", row["id"])
        return (rows[0]["prompt"], rows[0]["response"]) if rows else ("", "")

    def ensure(self, seconds: float = 0.25) -> None:
        """Index this step's file now, as far as it goes in that time."""
        import threading

        worker = threading.Thread(target=self.index.update, args=((self.split, self.step),), daemon=True)
        worker.start()
        worker.join(seconds)


def step_context(at: Place, query: Mapping[str, str]) -> Row | None:
    """The groups of a step, its timeline and metrics; None without samples or metrics of that step."""
    at.ensure()
    file = at.file_row()
    timeline, values = at.run.timeline_row(at.step), at.run.metrics_of(at.step)
    if file is None and not (at.split == "train" and (timeline or values)):
        return None
    groups = _groups(at)
    sort = query.get("sort", "spread" if at.run.kind == "rl" else "order")
    sort = sort if sort in _GROUP_SORTS else "spread"
    groups.sort(key=_GROUP_SORTS[sort][2])
    if query.get("only") == "signal":
        groups = [group for group in groups if group["spread"] > 0]
    page = whole_number(query.get("page", "")) or 0
    displayed = groups[page * PER_PAGE : (page + 1) * PER_PAGE]
    for group in displayed:
        group["prompt"], group["response"] = at.texts(group["rows"][0])
    before, after = at.neighbours()
    names = ("actor/", "critic/", "training/", "rollout/", "train/", "val/", "response", "perf/")
    metrics = {name: value for name, value in values.items() if name.startswith(names)}
    return {
        "file": file,
        "groups": displayed,
        "num_groups": len(groups),
        "num_samples": sum(group["count"] for group in groups),
        "num_errors": sum(group["errors"] for group in groups),
        "num_cut": sum(group["cut"] for group in groups),
        "page": page,
        "num_pages": -(-len(groups) // PER_PAGE),
        "sort": sort,
        "sorts": {
            name: label
            for name, (label, needed, _) in _GROUP_SORTS.items()
            if any(group[needed] is not None for group in groups)
        },
        "only": query.get("only", ""),
        "gantt": gantt(at.run.spans_of(at.step), timeline) if at.split == "train" else None,
        "plan": plan_bars(at.run.planned_row(at.step), timeline) if at.split == "train" else None,
        "phases": PHASES,
        "shades": set(PHASES.values()),
        "metrics": dict(sorted(metrics.items())),
        "before": before,
        "after": after,
        "others": at.others(),
        "marks": [mark for mark in at.run.marks() if mark["step"] == at.step],
        "indexing": not at.index.is_complete(at.split, at.step) and at.index.file(at.split, at.step) is not None,
    }


def _groups(at: Place) -> list[Row]:
    members: dict[str, list[IndexedSample]] = {}
    for row in at.samples():
        members.setdefault(row["unit"], []).append(row)
    groups = [_group(unit, rows) for unit, rows in members.items()]
    largest = max((group["spread"] for group in groups), default=0.0)
    scores = [score for group in groups for score in group["scores"]]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    for group in groups:
        group["level"] = round(_LEVELS * group["spread"] / largest) if largest else 0
        group["levels"] = [level_of(row["score"], low, high) for row in group["rows"]]
    return groups


def level_of(score: float | None, low: float, high: float) -> int | None:
    """A score as one of 0 to 10 between the lowest and the highest."""
    if score is None:
        return None
    return round(_LEVELS * (score - low) / (high - low)) if high > low else _LEVELS // 2


def _group(unit: str, rows: Sequence[IndexedSample]) -> Row:
    scores = [row["score"] for row in rows if row["score"] is not None]
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    answers: dict[str, set[float]] = {}
    for row in rows:
        if row["answer"] and row["score"] is not None:
            answers.setdefault(row["answer"], set()).add(row["score"])
    return {
        "unit": unit,
        "rows": list(rows),
        "count": len(rows),
        "line": rows[0]["line"],
        "scores": scores,
        "mean": sum(scores) / len(scores) if scores else None,
        "spread": deviation(scores),
        "length": sum(row["length"] for row in rows) / len(rows),
        "cut": sum(row["finish"] == "length" for row in rows),
        "errors": sum(bool(row["error"]) for row in rows),
        "gap": max(gaps, default=None),
        "tag": rows[0]["tag"],
        "prompt": "",
        "response": "",
        "conflict": any(len(scores_of_answer) > 1 for scores_of_answer in answers.values()),
        "margin": _margin(rows),
    }


def _margin(rows: Sequence[IndexedSample]) -> float | None:
    """Score of a pair's chosen completion minus the score of its rejected completion."""
    by_side = {row["chosen"]: row["score"] for row in rows}
    if set(by_side) != {0, 1} or None in by_side.values():
        return None
    return float(by_side[1] - by_side[0])


def group_context(at: Place, unit: str, query: Mapping[str, str]) -> Row | None:
    """The samples of a group side by side, and the diff of two of them."""
    at.ensure()
    rows = at.samples(unit)
    if not rows:
        return None
    group = _group(unit, rows)
    full_rows = [at.index.row(at.split, at.step, row["line"]) or {} for row in rows[:64]]
    units = at.units()
    place = units.index(unit) if unit in units else 0
    low, high = min(group["scores"], default=0.0), max(group["scores"], default=1.0)
    return {
        "group": group,
        "samples": [
            {"summary": row, "row": full, "level": level_of(row["score"], low, high)}
            for row, full in zip(rows, full_rows, strict=False)
        ],
        "prompt": text_of(full_rows[0], "prompt"),
        "images": _images(at, full_rows[0]),
        "truth": full_rows[0].get("ground_truth"),
        "parts": list(dict.fromkeys(name for full in full_rows for name in _parts(full))),
        "diff": _diff(full_rows, rows, query),
        "before": f"{at.path}/u/{units[place - 1]}" if place else None,
        "after": f"{at.path}/u/{units[place + 1]}" if place + 1 < len(units) else None,
        "elsewhere": _elsewhere(at, rows[0]),
    }


def _images(at: Place, row: Mapping[str, object]) -> list[str] | None:
    """Data URLs of the images of a sample, "" for one that cannot be shown; None if Pillow is not installed."""
    try:
        return stored_images(row, at.run.folder / "samples" / IMAGES)
    except ImportError:
        return None


def _parts(row: Mapping[str, object]) -> dict[str, object]:
    parts = row.get("reward_parts")
    return {str(name): value for name, value in parts.items()} if isinstance(parts, Mapping) else {}


def _diff(full_rows: Sequence[Mapping[str, object]], rows: Sequence[IndexedSample], query: Mapping[str, str]) -> object:
    """The two samples that the query names; else the best against the worst, if they differ."""
    lines = [row["line"] for row in rows]
    named = [whole_number(query.get(name, "")) for name in ("a", "b")]
    if all(line in lines for line in named):
        one, other = map(lines.index, named)
    else:
        scored = [i for i, row in enumerate(rows) if row["score"] is not None and i < len(full_rows)]
        if len(scored) < 2:
            return None
        one = max(scored, key=lambda i: rows[i]["score"])
        other = min(scored, key=lambda i: rows[i]["score"])
    if one == other or max(one, other) >= len(full_rows):
        return None
    first_words, right = diff_words(text_of(full_rows[one], "response"), text_of(full_rows[other], "response"))
    return {"left": first_words, "right": right, "a": rows[one], "b": rows[other]}


def _elsewhere(at: Place, row: IndexedSample) -> list[sqlite3.Row]:
    """Other steps with the same prompt."""
    if "id" not in row.keys():
        return []
    return at.index.rows(
        "SELECT split, step, unit, count(*) AS num, avg(score) AS mean FROM samples JOIN files ON files.id = file "
        "WHERE prompt_hash = ? AND NOT (split = ? AND step = ?) GROUP BY split, step, unit ORDER BY split, step LIMIT 50",
        *(row["prompt_hash"], at.split, at.step),
    )


def sample_context(at: Place, line: int) -> Row | None:
    """One sample: tokens, turns, reward, life, and further fields of its row."""
    row = at.index.row(at.split, at.step, line)
    if row is None:
        return None
    at.ensure()
    summary = at.index.summary(at.split, at.step, line)
    tokens = tokens_of(row, at.run.tokens)
    siblings = at.samples(summary["unit"]) if summary is not None else []
    place = next((i for i, other in enumerate(siblings) if other["line"] == line), 0)
    episode = episode_of(at.run.folder, row, at.split, at.step) or {
        "messages": row.get("messages"),
        "calls": [],
        "error": "",
    }
    return {
        "row": row,
        "line": line,
        "summary": summary,
        "tokens": tokens,
        "prompt_tokens": tokens_of(row, at.run.tokens, "prompt"),
        "parts": _parts(row),
        "images": _images(at, row),
        "messages": episode["messages"] if isinstance(episode["messages"], list) else [],
        "calls": episode["calls"],
        "episode_error": episode["error"],
        "life": life_of(at.run.folder, row, at.split, at.step),
        "siblings": siblings,
        "rest": {str(n): v for n, v in row.items() if n not in _SHOWN_APART},
        "facts": _facts(row),
        "before": f"{at.path}/s/{siblings[place - 1]['line']}" if place else None,
        "after": f"{at.path}/s/{siblings[place + 1]['line']}" if place + 1 < len(siblings) else None,
    }


def _facts(row: Mapping[str, object]) -> dict[str, object]:
    """Sums over the tokens of a response, by name."""
    facts: dict[str, object] = {}
    log_probs = row.get("log_probs")
    if isinstance(log_probs, list) and (numbers := [v for v in log_probs if is_number(v)]):
        facts["log-probability"] = sum(numbers)
        facts["perplexity"] = math.exp(min(-sum(numbers) / len(numbers), 700))
    return facts


def gantt(spans: Sequence[Json], timeline: Json | None) -> Row | None:
    """Bars of a step in thousandths of its time: `rows` of (name, [(start, width, seconds)]), as measured;
    `roles` has their busy seconds, without a time of day."""
    if not spans or timeline is None or not timeline.get("seconds"):
        return None
    start = timeline.get("start") or min(span["start"] for span in spans)
    total = timeline["seconds"]
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for span in sorted(spans, key=lambda span: span["start"]):
        offset = 1000 * (span["start"] - start) / total
        width = max(1000 * span["seconds"] / total, 1.0)
        rows.setdefault(span["name"], []).append((max(min(offset, 999.0), 0.0), min(width, 1000.0), span["seconds"]))
    roles = {name: role["busy_s"] for name, role in timeline["roles"].items()}
    return {"rows": rows, "roles": roles, "seconds": total, "communication": timeline["communication"]}


def plan_bars(planned: Json | None, measured: Json | None) -> dict[str, object] | None:
    """A step as simulated by `verl plan` against the measured one: `sides` of (name, seconds, [(phase, start, width,
    seconds)]) on one scale in thousandths, and `rows` of (phase or busy role, planned, measured seconds)."""
    if planned is None or measured is None:
        return None
    sides = {"planned": planned, "measured": measured}
    scale = max(*(row["seconds"] for row in sides.values()), 1e-9)
    bars = [(name, row["seconds"], parts_of_bar(row["phases"], scale)) for name, row in sides.items()]
    phases = dict.fromkeys([*measured["phases"], *planned["phases"]])
    rows = [(phase, *(row["phases"].get(phase) for row in sides.values())) for phase in phases]
    roles = dict.fromkeys([*measured["roles"], *planned["roles"]])
    rows += [(f"{role} busy", *(row["roles"].get(role, {}).get("busy_s") for row in sides.values())) for role in roles]
    return {"sides": bars, "rows": rows}
