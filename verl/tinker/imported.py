"""Adapters that peft saved, as checkpoints that every tenant may sample from and train on.

    verl serve tinker model=PATH adapters=FOLDER          FOLDER/NAME/{adapter_model.safetensors, adapter_config.json}

FOLDER/NAME becomes tinker://imported-NAME/sampler_weights/peft. Adapters here have one alpha, so `lora_B` takes the ratio of
both.
"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from verl.checkpoint.files import read_document
from verl.errors import ConfigError
from verl.foreign_text import clean
from verl.manifest import record_of
from verl.models.adapter_weights import ALPHA, AdapterWeights
from verl.models.folder import fetch, read_headers
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE, LoRASpec, read_adapter
from verl.tinker.adapters import PARTS, Adapter, part_of_adapter
from verl.tinker.bases import BaseModel
from verl.tinker.checkpoints import Checkpoints

PREFIX, NAME = "imported", "peft"
OWNER = "-imported"  # a name that no tenant can have
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def import_adapters(folder: Path, checkpoints: Checkpoints, bases: Sequence[BaseModel]) -> list[str]:
    """The addresses of the adapters in `folder`; those with other files than before are written again. Raises ConfigError for
    an adapter of no base model here, and ModelError for files that hold none."""
    sources = sorted(file.parent for file in folder.glob(f"*/{CONFIG_FILE}"))
    if not sources:
        raise ConfigError(
            f"adapters={folder} has no folder with {CONFIG_FILE}. Give the folder that holds peft's folders."
        )
    return [_import(source, checkpoints, bases) for source in sources]


def _import(source: Path, checkpoints: Checkpoints, bases: Sequence[BaseModel]) -> str:
    if not _NAME.fullmatch(source.name):
        raise ConfigError(f"{source} needs a name of letters, digits, _ and -.")
    config = read_document(source / CONFIG_FILE)
    rank, alpha, trained_on = config.get("r"), config.get("lora_alpha"), config.get("base_model_name_or_path")
    names = ", ".join(base.names[0] for base in bases)
    if not isinstance(trained_on, str) or not trained_on:
        raise ConfigError(f"{source / CONFIG_FILE} names no base model. Set base_model_name_or_path there to {names}.")
    fitting = [base for base in bases if trained_on in base.names or Path(trained_on).name in base.names]
    if not fitting:
        raise ConfigError(
            f"{source} was trained on {clean(trained_on, 100)}, and this server has {names}. Remove the folder."
        )
    (base, *_), model_id = fitting, f"{PREFIX}-{source.name}"
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not 1 <= rank <= base.facts.most_rank:
        raise ConfigError(
            f"{source} has rank {rank}, and the largest one of {base.names[0]} is {base.facts.most_rank}. Set rank=."
        )
    spec = LoRASpec(rank, alpha, "all-linear", rslora=bool(config.get("use_rslora")))
    tensors = read_adapter(source, spec, base.path)
    if odd := _unfitting(tensors, base.path):
        raise ConfigError(f"{source} has {odd}, which no adapter of {base.names[0]} has. Remove the folder.")
    factor = spec.scale * rank / ALPHA
    scaled = {name: tensor.float() * (factor if name.endswith(".lora_B") else 1) for name, tensor in tensors.items()}
    weights = AdapterWeights(rank, scaled)
    parts = [
        part for part in PARTS if part in {part_of_adapter(name, is_head=name == "lm_head") for name in weights.layers}
    ]
    facts = {"model_id": model_id, "base_model": base.names[0], "rank": rank, "parts": parts, "tenant": OWNER}
    checkpoints.register(model_id, {**facts, "created": time.time(), "user_metadata": None})
    notes = {"base_model": base.names[0], "user_metadata": None, "request": record_of(source / WEIGHTS_FILE).blake2b}
    saved = checkpoints.save(
        model_id, "sampler_weights", NAME, Adapter(weights), overwrite=True, notes=notes, base=base.path
    )
    checkpoints.set_public(saved, is_public=True)
    return saved.uri


def _unfitting(tensors: Mapping[str, torch.Tensor], base: str) -> str:
    """The first tensor that belongs to no linear layer of the base model; "" if all do."""
    headers = read_headers(fetch(base, weights=True))
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        header = headers.get(f"{layer}.weight") or (
            headers.get("model.embed_tokens.weight") if layer == "lm_head" else None
        )
        if kind not in ("lora_A", "lora_B") or header is None or len(header.shape) != 2:
            return clean(name, 100)
        if (tensor.shape[1] != header.shape[1]) if kind == "lora_A" else (tensor.shape[0] != header.shape[0]):
            return f"{clean(name, 100)} of shape {list(tensor.shape)}"
    return ""
