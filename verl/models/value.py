"""The critic's model: a decoder with a scalar head, stored under the names of Hugging Face's token classification
models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.errors import ModelError

# where value heads are found in folders: Hugging Face's classification models, ours, and TRL's
_WEIGHT_NAMES = ("score.weight", "classifier.weight", "v_head.weight", "v_head.summary.weight")


class ValueModel(nn.Module):
    """`base` under its own prefix ("model" for Llama) beside `score`, a linear layer in at least float32.

    The head starts at zero, so that an untrained critic says 0 and does not depend on a seed.
    """

    def __init__(self, base: Any):
        super().__init__()
        self.config = base.config
        self.prefix = base.base_model_prefix or "model"
        setattr(self, self.prefix, base)
        weight = next(base.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.score = nn.Linear(self.config.get_text_config().hidden_size, 1, dtype=dtype, device=weight.device)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def get_decoder(self) -> Any:
        return getattr(self, self.prefix)

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size] -> [tokens]."""
        return self.score(hidden.to(self.score.weight.dtype)).squeeze(-1)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.get_decoder().gradient_checkpointing_enable(**kwargs)

    def load_head(self, folder: Path) -> bool:
        """Take the head saved in `folder`, if there is one; raises ModelError when it is not a scalar head."""
        from safetensors import safe_open

        found: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                names = [
                    n
                    for n in tensors.keys()
                    if n in _WEIGHT_NAMES or n.removesuffix("bias") + "weight" in _WEIGHT_NAMES
                ]
                found.update({name: tensors.get_tensor(name) for name in names})
        weight_name = next((n for n in _WEIGHT_NAMES if n in found), None)
        if weight_name is None:
            return False
        weight, bias = found[weight_name], found.get(weight_name.removesuffix("weight") + "bias")
        if weight.shape != self.score.weight.shape:
            raise ModelError(
                f"{folder} holds a head {weight_name} of shape {list(weight.shape)}; a value model of this size needs "
                f"{list(self.score.weight.shape)}. Use a model with one label, or one without a head."
            )
        with torch.no_grad():
            self.score.weight.copy_(weight)
            if bias is not None:
                self.score.bias.copy_(bias)
        return True
