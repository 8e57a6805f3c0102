"""The forward of models that cannot take packed batches: padded rows through the model's own code.

A shared prompt is computed once for each row and padding is computed too, so it is slower than a packed forward. Rows are
padded on the right, beyond the view of a causal model.

    forward_kind   hidden states                       logits
    packed         verl.models.forward                 chunks of verl.models.log_probs
    padded         the decoder's own, padded           chunks of verl.models.log_probs
    logits         -                                   the model's own, padded, all at once
"""

import inspect
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from verl.errors import ConfigError
from verl.models.hf_module import HFModule
from verl.models.packing import PackedBatch

ForwardKind = Literal["packed", "padded", "logits"]
KINDS: tuple[ForwardKind, ...] = ("packed", "padded", "logits")


def forward_kind(module: nn.Module) -> ForwardKind:
    """The forward that verl.models.check chose for `module`."""
    return cast("ForwardKind", getattr(module, "forward_kind", "packed"))


def require_packed(module: nn.Module, keys: str) -> None:
    """Raise ConfigError if the layout that `keys` ask for needs packed batches and `module` takes none."""
    if forward_kind(module) != "packed":
        raise ConfigError(
            f"{type(module).__name__} runs by its own padded forward, which cannot be divided as {keys} asks. Set it to 1."
        )


def padded_states(module: HFModule, packed: PackedBatch) -> torch.Tensor:
    """[positions, hidden_size] at `packed.hidden_index`, by the own forward of the decoder of `module`."""
    rows = PaddedRows(packed)
    output = rows.through(module.get_decoder(), module)
    states = getattr(output, "last_hidden_state", None)
    return rows.read(output[0] if states is None else states)


def padded_logits(module: nn.Module, packed: PackedBatch) -> torch.Tensor:
    """[positions, vocabulary] at `packed.hidden_index`, by the own forward of `module`."""
    rows = PaddedRows(packed)
    return rows.read(_logits(rows.through(module, module)))


def own_logits(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, vocabulary] of `ids` [rows, tokens] without padding."""
    return _logits(module(input_ids=ids, **_accepted(module, use_cache=False)))


class PaddedRows:
    """The rows of a packed batch, padded on the right. A prompt that other segments continue has no separate row.

    `source` [rows, width] is the packed token at each place; `real` [rows, width] is false at padding.
    """

    def __init__(self, packed: PackedBatch):
        segments = packed.layout.segments
        prefixes = {(s.prefix_start, s.prefix_length) for s in segments}
        spans = [
            (torch.arange(s.prefix_start, s.prefix_start + s.prefix_length), torch.arange(s.start, s.start + s.length))
            for s in segments
            if (s.start, s.length) not in prefixes
        ]
        rows = [torch.cat(span) for span in spans]
        device = packed.input_ids.device
        self.packed = packed
        self.source = pad_sequence(rows, batch_first=True).to(device)
        self.real = pad_sequence([torch.ones_like(row).bool() for row in rows], batch_first=True).to(device)

    def through(self, model: nn.Module, module: Any) -> Any:
        """The output of `model` (`module` or its decoder) for the rows."""
        packed = self.packed
        tokens: dict[str, torch.Tensor] = {"input_ids": packed.input_ids[0][self.source]}
        if packed.noise is not None:
            embedded = module.get_input_embeddings()(tokens["input_ids"])
            tokens = {"inputs_embeds": embedded + packed.noise[self.source].to(embedded)}
        mask = {} if bool(self.real.all()) else {"attention_mask": self.real.long()}
        return model(**tokens, **_accepted(model, use_cache=False, **mask))

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, width, size] -> [positions, size]; the tokens of a shared prompt are read in its first row."""
        places = self.real.flatten().nonzero().squeeze(1)
        first = torch.zeros(self.packed.num_tokens, dtype=torch.int64, device=places.device)
        first.scatter_reduce_(0, self.source[self.real], places, "amin", include_self=False)
        return values.flatten(0, 1).index_select(0, first[self.packed.hidden_index])


def _logits(output: Any) -> torch.Tensor:
    """Logits in the output of a causal language model: an object or mapping with `logits`, a tuple, or a tensor."""
    if isinstance(output, torch.Tensor):
        return output
    value = getattr(output, "logits", None)
    if value is None:
        value = output["logits"] if isinstance(output, dict) else output[0]
    return cast("torch.Tensor", value)


def _accepted(model: nn.Module, **settings: object) -> dict[str, Any]:
    """Entries of `settings` that the forward of `model` takes; a user's module may take only token ids."""
    parameters = inspect.signature(model.forward).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in settings.items() if any_name or name in parameters}
