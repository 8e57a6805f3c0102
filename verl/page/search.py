"""Search over all samples of a run: full text, filters, and answers that got different scores."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from verl.foreign_text import clean
from verl.page.index import SampleIndex

PER_PAGE = 50
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
# samples of one group whose final answers are equal and whose scores are not
_CONFLICTS = """WITH conflicting AS (SELECT s.id FROM samples s JOIN (
  SELECT file, unit, answer FROM samples WHERE answer != '' AND score IS NOT NULL
  GROUP BY file, unit, answer HAVING max(score) > min(score)) c USING (file, unit, answer)) """


def search_context(index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """The samples that fit the query's words and filters, and what the filters can be set to."""
    text = query.get("q", "").strip()
    flags = [name for name in _FLAGS if query.get(name)]
    tags = [row["tag"] for row in index.rows("SELECT DISTINCT tag FROM samples WHERE tag != '' LIMIT 50")]
    splits = [row["split"] for row in index.rows("SELECT DISTINCT split FROM files ORDER BY split")]
    page = int(query["page"]) if query.get("page", "").isdigit() else 0
    problem, rows, more = "", [], False
    try:
        found = find_samples(index, query, limit=PER_PAGE + 1, offset=page * PER_PAGE)
        rows, more = found[:PER_PAGE], len(found) > PER_PAGE
    except sqlite3.Error as error:
        problem = f"The samples could not be searched: {clean(error)}."
    num_files = len(index.files())
    done = index.rows("SELECT count(*) AS files, sum(rows) AS samples FROM files WHERE complete = 1")[0]
    return {
        "q": text, "rows": rows, "more": more, "page": page, "flags": {n: label for n, (label, _) in _FLAGS.items()},
        "chosen": flags, "tags": tags, "splits": splits, "sorts": list(_SORTS), "problem": problem,
        "num_files": num_files, "num_indexed": done["files"], "num_samples": done["samples"] or 0,
        "filters": {name: query.get(name, "") for name in _NUMBERS},
    }  # fmt: skip


def find_samples(index: SampleIndex, query: Mapping[str, str], *, limit: int, offset: int = 0) -> list[sqlite3.Row]:
    """The samples that fit, with `excerpt`: the place of the searched text. Raises sqlite3.Error."""
    text = query.get("q", "").strip()[:500]
    conditions, values = _conditions(query)
    excerpt = "substr(texts.response, 1, 300)"
    if len(text) >= 3:
        conditions.append("texts MATCH ?")
        values.append('"' + text.replace('"', '""') + '"')
        excerpt = "snippet(texts, -1, char(2), char(3), '…', 40)"
    elif text:
        conditions.append("(texts.prompt LIKE ? ESCAPE '\\' OR texts.response LIKE ? ESCAPE '\\')")
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values += [f"%{escaped}%"] * 2
    order = _SORTS.get(query.get("sort", ""), _SORTS["newest"])
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    prefix = _CONFLICTS if query.get("conflict") else ""
    searched = "JOIN texts ON texts.rowid = samples.id" if text else ""
    # the texts of the found page alone are read
    ids = [
        row["id"]
        for row in index.rows(
            f"{prefix}SELECT samples.id AS id FROM samples JOIN files ON files.id = samples.file {searched} {where} "
            f"ORDER BY {order} LIMIT ? OFFSET ?",
            *values,
            limit,
            offset,
        )
    ]
    match, term = ("AND texts MATCH ?", [values[-1]]) if len(text) >= 3 else ("", [])
    rows = index.rows(
        f"SELECT samples.*, split, step, {excerpt} AS excerpt, substr(texts.prompt, -1500) AS prompt_end, "
        "substr(texts.response, 1, 300) AS response_start FROM texts JOIN samples ON samples.id = texts.rowid "
        f"JOIN files ON files.id = samples.file WHERE texts.rowid IN ({','.join('?' * len(ids))}) {match}",
        *ids,
        *term,
    )
    place = {number: i for i, number in enumerate(ids)}
    return sorted(rows, key=lambda row: place[row["id"]])


def _conditions(query: Mapping[str, str]) -> tuple[list[str], list[Any]]:
    conditions = [condition for name, (_, condition) in _FLAGS.items() if query.get(name)]
    values: list[Any] = []
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


def marked(excerpt: str) -> list[tuple[str, bool]]:
    """An excerpt as (text, whether it is the searched one)."""
    found = []
    for part in excerpt.split("\x02"):
        hit, mark, rest = part.partition("\x03")
        found += [(hit, True), (rest, False)] if mark else [(part, False)]
    return [(text, is_hit) for text, is_hit in found if text]
