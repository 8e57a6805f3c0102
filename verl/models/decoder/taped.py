"""The sums of training on a CPU: of its forward, and of a sampler that computes with its bits."""

from typing import Any

import torch

from verl.models.decoder.adapted import linear
from verl.models.decoder.forward import DecoderPass, Sum
from verl.models.decoder.halves import Normed
from verl.models.decoder.layers import DenseLayer, Mixture, Norm
from verl.models.decoder.projection import Projection
from verl.models.decoder.weights import DenseDecoder
from verl.models.ops.experts import ExpertChoice
from verl.models.ops.linear import Matmul
from verl.models.parallel.experts import Places
from verl.models.routing import Routing


class TapedPass(DecoderPass):
    """Norms and products of a forward. They go to a tape in a layer whose activations are kept."""

    def __init__(self, decoder: DenseDecoder, routing: Routing | None):
        super().__init__(decoder)
        self.routing, self.matmul = routing, Matmul(decoder.embed.dtype, decoder.embed.device)
        self._tape: list[Any] | None = None  # the fields of Saved

    def normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderPass."""
        normed = Normed.of(x, norm)
        self._keep(normed)
        return x, normed.out()

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """See DecoderPass."""
        y = linear(x, projection, self.matmul)
        self._keep(y)
        return y

    def project(self, x: torch.Tensor, inputs: torch.Tensor, projection: Projection, norm: Norm | None) -> Sum:
        """See DecoderPass."""
        if norm is None:
            self._keep(None)
            return linear(inputs, projection, self.matmul, residual=x), None
        _, normed = self.normed(linear(inputs, projection, self.matmul), None, norm)
        return normed.add_(x), None

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; the sum is made."""
        x, delta = super().feed_forward(weights, x, delta)
        return x if delta is None else delta.add_(x), None

    def routed(self, mixture: Mixture, x: torch.Tensor) -> tuple[ExpertChoice, Places]:
        """See DecoderPass."""
        choice, places = super().routed(mixture, x)
        self._keep(choice, places)
        return choice, places

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        return self.matmul.linear(x, weight)

    def by_experts(self, mixture: Mixture, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        gate_up = self.matmul.grouped(rows, mixture.gate_up, ends)
        self._keep(gate_up)
        return self.matmul.grouped(self.activated(gate_up), mixture.down, ends)

    def _keep(self, *values: object) -> None:
        if self._tape is not None:
            self._tape += values
