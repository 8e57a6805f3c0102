"""Checks of given rows: every row as the training sequences that it becomes, and the tokens that train."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from verl.cli.checklist import Subject, beginning, no_rows, steps_line, unusable_rows
from verl.cli.report import Line, info, skip, warn
from verl.data_proto.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verl.data.conversations.dataset import ConversationDataset


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
    yield info(f"first row, trained text in [[ ]]: {_first_row(train, subject.tokenizer)!r}")
    yield steps_line(subject, len(train), "rows")


def _files(
    subject: Subject, name: str, key: str, files: object, max_samples: int
) -> Generator[Line, None, ConversationDataset | None]:
    from verl.programs.api import PROGRAMS

    if not files:
        yield no_rows(subject, name, key)
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
        yield from unusable_rows(summary.problems, summary.num_problems - len(summary.problems), name)
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
    return beginning("".join(segments))
