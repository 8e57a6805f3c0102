"""Checks of the data before a run: every row's schema, template and length; repeated prompts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.data.dataset import Files, PromptRows, RLHFDataset, Scored, open_dataset
from verl.data.prompts import PromptEncoder, control_token_in, control_tokens
from verl.data.scan import BadRows, batches_of
from verl.data.template_checks import TemplateChecks
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import UnavailableRowError

if TYPE_CHECKING:
    from verl.config import DataConfig

NUM_PROBLEMS_SHOWN = 5


@dataclass
class RowsReport:
    """Findings in the rows of one set of files. Lengths are prompt tokens before truncation."""

    num_rows: int = 0
    num_problems: int = 0  # rows that would stop a run
    num_more: int = 0  # of these, rows that no sentence describes
    problems: list[str] = field(default_factory=list)  # a sentence for each of the first of them
    num_overlong: int = 0  # prompts longer than data.max_prompt_length
    num_repeated: int = 0  # rows with the prompt of an earlier row
    num_control: int = 0  # rows with control tokens in the contents of their messages
    first_control: str = ""  # the first of these tokens, and its row
    data_sources: Counter[str] = field(default_factory=Counter)  # rows per task
    lengths: list[int] = field(default_factory=list)
    prompts: set[bytes] = field(default_factory=set)  # digests

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    def add_problem(self, sentence: str) -> None:
        self.num_problems += 1
        if len(self.problems) < NUM_PROBLEMS_SHOWN:
            self.problems.append(sentence)
        else:
            self.num_more += 1


@dataclass
class DataReport:
    train: RowsReport | None
    validation: RowsReport | None
    num_shared: int  # validation prompts that occur in training too

    @property
    def ok(self) -> bool:
        return not any(report.num_problems for report in (self.train, self.validation) if report)


def check_rows(
    files: Files,
    tokenizer: Tokenizer,
    config: DataConfig,
    max_samples: int = -1,
    agents: Collection[str] = (),
    scored: Scored = True,
) -> RowsReport:
    """Check every row: schema, chat template, length against `data.max_prompt_length`. Bad rows are counted and the
    first ones described. Raises DataError when a file itself cannot be read, ConfigError for data.custom_cls."""
    make: Callable[..., object] = partial(open_dataset, config) if config.custom_cls.path else _Unfiltered
    processor = getattr(tokenizer, "processor", None)
    dataset = make(data_files=files, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples)
    rows = PromptRows(dataset, config, agents, scored=scored, reads_images=processor is not None)
    encoder, checks = PromptEncoder(tokenizer, config), TemplateChecks(tokenizer)
    controls = control_tokens(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    report, bad = RowsReport(num_rows=len(rows)), BadRows()
    for items in batches_of(len(rows)):
        for item, row, length, error in rows.examined(items, encoder, checks, measured=True):
            if row is not None:
                _count(report, row, rows.images(row), length, config)
            if isinstance(error, UnavailableRowError):
                report.num_problems += 1
                bad.add_error(item, error, rows.place(item))
            elif error is not None:
                report.add_problem(str(error))
            elif row is not None and (token := control_token_in(row["raw_prompt"], controls)):
                report.num_control += 1
                report.first_control = report.first_control or f"{token!r} in {rows.place(item)}"
    report.problems[:0] = bad.sentences(len(rows))
    if report.num_rows and report.num_overlong == report.num_rows and config.filter_overlong_prompts:
        report.add_problem(
            f"All prompts are longer than data.max_prompt_length={config.max_prompt_length}; raise the limit."
        )
    return report


def check_data(
    config: DataConfig, tokenizer: Tokenizer, agents: Collection[str] = (), scored: Scored = True
) -> DataReport:
    """`check_rows` of the training and of the validation files, and how many validation prompts occur in both."""
    train = validation = None
    if config.train_files:
        train = check_rows(config.train_files, tokenizer, config, config.train_max_samples, agents, scored)
    if config.val_files:
        validation = check_rows(config.val_files, tokenizer, config, config.val_max_samples, agents, scored)
    shared = len(train.prompts & validation.prompts) if train and validation else 0
    return DataReport(train, validation, shared)


class _Unfiltered(RLHFDataset):
    """The data set with its overlong rows, so that they are counted and a bad row does not stop the reading."""

    def maybe_filter_out_long_prompts(self, dataframe: object) -> Any:
        return dataframe


def _count(report: RowsReport, row: dict[str, Any], images: list[object], length: int, config: DataConfig) -> None:
    report.data_sources[row[config.reward_fn_key]] += 1
    text = json.dumps([row["raw_prompt"], *images], sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    report.num_repeated += digest in report.prompts
    report.prompts.add(digest)
    if length:
        report.lengths.append(length)
        report.num_overlong += length > config.max_prompt_length
