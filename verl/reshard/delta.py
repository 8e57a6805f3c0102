"""Changed values of a bucket, for receivers that still have the bucket of the update before.

    patch = changes(before, content)      # where they were sent; None: the content takes fewer bytes
    apply(patch, before)                  # where they arrive: `before` becomes `content`

At a learning rate of 1e-6 most bfloat16 weights stay as they are. A patch has the number of changed words (16 bits) in each
block of 2^16, then their places in the blocks, then the words: four bytes a changed word.
"""

import torch

_BLOCK_WORDS = 1 << 16
_FIRST = -(1 << 15)  # place of the first word of a block, as int16
_ROW_BYTES = 8  # compared at a time


def changes(before: torch.Tensor, content: torch.Tensor) -> torch.Tensor | None:
    """The patch from `before` to `content`, all uint8; None unless it is smaller. Both have the same multiple of 8 bytes."""
    rows = (before.view(torch.int64) != content.view(torch.int64)).nonzero().squeeze(1)
    if 4 * rows.numel() >= content.nbytes:
        return None
    old, new = (values.view(torch.int16).view(-1, _ROW_BYTES // 2) for values in (before, content))
    row, column = (old[rows] != new[rows]).nonzero(as_tuple=True)
    places = rows[row] * new.shape[1] + column
    counts = torch.bincount(places // _BLOCK_WORDS, minlength=_num_blocks(content)).to(torch.int32)
    in_block = (places % _BLOCK_WORDS + _FIRST).to(torch.int16)
    patch = torch.cat([counts.view(torch.int16), in_block, new.reshape(-1)[places]]).view(torch.uint8)
    return patch if patch.nbytes < content.nbytes else None


def apply(patch: torch.Tensor, content: torch.Tensor) -> None:
    """Write the changed words into `content`, uint8."""
    counts = patch[: 4 * _num_blocks(content)].view(torch.int32)
    in_block, values = patch[counts.nbytes :].view(torch.int16).chunk(2)
    blocks = torch.arange(len(counts), device=patch.device).repeat_interleave(counts)
    content.view(torch.int16)[blocks * _BLOCK_WORDS + in_block - _FIRST] = values


def _num_blocks(content: torch.Tensor) -> int:
    return -(-content.nbytes // (2 * _BLOCK_WORDS))
