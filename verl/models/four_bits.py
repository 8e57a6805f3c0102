"""Base weights in four bits below adapters (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), by torchao.

NF4 has 16 levels in each block of 64 weights. Their scales are quantized in turn: about 4.1 bits a weight. A layer computes
with the weights that the levels stand for, made again in the forward and in the backward pass.
"""

import logging
import math

import torch
from torch import nn

from verl.errors import MissingExtraError
from verl.models.lora import lora_layers

log = logging.getLogger(__name__)
BLOCK, SCALES = 64, 256  # weights with one scale, scales with one scale


@torch.no_grad()
def quantize_base(module: nn.Module) -> None:
    """Hold the frozen weight of each adapted layer in four bits. Raises MissingExtraError without torchao."""
    try:
        from torchao.quantization import to_nf4
    except ImportError as error:
        raise MissingExtraError("model.quantization=nf4", "qlora", "torchao") from error
    layers = lora_layers(module)
    uneven = [name for name, layer in layers.items() if layer.weight.numel() % BLOCK]
    before = after = 0
    for name, layer in layers.items():
        if name not in uneven:
            count = layer.weight.numel()
            quantized = to_nf4(layer.weight.detach(), BLOCK, math.gcd(count // BLOCK, SCALES))
            before += count * layer.weight.element_size()
            after += sum(getattr(quantized, part).nbytes for part in quantized.__tensor_flatten__()[0])
            layer.weight = nn.Parameter(quantized, requires_grad=False)
    log.info(
        "The base of %d adapted layers is in four bits: %.2f GB in place of %.2f.",
        len(layers) - len(uneven),
        after / 1e9,
        before / 1e9,
    )
    if uneven:
        log.warning(
            "%d adapted layers keep their dtype: %s does not divide into blocks of %d.", len(uneven), uneven[0], BLOCK
        )
