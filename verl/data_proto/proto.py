"""DataProto: the batch that travels between workers. Tensor columns, object columns and metadata of all rows.

    batch = DataProto.from_dict(tensors={"prompts": ids}, non_tensors={"uid": uids}, meta_info={"step": 3})
    for part in batch.chunk(4): ...

Names and meanings follow verl's protocol; `verl.protocol` is the path that recipes import.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.data_proto.merge import (
    concat_columns,
    concat_meta_info,
    object_array,
    union_meta_info,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.data_proto.settings import DataProtoConfig
from verl.data_proto.storage import load_columns, save_columns
from verl.errors import BatchError

logger = logging.getLogger(__name__)

Columns: TypeAlias = Any  # TensorDict, or None without tensor columns: a union would make every reader check for None
RowIndices: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


@dataclass
class DataProtoItem:
    """One row of a DataProto."""

    batch: Columns = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """`batch`: TensorDict with one batch dimension, or None without tensor columns. `non_tensor_batch`: arrays (usually
    of objects) of the same length. `meta_info`: facts about the batch.

    Raises ValueError when the columns disagree about the number of rows.
    """

    batch: Columns = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.check_consistency()

    # -- making and storing -------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: dict[str, object], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Tensors and arrays in one dict; raises ValueError for a value of another kind."""
        for key, value in data.items():
            if not isinstance(value, (torch.Tensor, np.ndarray)):
                raise ValueError(f"Column {key!r} is a {type(value).__name__}; give a torch.Tensor or a numpy array.")
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        arrays = {k: v for k, v in data.items() if isinstance(v, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, object] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Columns by name. Object columns that are no arrays become 1-d object arrays, one element per row.

        Raises ValueError when the first `num_batch_dims` axes of the tensors differ.
        """
        tensors, meta = tensors or {}, dict(meta_info or {})
        if non_tensors and num_batch_dims != 1:
            raise ValueError("Object columns have one batch dimension; use num_batch_dims=1 or leave them out.")
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        shapes = {name: tuple(t.shape[:num_batch_dims]) for name, t in tensors.items()}
        if len(set(shapes.values())) > 1:
            raise BatchError(f"The tensor columns do not have the same batch size: {shapes}.")
        batch = TensorDict(dict(tensors), batch_size=next(iter(shapes.values()))) if tensors else None
        objects = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in (non_tensors or {}).items()}
        return cls(batch=batch, non_tensor_batch=objects, meta_info=meta)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Mapping[str, object] | None = None) -> DataProto:
        """Inverse of `to_tensordict`: stacks of non-tensors become object columns, single non-tensors meta_info."""
        tensors: dict[str, torch.Tensor] = {}
        objects, meta = {}, {}
        for key in map(str, tensor_dict.keys()):
            value: Any = tensor_dict.get(key)
            if isinstance(value, NonTensorStack):
                objects[key] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        batch = TensorDict(tensors, batch_size=tensor_dict.batch_size) if tensors else None
        return cls(batch=batch, non_tensor_batch=objects, meta_info={**meta, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as NonTensorStack, meta_info as NonTensorData."""
        columns: dict[str, Any] = self._tensors()
        for key, array in self.non_tensor_batch.items():
            columns[key] = NonTensorStack(*[NonTensorData(value) for value in array])
        for key, value in self.meta_info.items():
            if key in columns:
                raise ValueError(f"{key!r} is a column and a key of meta_info; rename one of them.")
            columns[key] = NonTensorData(value, batch_size=[len(self)])
        return TensorDict(columns, batch_size=[len(self)])

    def save_to_disk(self, filepath: str | Path) -> None:
        """One safetensors file with the tensor columns, and object columns and meta_info as JSON; written completely or not
        at all. Raises ValueError naming the first object column or meta key that JSON cannot hold."""
        save_columns(Path(filepath), self._tensors(), self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Inverse of `save_to_disk`; raises ValueError when the file is not one of its files."""
        return cls.from_dict(*load_columns(Path(filepath)))

    # -- looking ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def __getitem__(self, item: int | slice | RowIndices) -> DataProto | DataProtoItem:
        """An int gives a DataProtoItem; a slice, or indices or a mask over the rows, a DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        if isinstance(item, (int, np.integer)):
            if not -len(self) <= item < len(self):
                raise IndexError(f"Row {item} of a batch of {len(self)} rows.")
            row = None if self.batch is None else self.batch[int(item)]
            objects = {k: v[item] for k, v in self.non_tensor_batch.items()}
            return DataProtoItem(row, objects, self.meta_info)
        raise TypeError(f"Rows are chosen by int, slice, list, array or tensor, not by {type(item).__name__}.")

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else {k: self.batch.get(k) for k in self.batch.keys()}

    def check_consistency(self) -> None:
        """Raises ValueError when a column is not an array or has another number of rows than the batch."""
        if self.batch is not None and len(self.batch.batch_size) != 1 and self.non_tensor_batch:
            shape = tuple(self.batch.batch_size)
            raise ValueError(f"Object columns need one batch dimension; the tensors have {shape}.")
        num_rows = len(self)
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"Object column {name!r} is a {type(array).__name__}, not a numpy array.")
            if array.ndim == 0 or len(array) != num_rows:
                raise ValueError(f"Object column {name!r} has shape {array.shape}, but the batch has {num_rows} rows.")

    def get_data_info(self) -> str:
        """A few lines: name, shape, dtype and device of each column, and the type of each meta_info value."""
        lines = [f"DataProto of {len(self)} rows"]
        for key, tensor in self._tensors().items():
            lines.append(f"  {key}: {tuple(tensor.shape)} {tensor.dtype} {tensor.device}".replace("torch.", ""))
        for key, array in self.non_tensor_batch.items():
            kind = type(array.flat[0]).__name__ if array.size else "nothing"
            lines.append(f"  {key}: {array.shape} {array.dtype} of {kind}")
        lines.extend(f"  meta {key}: {type(value).__name__}" for key, value in self.meta_info.items())
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Logs the size of the tensor columns and of the object columns' own arrays, in GiB."""
        tensor_gib = sum(t.element_size() * t.numel() for t in self._tensors().values()) / 2**30
        object_gib = sum(a.nbytes for a in self.non_tensor_batch.values()) / 2**30
        logger.info(
            "%sSize of tensors: %.4f GiB, of object columns: %.4f GiB", prefix and prefix + ": ", tensor_gib, object_gib
        )

    # -- choosing columns ---------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The named columns (None: all) of all rows; tensors are shared unless `deepcopy`."""
        names = None if batch_keys is None else tuple(batch_keys)
        batch = self.batch if names is None or self.batch is None else self.batch.select(*names)
        objects = _chosen(self.non_tensor_batch, non_tensor_batch_keys)
        meta = _chosen(self.meta_info, meta_info_keys)
        if deepcopy:
            batch, objects, meta = copy.deepcopy((None if batch is None else batch.clone(), objects, meta))
        return DataProto(batch, objects, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Takes the named columns out of this batch and returns them. Raises ValueError, before anything is taken, when
        one is missing."""
        requests = (
            (batch_keys or (), set(self._tensors()), "tensor column"),
            (non_tensor_batch_keys or (), set(self.non_tensor_batch), "object column"),
            (meta_info_keys or (), set(self.meta_info), "meta_info key"),
        )
        for keys, present, kind in requests:
            for key in keys:
                if key not in present:
                    raise ValueError(f"There is no {kind} {key!r} to pop; there are {sorted(present)}.")
        return DataProto.from_dict(
            {key: self.batch.pop(key) for key in batch_keys or ()},
            {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()},
            {key: self.meta_info.pop(key) for key in meta_info_keys or ()},
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Renames tensor columns in place and returns self; raises ValueError when the lists differ in length."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} columns cannot be renamed to {len(new)} names.")
        taken = [self.batch.pop(key) for key in old]
        for key, value in zip(new, taken, strict=True):
            self.batch[key] = value
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns and meta_info of `other` to this batch, in place, and returns self.

        Raises ValueError when a name of both has different values, or the row counts differ.
        """
        if self.batch is None:
            self.batch = other.batch
        elif other.batch is not None:
            union_tensor_dict(self.batch, other.batch)
        union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = union_meta_info(self.meta_info, other.meta_info)
        self.check_consistency()
        return self

    def to(self, device: torch.device | str) -> DataProto:
        """Moves the tensor columns, in place, and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # -- choosing rows ------------------------------------------------------------------------------------------------

    def select_idxs(self, idxs: RowIndices) -> DataProto:
        """The rows of a boolean mask or of integer indices, in that order (copies). Raises ValueError when a mask has
        another length than the batch."""
        index = (idxs if isinstance(idxs, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(idxs))).cpu()
        if index.numel() == 0 and index.dtype != torch.bool:
            index = index.long()
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise ValueError(f"A mask of {len(index)} cannot choose among {len(self)} rows.")
            index = index.nonzero().flatten()
        rows = index.numpy()
        batch = None if self.batch is None else self.batch[index.to(self.batch.device or "cpu")]
        return DataProto(batch, {k: v[rows] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows start:end:step; tensors are views, and columns that the batch gets later are not in the result."""
        rows = slice(0 if start is None and (step is None or step > 0) else start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(np.arange(len(self))[rows])
        batch = None if self.batch is None else self.batch[rows]
        return DataProto(batch, {k: v[rows] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def reorder(self, indices: RowIndices) -> None:
        """Puts row `indices[i]` at place i, in place. Raises ValueError when `indices` is not a permutation."""
        order = np.asarray(indices)
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise ValueError(f"The order given is not a permutation of the {len(self)} rows.")
        ordered = self.select_idxs(order)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: [a, a, b, b] with `interleave`, [a, b, a, b] without."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row i `repeat_times[i]` times, in row order."""
        times = np.asarray(repeat_times)
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times has shape {times.shape}; it needs one number for each of {len(self)} rows.")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cuts axis 1 of the columns `split_keys` into `n_split` equal parts that become rows, the parts of a row
        adjacent; other columns are repeated. [batch, n * T] -> [batch * n, T]."""
        repeated = self.repeat(n_split, interleave=True)
        for key in split_keys or ():
            columns: Any = self.batch if self.batch is not None and key in self.batch.keys() else self.non_tensor_batch
            target: Any = repeated.batch if columns is self.batch else repeated.non_tensor_batch
            value = columns[key]
            if value.ndim < 2 or value.shape[1] % n_split:
                raise ValueError(
                    f"Axis 1 of column {key!r}, shape {tuple(value.shape)}, does not divide into {n_split}."
                )
            target[key] = value.reshape(len(self) * n_split, value.shape[1] // n_split, *value.shape[2:])
        return repeated

    # -- cutting into parts and putting together ----------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may cut unevenly: asked for on this batch or for the process."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last"] = "last") -> None:
        """Appends `padding_size` copies of the first or last row, in place."""
        if padding_candidate not in ("first", "last"):
            raise ValueError(f"padding_candidate is {padding_candidate!r}; it can be 'first' or 'last'.")
        filler = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs(np.append(np.arange(len(self)), np.full(padding_size, filler)))
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` equal parts in row order. With padding enabled the first parts may be one row longer, otherwise
        ValueError when the rows do not divide."""
        if len(self) % chunks and not self.is_padding_enabled():
            raise BatchError(
                f"only support equal chunk: {len(self)} rows do not divide into {chunks} chunks. Pad the batch with "
                "pad_dataproto_to_divisor, or make it with auto_padding=True."
            )
        ends = np.cumsum([len(rows) for rows in np.array_split(np.arange(len(self)), chunks)]).tolist()
        return [self.slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows; the last may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all parts, in order. meta_info `metrics` become a dict of lists; other keys must be equal if
        they occur twice. Raises ValueError for no parts, or parts with different columns."""
        if not data:
            raise BatchError("There is nothing to concatenate: the list of batches is empty.")
        tensors = [part.batch for part in data if part.batch is not None]
        names = {frozenset(td.keys()) for td in tensors}
        if len(tensors) not in (0, len(data)) or len(names) > 1:
            odd = sorted(frozenset.union(*names) - frozenset.intersection(*names)) if len(names) > 1 else "tensors"
            raise BatchError(f"Batches with different columns cannot be concatenated; not all parts have {odd}.")
        batch: Columns = torch.cat(tensors, dim=0) if tensors else None
        return DataProto(
            batch, concat_columns([p.non_tensor_batch for p in data]), concat_meta_info([p.meta_info for p in data])
        )

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """`epochs` passes in mini-batches of `mini_batch_size` rows, shuffled when `dataloader_kwargs["shuffle"]` is
        set; the order is a function of (seed, pass). Raises ValueError when the rows do not divide."""
        options = dict(dataloader_kwargs or {})
        shuffle = options.pop("shuffle", False)
        if options:
            raise ValueError(f"make_iterator reads only 'shuffle' from dataloader_kwargs, not {sorted(options)}.")
        if len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}.")
        return self._mini_batches(mini_batch_size, epochs, seed, shuffle)

    def _mini_batches(self, size: int, epochs: int, seed: int | None, shuffle: bool) -> Iterator[DataProto]:
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        for _ in range(epochs):
            rows = torch.randperm(len(self), generator=generator) if shuffle else torch.arange(len(self))
            for chosen in rows.split(size):
                yield self.select_idxs(chosen)


def _chosen(columns: dict[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(columns) if keys is None else {k: v for k, v in columns.items() if k in set(keys)}
