"""Prompts by prompt index (column `ordinal`): a pure function of it, so nothing needs to be saved to resume."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from verl.data.dataset import PromptRows
from verl.data.order import PromptOrder, SamplerOrder
from verl.data.prompts import PromptEncoder
from verl.data_proto.columns import COLUMNS
from verl.data_proto.media import VideoSource
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto

logger = logging.getLogger(__name__)

_FROM_ROW = ("raw_prompt", "template_kwargs", "data_source", "reward_model", "extra_info")
# columns that the run makes itself: a field of that name in a user's file would hide or be hidden by them
_RESERVED = (set(COLUMNS) - set(_FROM_ROW)) | {"dummy_tensor"}


class _Reader:
    """Rows of a data set as a batch: ordinal, row_index, uid, prompt_token_ids, and every field of the row."""

    def __init__(self, rows: PromptRows, encoder: PromptEncoder):
        self.rows = rows
        self.encoder = encoder
        self._warned: set[str] = set()

    def read(self, ordinals: Sequence[int], numbers: Sequence[int]) -> DataProto:
        self.rows.poll()
        rows = [self.rows[number] for number in numbers]
        encoded = [
            self.encoder.encode_row(
                self.rows.prompt(row), self.rows.place(number), self.rows.images(row), row.get("template_kwargs", {})
            )
            for row, number in zip(rows, numbers, strict=True)
        ]
        objects: dict[str, Any] = {
            "uid": [str(ordinal) for ordinal in ordinals],
            "prompt_token_ids": [prompt.ids for prompt in encoded],
            "data_source": [row[self.rows.config.reward_fn_key] for row in rows],
        }
        if self.rows.reads_images:
            objects["media"] = [prompt.media for prompt in encoded]
        for name in dict.fromkeys(key for row in rows for key in row):
            if self.rows.reads_images and name in (self.rows.config.image_key, self.rows.config.video_key):
                continue  # files and pictures: `media` has them as tensors
            if name in _RESERVED:
                self._note_reserved(name)
            elif name not in objects:
                objects[name] = [row.get(name) for row in rows]
        numbered = {"ordinal": torch.tensor(ordinals), "row_index": torch.tensor(numbers)}
        return DataProto.from_dict(numbered, {name: object_array(values) for name, values in objects.items()})

    def _note_reserved(self, name: str) -> None:
        if name != "dummy_tensor" and name not in self._warned:
            self._warned.add(name)
            logger.warning("The field %r of the data is left out: the run makes a column of that name.", name)


class PromptLoader:
    """Training prompts. The results of `take` and `batch` depend only on their arguments, except with a user's sampler."""

    def __init__(self, rows: PromptRows, encoder: PromptEncoder, order: PromptOrder | SamplerOrder, batch_size: int):
        self._reader = _Reader(rows, encoder)
        self.order = replace(order, batch_size=batch_size) if isinstance(order, PromptOrder) else order
        self.batch_size = batch_size
        self.num_rows = len(rows)
        self.num_steps_per_epoch = self.order.rows_per_epoch // batch_size
        pad = getattr(encoder.tokenizer, "pad_token_id", None)
        self.pad_token_id = pad if pad is not None else 0  # as the rollout pads
        self.max_prompt_length, self.image_encoder = encoder.max_length, encoder.images
        self.template_kwargs = encoder.template_kwargs

    def take(self, ordinal_start: int, count: int) -> DataProto:
        """The prompts of ordinals `ordinal_start` to `ordinal_start + count - 1`, from 0. Columns as verl/data_proto/columns.py
        names them under data, and the row's other fields as object columns."""
        ordinals = range(ordinal_start, ordinal_start + count)
        return self._reader.read(ordinals, [self.order.row(ordinal)[1] for ordinal in ordinals])

    def images(self, number: int) -> dict[str, list[Any]]:
        """The fields images and videos of row `number`, in the order of its messages: paths, URLs and data URLs."""
        from verl.data.pictures import image_text, video_entry

        rows = self._reader.rows
        sources, place = rows.images(rows[number]), rows.place(number)
        videos = [video_entry(source, place) for source in sources if isinstance(source, VideoSource)]
        images = [image_text(source, place) for source in sources if not isinstance(source, VideoSource)]
        return {name: entries for name, entries in (("images", images), ("videos", videos)) if entries}

    def update(self, batch: DataProto) -> None:
        if isinstance(self.order, SamplerOrder):
            self.order.update(batch)

    def state_dict(self, cursor: int) -> dict[str, object]:
        """The state of a user's sampler when prompt index `cursor` is next to train, as JSON; {} without one."""
        return self.order.state_dict(cursor) if isinstance(self.order, SamplerOrder) else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if isinstance(self.order, SamplerOrder) and state:
            self.order.load_state_dict(state)

    def batch(self, step: int) -> DataProto:
        """The prompts of a step when every step takes one batch; steps count from 1."""
        return self.take((step - 1) * self.batch_size, self.batch_size)


class ValidationLoader:
    """Iterates over all validation prompts in batches of `batch_size` (the last may be short); the ordinal of a prompt
    is its row number, so that its random numbers are the same in any batch. `order` may reorder the rows."""

    def __init__(self, rows: PromptRows, encoder: PromptEncoder, batch_size: int, order: PromptOrder | None = None):
        self._reader = _Reader(rows, encoder)
        self.batch_size = batch_size
        self.num_rows = len(rows)
        self._numbers = [order.row(i)[1] for i in range(len(rows))] if order else list(range(len(rows)))

    def row(self, number: int) -> dict[str, Any]:
        """The row as its file has it; as the class gives it for a data set class without `dataframe`."""
        dataset = self._reader.rows.dataset
        return dict(getattr(dataset, "dataframe", dataset)[number])

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[DataProto]:
        for start in range(0, self.num_rows, self.batch_size):
            numbers = self._numbers[start : start + self.batch_size]
            yield self._reader.read(numbers, numbers)
