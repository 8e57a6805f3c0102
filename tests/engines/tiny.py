"""An engine for tests, on the CPU."""

import torch
from safetensors.torch import load_file, save_file

from tests.vision_families import CONFIGS, vision_folder
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.engines.local import LocalEngine
from verl.models.tiny import make_tiny_model

# family -> (names of a head's own tensors, and what stands before a tensor of its layer)
HEADS = {
    "deepseek_v3": (("model.layers.2.enorm", "model.layers.2.hnorm", "model.layers.2.eh_proj",
                     "model.layers.2.shared_head.norm"), "model.layers.2."),
    "qwen2": (("model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
               "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm"), "model.mtp_layers.0."),
    "qwen3_5_moe": (("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"), "mtp.layers.0."),
    "qwen3": (("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"), "mtp.layers.0."),
}  # fmt: skip


def make_model_with_head(path, family):
    """A tiny model of two layers with a head for further tokens, as checkpoints have it: of its family, or as Qwen3-Next's."""
    more = {"num_nextn_predict_layers": 1, "tie_word_embeddings": False} if family == "deepseek_v3" else {}
    reads_images = family in CONFIGS
    file = (
        vision_folder(path, family) if reads_images else make_tiny_model(path, family, **more)
    ) / "model.safetensors"
    parts, layer = HEADS.get(family, HEADS["qwen3"])
    tensors, draw = load_file(file), torch.Generator().manual_seed(3)
    shapes = [(64,), (64,), (64, 128), (64,)]
    head = {
        f"{n}.weight": torch.randn(s, generator=draw) * 0.1 + (len(s) == 1) for n, s in zip(parts, shapes, strict=True)
    }
    below = "model.language_model.layers.1." if reads_images else "model.layers.1."
    head |= {
        layer + n.removeprefix(below): t + 0.05 * torch.randn(t.shape, generator=draw)
        for n, t in tensors.items()
        if n.startswith(below)
    }
    if reads_images:  # experts of a layer in one tensor, as published files have them
        by_part = [
            [head.pop(f"{layer}mlp.experts.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(4)
        ]
        head[f"{layer}mlp.experts.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in by_part])
        head[f"{layer}mlp.experts.down_proj"] = torch.stack([parts[2] for parts in by_part])
    if family == "deepseek_v3":
        head["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        head["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]
    save_file({**tensors, **{n: t.contiguous().clone() for n, t in head.items()}}, file, metadata={"format": "pt"})
    return path


def make_engine(
    path, cls=LocalEngine, *, dtype="float32", model=None, engine=None, optim=None, trainable=True, **settings
):
    """`model`, `engine` and `optim` are values of their sections; other settings are arguments of `cls`."""
    return cls(
        model=ModelConfig(path=str(path), **(model or {})),
        engine=FSDPConfig(dtype=dtype, **(engine or {})),
        optim=OptimConfig(**{"lr": 1e-2, **(optim or {})}) if trainable else None,
        **{"head": "lm", "device": torch.device("cpu"), "total_steps": 10, **settings},
    )
