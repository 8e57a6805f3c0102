"""`verl data preferences`: pairs of a chosen and a rejected response, labelled by a judge, for `verl dpo` and `verl rm`.

rows of {prompt, responses} ──► judge, both orders or a rubric ──► rows of {prompt, chosen, rejected, margin}
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.config import RewardModelConfig
from verl.config.sections.data import PreferenceDataConfig
from verl.config.sections.reward import JudgeServiceConfig, RewardModelRolloutConfig
from verl.data.files import read_rows, write_parquet
from verl.data.messages import CHAT_COLUMNS, messages_in, template_kwargs_of, unfilled, without_marks
from verl.data.prompts import answer_prefix
from verl.data.schema import at
from verl.errors import DataError
from verl.families import SERVICE_ROLLOUT
from verl.parallel.device import resolve_device
from verl.regular_files import make_folder
from verl.roles.judges import build_judge
from verl.roles.reward_model import conversation_text
from verl.roles.verdicts import (
    PAIR_TEMPLATE,
    RUBRIC_TEMPLATE,
    Ask,
    CachedReplies,
    Criterion,
    compare_pairs,
    name_of_judge,
    read_rubric,
    rubric_scores,
    verdict_metrics,
)
from verl.tracking.files import json_text, write_atomically

Gaps = dict[tuple[int, int], float]  # numbers of two responses -> by how much the first is better; NaN: not known


@dataclass(frozen=True)
class Candidates:
    """A prompt with its responses, all different."""

    prompt: Any  # messages or text, as its row has it
    responses: tuple[str, ...]
    columns: Mapping[str, object] = field(default_factory=dict)  # CHAT_COLUMNS of its row

    @property
    def question(self) -> str:
        """The prompt as the judge reads it."""
        return self.prompt if isinstance(self.prompt, str) else conversation_text(self.prompt)

    def row(self, better: int, worse: int, margin: float) -> dict[str, object]:
        """A row of preferences, texts or messages like the prompt."""
        texts = {"chosen": self.responses[better], "rejected": self.responses[worse]}
        if not isinstance(self.prompt, str):
            texts = {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}  # type: ignore[misc]
        return {"prompt": self.prompt, **texts, "margin": margin, **self.columns}


def label(options: argparse.Namespace) -> list[str]:
    """Write the labelled rows of `options.input` to `options.output`; returns sentences about them. Raises DataError for a bad
    row, before the judge is loaded, and what build_judge and its replies raise."""
    candidates = list(read_candidates(options.input, options.prompt_key, options.responses_key))
    rubric = None if options.rubric is None else read_rubric(options.rubric)
    default = PAIR_TEMPLATE if rubric is None else RUBRIC_TEMPLATE
    template = default if options.template is None else Path(options.template).read_text(encoding="utf-8")
    judge = build_judge(_judge_config(options), resolve_device(), start_timeout_s=300.0, call_timeout_s=600.0)
    try:
        ask: Ask = judge.replies
        if options.cache is not None:
            name = name_of_judge(options.model or options.judge, options.max_reply_tokens)
            ask = CachedReplies(judge.replies, Path(options.cache), name)
        if rubric is None:
            gaps, lines = compared(ask, template, candidates, ends_only=options.pairs == "first_last")
        else:
            gaps, lines = graded(ask, template, rubric, candidates)
    finally:
        judge.close()
    pairs = zip(candidates, gaps, strict=True)
    rows = [row for candidate, gap in pairs for row in preferences(candidate, gap, options.pairs)]
    if not rows:
        raise DataError(f"The judge preferred no response of {options.input} to another one. {' '.join(lines)}")
    _write(Path(options.output), rows)
    return [f"{options.output}: {len(rows):,} rows from {len(candidates):,} prompts.", *lines]


def read_candidates(file: str, prompt_key: str, responses_key: str) -> Iterator[Candidates]:
    """The rows of `file` that have at least two different responses. Raises DataError for a bad row."""
    table = read_rows(file)
    for number in range(len(table)):
        row = table[number]
        with at(table.place(number)):
            row = unfilled(row, (prompt_key, *CHAT_COLUMNS))
            prompt, responses = row.get(prompt_key), row.get(responses_key)
            if not isinstance(prompt, str):
                prompt = without_marks(messages_in(prompt, prompt_key))
            if not isinstance(responses, list | tuple | np.ndarray) or not all(isinstance(r, str) for r in responses):
                raise DataError(
                    f"field {responses_key!r} must be a list of texts, as `verl generate --output FILE.parquet` writes "
                    f"it, but it is {responses!r:.80}."
                )
            kwargs = template_kwargs_of(row, PreferenceDataConfig())
        if not isinstance(prompt, str) and (begun := answer_prefix(prompt, kwargs)) is not None:
            prompt, responses = prompt[:-1], [begun + response for response in responses]  # rows train complete
        unique = tuple(dict.fromkeys(responses))
        if len(unique) > 1:
            yield Candidates(prompt, unique, {n: row[n] for n in CHAT_COLUMNS if row.get(n) is not None})


def compared(
    ask: Ask, template: str, candidates: Sequence[Candidates], *, ends_only: bool = False
) -> tuple[list[Gaps], list[str]]:
    """Preferences from -1 to 1 of all pairs of responses of each prompt, or of the first and the last one; and sentences about
    the judge."""
    pairs_by_prompt = [[(0, len(c.responses) - 1)] if ends_only else _pairs(c) for c in candidates]
    requests = [
        (c.question, c.responses[i], c.responses[j])
        for c, pairs in zip(candidates, pairs_by_prompt, strict=True)
        for i, j in pairs
    ]
    verdicts = compare_pairs(ask, template, requests)
    answers = iter(math.nan if v.preference is None else v.preference for v in verdicts)
    shares = {name: f"{value:.3f}" for name, value in verdict_metrics(verdicts).items()}
    lines = [
        f"Pairs whose two orders have the same verdict: {shares['order_agreement']}; verdicts for the response shown first: "
        f"{shares['first_shown']} (0.5: no bias); ties: {shares['tie']}; replies without a verdict: {shares['unusable']}."
    ]
    return [{pair: next(answers) for pair in pairs} for pairs in pairs_by_prompt], lines


def graded(
    ask: Ask, template: str, rubric: Sequence[Criterion], candidates: Sequence[Candidates]
) -> tuple[list[Gaps], list[str]]:
    """Differences of the rubric's scores for all pairs of responses of each prompt; and sentences about the judge."""
    rows = [(c.question, response, "") for c in candidates for response in c.responses]
    scores = [grades["score"] for grades in rubric_scores(ask, template, rubric, rows)]
    usable, scores_left = [score for score in scores if not math.isnan(score)], iter(scores)
    mean = sum(usable) / len(usable) if usable else math.nan
    gaps = []
    for c in candidates:
        row_scores = [next(scores_left) for _ in c.responses]
        gaps.append({(i, j): row_scores[i] - row_scores[j] for i, j in _pairs(c)})
    return gaps, [f"Mean score: {mean:.3f}; responses without one: {len(scores) - len(usable):,} of {len(scores):,}."]


def preferences(candidates: Candidates, gaps: Gaps, pairs: str) -> Iterator[dict[str, object]]:
    """Rows for the best and the worst response by their mean gap to the other responses (`best_worst`), for the first and the
    last one (`first_last`), or for every pair with a winner (`all`). Ties and unknown gaps make no row."""
    gaps_known = {pair: gap for pair, gap in gaps.items() if gap == gap}
    if pairs == "best_worst":
        totals = [0.0] * len(candidates.responses)
        for (i, j), gap in gaps_known.items():
            totals[i] += gap
            totals[j] -= gap
        best, worst = totals.index(max(totals)), totals.index(min(totals))
        gaps_known = {(best, worst): (totals[best] - totals[worst]) / len(totals)}
    elif pairs == "first_last":
        ends = (0, len(candidates.responses) - 1)
        gaps_known = {ends: gaps_known[ends]} if ends in gaps_known else {}
    for (i, j), gap in gaps_known.items():
        if gap:
            yield candidates.row(*((i, j) if gap > 0 else (j, i)), abs(gap))


def _pairs(candidates: Candidates) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(len(candidates.responses)), 2))


def _judge_config(options: argparse.Namespace) -> RewardModelConfig:
    at_service = options.judge.startswith(("http://", "https://"))
    url = options.judge if at_service else JudgeServiceConfig().url
    rollout = RewardModelRolloutConfig(
        name=SERVICE_ROLLOUT if at_service else options.engine,
        service=JudgeServiceConfig(url=url, served_model_name=options.model),
        response_length=options.max_reply_tokens,
        dtype=options.dtype,
    )
    return RewardModelConfig(enable=True, model_path=None if at_service else options.judge, rollout=rollout)


def _write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    if file.suffix == ".parquet":
        write_parquet(file, [dict(row) for row in rows])
        return
    make_folder(file.parent)
    write_atomically(file, "".join(json_text(row) + "\n" for row in rows))
