"""The columns of the sample index, one line about a row of a samples file; and packed texts, laid end to end for a search.

A scan of packed texts is one `bytes.find`: it finds substrings of any length in any script. An index of trigrams (FTS5) took
most of the time of reading samples, and was slower for frequent words.
"""

import itertools
import math
import operator
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from verl.foreign_text import valid_utf8
from verl.tracking.files import Json, is_count, is_number

_END = b"\0"


class PackedTexts(NamedTuple):
    """`folded`: the texts, each with an end mark; `owners` (int64): samples; `ends` (int64): the end of each text.

    Neighbours with the same text share it: the samples of a group have one prompt.
    """

    owners: bytes
    ends: bytes
    folded: bytes


def fold(text: str) -> bytes:
    """`text` as it is compared: lower case, UTF-8, without the end mark."""
    return text.lower().encode().replace(_END, b" ")


def pack_texts(texts: Iterable[tuple[int, str]]) -> PackedTexts:
    """The texts of (sample, text), in that order."""
    owners, ends, parts, size = array("q"), array("q"), [], 0
    last: str | None = None
    for owner, text in texts:
        if text != last:
            parts.append(fold(text))
            size, last = size + len(parts[-1]) + len(_END), text
        owners.append(owner)
        ends.append(size)
    return PackedTexts(owners.tobytes(), ends.tobytes(), b"".join(part + _END for part in parts))


def owners_with(needle: bytes, packed: PackedTexts) -> list[int]:
    """The samples with the folded `needle` in their text."""
    find = packed.folded.find
    at = find(needle)
    if at < 0:
        return []
    owners, ends = array("q", packed.owners), array("q", packed.ends)
    matching, place = set(), 0  # ends of texts
    while at >= 0:
        place = bisect_right(ends, at, place)
        matching.add(ends[place])
        at = find(needle, ends[place])
    return [owner for owner, end in zip(owners, ends, strict=True) if end in matching]


_MAX_TEXT = 20_000  # characters of a prompt or response that can be searched
_MAX_ANSWER = 200
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_MARKED = re.compile(r"(?:####|[Aa]nswer(?: is)?:?)\s*([^\n]+)")
_NAME = re.compile(r"[\w-]{1,60}", re.ASCII)  # part of a path
# the first one stands for the trainer's log-probs if a row has no second
_UNUSED_ARRAYS = [
    f'"{name}": ['.encode() for name in ("old_log_probs", "prompt_ids", "entropy", "ref_log_probs", "token_versions")
]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class SampleSummary(NamedTuple):
    """Columns of a sample. `unit` is what its step compares it with: the prompt of a group, the pair of a preference."""

    unit: str
    ordinal: int | None
    sample: int | None
    score: float | None
    length: int
    finish: str
    error: str
    tag: str
    version: int | None
    advantage: float | None
    gap: float | None  # largest |trainer - sampler probability| of its tokens
    chosen: int | None
    answer: str
    prompt: str
    response: str


def summary_of(row: Json, line: int) -> SampleSummary:
    """The columns of a row; None and "" for values that are missing or of another type."""
    response = text_of(row, "response")
    chosen = row.get("chosen")
    ids = row.get("response_ids")
    return SampleSummary(
        unit=_unit(row, line),
        ordinal=row["ordinal"] if is_count(row.get("ordinal")) else None,
        sample=row["sample_index"] if is_count(row.get("sample_index")) else None,
        score=float(row["score"]) if is_number(row.get("score")) else None,
        length=len(ids) if isinstance(ids, list) else len(response.split()),
        finish=text_of(row, "finish_reason")[:40],
        error=text_of(row, "reward_error")[:1000],
        tag=text_of(row, "data_source")[:200],
        version=row["weight_version"] if is_count(row.get("weight_version")) else None,
        advantage=_first(row.get("advantages")),
        gap=largest_gap(row),
        chosen=int(chosen) if isinstance(chosen, bool) else None,
        answer=final_answer(response),
        prompt=text_of(row, "prompt")[:_MAX_TEXT],
        response=response[:_MAX_TEXT],
    )


def without_arrays(content: bytes) -> bytes:
    """The JSON of a row with the arrays of numbers empty that no summary needs: most of the time of reading a row is the
    conversion of its numbers.

    A key is never found within a text: quotes are escaped there. Arrays within an array leave no JSON: then the caller
    reads the complete row.
    """
    parts, at = [], 0
    for name in _UNUSED_ARRAYS if b'"train_log_probs": [' in content else _UNUSED_ARRAYS[1:]:
        key = content.find(name)
        end = content.find(b"]", key)
        if key >= 0 and end >= 0 and content.find(b'"', key + len(name), end) < 0:
            parts.append((key + len(name), end))
    chunks = []
    for start, end in sorted(parts):
        chunks.append(content[at:start])
        at = end
    return b"".join([*chunks, content[at:]])


def _unit(row: Mapping[str, object], line: int) -> str:
    for name in ("ordinal", "uid"):
        value = row.get(name)
        if is_count(value) or (isinstance(value, str) and value):
            return str(value) if _NAME.fullmatch(str(value)) else f"h{hash_of(str(value))}"
    prompt = text_of(row, "prompt")
    return f"p{hash_of(prompt)}" if prompt else f"line{line}"


_TAGS = re.compile(r"<\|[^|<>]{1,40}\|>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>")
_ROLES = re.compile(r"^(?:user|assistant|model|human|system)\b[:\s]*", re.IGNORECASE)


def last_message(prompt: str) -> str:
    """The last message of a prompt, without the marks of chat templates, for lists."""
    for part in reversed(_TAGS.split(prompt)):
        text = _ROLES.sub("", part.strip()).strip()
        if text and text.lower() not in ("think", "<think>"):
            return text
    return prompt.strip()


def hash_of(text: str) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))  # names of files may hold any bytes


def text_of(row: Mapping[str, object], name: str) -> str:
    """The text in a column; "" for anything else."""
    value = row.get(name)
    return valid_utf8(value) if isinstance(value, str) else ""


def _first(values: object) -> float | None:
    """The first of the advantages that is not 0; without a critic they are equal over a response."""
    if not isinstance(values, list):
        return None
    first = next((float(value) for value in values if value and is_number(value)), None)
    return 0.0 if first is None and any(map(is_number, values)) else first


def trainer_log_probs(row: Json) -> Sequence[Any]:
    """The trainer's log-probs of the response tokens; [] if the row has none."""
    for name in ("train_log_probs", "old_log_probs"):
        if isinstance(row.get(name), list):
            return cast("Sequence[Any]", row[name])
    return []


def probability(log_prob: float) -> float:
    """exp of a log-prob; 1 for numbers above 0, as damaged files have."""
    return math.exp(min(log_prob, 0.0))


def largest_gap(row: Mapping[str, object]) -> float | None:
    """Largest |trainer - sampler probability|, as training/rollout_probs_diff_max; None if one of the two is missing."""
    sampled, trained, mask = row.get("log_probs"), trainer_log_probs(row), row.get("response_mask")
    if not isinstance(sampled, list):
        return None
    used = mask if isinstance(mask, list) else itertools.repeat(True)
    with suppress(TypeError, OverflowError):  # no number, or no log-prob; else this is the fast way for most rows
        gaps = map(operator.sub, map(math.exp, trained), map(math.exp, sampled))
        largest = max(map(abs, itertools.compress(gaps, used)), default=None)
        if largest is None or is_number(largest):
            return largest
    pairs = ((a, b) for a, b, m in zip(trained, sampled, used, strict=False) if m and is_number(a) and is_number(b))
    return max((abs(probability(a) - probability(b)) for a, b in pairs), default=None)


def final_answer(response: str) -> str:
    """The last boxed or marked answer of a response, else its last number, else its last line."""
    end = response[-4000:]
    marked = _MARKED.findall(end) if "####" in end or "nswer" in end else []
    answers = _BOXED.findall(end) or marked or _NUMBER.findall(end) or end.strip().splitlines()[-1:]
    if not answers:
        return ""
    answer = answers[-1].strip().strip("$.*").replace(",", "")
    return answer[:_MAX_ANSWER]


def deviation(scores: Sequence[float]) -> float:
    """Standard deviation."""
    if len(scores) < 2:
        return 0.0
    mean = math.fsum(scores) / len(scores)
    return math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))


def score_statistics(scored: Iterable[tuple[str, float]]) -> tuple[float | None, ...]:
    """Of the scores of units: mean, 10th and 90th percentile of the groups' means, mean spread of a group, share of groups of
    equal scores."""
    groups: dict[str, list[float]] = {}
    for unit, score in scored:
        groups.setdefault(unit, []).append(score)
    if not groups:
        return (None,) * 5
    means = sorted(sum(scores) / len(scores) for scores in groups.values())
    several = [scores for scores in groups.values() if len(scores) > 1]
    return (
        sum(map(sum, groups.values())) / sum(map(len, groups.values())),
        means[int(0.1 * (len(means) - 1))],
        means[int(0.9 * (len(means) - 1) + 0.999)],
        sum(map(deviation, several)) / len(several) if several else None,
        sum(deviation(scores) == 0 for scores in several) / len(several) if several else None,
    )
