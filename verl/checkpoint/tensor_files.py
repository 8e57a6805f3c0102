"""safetensors files, written tensor by tensor without a second copy in memory, and model folders of one or several."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl.engines.api import Deferred, Tensors, whole
from verl.errors import CheckpointError
from verl.manifest import FileRecord, write_file

MAX_SHARD_BYTES = 4_000_000_000

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def num_bytes(tensors: Tensors) -> int:
    """Bytes of all values."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def write_tensors(path: Path, tensors: Tensors) -> FileRecord:
    """Write one safetensors file. Deferred tensors are built one at a time."""
    names = file_order(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            yield _raw(whole(tensors[name]))

    return write_file(path, parts())


def file_order(tensors: Tensors) -> list[str]:
    """Names in file order: widest dtype first, to align every tensor to its itemsize."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def model_parts(tensors: Tensors, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Tensors]:
    """The tensors of each file of a model folder: in order, at most `max_shard_bytes` per file. A larger tensor gets its own
    file."""
    parts: list[dict[str, Any]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and parts[-1]:
            parts.append({})
            room = max_shard_bytes
        parts[-1][name] = tensor
        room -= size
    return list(parts)


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises CheckpointError when it is not one."""
    return {name: whole(tensor) for name, tensor in deferred_tensors(path).items()}


def deferred_tensors(path: Path) -> dict[str, Deferred]:
    """`read_tensors` one by one, by ordinary reads: if the disk fails, a memory map would end the process."""
    tensors, dtypes = dict[str, Deferred](), {name: dtype for dtype, name in _DTYPES.items()}
    try:
        with open(path, "rb") as file, safe_open(path, framework="pt"):  # it checks the header
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, dtype = tuple(entry["shape"]), dtypes[entry["dtype"]]
            read = partial(_read_tensor, path, start + entry["data_offsets"][0])
            build = partial(_new_tensor, read, shape, dtype)
            tensors[name] = Deferred(shape, dtype, build, is_collective=False, read=read)
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    return tensors


def _new_tensor(read: Callable[[torch.Tensor], None], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    read(tensor)
    return tensor


def _read_tensor(path: Path, start: int, tensor: torch.Tensor) -> None:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            target = _raw(tensor)
            num_missing = len(target) - file.readinto(target)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    if num_missing:
        raise CheckpointError(f"{path} ends {num_missing} bytes before its last tensor.")


def write_model(folder: Path, tensors: Tensors, max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, FileRecord]:
    """model.safetensors, or shards of at most `max_shard_bytes` with their index, under the names that `from_pretrained`
    looks for. Returns the records by file name."""
    shards = model_parts(tensors, max_shard_bytes)
    if len(shards) == 1:
        return {"model.safetensors": write_tensors(folder / "model.safetensors", shards[0])}
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    records = {name: write_tensors(folder / name, shard) for name, shard in zip(names, shards, strict=True)}
    index = {
        "metadata": {"total_size": num_bytes(tensors)},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    name = "model.safetensors.index.json"
    return {**records, name: write_file(folder / name, [json.dumps(index, indent=1).encode()])}


def read_model(folder: Path) -> dict[str, Deferred]:
    """The inverse of `write_model`, see `deferred_tensors`. Raises CheckpointError when the folder holds no weights."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no weights; the checkpoint was saved without 'model' in save_contents.")
    return {name: tensor for file in files for name, tensor in deferred_tensors(file).items()}


def set_config_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """Set the dtype of the weights in config.json; `from_pretrained` takes it from there."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
