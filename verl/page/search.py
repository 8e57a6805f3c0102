"""Search over all samples of a run: full text, filters, and answers that got different scores."""

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence, Set
from itertools import chain

from verl.foreign_text import clean
from verl.page.index import SampleIndex
from verl.page.summaries import text_of
from verl.page.text import visible, whole_number
from verl.tracking.files import Row

PER_PAGE = 50
_FEW = 5000  # samples that are looked up one by one
_AROUND = 80  # characters of an excerpt on each side of a match
_MAX_QUERY = 500  # characters
_SORTS = {
    "newest": "step DESC, split, line",
    "score": "score ASC, step DESC",
    "best": "score DESC, step DESC",
    "longest": "length DESC",
    "gap": "gap DESC",
}
_NUMBERS = {  # parameter -> condition
    "from": "step >= ?", "to": "step <= ?", "min": "score >= ?", "max": "score <= ?", "shorter": "length <= ?",
    "longer": "length >= ?", "gap": "gap >= ?",
}  # fmt: skip
_FLAGS = {
    "cut": ("cut at the length limit", "finish = 'length'"),
    "failed": ("scorer failed", "error != ''"),
    "conflict": ("same answer, different score", "samples.id IN (SELECT id FROM conflicting)"),
}
QUESTIONS = [  # label, query
    ("all", {}),
    *((label, {name: "1"}) for name, (label, _) in _FLAGS.items()),
    ("largest sampler/trainer difference", {"sort": "gap"}),
    ("longest", {"sort": "longest"}),
]
# samples of one group with equal final answers and different scores
_CONFLICTS = """WITH conflicting AS (SELECT s.id FROM samples s JOIN (
  SELECT file, unit, answer FROM samples WHERE answer != '' AND score IS NOT NULL
  GROUP BY file, unit, answer HAVING max(score) > min(score)) c USING (file, unit, answer)) """


def search_context(index: SampleIndex, query: Mapping[str, str]) -> dict[str, object]:
    """The samples that fit the query's words and filters, and the possible values of the filters."""
    text = query.get("q", "").strip()
    flags = [name for name in _FLAGS if query.get(name)]
    tags = [row["tag"] for row in index.rows("SELECT DISTINCT tag FROM samples WHERE tag != '' LIMIT 50")]
    splits = [row["split"] for row in index.rows("SELECT DISTINCT split FROM files ORDER BY split")]
    for name, choices in (("tag", tags), ("split", splits)):  # the address has the displayed form of their values
        chosen = query.get(name, "")
        query = {**query, name: next((value for value in choices if visible(value) == chosen), chosen)}
    page = whole_number(query.get("page", "")) or 0
    problem, rows, more = "", [], False
    try:
        samples = find_samples(index, query, limit=PER_PAGE + 1, offset=page * PER_PAGE)
        rows, more = samples[:PER_PAGE], len(samples) > PER_PAGE
    except sqlite3.Error as error:
        problem = f"The samples could not be searched: {clean(error)}."
    done = index.rows("SELECT sum(rows) AS samples FROM files WHERE complete = 1")[0]
    return {
        "q": text, "rows": rows, "more": more, "page": page, "flags": {n: label for n, (label, _) in _FLAGS.items()},
        "questions": QUESTIONS, "asked": {name: value for name, value in query.items() if value and name != "page"},
        "chosen": flags, "tags": list(map(visible, tags)), "splits": list(map(visible, splits)), "sorts": list(_SORTS),
        "problem": problem,
        "num_unread": index.num_unread(), "num_samples": done["samples"] or 0,
        "filters": {name: query.get(name, "") for name in _NUMBERS},
    }  # fmt: skip


def find_samples(index: SampleIndex, query: Mapping[str, str], *, limit: int, offset: int = 0) -> list[Row]:
    """The samples that fit: their columns, `prompt` and `response` as lists show them, and `excerpt`, the place of the
    searched text as (text, whether it is the searched one). Raises sqlite3.Error."""
    text = query.get("q", "").strip()[:_MAX_QUERY]
    if not text:
        ids = _ids(index, query, None, limit, offset)
    elif query.get("sort", "newest") == "newest" and not query.get("conflict"):
        ids = _newest_ids(index, query, text, limit + offset)[offset:]
    else:
        ids = _ids(index, query, set(chain.from_iterable(index.containing(text))), limit, offset)
    rows = index.rows(
        "SELECT samples.*, split, step, prompt, response FROM samples JOIN files ON files.id = file "
        "JOIN shown ON shown.id = samples.id WHERE samples.id IN (SELECT value FROM json_each(?))",
        json.dumps(ids),
    )
    place = {number: i for i, number in enumerate(ids)}
    return _with_excerpts(index, sorted(rows, key=lambda row: place[row["id"]]), text)


def _newest_ids(index: SampleIndex, query: Mapping[str, str], text: str, count: int) -> list[int]:
    """The newest samples with `text` that the filters let through; older files than they are in are not read."""
    ids: list[int] = []
    matches: set[int] = set()
    for ids_of_file in index.containing(text):
        matches |= ids_of_file
        if len(matches) >= count - len(ids):
            ids += _ids(index, query, matches, count - len(ids), 0)
            matches = set()
            if len(ids) == count:
                return ids
    return ids + _ids(index, query, matches, count - len(ids), 0)


def _ids(index: SampleIndex, query: Mapping[str, str], among: Set[int] | None, limit: int, offset: int) -> list[int]:
    """The samples that the filters let through, of those in `among` or of all, in the order of the query."""
    conditions, values = _conditions(query)
    tables = "files CROSS JOIN samples ON samples.file = files.id"
    if among is not None and len(among) <= _FEW:  # found by their ids
        tables = "json_each(?) CROSS JOIN samples ON samples.id = value JOIN files ON files.id = samples.file"
        values.insert(0, json.dumps(list(among)))
    elif among is not None:  # all are read: this is faster then
        index.db.create_function("is_among", 1, among.__contains__)
        conditions.append("is_among(samples.id)")
    order = _SORTS.get(query.get("sort", ""), _SORTS["newest"])
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = index.rows(
        f"{_CONFLICTS if query.get('conflict') else ''}SELECT samples.id AS id FROM {tables} {where} "
        f"ORDER BY {order} LIMIT ? OFFSET ?",
        *(*values, limit, offset),
    )
    return [row["id"] for row in rows]


def _with_excerpts(index: SampleIndex, rows: Sequence[sqlite3.Row], text: str) -> list[dict[str, object]]:
    if not text:
        return [{**dict(row), "excerpt": []} for row in rows]
    excerpted = []
    for row in rows:
        excerpt = _first_excerpt((row["response"], row["prompt"]), text)
        if not excerpt:  # beyond what lists show
            full = index.read(index.file(row["split"], row["step"]), row["start"], row["size"]) or {}
            excerpt = _first_excerpt((text_of(full, "response"), text_of(full, "prompt")), text)
        excerpted.append({**dict(row), "excerpt": excerpt})
    return excerpted


def _first_excerpt(texts: Sequence[str], text: str) -> list[tuple[str, bool]]:
    return next(filter(None, (excerpt_of(candidate, text) for candidate in texts)), [])


def excerpt_of(text_of_match: str, text: str) -> list[tuple[str, bool]]:
    """The first place of `text` in `text_of_match` with some characters around it: (text, whether it is the searched one)."""
    match = re.search(re.escape(text), text_of_match, re.IGNORECASE)
    if match is None:
        return []
    start, end = max(match.start() - _AROUND, 0), match.end() + _AROUND
    before = ("…" if start else "") + text_of_match[start : match.start()]
    after = text_of_match[match.end() : end] + ("…" if end < len(text_of_match) else "")
    return [(part, is_hit) for part, is_hit in ((before, False), (match.group(), True), (after, False)) if part]


def _conditions(query: Mapping[str, str]) -> tuple[list[str], list[object]]:
    conditions = [condition for name, (_, condition) in _FLAGS.items() if query.get(name)]
    values: list[object] = []
    for name, condition in _NUMBERS.items():
        try:
            value = float(query.get(name, ""))
        except ValueError:
            continue
        conditions.append(condition)
        values.append(value)
    for name in ("split", "tag"):
        if query.get(name):
            conditions.append(f"{name} = ?")
            values.append(query[name])
    return conditions, values
