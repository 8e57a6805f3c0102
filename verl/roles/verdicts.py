"""Verdicts of a judge: pairs of responses in both orders, rubrics with weights, and replies that are asked for once.

ask = CachedReplies(judge.replies, file, "my-judge")           # or judge.replies itself
compare_pairs(ask, PAIR_TEMPLATE, [(prompt, one, other)])            # -> verdicts; one is better where preference > 0
rubric_scores(ask, RUBRIC_TEMPLATE, rubric, [(prompt, response, ground_truth)])
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.config.sources import read_limited
from verl.errors import ConfigError
from verl.foreign_text import clean, quoted
from verl.models.content import digest_of_files, digest_of_text
from verl.regular_files import make_folder
from verl.rewards.model_score import grade_of
from verl.tracking.files import append_rows, has, is_text, read_json_rows

Ask = Callable[[Sequence[str]], list[str]]  # questions -> replies, in the same order

PAIR_TEMPLATE = """Two responses to a request are given. Decide which one is better: more helpful, correct and harmless.
Neither the order in which they are shown nor their length counts.

Request:
{prompt}

Response A:
{first}

Response B:
{second}

Explain your decision in a few words. Then end with [[A]] if response A is better, [[B]] if response B is better, or [[C]] if
they are equally good."""
RUBRIC_TEMPLATE = """Grade a response to a request by one criterion.

Request:
{prompt}

Response:
{response}

Criterion: {criterion}

Explain your grade in a few words, then end with a number from 0 (not at all) to 10 (fully)."""

_PLACES = re.compile(r"\{(prompt|response|ground_truth|first|second|criterion)\}")
_MARKED = re.compile(r"\[\[\s*(A|B|C|tie)\s*\]\]", re.IGNORECASE)
_NAMED = re.compile(r"\b(A|B|C|TIE|Tie|tie)\b")
_MAX_WEIGHT, _MAX_NAME = 1e6, 100  # of a criterion
_READ = (".safetensors", ".json", ".jinja")  # files of a model folder
_MEANINGS = {"A": 1, "B": -1, "C": 0, "TIE": 0}


def fill(template: str, **parts: str) -> str:
    """The template with its places filled by `parts`; other braces stay."""
    return _PLACES.sub(lambda match: parts.get(match.group(1), match.group(0)), template)


class CachedReplies:
    """`ask` with its replies kept in `file`, by the digest of judge and question; an equal question is not asked again, in this
    run or a later one. `judge` names model and settings, since other ones reply otherwise. A damaged row is asked again."""

    def __init__(self, ask: Ask, file: Path, judge: str):
        self._ask, self.file, self.judge = ask, file, judge
        make_folder(file.parent)
        rows = read_json_rows(file, has(digest=is_text, reply=is_text))
        self._known = {row["digest"]: row["reply"] for row in rows if row == self._row(row) or len(row) == 2}

    def __call__(self, questions: Sequence[str]) -> list[str]:
        names = [self._digest(question) for question in questions]
        missing = {name: q for name, q in zip(names, questions, strict=True) if name not in self._known}
        if missing:
            replies = dict(zip(missing, self._ask(list(missing.values())), strict=True))
            append_rows(self.file, (self._row({"digest": name, "reply": reply}) for name, reply in replies.items()))
            self._known |= replies
        return [self._known[name] for name in names]

    def _row(self, row: Mapping[str, object]) -> dict[str, object]:
        """A row of the file; those of older versions have no checksum."""
        digest, reply = str(row["digest"]), str(row["reply"])
        return {"digest": digest, "reply": reply, "checksum": digest_of_text(digest, reply)}

    def _digest(self, question: str) -> str:
        return hashlib.blake2b(json.dumps([self.judge, question]).encode(), digest_size=16).hexdigest()


def name_of_judge(model: str | None, max_tokens: int) -> str:
    """The name of a judge for CachedReplies: a model folder by the content of its files, since training may change them."""
    folder = Path(model or "").expanduser()
    files = sorted(file for file in folder.glob("*.*") if file.suffix in _READ) if model else []
    return f"{digest_of_files(files) if files else model}, {max_tokens} tokens"


@dataclass(frozen=True)
class PairVerdict:
    """The verdicts about one pair, asked with the first response shown first (`straight`) and shown second (`swapped`): 1 if
    the first is better, -1 if the second is, 0 for a tie, None for a reply without a verdict."""

    straight: int | None
    swapped: int | None
    replies: tuple[str, str] = ("", "")

    @property
    def preference(self) -> float | None:
        """Mean of the verdicts, from -1 (the second response is better) to 1; None without a verdict."""
        usable = [verdict for verdict in (self.straight, self.swapped) if verdict is not None]
        return sum(usable) / len(usable) if usable else None

    @property
    def agrees(self) -> bool | None:
        """Whether both orders have the same verdict; None if one of them has none."""
        return None if self.straight is None or self.swapped is None else self.straight == self.swapped


def verdict_of(reply: str) -> int | None:
    """Read 1 for A, -1 for B, 0 for C or tie; None without a verdict.

    The last verdict in double brackets counts (the form of 2306.05685). Without one, verdicts that are separate words count if
    all of them agree: "B is better, since A is wrong" says nothing that could be read safely.
    """
    if marked := _MARKED.findall(reply):
        return _MEANINGS[marked[-1].upper()]
    named = {_MEANINGS[word.upper()] for word in _NAMED.findall(reply)}
    return named.pop() if len(named) == 1 else None


def compare_pairs(ask: Ask, template: str, pairs: Sequence[tuple[str, str, str]]) -> list[PairVerdict]:
    """Verdicts about (prompt, first response, second response), each asked in both orders (2306.05685, section 3.4). `template`
    has the places {prompt}, {first} and {second}."""
    questions = [fill(template, prompt=p, first=one, second=other) for p, one, other in pairs]
    questions += [fill(template, prompt=p, first=other, second=one) for p, one, other in pairs]
    replies = ask_once(ask, questions)
    straight, swapped = replies[: len(pairs)], replies[len(pairs) :]
    return [PairVerdict(verdict_of(a), _negated(verdict_of(b)), (a, b)) for a, b in zip(straight, swapped, strict=True)]


def verdict_metrics(verdicts: Sequence[PairVerdict]) -> dict[str, float]:
    """order_agreement: share of pairs with the same verdict in both orders; first_shown: share of the verdicts for one side
    that are for the response shown first, 0.5 without a bias; tie and unusable: shares of the verdicts. NaN without any."""
    agreements = [v.agrees for v in verdicts if v.agrees is not None]
    by_order = [s for v in verdicts for s in (v.straight, _negated(v.swapped))]
    decided = [s for s in by_order if s]
    return {
        "order_agreement": _share(agreements),
        "first_shown": _share([s > 0 for s in decided]),
        "tie": _share([s == 0 for s in by_order]),
        "unusable": _share([s is None for s in by_order]),
    }


@dataclass(frozen=True)
class Criterion:
    """One question of a rubric. The score of a response is the mean over criteria, by weight."""

    name: str
    question: str
    weight: float = 1.0


def read_rubric(file: str | Path) -> list[Criterion]:
    """The criteria of a YAML or JSON file: a list of {name, question, weight}. Raises ConfigError."""
    rows = read_limited(Path(file).expanduser(), kind="rubric")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"The rubric {file} has no list of criteria, each {{name, question, weight}}.")
    criteria = [_criterion(row, f"{file}, criterion {number}") for number, row in enumerate(rows, start=1)]
    if len({criterion.name for criterion in criteria}) < len(criteria):
        raise ConfigError(f"Two criteria of the rubric {file} have the same name; rename one.")
    return criteria


def rubric_scores(
    ask: Ask, template: str, rubric: Sequence[Criterion], rows: Sequence[tuple[str, str, str]]
) -> list[dict[str, float]]:
    """For each (prompt, response, ground truth) the last number of the reply to each criterion by its name, and their mean by
    weight as "score"; NaN for a reply without a number. `template` has the places {response} and {criterion}."""
    questions = [
        fill(template, prompt=prompt, response=response, ground_truth=truth, criterion=criterion.question)
        for prompt, response, truth in rows
        for criterion in rubric
    ]
    replies, total = iter(ask_once(ask, questions)), sum(criterion.weight for criterion in rubric)
    scored = []
    for _ in rows:
        grades = {criterion.name: grade_of(next(replies)) for criterion in rubric}
        mean = sum(criterion.weight * grades[criterion.name] for criterion in rubric) / total
        scored.append({**grades, "score": mean})
    return scored


def _criterion(row: object, place: str) -> Criterion:
    if not isinstance(row, Mapping) or not {"name", "question"} <= set(row) <= {"name", "question", "weight"}:
        raise ConfigError(f"{place} must have a name and a question, and may have a weight; it is {quoted(row, 80)}.")
    weight = row.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1 / _MAX_WEIGHT <= weight <= _MAX_WEIGHT:
        raise ConfigError(
            f"{place} has the weight {quoted(weight, 40)}; it must be a number above 0, of at most {_MAX_WEIGHT:g}."
        )
    if row["name"] == "score" or not all(isinstance(row[key], str) and row[key] for key in ("name", "question")):
        raise ConfigError(f"{place} must have texts as name and question, and another name than score.")
    return Criterion(clean(row["name"], _MAX_NAME), row["question"], float(weight))


def ask_once(ask: Ask, questions: Sequence[str]) -> list[str]:
    """The replies; equal questions are asked once."""
    unique = list(dict.fromkeys(questions))
    replies = dict(zip(unique, ask(unique), strict=True))
    return [replies[question] for question in questions]


def _negated(verdict: int | None) -> int | None:
    return None if verdict is None else -verdict


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else math.nan
