"""Score the reference answer of each row before training; it should get the full score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl.data_proto.samples import Score, ScoreRequest
from verl.rewards.managers.build import build_pool
from verl.rewards.pool import RewardPool
from verl.rewards.scorers.route import find_scorer

if TYPE_CHECKING:
    from verl.config import RewardConfig

NUM_FAILURES_KEPT = 5
BATCH_ROWS = 64  # rows of one call of a batched function


@dataclass
class SourceReport:
    """Results of one data_source. `custom`: a function of the user's; its full score is unknown."""

    data_source: str
    custom: bool
    num_rows: int = 0
    num_without_reference: int = 0
    num_full: int = 0  # reference answers with a score of exactly 1
    num_errors: int = 0  # reference answers for which the function failed
    score_sum: float = 0.0
    failures: list[str] = field(default_factory=list)  # the first sentences, row by row

    @property
    def num_scored(self) -> int:
        return self.num_rows - self.num_without_reference

    @property
    def level(self) -> Literal["pass", "warn", "fail"]:
        """A built-in scorer fails when one reference does not get 1; a custom function when it fails on all, and warns on
        one."""
        if self.num_errors and self.num_errors == self.num_scored:
            return "fail"
        if self.custom:
            return "warn" if self.num_errors else "pass"
        if self.num_full < self.num_scored:
            return "fail"
        return "warn" if self.num_without_reference else "pass"

    @property
    def sentence(self) -> str:
        mean = self.score_sum / self.num_scored if self.num_scored else float("nan")
        text = f"{self.data_source}: {self.num_full} of {self.num_scored} reference answers get 1 (mean {mean:.3f})"
        if self.num_errors:
            text += f", the reward function failed on {self.num_errors}"
        if self.num_without_reference:
            text += f", {self.num_without_reference} rows have no reference answer"
        return text + "."


def check_references(rows: Iterable[Mapping[str, object]], config: RewardConfig) -> list[SourceReport]:
    """Score the reference answer of every row (`data_source`, `reward_model.ground_truth`, `extra_info`): one report per
    data_source. The answer has the form that the built-in scorer reads ("#### 18"); without such a scorer it is the ground
    truth. Raises RewardError when the function cannot be loaded or there is no scorer for a data_source."""
    reports: dict[str, SourceReport] = {}
    requests = []
    custom = bool(config.custom_reward_function.path)
    for index, row in enumerate(rows):
        source = str(row["data_source"])
        report = reports.setdefault(source, SourceReport(source, custom))
        report.num_rows += 1
        request = _reference_request(index, row)
        if request is None:
            report.num_without_reference += 1
        else:
            requests.append(request)
    pool = build_pool(config)
    try:
        pool.start(list(reports))
        for request, score in zip(requests, _score(pool, requests), strict=True):
            _record(reports[request.data_source], request, score)
    finally:
        pool.close()
    return list(reports.values())


def _reference_request(index: int, row: Mapping[str, Any]) -> ScoreRequest | None:
    source, extra = str(row["data_source"]), dict(row.get("extra_info") or {})
    ground_truth = (row.get("reward_model") or {}).get("ground_truth")
    scorer = find_scorer(source)
    if scorer is not None:
        reply = scorer.reference(ground_truth, extra)
    else:
        reply = None if ground_truth is None else str(ground_truth)
    if reply is None:
        return None
    return ScoreRequest(f"row {index}", source, reply, ground_truth, extra, response_length=len(reply))


def _score(pool: RewardPool, requests: list[ScoreRequest]) -> list[Score]:
    if not pool.function.batched:
        return pool.score_all(requests)
    chunks = [requests[i : i + BATCH_ROWS] for i in range(0, len(requests), BATCH_ROWS)]
    return [score for chunk in chunks for score in pool.score_all(chunk)]


def _record(report: SourceReport, request: ScoreRequest, score: Score) -> None:
    report.score_sum += score.score
    report.num_full += score.error is None and score.score == 1
    report.num_errors += score.error is not None
    unexpected = score.error
    if unexpected is None and not report.custom and score.score != 1:
        answer = request.solution_str[:80]
        unexpected = f"{request.key} of {request.data_source}: the reference {answer!r} gets {score.score:g}, not 1."
    if unexpected and len(report.failures) < NUM_FAILURES_KEPT:
        report.failures.append(unexpected)
