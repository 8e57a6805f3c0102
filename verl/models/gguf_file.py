"""Hugging Face models as GGUF files for llama.cpp, Ollama and LM Studio; the inverse is verl/models/convert.py.

Names of tensors and keys are the names in llama.cpp's convert_hf_to_gguf.py, through its package gguf.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from verl.errors import ConfigError, MissingExtraError, ModelError, nearest
from verl.manifest import new_file
from verl.models.folder import read_json_object
from verl.models.gguf_tokenizer import add_tokenizer

if TYPE_CHECKING:
    import gguf

# model_type -> architecture of llama.cpp
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma"}
# dtype -> (dtype of the rounded masters, names of gguf's tensor and file types)
DTYPES = {
    "float32": ("float32", "F32", "ALL_F32"),
    "float16": ("float16", "F16", "MOSTLY_F16"),
    "bfloat16": ("bfloat16", "BF16", "MOSTLY_BF16"),
    "q8_0": ("float32", "Q8_0", "MOSTLY_Q8_0"),
}


def rounded_dtype(dtype: str) -> str:
    """The dtype of weights for a file of `dtype`: its own, and float32 before they are quantized. Raises ConfigError."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"GGUF files are written in {', '.join(DTYPES)}, not in {dtype!r}{nearest(dtype, DTYPES) or '.'}"
        )
    return DTYPES[dtype][0]


def write_gguf(folder: Path, tensors: Mapping[str, torch.Tensor], out: Path, dtype: str) -> None:
    """Write the model of the config and tokenizer in `folder` to the file `out`. It appears complete or not at all.

    `tensors` are weights in `rounded_dtype(dtype)` by their Hugging Face names. Vectors (norms, biases) are stored in
    float32, as llama.cpp expects. Raises ModelError for a model that llama.cpp would compute in another way.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("Writing GGUF files", "gguf", "gguf")
    import gguf

    config = read_json_object(folder / "config.json")
    architecture = _architecture(config, tensors)
    with new_file(out) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        _add_keys(writer, config, folder.name)
        writer.add_file_type(gguf.LlamaFileType[DTYPES[dtype][2]])
        add_tokenizer(writer, folder, int(config["vocab_size"]))
        for key, tensor in _stored(config, tensors):
            kind = _tensor_type(tensor, DTYPES[dtype][1])
            writer.add_tensor(key, gguf.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _architecture(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> str:
    """llama.cpp's name for the model. Raises ModelError for other families, heads and scaled rotary embeddings."""
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ModelError(
            f"GGUF export takes {', '.join(_ARCHITECTURES)} models, not {family!r}. llama.cpp's convert_hf_to_gguf.py "
            "converts others from the folder that `verl export` writes."
        )
    if any(name.startswith("score.") for name in tensors):
        raise ModelError("GGUF export takes language models; this one has the head of a reward or value model.")
    if (scaling := _rope(config)["rope_type"]) not in ("default", "linear", "llama3"):
        raise ModelError(f"GGUF export takes rotary embeddings of type default, linear and llama3, not {scaling!r}.")
    return _ARCHITECTURES[family]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary embedding; older configs spread them over two entries."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10_000.0), **settings, "rope_type": kind}


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str) -> None:
    import gguf

    rope, head_dim = _rope(config), _head_dim(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    longest = int(config["max_position_embeddings"])
    writer.add_name(str(config.get("_name_or_path") or name))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(min(longest, window or longest))  # within its window, a model attends to everything
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _stored(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(key in the file, value) of all tensors as llama.cpp's graph of the family reads them."""
    import gguf

    family = config["model_type"]
    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[family].upper()]
    keys = gguf.get_tensor_name_map(architecture, int(config["num_hidden_layers"]))
    heads = int(config["num_attention_heads"])
    rotated = {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        if family in ("llama", "mistral") and module in rotated:
            # from halves to neighbouring pairs, as its rotary embedding turns them
            tensor = tensor.unflatten(0, (rotated[module], 2, -1)).transpose(1, 2).flatten(0, 2)
        elif family == "gemma" and name.endswith("norm.weight"):
            tensor = tensor.float() + 1  # the module adds it
        if (key := keys.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise ModelError(f"GGUF has no place for the tensor {name} of a {family} model.")
        yield key, tensor.contiguous()
    if _rope(config)["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(_rope(config), _head_dim(config))


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Divisors [head_dim / 2] of the rotary frequencies of Llama 3.1 (transformers' `_compute_llama3_parameters`)."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return cast("torch.Tensor", (1 / ((1 - smooth) / factor + smooth)).float())


def _tensor_type(tensor: torch.Tensor, name: str) -> gguf.GGMLQuantizationType:
    """gguf's type for a tensor in a file of type `name`: float32 for vectors, float16 for rows of an odd length."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    if tensor.dim() < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
