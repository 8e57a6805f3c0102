"""The type of a language model as verl reads it: a module of transformers, or a head of verl.models.heads on one."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn


class HFModule(nn.Module):
    """The members of a transformers model that verl uses in addition to nn.Module's, for annotations: transformers' own classes
    do not derive from it, and have no types."""

    config: Any
    generation_config: object
    base_model_prefix: str
    forward_kind: str  # a row of verl.models.padded.KINDS, once choose_forward has set it
    device: torch.device
    dtype: torch.dtype

    if TYPE_CHECKING:

        def get_decoder(self) -> Any: ...
        def get_input_embeddings(self) -> nn.Embedding: ...
        def get_output_embeddings(self) -> Any: ...
        def set_attn_implementation(self, name: str) -> None: ...
        def gradient_checkpointing_enable(self, **settings: object) -> None: ...
        def save_pretrained(self, folder: object, **settings: object) -> None: ...
        def generate(self, **inputs: object) -> object: ...


class AutogradContext:
    """The context of a torch.autograd.Function, for annotations: saved tensors, and what its forward sets for its backward."""

    if TYPE_CHECKING:
        saved_tensors: tuple[torch.Tensor, ...]

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...
