"""One forward pass over a packed batch: hidden states, then the named outputs at the positions that need them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from verl.models.decoder import weights
from verl.models.decoder.autograd import straight_states
from verl.models.decoder.backward import dense_hidden_states
from verl.models.decoder.reuse import recorded_batch
from verl.models.decoder.weights import DenseDecoder
from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import HFModule
from verl.models.log_probs import TokenStats, logit_statistics, token_log_probs
from verl.models.lora import LoRALinear
from verl.models.memory import Recompute
from verl.models.outputs import HeadInputs, output_kind, statistics_wanted
from verl.models.packed import PackedLayout
from verl.models.packing import PackedBatch
from verl.models.padded import forward_kind, padded_logits, padded_states
from verl.models.parallel.sequence import SequenceLayout
from verl.models.qat import rounds_layers
from verl.models.vision import is_vision_model, language_model_of, vision_states, with_features

log = logging.getLogger(__name__)

_FUSED_DEVICES = ("cpu",)  # the fused decoder has been measured and checked on these
_STRAIGHT_DEVICES = ("cuda",)  # training computes as the sampler does on these
# In float64 the modules' norms still round to float32, unlike the fused decoder's: modules compute float64.
_FUSED_DTYPES = {torch.float32, torch.bfloat16}
_LAYOUTS = (PackedLayout, SequenceLayout)


def hidden_states(module: Any, packed: PackedBatch, gradients: GradientBuffers | None = None) -> torch.Tensor:
    """[positions, hidden_size]: the last hidden states of the tokens at `packed.hidden_index`.

    verl.models.decoder computes a plain dense decoder, sharded or not: on a CPU its backward adds the gradients of the
    weights to `gradients` if given, and on a GPU it has autograd. The module computes every other model by its own forward,
    with autograd: packed, or padded if its attention takes no layout.
    """
    if forward_kind(module) != "packed":
        return padded_states(module, packed)
    device = packed.input_ids.device
    if type(packed.layout) in _LAYOUTS:
        if (dense := fused_decoder(module, device)) is not None:
            packed, images = with_features(module, packed)
            recorded = recorded_batch(module, packed) if torch.is_grad_enabled() else None
            return dense_hidden_states(dense, packed, gradients, recompute_of(module), images, recorded)
        if (dense := straight_decoder(module, device)) is not None:
            packed, images = with_features(module, packed)
            offloads = bool(getattr(module, "offloads_inputs", False))
            return straight_states(dense, packed, recompute_of(module), images, offloads)
    if is_vision_model(module):
        return vision_states(module, packed).index_select(0, packed.hidden_index)
    return decoder_states(module.get_decoder(), packed).index_select(0, packed.hidden_index)


def recompute_of(module: HFModule) -> Recompute:
    """Parts of a layer of `module` that its backward computes again, if verl.models.decoder computes them."""
    checkpoints = bool(getattr(language_model_of(module), "gradient_checkpointing", False))
    return getattr(module, "recompute", "full") if checkpoints else "none"


def decoder_states(decoder: Any, inputs: Any) -> torch.Tensor:
    """[tokens, hidden_size] of `inputs`, a PackedBatch or a rank's part of one, by the decoder's own forward."""
    tokens = {"input_ids": inputs.input_ids}
    if inputs.noise is not None:
        embeddings = decoder.get_input_embeddings()(inputs.input_ids)
        tokens = {"inputs_embeds": embeddings + inputs.noise.to(embeddings)}
    output = decoder(**tokens, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout)
    return cast("torch.Tensor", output.last_hidden_state[0])


def fused_decoder(module: nn.Module, device: torch.device) -> DenseDecoder | None:
    """The weights of `decoder_for`, if verl.models.decoder.backward computes."""
    return _dense(module, _FUSED_DTYPES) if device.type in _FUSED_DEVICES else None


def straight_decoder(module: nn.Module, device: torch.device) -> DenseDecoder | None:
    """The weights of `decoder_for`, if verl.models.decoder.autograd computes."""
    return _dense(module, _FUSED_DTYPES | {torch.float16}) if device.type in _STRAIGHT_DEVICES else None


def decoder_for(module: nn.Module, device: torch.device) -> DenseDecoder | None:
    """The weights with which verl.models.decoder computes `module` on `device`; None where its own forward does."""
    return fused_decoder(module, device) or straight_decoder(module, device)


def make_units(module: nn.Module, shards: Sequence[nn.Module], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether verl.models.decoder computes `module` in `dtype` on `device` once the modules `shards` are sharded by themselves;
    see verl.models.decoder.weights.make_layer_units."""
    is_straight, is_fused = device.type in _STRAIGHT_DEVICES, device.type in _FUSED_DEVICES
    computes = ((is_straight or is_fused) and dtype in _FUSED_DTYPES) or (is_straight and dtype == torch.float16)
    return computes and forward_kind(module) == "packed" and weights.make_layer_units(module, shards)


def _dense(module: nn.Module, dtypes: set[torch.dtype]) -> DenseDecoder | None:
    dense = None if rounds_layers(module) else DenseDecoder.of(module, adapters=True)
    return dense if dense is not None and dense.embed.dtype in dtypes else None


def computed_by(module: nn.Module, device: torch.device) -> str:
    """The implementation that computes `module` on `device`, for people."""
    kind = forward_kind(module)
    if kind == "logits":
        return "the model's own padded forward, whole logits"
    if kind == "padded":
        forward = "the model's own padded forward"
    elif fused_decoder(module, device) is not None:
        forward = "verl's decoder for CPUs"
    elif straight_decoder(module, device) is not None:
        forward = "the forward of verl's sampler, with gradients"
    else:
        forward = "transformers' modules with verl's packed attention"
        if rounds_layers(module):
            forward += ", rounded to int8 (actor.qat)"
        if recompute_of(cast("HFModule", module)) == "selective":
            forward += ", which recompute whole layers"
    if kind == "packed" and is_vision_model(module):
        forward += ", images by transformers' modules"
    if not fuses_log_probs(module):
        return f"{forward}; log-probs from whole logits by torch"
    return f"{forward}; log-probs in chunks of torch matmuls, without whole logits"


def weight_of(head: Any) -> torch.Tensor:
    """The weight of an output projection with its adapter, if it has one, with a graph."""
    return head.merged_weight() if isinstance(head, LoRALinear) else head.weight


def fuses_log_probs(module: object) -> bool:
    """Whether logits of `module` never exist all at once (model.use_fused_kernels)."""
    return bool(getattr(module, "fused_log_probs", True))


def keep_fused(module: Any, why: str) -> None:
    """Never compute all logits of `module` at once, in spite of model.use_fused_kernels; a line in the log says `why`."""
    if not fuses_log_probs(module):
        log.info("model.use_fused_kernels=False: log-probs stay in chunks, since %s.", why)
    module.fused_log_probs = True


def packed_outputs(
    module: Any,
    packed: PackedBatch,
    outputs: Sequence[str],
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradients: GradientBuffers | None = None,
) -> dict[str, torch.Tensor]:
    """The named rows of verl.models.outputs.OUTPUTS, at the positions of the layout `packed`.

    With `gradients`, backward sums the weights' gradients there as far as it can, and leaves other gradients to autograd.
    """
    if len(packed.hidden_index) == 0:
        return {name: output_kind(name).empty(packed) for name in outputs}
    if forward_kind(module) == "logits":
        return logit_outputs(module, packed, outputs, temperature)
    hidden = hidden_states(module, packed, gradients)

    def statistics() -> TokenStats:
        head = module.get_output_embeddings()
        return token_log_probs(
            hidden,
            weight_of(head),
            packed.targets,
            temperature,
            bias=getattr(head, "bias", None),
            chunk_tokens=chunk_tokens,
            gradients=gradients,
            fused=fuses_log_probs(module),
            **statistics_wanted(outputs, packed.columns, head.weight.shape[0]),
            **head_transform(module.config),
        )

    return computed_outputs(HeadInputs(module, hidden, packed.targets, temperature, statistics), packed, outputs)


def logit_outputs(
    module: HFModule, packed: PackedBatch, outputs: Sequence[str], temperature: float
) -> dict[str, torch.Tensor]:
    """The outputs of `packed_outputs` from the logits of the module's own forward. All of them exist at once."""
    logits = padded_logits(module, packed)
    options = statistics_wanted(outputs, packed.columns, logits.shape[1])
    statistics = partial(logit_statistics, logits, packed.targets, temperature, **options)
    return computed_outputs(HeadInputs(module, logits, packed.targets, temperature, statistics), packed, outputs)


def computed_outputs(
    inputs: HeadInputs,
    packed: PackedBatch,
    outputs: Sequence[str],
    joined: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> dict[str, torch.Tensor]:
    """The named outputs of `inputs` in their shapes; `joined` joins the values of ranks that have some of the tokens."""
    kinds = {name: output_kind(name) for name in outputs}
    return {name: kind.scatter(packed, joined(kind.compute(inputs))) for name, kind in kinds.items()}


def head_transform(config: PreTrainedConfig) -> dict[str, Any]:
    """A family's transform of its logits after the projection: Gemma caps them, Cohere multiplies and Granite divides."""
    config = config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None)
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return {
        "softcap": next((getattr(config, name) for name in caps if getattr(config, name, None)), None),
        "logit_scale": float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor),
    }
