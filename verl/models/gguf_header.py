"""The header of a GGUF file, read and checked against the size of the file before a library builds anything from it.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3): magic, version, numbers of tensors and
keys; the keys with their values; names, shapes, types and offsets of the tensors; padding; the data of the tensors.
"""

import os
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from verl.errors import ModelError
from verl.foreign_text import clean, quoted
from verl.models.folder import TensorHeader, require_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS, _MAX_NAME, _MAX_TEXT, _MAX_DEPTH = 4, 256, 16 << 20, 2
_MAX_KEYS, _MAX_ALIGNMENT = 1 << 16, 1 << 20
_ENTRY = 17  # bytes of the shortest key with its value; a tensor's entry is longer
# without one of these keys transformers takes the defaults of a model of 7 billion parameters
_NEEDED = ("block_count", "embedding_length", "context_length")
_NEEDED_TEXTS = ("tokenizer.ggml.model",)
_NEEDED_LISTS = ("tokenizer.ggml.tokens",)


@dataclass
class GGUFHeader:
    """`values` has the numbers and texts by key, `lists` the lengths of lists by key. `tensors` have GGUF's names of dtypes."""

    values: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, TensorHeader] = field(default_factory=dict)

    @property
    def num_elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_gguf_header(file: Path) -> GGUFHeader:
    """The header of a GGUF file. Raises ModelError unless all that it declares is in the file, and it has the keys from which
    model and tokenizer are built."""
    require_file(file)
    try:
        with file.open("rb") as opened:
            header = _Reader(opened, os.fstat(opened.fileno()).st_size).header(file.name)
    except OSError as error:
        raise ModelError(f"{clean(file)} cannot be read: {error.strerror}.") from error
    except _Damaged as error:
        raise ModelError(f"{clean(file)} could not be read as GGUF: {error}. Download it again.") from error
    _require_keys(file, header)
    return header


class _Damaged(Exception):
    """The fault of a GGUF file, without its name."""


class _Reader:
    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size

    def header(self, name: str) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise _Damaged("its first bytes are not 'GGUF'")
        version = self._number("I")
        if version not in (2, 3):
            raise _Damaged(f"it has version {version}, and versions 2 and 3 in little-endian order are read")
        num_tensors, num_keys = self._count("tensors", _ENTRY), self._count("keys", _ENTRY)
        if num_keys > _MAX_KEYS:
            raise _Damaged(f"it declares {num_keys:,} keys")
        header = GGUFHeader()
        for _ in range(num_keys):
            self._key(header)
        places = [self._tensor(header, name) for _ in range(num_tensors)]
        alignment = header.values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment is {quoted(alignment, 40)}, which is no power of two")
        start = -(-self.file.tell() // alignment) * alignment
        for tensor, offset, num_bytes in places:
            if offset % alignment or start + offset + num_bytes > self.size:
                raise _Damaged(
                    f"tensor {quoted(tensor, 80)} has {num_bytes:,} bytes from {start + offset:,} on, and the file has "
                    f"{self.size:,}: it is cut short or damaged"
                )
        return header

    def _key(self, header: GGUFHeader) -> None:
        key = self._text(_MAX_NAME)
        if key in header.values or key in header.lists:
            raise _Damaged(f"it has the key {quoted(key, 80)} twice")
        kind = self._number("I")
        if kind == _ARRAY:
            header.lists[key] = self._skip_list(key, 0)
        else:
            header.values[key] = self._value(key, kind)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(_MAX_TEXT)
        if kind not in _SCALARS:
            raise _Damaged(f"the key {quoted(key, 80)} has a value of type {kind}, which does not exist")
        return self._number(_SCALARS[kind])

    def _skip_list(self, key: str, depth: int) -> int:
        """The length of a list that is fully in the file."""
        kind = self._number("I")
        if kind == _ARRAY and depth + 1 == _MAX_DEPTH:
            raise _Damaged(f"the key {quoted(key, 80)} has lists more than {_MAX_DEPTH} deep")
        size = struct.calcsize(f"<{_SCALARS.get(kind, 'Q')}")  # of a scalar, or of the length of a text or a list
        count = self._count(f"entries of {quoted(key, 80)}", size)
        if kind in _SCALARS:
            self.file.seek(count * size, os.SEEK_CUR)
            return count
        for _ in range(count):
            if kind == _ARRAY:
                self._skip_list(key, depth + 1)
            else:
                self._value(key, kind)
        return count

    def _tensor(self, header: GGUFHeader, file: str) -> tuple[str, int, int]:
        """Adds a tensor; returns its name, and the offset and number of its bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, num_dimensions = self._text(_MAX_NAME), self._number("I")
        if name in header.tensors:
            raise _Damaged(f"it has the tensor {quoted(name, 80)} twice")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _Damaged(f"tensor {quoted(name, 80)} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in {*GGMLQuantizationType}:
            raise _Damaged(f"tensor {quoted(name, 80)} has the type {kind}, which this release of gguf does not know")
        dtype = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[dtype]
        if not prod(shape) or shape[0] % block:
            raise _Damaged(f"tensor {quoted(name, 80)} has the shape {list(shape)}, which {dtype.name} cannot have")
        header.tensors[name] = TensorHeader(file, tuple(reversed(shape)), dtype.name)
        return name, offset, prod(shape) // block * block_bytes

    def _count(self, what: str, size: int) -> int:
        """A number of entries of at least `size` bytes each, as fit behind this place of the file."""
        count: int = self._number("Q")
        if count * size > self.size - self.file.tell():
            raise _Damaged(f"it declares {count:,} {what}, more than fit into its {self.size:,} bytes")
        return count

    def _text(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise _Damaged(f"it declares a text of {length:,} bytes where at most {limit:,} are read")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise _Damaged("a text in its header is not UTF-8") from error

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, length: int) -> bytes:
        content = self.file.read(length)
        if len(content) != length:
            raise _Damaged(f"its {self.size:,} bytes end inside the header: it is cut short")
        return content


def _require_keys(file: Path, header: GGUFHeader) -> None:
    values = header.values
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(f"{clean(file)} has no key general.architecture, so it holds no language model.")
    counts = [f"{architecture}.{name}" for name in _NEEDED]
    if not any(key.startswith(f"{architecture}.ssm.") for key in values):
        counts.append(f"{architecture}.attention.head_count")
    lacking = [key for key in counts if key not in values and key not in header.lists]
    lacking += [key for key in _NEEDED_TEXTS if not isinstance(values.get(key), str)]
    lacking += [key for key in _NEEDED_LISTS if not header.lists.get(key)]
    if lacking:
        raise ModelError(
            f"{clean(file)} has no value for {', '.join(clean(key, 80) for key in lacking)}, without which no model can be "
            "built. It is incomplete, or made by a converter of another kind."
        )
    if values["tokenizer.ggml.model"] == "gpt2" and not header.lists.get("tokenizer.ggml.merges"):
        raise ModelError(
            f"{clean(file)} has no merges (tokenizer.ggml.merges), without which neither transformers nor llama.cpp builds its "
            "tokenizer of kind gpt2. Use the folder that the file was made from."
        )
    if wrong := [key for key in counts if type(number := values.get(key, 1)) is not int or number < 1]:
        raise ModelError(f"{clean(file)}: {clean(wrong[0], 80)} is {quoted(values[wrong[0]], 40)}; it is at least 1.")
    if not header.tensors:
        raise ModelError(f"{clean(file)} holds no tensors; it is a vocabulary, or incomplete.")
