"""Make the layers of a decoder compute in the numbers of the sampler (verl/models/qat.py)."""

from __future__ import annotations

from verl.config import full_key
from verl.errors import ConfigError
from verl.models.decoder.weights import DenseDecoder
from verl.models.hf_module import HFModule
from verl.models.qat import RoundedLinear


def round_layers(module: HFModule) -> None:
    """Make the projections of `module` RoundedLinear, those that the sampler quantizes. Raises ConfigError for other models."""
    decoder, key = DenseDecoder.of(module), full_key("actor.qat.enable")
    if decoder is None or decoder.has_experts or decoder.departures:
        name = type(module).__name__
        raise ConfigError(f"{key}=True rounds plain dense decoders, and {name} is none. Set it to False.")
    for projection in decoder.projections():
        for part in projection.parts:
            part.__class__ = RoundedLinear
