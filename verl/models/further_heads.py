"""Training of a head that predicts the token after the next (multi-token prediction, arXiv:2412.19437, section 2.2).

    state of token i        ──► norm ──┐
    embedding of token i+1  ──► norm ──┴► join ──► a layer as the model's last ──► norm ──► output projection ──► token i+2

The states come from one more forward without gradients, and embedding and output projection are read as constants. So the
loss has gradients of the head only: the policy trains to the same bits with it and without.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from verl.data_proto.extras import row_media_of
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import ModelError
from verl.models.folder import TensorHeader, fetch, opened, read_headers
from verl.models.forward import decoder_states, head_transform
from verl.models.heads import is_further_head
from verl.models.hf_module import HFModule
from verl.models.log_probs import token_log_probs
from verl.models.lora import lora_layers
from verl.models.packing import PackedBatch, pack_rows
from verl.models.padded import forward_kind


class _Names(NamedTuple):
    """Names of a head's parts behind `prefix`, as a family's checkpoints have them."""

    prefix: str
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    layer: str = ""
    hidden_first: bool = False  # in the input of `join`
    reads_normed: bool = True  # states behind the final norm of the decoder


_FAMILIES = (
    _Names(r"(.*\.)?layers\.\d+\.", "enorm.", "hnorm.", "eh_proj.", "shared_head.norm."),  # DeepSeek-V3, GLM-4.5
    _Names(r"(.*\.)?mtp_layers\.\d+\.", "token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.",
           hidden_first=True, reads_normed=False),  # MiMo
    _Names(r"(.*\.)?mtp\.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0."),  # Qwen3-Next, 3.5
)  # fmt: skip
_heads: WeakKeyDictionary[nn.Module, FurtherHead] = WeakKeyDictionary()
_COPIES = {"embed_tokens.weight": "get_input_embeddings", "shared_head.head.weight": "get_output_embeddings"}


def read_head(module: HFModule, source: str, setting: str) -> tuple[Path, dict[str, TensorHeader], dict[str, _Names]]:
    """The folder of `source`, the tensors of its head, and their family by the tensor that joins inputs; see FurtherHead."""
    folder = fetch(source, weights=True)
    headers = {n: h for n, h in read_headers(folder).items() if is_further_head(n, module.config)}
    names = {n: family for n in headers for family in _FAMILIES if re.match(family.prefix + family.join, n)}
    if forward_kind(module) != "packed":
        raise ModelError(
            f"A head for further tokens needs packed rows, which {type(module).__name__} does not compute. Set {setting}."
        )
    if len(names) != 1:
        raise ModelError(
            f"{source} has {len(names) or 'no'} heads that predict further tokens, and one is needed. Set {setting}, or "
            "choose a checkpoint with one."
        )
    return folder, headers, names


class FurtherHead(nn.Module):
    """The head of `module` in the folder or hub name `source`, in the dtype of `module`. `copies` has the parameter of `module`
    by the name of a tensor that repeats it. Raises ModelError for a folder without exactly one head, and says what `setting`,
    which needs one, should be."""

    def __init__(self, module: HFModule, source: str, setting: str = "model.mtp.enable_train=False"):
        super().__init__()
        folder, headers, names = read_head(module, source, setting)
        self.names = next(iter(names.values()))
        decoder = module.get_decoder()
        size, weight = decoder.config.hidden_size, next(module.parameters())
        self.join = nn.Linear(2 * size, size, bias=False, dtype=weight.dtype, device=weight.device)
        self.token_norm, self.hidden_norm, self.norm = (copy.deepcopy(decoder.norm) for _ in range(3))
        self.layer = copy.deepcopy(decoder.layers[-1])
        for name, part in lora_layers(self.layer).items():  # adapters are the policy's
            plain = nn.Linear(part.in_features, part.out_features, part.bias is not None, weight.device, weight.dtype)
            self.layer.set_submodule(name, plain)
        self.layer.gradient_checkpointing = False
        self.requires_grad_(True)
        self._stacked = any(name.endswith(".experts.down_proj") for name in headers)  # experts, as Qwen3.5 has them
        self._prefix = next(cast("re.Match[str]", re.match(self.names.prefix, name))[0] for name in names)
        parameters = {id(p): name for name, p in module.named_parameters()}
        copied = {self._prefix + name: getattr(module, get)().weight for name, get in _COPIES.items()}
        self.copies = {name: parameters[id(weight)] for name, weight in copied.items() if name in headers}
        views = self.in_checkpoint(self.state_dict())
        if differing := views.keys() ^ (headers.keys() - self.copies.keys()):
            raise ModelError(
                f"The head in {source} has other tensors than a layer of its model: {len(differing)} differ, such as "
                f"{min(differing)}. Set {setting}."
            )
        for name, view in views.items():
            with opened(folder / headers[name].file) as file, torch.no_grad():
                view.copy_(file.get_tensor(name))
        _heads[module] = self

    @classmethod
    def of(cls, module: Any, setting: str) -> FurtherHead:
        """The head that was made of `module`, which may train, or the head in its folder; see FurtherHead."""
        held = _heads.get(module)
        return cls(module, module.config._name_or_path, setting).requires_grad_(False) if held is None else held

    def forward(self, module: Any, packed: PackedBatch) -> torch.Tensor:
        """States of the head, [tokens, hidden_size], for the tokens of `packed`; a token's state predicts the token after the
        next."""
        decoder, names, ids = module.get_decoder(), self.names, packed.input_ids[0]
        with torch.no_grad():
            before: list[torch.Tensor] = []
            with decoder.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0])):
                hidden = decoder_states(decoder, packed)
            hidden = hidden if names.reads_normed else before[0][0]
            # a row's last token predicts nothing
            tokens = F.embedding(ids.roll(-1), module.get_input_embeddings().weight)
        x = self.join(self.joined(tokens, hidden)).unsqueeze(0)
        turns = decoder.rotary_emb(x, packed.position_ids)
        settings = {"position_embeddings": turns, "position_ids": packed.position_ids, "layout": packed.layout}
        out = self.layer(x, attention_mask=None, use_cache=False, **settings)
        return cast("torch.Tensor", self.norm(out[0] if isinstance(out, tuple) else out)[0])

    def joined(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of `join`, [tokens, 2 * hidden_size], of embeddings and of the states of the tokens before."""
        parts = self.token_norm(tokens), self.hidden_norm(hidden)
        return torch.cat(parts[::-1] if self.names.hidden_first else parts, -1)

    def loss(self, module: Any, batch: DataProto, num_tokens: int) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The cross-entropy of trained response tokens, their sum divided by `num_tokens`, and metrics. Each row is computed by
        itself. The first two tokens of a row have no prediction."""
        if any(row_media_of(batch) or ()):
            raise ModelError(
                "A head for further tokens trains on text, and rows have images. Set model.mtp.enable_train=False."
            )
        device = self.join.weight.device
        packed = pack_rows(batch.batch, share_prompts=False, device=device)
        at = packed.hidden_index
        predicted = packed.position_ids[0, at] > 0
        states = self(module, packed).index_select(0, at[predicted] - 1)
        head, targets = module.get_output_embeddings(), packed.targets[predicted]
        bias = None if getattr(head, "bias", None) is None else head.bias.detach()
        transform = head_transform(module.config)
        statistics = token_log_probs(states, head.weight.detach(), targets, bias=bias, **transform)
        loss = -statistics.log_probs.sum() / max(1, num_tokens)
        return loss, {"mtp_loss": Metric.sum(loss.detach())}

    def in_checkpoint(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`values` by name of parameter here, as views by name in a checkpoint, which has experts as the head's had them."""
        views = dict[str, torch.Tensor]()
        for name, value in values.items():
            part, _, below = name.partition(".")
            name = self._prefix + getattr(self.names, part) + below
            block, _, leaf = name.rpartition(".")
            if self._stacked or leaf not in ("gate_up_proj", "down_proj"):
                views[name] = value
                continue
            for number, expert in enumerate(value):
                halves = expert.chunk(2) if leaf == "gate_up_proj" else (expert,)
                names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
                views |= {f"{block}.{number}.{n}.weight": half for n, half in zip(names, halves, strict=True)}
        return views
