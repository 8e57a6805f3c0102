"""Files of conversations as training sequences: every row read, cut and counted before a run, then batches by step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from verl.config.sections.data import SFTDataConfig, TextDataConfig
from verl.data.conversations.formats import example_of
from verl.data.conversations.store import FileSummary, SequenceStore, columns_of
from verl.data.conversations.tokenized import tokenized, tokenized_sequences
from verl.data.conversations.tokens import ConversationEncoder, TrainingSequence
from verl.data.conversations.turn_ends import TurnEnds
from verl.data.dataset import Files, open_dataset
from verl.data.files import read_rows
from verl.data.images import RowImages
from verl.data.order import PromptOrder
from verl.data.prompts import control_token_in, control_tokens, identity_of
from verl.data.row_cache import key_of
from verl.data.scan import BadRows, ScanPart, scan_rows
from verl.data.schema import Messages, at
from verl.data.tables import Rows
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer
from verl.data_proto.trajectory import token_columns
from verl.errors import DataError, FewRowsError

if TYPE_CHECKING:
    from verl.config.sections.data import PreferenceDataConfig

_COMMON_TOKENS = 16  # rows with fewer equal tokens at their start are not compared
# keys of `data` that no sequence depends on
_NOT_OF_ROWS = (
    "train_files", "val_files", "train_max_samples", "val_max_samples", "train_batch_size", "use_dynamic_bsz",
    "max_token_len_per_gpu", "micro_batch_size_per_gpu", "shuffle", "seed",
)  # fmt: skip


@dataclass
class Source:
    """Rows of the user's class with token ids below `vocab_size`; a subclass has rows of a file."""

    name: str
    rows: Any
    vocab_size: int
    forks = False  # whether other processes may read rows

    def __len__(self) -> int:
        return len(self.rows)

    def decoded(self, rows: range) -> Sequence[Any]:
        """Each of `rows` as `read` takes it."""
        return rows

    def read(self, row: Any, place: str) -> tuple[str, list[TrainingSequence], str | None]:
        """Format of a row, its uncut sequences, a control token in its messages or "" (None: plain text). Raises DataError."""
        return self.name, [tokenized(self.rows[row], place, self.vocab_size)], ""

    def place(self, row: int) -> str:
        """File and row, for messages."""
        return f"row {row} of {self.name}"

    def images(self, row: int) -> RowImages | None:
        """The images of a row; None for text."""
        return None

    def identity(self) -> list[object]:
        """The values that decide the sequences next to the settings, for a key of the cache; None if unknown."""
        return [None]


class ConversationDataset:
    """The rows of files that train; `dataset[i]` is the list of sequences of row i, at most max_length tokens each. A subclass
    reads other rows: `summary_class` counts them, `sequences_of` makes their sequences."""

    summary_class = FileSummary
    sequence_class: type[object] = TrainingSequence

    def __init__(self) -> None:
        self.settings: Any = None  # of the rows
        self.summaries: list[Any] = []  # of summary_class, one per file
        self._rows = SequenceStore(self.sequence_class)
        self._sources: list[tuple[Source, np.ndarray, np.ndarray]] = []  # numbers of rows, and whether they have images

    def sequences_of(
        self, row: Mapping[str, object], encoder: ConversationEncoder, place: str
    ) -> tuple[str, list[TrainingSequence], Messages]:
        """Format of a row of a file, its uncut sequences, and its messages. Raises DataError."""
        assert isinstance(encoder.settings, SFTDataConfig)
        if encoder.settings.row_format is None and "input_ids" in row:
            return "tokenized", tokenized_sequences(row, place, num_embeddings(encoder.tokenizer)), []
        with at(place):
            example = example_of(row, encoder.settings, images=encoder.images is not None)
        messages = [m for part in (example.prompt, example.completion) if isinstance(part, list) for m in part]
        return example.row_format, encoder.encode(example, place), messages

    def image_sources(self, row: Mapping[str, Any], settings: Any) -> list[object]:
        """The sources of the images of a row whose sequences have images."""
        return example_of(row, settings, images=True).images

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> list[TrainingSequence]:
        sequences: list[TrainingSequence] = self._rows[item]
        file, row = self._rows.locate(item)
        source, numbers, has_images = self._sources[file]
        if not has_images[row]:
            return sequences
        images = source.images(int(numbers[row]))
        return [replace(sequence, images=images) for sequence in sequences]

    def place(self, item: int) -> str:
        file, row = self._rows.locate(item)
        source, numbers, _ = self._sources[file]
        return source.place(int(numbers[row]))

    def batch(self, rows: Sequence[int]) -> DataProto:
        """See `training_batch`; the sequences of a row are adjacent, and have its number as `ordinal`."""
        sequences = [self[row] for row in rows]
        batch = training_batch([sequence for row_sequences in sequences for sequence in row_sequences])
        batch.batch["ordinal"] = torch.tensor(
            [row for row, row_sequences in zip(rows, sequences, strict=True) for _ in row_sequences]
        )
        batch.batch["sample_index"] = torch.tensor(
            [index for row_sequences in sequences for index in range(len(row_sequences))]
        )
        return batch

    def add(self, source: Source, settings: TextDataConfig, *, stop_token_ids: Sequence[int], keep_going: bool) -> None:
        """Add the rows of `source`. Raises DataError for the first bad one; with `keep_going` the summary describes them."""
        self.settings = settings
        examine = partial(self._examine, source, settings, stop_token_ids, keep_going)
        scan = scan_rows(
            source.name, len(source), examine,
            key=lambda: key_of(type(self).__name__, self.rules(settings), stop_token_ids, keep_going, *source.identity()),
            forks=source.forks,
        )  # fmt: skip
        arrays, counts = scan.results()
        summary = self.summary_class(source.name, settings)
        for part in counts:
            summary.add_counts(part)
        self.summaries.append(summary)
        self._rows.add(arrays)
        self._sources.append((source, arrays["numbers"], arrays["has_images"]))

    def _examine(
        self, source: Source, settings: Any, stop_token_ids: Sequence[int], keep_going: bool, numbers: range
    ) -> ScanPart:
        """Rows as columns with the number of each, and the counts of their summary: an Examine of verl/data/scan.py."""
        summary, bad = self.summary_class(source.name, settings), BadRows()
        rows, numbers_of_rows = [], []
        for number, row in zip(numbers, source.decoded(numbers), strict=True):
            place = source.place(number)
            try:
                row_format, uncut, control = source.read(row, place)
                _check_length(uncut, settings, place)
                sequences = summary.fit_row(uncut, place, stop_token_ids)
            except DataError as error:
                if not keep_going:
                    bad.add_error(number, error, place)
                    break
                summary.add_problem(error)
                continue
            summary.formats[row_format] += 1
            summary.num_plain += control is None
            if control:
                summary.num_control += 1
                summary.first_control = summary.first_control or f"{control!r} in {place}"
            summary.num_untrainable_rows += not sequences
            if sequences:
                summary.num_rows += 1
                summary.num_sequences += len(sequences)
                rows += (new_rows := self.rows_of(sequences))
                numbers_of_rows += [number] * len(new_rows)
        columns = columns_of(self.sequence_class, rows)
        columns["numbers"] = np.array(numbers_of_rows, dtype=np.int64)
        columns["has_images"] = np.array([row[0].images is not None for row in rows], dtype=np.bool_)
        return ScanPart(columns, summary.counts(), bad)

    def rules(self, settings: Any) -> dict[str, Any]:
        """The values that decide the sequences of a row next to its tokenizer."""
        flags = {name: value for name, value in vars(self).items() if isinstance(value, bool | str)}
        return flags | {name: value for name, value in asdict(settings).items() if name not in _NOT_OF_ROWS}

    def rows_of(self, sequences: list[Any]) -> list[list[Any]]:
        """The rows of the data set that the sequences of a row of the file become."""
        return [sequences]


def _check_length(sequences: Sequence[TrainingSequence], settings: TextDataConfig, place: str) -> None:
    length, has_images = max(len(s.input_ids) for s in sequences), any(s.images is not None for s in sequences)
    if settings.max_length is None or length <= settings.max_length:
        return
    if settings.truncation == "error" or has_images:
        fix = "make its images smaller" if has_images else "set data.truncation to left or right to cut such rows"
        raise DataError(
            f"{place}: a sequence has {length} tokens, more than data.max_length={settings.max_length}. Raise the limit, "
            f"or {fix}."
        )


DatasetT = TypeVar("DatasetT", bound=ConversationDataset)


def load_conversations(
    files: Files, tokenizer: Tokenizer, settings: SFTDataConfig, **selects: Any
) -> ConversationDataset:
    """Read, tokenize and cut every row of `files`, or of the class of `data.custom_cls` on them; see `read_into`."""
    return read_into(ConversationDataset(), files, tokenizer, settings, **selects)


def read_into(
    dataset: DatasetT,
    files: Files,
    tokenizer: Tokenizer,
    settings: SFTDataConfig | PreferenceDataConfig,
    *,
    max_samples: int = -1,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    keep_going: bool = False,
) -> DatasetT:
    """The empty `dataset` with every row of `files`, tokenized and cut; with `max_samples` only so many, which `seed` selects
    (None: the first). `stop_token_ids` end generation (None: the tokenizer's eos). Raises DataError for files that cannot be
    read and for the first bad row; with `keep_going` bad rows are left out, and `dataset.summaries` describes them."""
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    stops = sorted(TurnEnds(tokenizer, stop_token_ids).stops)
    for source in _sources(dataset, names, tokenizer, settings, max_samples, seed, stops):
        dataset.add(source, settings, stop_token_ids=stops, keep_going=keep_going)
    if not len(dataset) and not keep_going:
        raise DataError(
            f"None of the rows of {', '.join(map(str, names))} keeps a token that trains within "
            f"data.max_length={settings.max_length}; raise it, or change data.truncation."
        )
    return dataset


def _sources(
    dataset: ConversationDataset,
    names: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    settings: SFTDataConfig | PreferenceDataConfig,
    max_samples: int,
    seed: int | None,
    stop_token_ids: Sequence[int],
) -> Iterator[Source]:
    if isinstance(settings, SFTDataConfig) and settings.custom_cls.path:
        rows = open_dataset(
            settings, parquet_files=names, tokenizer=tokenizer, config=settings, processor=None, max_samples=max_samples
        )
        yield Source(type(rows).__name__, rows, num_embeddings(tokenizer))
        return
    tables = [read_rows(name) for name in names] or [read_rows([])]
    chosen, start = _chosen(sum(map(len, tables)), max_samples, seed), 0
    encoder, controls = ConversationEncoder(tokenizer, settings, stop_token_ids), control_tokens(tokenizer)
    for name, rows in zip(names, tables, strict=True):
        inside = rows.select(chosen[(chosen >= start) & (chosen < start + len(rows))] - start)
        yield _FileSource(str(name), inside, num_embeddings(tokenizer), dataset, encoder, controls)
        start += len(rows)


@dataclass
class _FileSource(Source):
    rows: Rows
    dataset: ConversationDataset
    encoder: ConversationEncoder
    controls: re.Pattern[str] | None

    def __post_init__(self) -> None:
        self.forks = self.encoder.images is None

    def decoded(self, rows: range) -> Sequence[Any]:
        try:
            return self.rows.batch(rows)
        except DataError:
            return rows  # to be read one by one

    def read(self, row: Any, place: str) -> tuple[str, list[TrainingSequence], str | None]:
        fields = self.rows[row] if isinstance(row, int) else row
        row_format, sequences, messages = self.dataset.sequences_of(fields, self.encoder, place)
        has_template = bool(getattr(self.encoder.tokenizer, "chat_template", None))
        is_plain = has_template and not messages and row_format not in ("text", "tokenized")
        return row_format, sequences, None if is_plain else control_token_in(messages, self.controls)

    def place(self, row: int) -> str:
        return self.rows.place(row)

    def images(self, row: int) -> RowImages | None:
        if (encoder := self.encoder.images) is None:
            return None
        return RowImages(self.dataset.image_sources(self.rows[row], self.encoder.settings), encoder, self.place(row))

    def identity(self) -> list[object]:
        return [self.name, self.rows.digest(), *identity_of(self.encoder.tokenizer)]


def _chosen(num_rows: int, max_samples: int, seed: int | None) -> np.ndarray:
    if not 0 < max_samples < num_rows:
        return np.arange(num_rows)
    order = PromptOrder(num_rows, seed or 0, shuffle=seed is not None)
    return np.sort([order.row(number)[1] for number in range(max_samples)])


def training_batch(sequences: Sequence[TrainingSequence]) -> DataProto:
    """Columns prompts, prompt_mask, responses, response_mask and attention_mask of one row per sequence. The prompt is
    everything before the first trained token, or the start that many rows have in common; tokens after the last trained one
    change no loss and are left out."""
    bounds = [(int(trained[0]), int(trained[-1]) + 1) for s in sequences for trained in [s.loss_mask.nonzero()[0]]]
    rows = [
        (sequence.input_ids[:split], sequence.input_ids[split:end], sequence.loss_mask[split:end])
        for sequence, split, (_, end) in zip(sequences, _prompt_lengths(sequences, bounds), bounds, strict=True)
    ]
    # the sequences of a row share its images
    row_images = {id(s.images): s.images for s in sequences if s.images is not None}
    pixels = {name: images.read().media for name, images in row_images.items()}
    media = [pixels.get(id(sequence.images)) for sequence in sequences]
    objects = {"media": object_array(media)} if any(media) else {}
    return DataProto.from_dict(token_columns(rows), objects)


def _prompt_lengths(sequences: Sequence[TrainingSequence], bounds: Sequence[tuple[int, int]]) -> list[int]:
    """The first trained token of each row in `bounds`, or the end of a start that rows have in common (system prompt, tools)
    if this saves 5% of their tokens: training computes equal prompts once (verl.models.packing)."""
    groups, lengths = dict[bytes, list[int]](), [first for first, _ in bounds]
    for row, sequence in enumerate(sequences):
        if lengths[row] >= _COMMON_TOKENS and sequence.images is None:
            groups.setdefault(sequence.input_ids[:_COMMON_TOKENS].tobytes(), []).append(row)
    for rows in groups.values():
        starts = np.stack([sequences[row].input_ids[: min(lengths[r] for r in rows)] for row in rows])
        common = int((starts == starts[0]).all(axis=0).cumprod().sum())
        prompts = {sequences[row].input_ids[: lengths[row]].tobytes(): lengths[row] for row in rows}.values()
        num_saved = sum(prompts) - common - sum(lengths[row] - common for row in rows)
        if num_saved > (sum(prompts) + sum(bounds[row][1] - lengths[row] for row in rows)) / 20:
            for row in rows:
                lengths[row] = common
    return lengths


class ConversationLoader:
    """Batches of `batch_size` rows by step, from 1; their order is a function of (seed, epoch), so resuming needs the step
    only. Every epoch leaves out its incomplete last batch. Raises FewRowsError."""

    def __init__(self, dataset: ConversationDataset, batch_size: int, *, seed: int = 42, shuffle: bool = True):
        if not 1 <= batch_size <= len(dataset):
            raise FewRowsError(len(dataset), batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.order = PromptOrder(len(dataset), seed, shuffle, batch_size)
        self.num_steps_per_epoch = len(dataset) // batch_size

    def rows(self, step: int) -> list[int]:
        first = (step - 1) * self.batch_size
        return [self.order.row(number)[1] for number in range(first, first + self.batch_size)]

    def batch(self, step: int) -> DataProto:
        """The sequences of a step, see `training_batch`; a row's sequences stay together."""
        return self.dataset.batch(self.rows(step))
