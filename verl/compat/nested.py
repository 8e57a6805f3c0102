"""Columns of sequences without padding, as jagged tensors: `verl.workers.utils.padding`.

A model output at position t is of the token t + 1, so the outputs of a response begin one place before its first token.
"""

from typing import cast

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from verl.compat.tensordicts import nested_tensor_from_tensor_list

_SEQUENCES = ("input_ids", "position_ids")


def left_right_2_no_padding(data: TensorDict) -> TensorDict:
    """`data` with `input_ids` and `position_ids` [batch, sequence] as jagged tensors of the tokens under `attention_mask`, in
    place. Other columns keep their padding."""
    masks = data["attention_mask"].bool()
    for name in _SEQUENCES:
        columns = data[name]
        rows = [row[..., mask] for row, mask in zip(columns, masks, strict=True)]
        data[name] = nested_tensor_from_tensor_list(rows, rows[0].dim())  # also if all rows have one length
    return data


def embeds_padding_2_no_padding(data: TensorDict) -> TensorDict:
    """`data` with each column x_embeds [batch, sequence, width] as a jagged tensor of what x_embeds_mask keeps, in place."""
    for name in [str(key) for key in data.keys() if str(key).endswith("_embeds")]:
        if f"{name}_mask" in data.keys():
            rows = [row[mask.bool()] for row, mask in zip(data[name], data[f"{name}_mask"], strict=True)]
            data[name] = nested_tensor_from_tensor_list(rows, 1)
    return data


def no_padding_2_padding(nested: Tensor, data: TensorDict) -> Tensor:
    """Outputs of the response tokens [batch, response], of outputs at all tokens (jagged). `data` has `responses`; the width is
    that of `response_mask`."""
    lengths = _response_lengths(data)
    width = max(int(_width(data)), max(lengths, default=0))
    rows = [F.pad(row[-n - 1 : -1], (0, width - n)) for row, n in zip(nested.unbind(), lengths, strict=True)]
    return torch.stack(rows)


def response_from_nested(tensor: Tensor, response_mask: Tensor) -> Tensor:
    """Outputs of the response tokens, of outputs at all tokens; both jagged."""
    return nested_tensor_from_tensor_list(
        [row[-len(mask) - 1 : -1] for row, mask in zip(tensor.unbind(), response_mask.unbind(), strict=True)]
    )


def response_to_nested(tensor: Tensor, response_mask: Tensor) -> Tensor:
    """Values of response tokens [batch, response], padded on the right, as a jagged tensor of the lengths of a jagged mask."""
    return nested_tensor_from_tensor_list(
        [row[: len(mask)] for row, mask in zip(tensor, response_mask.unbind(), strict=True)]
    )


def build_attention_mask_from_nested(input_ids: Tensor, max_seq_len: int) -> Tensor:
    """1 on the tokens of each row of a jagged tensor: int32 [batch, max_seq_len]."""
    lengths = torch.tensor([len(row) for row in input_ids.unbind()], device=input_ids.device)
    is_token: Tensor = torch.arange(max_seq_len, device=lengths.device) < lengths[:, None]
    return is_token.to(torch.int32)


def _response_lengths(data: TensorDict) -> list[int]:
    responses = cast("Tensor", data["responses"])
    if responses.is_nested:
        return [len(row) for row in responses.unbind()]
    width = responses.shape[1]
    return cast("list[int]", data["attention_mask"][:, -width:].sum(-1).int().tolist())


def _width(data: TensorDict) -> int:
    mask = cast("Tensor | None", data.get("response_mask"))
    return 0 if mask is None or mask.is_nested else mask.shape[1]
