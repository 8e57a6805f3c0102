"""The one reader of model folders: all that a folder says is checked before a model is built or a weight is read.

Weights are safetensors files in the folder itself. No file of a folder chooses another place to load from, and none is
unpickled. A hub name becomes the folder of its snapshot in the local cache.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
from safetensors import SafetensorError, safe_open

from verl.errors import ModelError, nearest
from verl.foreign_text import clean
from verl.models.intact import READ, require_intact
from verl.parallel.memory import available_memory
from verl.regular_files import kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.models.hf_module import HFModule

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "Download or convert the model again."
_MAX_JSON_BYTES = 256 << 20  # tokenizers of large vocabularies have 30 MiB
_FLOATS = ("F64", "F32", "F16", "BF16")
# entries of config.json that count something, but those with defaults that a small model leaves as they are
_COUNT = re.compile(r"^(num|n)_|_size$|_dim$|_layers$|_heads$|^d_model$|^max_position_embeddings$")
_POSITIVE = "vocab_size hidden_size n_embd d_model num_hidden_layers n_layer max_position_embeddings".split()
_MAX_LAYERS = 10_000
_COMPARED_ROWS = 4096  # of two tensors at a time
# entries that change the forward of families that have them, with the values (besides null) that change nothing. Entries
# that bring weights (use_qk_norm) are not here: tensors without a place are refused anyway, and some families always have them
_ACTING = {
    **dict.fromkeys(
        "is_encoder_decoder add_cross_attention tie_encoder_decoder alibi use_alibi use_cla".split(), (False,)
    ),
    **dict.fromkeys("sliding_window attention_chunk_size clip_qkv num_kv_shared_layers".split(), (0,)),
    **dict.fromkeys(
        "attn_logit_softcapping final_logit_softcapping logits_soft_cap output_logit_soft_cap".split(), (0,)
    ),
    **dict.fromkeys("logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb".split(), (1,)),
    **dict.fromkeys("attention_multiplier query_pre_attn_scalar scale_depth".split(), ()),
    "pruned_heads": ({},),
}
_LAYERS, _PARTS = re.compile(r"_layers$|^n_layers?$"), re.compile("experts|heads?$")


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as a weight file declares it; `dtype` by its safetensors name (F32, I8)."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def locate(path: str | Path) -> str:
    """A folder, checked to hold a config, or a hub name. Raises ModelError for a folder that is not there."""
    folder = Path(path).expanduser()
    kind = _kind(folder) if str(path) else "an empty name"
    if kind == "a folder":
        if _kind(folder / "config.json") is None:
            saved = max(folder.glob("**/huggingface/config.json"), key=os.path.getmtime, default=None)
            hint = (
                f"it holds checkpoints: give {saved.parent}" if saved else "give the folder that save_pretrained wrote"
            )
            raise ModelError(f"The folder {folder} has no config.json; {hint}.")
        return str(folder)
    if kind == "a file":
        convert = " (verl convert makes one of a .gguf file)" if folder.suffix == ".gguf" else ""
        raise ModelError(f"{folder} is a file; give the folder of a model{convert}.")
    if kind is not None:
        raise ModelError(f"{clean(folder)} is {kind}; give the folder of a model.")
    text = str(path)
    if text.startswith(("/", "~", ".")) or text.count("/") > 1:
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ModelError(f"The model folder {clean(folder)} does not exist{nearest(folder.name, siblings) or '.'}")
    return text


def fetch(path: str | Path, *, weights: bool, only: str = "") -> Path:
    """The folder `path`, or the hub name's folder in the local cache, downloaded if HF_HUB_OFFLINE allows it. `weights`: with
    the weight files. `only`: the file to download. All files that loading may open are regular and readable. Raises
    ModelError."""
    source = locate(path)
    folder = Path(source)
    if not folder.is_dir():
        try:
            patterns = [only or f"*{ending}" for ending in READ if weights or ending != ".safetensors"]
            folder = Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns, ignore_patterns=["*/*"]))
        except Exception as error:  # noqa: BLE001 - of the network, the hub's answers or the cache, from several libraries
            siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
            missing = f"There is no model folder {clean(source)}{nearest(folder.name, siblings) or '.'}"
            cause = (
                "The hub's local cache does not have it, and HF_HUB_OFFLINE is set. Correct the path, or unset HF_HUB_OFFLINE "
                "to download it."
                if _offline()
                else f"Loading it from the hub failed: {reason(error)}."
            )
            raise ModelError(f"{missing} {cause}") from None  # the cause is in the sentence; its traceback has 70 lines
    try:
        entries = sorted(entry.path for entry in os.scandir(folder) if entry.name.endswith(READ))
    except OSError as error:
        raise ModelError(f"The folder {folder} cannot be read: {error.strerror}.") from error
    for entry in entries:
        require_file(Path(entry))
    require_intact(folder, weights=False)
    return folder


def require_file(file: Path) -> None:
    """Raise ModelError unless `file` is a regular file, or a link to one, that this process may read."""
    kind = _kind(file)
    if kind != "a file":
        raise ModelError(f"{clean(file)} is {kind or 'missing'}, and a model folder needs a file there. {_AGAIN}")
    if not os.access(file, os.R_OK):
        raise ModelError(f"{clean(file)} cannot be read: permission denied. Let the user of this run read it.")


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises ModelError."""
    require_file(file)
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"it has more than {_MAX_JSON_BYTES:,} bytes")
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{clean(file)} could not be read as JSON: {reason(error)}. {_AGAIN}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{clean(file)} holds {_json_kind(document)} where a JSON object belongs. {_AGAIN}")
    return document


def read_config(folder: Path) -> dict[str, object]:
    """config.json of `folder`, its counts checked to be counts. Raises ModelError."""
    file = folder / "config.json"
    config = read_json_object(file)
    for key, value in _counts(config):
        name = key.rpartition(".")[2]
        if isinstance(value, str | float) or (isinstance(value, bool) and name in _POSITIVE):
            raise ModelError(f"{file}: {key} is {_json_kind(value)} ({clean(repr(value), 40)}); it is a whole number.")
        if isinstance(value, int) and name in _POSITIVE and value < 1:
            raise ModelError(f"{file}: {key} is {value}; it is at least 1.")
        if isinstance(value, int) and _LAYERS.search(key) and value > _MAX_LAYERS:  # some configs make a list of them
            raise ModelError(f"{file}: {key} is {clean(value, 40)}, more than any model has.")
    if "transformers_weights" in config:
        raise ModelError(f"{file} names a weight file (transformers_weights); verl reads only {WEIGHTS} and {INDEX}.")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{file}: architectures is not a list of names. {_AGAIN}")
    if config.get("quantization_config"):
        kind = config["quantization_config"]
        method = clean(kind.get("quant_method", "quantized") if isinstance(kind, dict) else kind, 40)
        raise ModelError(
            f"The weights in {folder} are quantized ({method}), which verl does not train. Give the folder of the model in "
            "bfloat16 or float32, as transformers saves it after dequantize()."
        )
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} holds LoRA adapters (adapter_config.json). Give the base model as model.path, and adapters as "
            "model.lora_adapter_path from a folder of their own."
        )
    return config


def check_acting_entries(file: Path, entries: Mapping[str, object], kind: type[PreTrainedConfig]) -> None:
    """Raise ModelError for an entry of a config.json that should change the forward, if `kind`, the family's config class,
    does not have it: the family's modules would ignore it."""
    longest = entries.get("max_position_embeddings")
    for name in _ACTING.keys() & entries.keys():
        value = entries[name]
        is_off = value is None or value in _ACTING[name]
        if name == "sliding_window":
            covers_all = isinstance(value, int) and isinstance(longest, int) and value >= longest
            is_off = is_off or covers_all or entries.get("use_sliding_window") is False
        # a field of the class or a parameter of it, by release of transformers, or an attribute that it derives
        is_read = hasattr(kind, name) or name in inspect.signature(kind).parameters
        has_defaults = not getattr(kind, "has_no_defaults_at_init", False)  # gone in transformers 5.24
        is_read = is_read or (has_defaults and hasattr(kind(), name))
        if name == "is_encoder_decoder":  # every family has it, and it is false in decoders
            is_read = bool(getattr(kind, name))
        if not is_off and not is_read:
            raise ModelError(
                f"{file}: {name}={clean(value, 40)} has no effect on this model, since {kind.__name__} has no such entry. "
                "Remove it if the model was trained without it; else model_type names another family."
            )


def check_tied(folder: Path, headers: Mapping[str, TensorHeader], skeleton: Any) -> None:
    """Raise ModelError if the weights hold two different tensors under names that the model ties to one parameter."""
    prefix = skeleton.base_model_prefix
    for pair in getattr(skeleton, "all_tied_weights_keys", {}).items():
        both = [n for n in (_stored_name(name, prefix, headers) for name in pair) if n]
        if len(both) == 2 and not _are_equal(folder, headers, *both):
            raise ModelError(
                f"The weights in {folder} have different tensors {both[0]} and {both[1]}, and config.json says "
                "tie_word_embeddings=true, so that one of them would be dropped. Set tie_word_embeddings to false, there or by "
                "model.override_config.tie_word_embeddings=false, or remove the tensor that the model was trained without."
            )


def _stored_name(name: str, prefix: str, headers: Mapping[str, TensorHeader]) -> str | None:
    """The name that the parameter `name` has in the weights: some folders leave out the prefix of the decoder."""
    return next((n for n in _spellings(name, prefix) if n in headers), None)


def _spellings(name: str, prefix: str) -> tuple[str, str, str]:
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


def _are_equal(folder: Path, headers: Mapping[str, TensorHeader], one: str, other: str) -> bool:
    if headers[one].shape != headers[other].shape:
        return False
    with opened(folder / headers[one].file) as first, opened(folder / headers[other].file) as second:
        a, b = first.get_slice(one), second.get_slice(other)
        rows = range(0, headers[one].shape[0], _COMPARED_ROWS)
        return all(bool((a[i : i + _COMPARED_ROWS] == b[i : i + _COMPARED_ROWS]).all()) for i in rows)


def check_eos(folder: Path, config: Mapping[str, object]) -> None:
    """Raise ModelError for an eos_token_id, in config.json (`config`) or generation_config.json, that transformers would
    ignore or fail on."""
    file = folder / "generation_config.json"
    entries_of = {folder / "config.json": config, **({} if _kind(file) is None else {file: read_json_object(file)})}
    for place, entries in entries_of.items():
        ids = entries.get("eos_token_id")
        if not all(type(token) is int and token >= 0 for token in (ids if isinstance(ids, list) else [ids or 0])):
            raise ModelError(f"{place}: eos_token_id is {clean(repr(ids), 40)}; it is a token id or a list of them.")


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of the tensors in the weight files of `folder`, by tensor name. Raises ModelError."""
    headers: dict[str, TensorHeader] = {}
    indexed = _indexed_names(folder)
    for name in indexed or (WEIGHTS,):
        with opened(folder / name) as tensors:
            slices = {key: tensors.get_slice(key) for key in tensors.keys()}
            new = {key: TensorHeader(name, tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}
        different = sorted(new.keys() ^ indexed[name]) if indexed else []
        if different:
            raise ModelError(f"{INDEX} and {name} in {folder} differ in {clean(different[0], 80)}. {_AGAIN}")
        headers.update(new)
    if not headers:
        raise ModelError(f"The weight file {folder / WEIGHTS} holds no tensors. {_AGAIN}")
    return headers


def weight_files(folder: Path) -> list[Path]:
    """The weight files that loading reads. Raises ModelError."""
    return [folder / name for name in _indexed_names(folder) or (WEIGHTS,)]


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The safetensors file, open for reading. Raises ModelError when it is damaged."""
    require_file(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"The weight file {file} is damaged: {reason(error)}. {_AGAIN}") from error


def check_counts(source: Path, config: Mapping[str, object], headers: Mapping[str, TensorHeader]) -> None:
    """Raise ModelError for counts in the config of `source` that the weights cannot have: building the model would not end."""
    elements = sum(prod(header.shape) for header in headers.values())
    largest = max((max(header.shape, default=0) for header in headers.values()), default=0)
    for key, value in _counts(config):
        name = key.rpartition(".")[2]
        if not isinstance(value, int):
            continue
        limit = max(1 << 20, elements)
        if _LAYERS.search(name) and not name.startswith("max_"):
            limit = max(128, len(headers))
        elif _PARTS.search(name):
            limit = max(4096, largest, len(headers))
        if value > limit and name != "max_position_embeddings":
            raise ModelError(
                f"{clean(source)} says {key}={clean(value, 40)}, and its weights are {len(headers)} tensors of "
                f"{elements:,} elements together. Config and weights belong to different models."
            )


def check_tensors(folder: Path, headers: Mapping[str, TensorHeader], skeleton: HFModule, itemsize: int) -> None:
    """Raise ModelError unless the tensors have the shapes and kinds of dtype of `skeleton` (on the meta device), and memory
    for them with elements of `itemsize` bytes is free."""
    expected, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    tables = [tuple(t.shape) for t in expected.values() if not t.is_floating_point()]
    ignored = [re.compile(p) for p in getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for name, header in headers.items():
        parameter = next((expected[n] for n in _spellings(name, prefix) if n in expected), None)
        shapes = [] if parameter is None else [tuple(parameter.shape)]
        if parameter is not None and ".experts." in name and parameter.dim() == 3:
            shapes.append(tuple(parameter.mT.shape))  # transposed by transformers, in published files of Qwen3-VL
        if parameter is not None and header.shape not in shapes:
            raise ModelError(
                f"The weights in {folder} have other shapes than its config.json says: {clean(name, 80)} is "
                f"{list(header.shape)} in {header.file} and {list(parameter.shape)} in the model. {_AGAIN}"
            )
        # a table of integers, saved by some families under another name
        is_table = header.shape in tables if parameter is None else not parameter.is_floating_point()
        if header.dtype not in _FLOATS and not is_table and not any(p.search(name) for p in ignored):
            raise ModelError(
                f"The weights in {folder} are quantized or damaged: {clean(name, 80)} in {header.file} is {header.dtype}. "
                "Give the folder of the model in bfloat16 or float32."
            )
    require_memory(folder, headers, itemsize)


def require_memory(source: Path, headers: Mapping[str, TensorHeader], itemsize: int) -> None:
    """Raise ModelError unless memory for the tensors, with elements of `itemsize` bytes, is free."""
    needed, free = sum(prod(header.shape) for header in headers.values()) * itemsize, available_memory()
    if needed > free:
        raise ModelError(
            f"The model in {clean(source)} takes {needed / 1e9:.1f} GB of memory in this dtype, and {free / 1e9:.1f} GB are "
            "free. Use a smaller model or a machine with more memory, or stop other programs."
        )


def reason(error: BaseException) -> str:
    """The first line of an error's text, for a sentence; with the second one if the first only leads to it."""
    first, _, rest = str(error).strip().partition("\n")
    text = f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
    return clean(text).rstrip(".") or type(error).__name__


def _indexed_names(folder: Path) -> dict[str, set[str]]:
    """The tensors of each file that the index names; none if one file has all weights. Raises ModelError."""
    if _kind(folder / WEIGHTS) is not None:
        return {}
    if _kind(folder / INDEX) is None:
        files = sorted(p.name for pattern in ("*.gguf", "*.bin", "*.pt") for p in folder.glob(pattern))
        hint = "download or convert the model again"
        if files:
            how = "verl convert" if files[0].endswith(".gguf") else "load it with transformers and save_pretrained it"
            hint = f"it has {clean(files[0], 80)}: convert it first ({how})"
        raise ModelError(f"The folder {folder} has no weights ({WEIGHTS} or {INDEX}); {hint}.")
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map of tensors and files. {_AGAIN}")
    names_by_file: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{folder / INDEX} names {clean(repr(file), 80)}: weights are safetensors files inside the folder, and "
                "nothing else is loaded."
            )
        if file not in names_by_file:
            require_file(folder / file)
        names_by_file.setdefault(file, set()).add(tensor)
    return names_by_file


def _kind(path: Path) -> str | None:
    """Kind of what lies at `path`. Raises ModelError if looking is forbidden."""
    try:
        return kind_of(path)
    except (OSError, ValueError) as error:  # no permission, a zero byte, a name that is too long
        raise ModelError(f"{clean(path)} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _counts(config: Mapping[str, object], place: str = "") -> Iterator[tuple[str, object]]:
    """Entries that count something, by dotted name, including entries of nested objects (text_config)."""
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _counts(value, f"{place}{key}.")
        elif _COUNT.search(key):
            yield f"{place}{key}", value


def _json_kind(value: object) -> str:
    kinds = {
        bool: "a truth value",
        str: "text",
        int: "a number",
        float: "a fraction",
        list: "a list",
        type(None): "null",
    }
    return kinds.get(type(value), "an object")


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")
