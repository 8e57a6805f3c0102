"""Heads of models, by name: what stands above a decoder, and how a model with it is built.

lm              the output projection of a causal language model
token_value     a scalar at each token: a critic
sequence_score  a scalar at the last token of a sequence: a reward model
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from verl.errors import ModelError
from verl.models.folder import opened, read_headers
from verl.models.hf_module import HFModule
from verl.registry import Registry

log = logging.getLogger(__name__)

# scalar heads in folders: of Hugging Face's classification models, ours, and TRL's
_HEADS = ("score", "classifier", "v_head", "v_head.summary")
WEIGHT_NAMES = tuple(f"{head}.{part}" for head in _HEADS for part in ("weight", "bias"))


def is_further_head(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor in a folder belongs to a head that predicts further tokens (multi-token prediction, arXiv:2412.19437,
    section 2.2), in no model of transformers: below `mtp`, or a layer after the last one."""
    config = config.get_text_config()
    layer, num_layers = re.search(r"(?:^|\.)layers\.(\d+)\.", name), getattr(config, "num_hidden_layers", None)
    count = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "num_mtp_layers", None) or 0
    if layer is None or num_layers is None or int(layer[1]) < num_layers:
        return re.search(r"(?:^|\.)mtp(?:_layers)?\.", name) is not None
    return bool(int(layer[1]) < num_layers + count)


class ScalarHeadModel(nn.Module):
    """`base` under its own prefix ("model" for Llama), and `score`, a linear layer in at least float32. The names are the
    same as in the Hugging Face class with a name that ends with `architecture`."""

    architecture: str
    peft_task: str  # of adapters; peft's Auto classes choose by it transformers' class
    bias: bool

    def __init__(self, base: HFModule):
        super().__init__()
        self.config = base.config
        self.prefix = base.base_model_prefix or "model"
        setattr(self, self.prefix, base)
        weight, size = next(base.parameters()), self.config.get_text_config().hidden_size
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.score = nn.Linear(size, 1, bias=self.bias, dtype=dtype, device=weight.device)
        if not weight.is_meta:
            with torch.no_grad():
                self.reset_head()

    def reset_head(self) -> None:
        """Set the head's weights to zero, as for a model without a head."""
        for parameter in self.score.parameters():
            parameter.zero_()

    def get_decoder(self) -> Any:
        return getattr(self, self.prefix)

    def get_input_embeddings(self) -> Any:
        return self.get_decoder().get_input_embeddings()

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size] -> [tokens]."""
        return cast("torch.Tensor", self.score(hidden.to(self.score.weight.dtype)).squeeze(-1))

    def gradient_checkpointing_enable(self, **kwargs: object) -> None:
        self.get_decoder().gradient_checkpointing_enable(**kwargs)

    def load_head(self, folder: Path) -> bool:
        """Load the head saved in `folder`, if there is one; raises ModelError when it is not a scalar head."""
        head_tensors: dict[str, torch.Tensor] = {}
        for name, header in read_headers(folder).items():
            if name in WEIGHT_NAMES:
                with opened(folder / header.file) as tensors:
                    head_tensors[name] = tensors.get_tensor(name)
        weight_name = next((n for n in WEIGHT_NAMES if n in head_tensors and n.endswith("weight")), None)
        if weight_name is None:
            return False
        weight, bias = head_tensors[weight_name], head_tensors.get(weight_name.removesuffix("weight") + "bias")
        if weight.shape != self.score.weight.shape:
            raise ModelError(
                f"{folder} holds a head {weight_name} of shape {list(weight.shape)}; a scalar head of this size needs "
                f"{list(self.score.weight.shape)}. Use a model with one label, or one without a head."
            )
        with torch.no_grad():
            self.score.weight.copy_(weight)
            if bias is not None and self.bias:
                self.score.bias.copy_(bias)
            elif bias is not None:
                log.warning("The bias of %s in %s is left out: it adds the same to every score.", weight_name, folder)
        return True


class TokenValueModel(ScalarHeadModel):
    """A critic. An untrained one says 0 everywhere."""

    architecture = "ForTokenClassification"
    peft_task = "TOKEN_CLS"
    bias = True


class SequenceScoreModel(ScalarHeadModel):
    """A reward model. Its head starts with normal values from a fixed seed, so that the decoder has a gradient at once."""

    architecture = "ForSequenceClassification"
    peft_task = "SEQ_CLS"
    bias = False

    def reset_head(self) -> None:
        """See ScalarHeadModel; standard deviation: the config's initializer_range."""
        scale = getattr(self.config.get_text_config(), "initializer_range", 0.02)
        values = torch.randn(self.score.weight.shape, generator=torch.Generator().manual_seed(0))
        self.score.weight.copy_(values * scale)


@dataclass(frozen=True)
class HeadKind:
    """`auto_class` of transformers loads what lies below the head; `wrap` puts the head on it."""

    auto_class: str
    wrap: Callable[[Any], object]


HEADS = Registry(
    "head",
    {
        "lm": HeadKind("AutoModelForCausalLM", lambda module: module),
        "token_value": HeadKind("AutoModel", TokenValueModel),
        "sequence_score": HeadKind("AutoModel", SequenceScoreModel),
    },
)
