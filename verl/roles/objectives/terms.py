"""Parts that objectives share."""

import torch

from verl.algorithms.reduce import Aggregate, agg_loss
from verl.data_proto.proto import DataProto
from verl.data_proto.token_values import token_keys
from verl.engines.api import BatchTotals

_LOGGED_ROWS = 16  # of an update, on each rank: a data set is not written again as samples


def aggregate(mode: str, scale: float, totals: BatchTotals) -> Aggregate:
    """The reduction of a loss matrix [batch, response] by `mode`, divided by the `totals` of the mini-batch; `scale` is the
    constant divisor of seq-mean-token-sum-norm."""

    def agg(matrix: torch.Tensor, mask: torch.Tensor, mode_override: str | None = None, /) -> torch.Tensor:
        return agg_loss(
            matrix,
            mask,
            mode_override or mode,
            batch_num_tokens=max(1, totals.num_tokens),  # if no token trains, the loss is 0, not NaN
            global_batch_size=max(1, totals.num_sequences),
            loss_scale_factor=scale,
        )

    return agg


def zero_or_nan(outputs: torch.Tensor) -> torch.Tensor:
    """0, or NaN if the model's outputs are not all finite: a clipped loss may hide that, and the step must not be taken."""
    return (outputs.detach() * 0.0).sum()


class FirstRows:
    """The tokens of the first rows of an update, for the samples files."""

    def __init__(self) -> None:
        self._num_rows = 0
        # mask and keys, and values that are read after the step, since the host does not wait
        self._rows: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []

    def add(self, outputs: dict[str, torch.Tensor], batch: DataProto, mask: torch.Tensor) -> None:
        """Keep the tokens in `mask`, on the host, of the rows of a micro-batch, while there are fewer than the limit."""
        room = _LOGGED_ROWS - self._num_rows
        if room <= 0:
            return
        mask = mask.clone()
        mask[room:] = False
        self._num_rows += min(room, len(mask))
        if keys := token_keys(batch, mask):
            self._rows.append((mask, keys, [outputs[name].detach() for name in ("log_probs", "entropy")]))

    def pop(self) -> list[torch.Tensor]:
        """[*token_keys, log-probs, entropy] of the tokens, flat; [] for none."""
        rows, self._rows, self._num_rows = self._rows, [], 0
        parts = [[*keys, *(values.cpu()[mask] for values in computed)] for mask, keys, computed in rows]
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
