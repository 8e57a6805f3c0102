"""Checks of given rows: every row as the training sequences that it becomes, and the tokens that train."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from verl.cli.checklist import Subject
from verl.cli.report import Line, fail, info, passed, skip, warn
from verl.data_proto.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verl.data.conversations.dataset import ConversationDataset

_NUM_CHARACTERS = 300  # of the first row


def check_conversations(subject: Subject) -> Iterator[Line]:
    """Format, tokens, cut and unusable rows of each file, and the first row with its trained text marked."""
    if subject.tokenizer is None:
        yield skip("not checked without a tokenizer")
        return
    config = subject.config.data
    train = yield from _files(subject, "training", "data.train_files", config.train_files, config.train_max_samples)
    yield from _files(subject, "validation", "data.val_files", config.val_files, config.val_max_samples)
    if train is None or not len(train):
        return
    subject.num_rows = len(train)
    yield info(f"first row, trained text in [[ ]]: {_first_row(train, subject.tokenizer)!r}")
    if len(train) < config.train_batch_size:
        yield fail(
            f"data.train_batch_size={config.train_batch_size} is more than the {len(train)} usable rows. "
            "Lower it or give more data."
        )
    else:
        yield passed(f"{subject.num_steps:,} steps of {config.train_batch_size} rows")


def _files(
    subject: Subject, name: str, key: str, files: object, max_samples: int
) -> Generator[Line, None, ConversationDataset | None]:
    from verl.programs.api import PROGRAMS

    if not files:
        needed = name == "training" and not subject.config.trainer.val_only
        yield Line("fail" if needed else "info", f"no {name} rows: {key} is empty")
        return None
    program: Any = PROGRAMS.get(subject.loaded.schema.name)
    dataset = program.load_rows(
        subject.config, files, subject.tokenizer, max_samples=max_samples, seed=None, keep_going=True
    )
    for summary in dataset.summaries:
        counts, *remarks = summary.sentences()
        yield Line("fail" if summary.num_problems else "pass", f"{name}: {counts}")
        for sentence in remarks:
            yield warn(sentence)
        for problem in summary.problems:
            yield fail(problem)
    return dataset


def _first_row(dataset: ConversationDataset, tokenizer: Tokenizer) -> str:
    """The text of the first sequence, with its trained segments in [[ ]]."""
    sequence = dataset[0][0]
    ids, mask = sequence.input_ids.tolist(), sequence.loss_mask.tolist()
    segments, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = tokenizer.decode(ids[start:end])
            segments.append(f"[[{text}]]" if mask[start] else text)
            start = end
    shown = "".join(segments)
    return shown if len(shown) <= _NUM_CHARACTERS else shown[:_NUM_CHARACTERS] + "..."
