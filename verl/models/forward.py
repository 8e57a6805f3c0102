"""One forward pass over a packed batch: hidden states, then only what was asked for, only where it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.errors import ModelError
from verl.models.cpu.decoder import dense_hidden_states
from verl.models.cpu.weights import DenseDecoder
from verl.models.grad_buffers import GradientBuffers
from verl.models.log_probs import token_log_probs
from verl.models.packed import PackedLayout
from verl.models.packing import PackedBatch

_WRITTEN_OUT = ("cpu",)  # devices on which the passes of `dense` have been measured and checked
# In float64 the modules' norms still round to float32, those of `dense` do not: whoever computes in it compares modules.
_FORMATS = {torch.float32, torch.bfloat16}


def hidden_states(module: Any, packed: PackedBatch, gradients: GradientBuffers | None = None) -> torch.Tensor:
    """[predictions, hidden_size]: the last hidden state of each token that predicts a trained response token.

    A plain dense decoder is computed by the passes written out in `dense`, which put the gradients of its weights into
    `gradients` if given; every other module by its own forward, with autograd.
    """
    dense = written_out(module, packed.input_ids.device) if type(packed.layout) is PackedLayout else None
    if dense is not None:
        decoder = module.get_decoder()
        return dense_hidden_states(
            dense, packed, gradients, checkpointing=decoder.gradient_checkpointing and decoder.training
        )
    output = module.get_decoder()(
        input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, layout=packed.layout
    )
    return output.last_hidden_state[0].index_select(0, packed.hidden_index)


def written_out(module: Any, device: torch.device) -> DenseDecoder | None:
    """The weights by which the passes of `dense` compute `module` on `device`; None where its own forward does."""
    dense = DenseDecoder.of(module) if device.type in _WRITTEN_OUT else None
    return dense if dense is not None and dense.embed.dtype in _FORMATS else None


def policy_outputs(
    module: Any,
    packed: PackedBatch,
    outputs: Sequence[str],
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradients: GradientBuffers | None = None,
) -> dict[str, torch.Tensor]:
    """`log_probs`, `entropy` and `sum_pi_squared` as asked, each [batch, response] (float32 or wider, zero where the
    response mask is false) of `softmax(logits / temperature)`.

    With `gradients`, backward sums those of the weights there as far as it can, and leaves the others to autograd.
    Raises ModelError for an output that a policy does not have.
    """
    _require(outputs, ("log_probs", "entropy", "sum_pi_squared"), "policy")
    if len(packed.targets) == 0:
        return {name: torch.zeros(packed.shape, device=packed.targets.device) for name in outputs}
    head = module.get_output_embeddings()
    stats = token_log_probs(
        hidden_states(module, packed, gradients),
        head.weight,
        packed.targets,
        temperature,
        want_entropy="entropy" in outputs,
        want_sum_pi_squared="sum_pi_squared" in outputs,
        bias=getattr(head, "bias", None),
        chunk_tokens=chunk_tokens,
        gradients=gradients,
        **head_transform(module.config),
    )
    return {name: packed.scatter(getattr(stats, name)) for name in outputs}


def head_transform(config: Any) -> dict[str, Any]:
    """What a family does to its logits after the projection: Gemma caps them, Cohere multiplies and Granite divides."""
    config = config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None)
    return {
        "softcap": getattr(config, "final_logit_softcapping", None),
        "logit_scale": float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor),
    }


def value_outputs(
    module: Any,
    packed: PackedBatch,
    outputs: Sequence[str] = ("values",),
    gradients: GradientBuffers | None = None,
) -> dict[str, torch.Tensor]:
    """`values` [batch, response]: the value of the state before each response token, zero where the mask is false."""
    _require(outputs, ("values",), "value")
    if len(packed.targets) == 0:
        return {"values": torch.zeros(packed.shape, device=packed.targets.device)}
    return {"values": packed.scatter(module.value(hidden_states(module, packed, gradients)))}


def _require(outputs: Sequence[str], known: Sequence[str], kind: str) -> None:
    for name in outputs:
        if name not in known:
            raise ModelError(f"A {kind} model has no output {name!r}; it has {', '.join(known)}.")
