"""A frozen model with its weights on the host; they come to the device layer by layer, during the forward that reads them.

    device   | embeddings, last norm, head ............................ |    for a call
             | layer 0 | layer 1 | layer 2 | ...                             each during its own forward

Every micro-batch reads the layers again: least memory, at the price of copies.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from verl.models.hf_module import HFModule


class StreamedWeights:
    """Hooks of the layers of `module`, with parameters on the host; its buffers move to `device` and stay there."""

    def __init__(self, module: HFModule, device: torch.device):
        self._device = device
        self._on_host: dict[nn.Parameter, torch.Tensor] = {}
        layers = decoder_layers(module)
        inside = {part for layer in layers for part in layer.modules()}
        outside = [part for part in module.modules() if part not in inside]
        self._others = list(dict.fromkeys(p for part in outside for p in part.parameters(recurse=False)))
        for layer in layers:
            parameters = [p for p in layer.parameters() if p not in set(self._others)]
            layer.register_forward_pre_hook(lambda *_, parameters=parameters: self._bring(parameters))
            layer.register_forward_hook(lambda *_, parameters=parameters: self._drop(parameters), always_call=True)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, the module can be called."""
        self._bring(self._others)
        try:
            yield
        finally:
            self._drop(list(self._on_host))

    def _bring(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            self._on_host[p] = p.data
            p.data = torch.empty_like(p.data, device=self._device).copy_(p.data)

    def _drop(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p in self._on_host:
                p.data = self._on_host.pop(p)


def decoder_layers(module: HFModule) -> list[nn.Module]:
    """The layers of a causal language model, in order."""
    decoder = module.get_decoder()
    lists = [part for part in decoder.modules() if isinstance(part, nn.ModuleList)]
    return list(getattr(decoder, "layers", max(lists, key=len, default=())))
