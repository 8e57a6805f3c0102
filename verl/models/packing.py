"""Rows of a batch laid out for one padding-free forward in which a prompt that several rows share is computed once.

Three samples of one prompt:  [ prompt | response 1 | response 2 | response 3 ], one row of tokens. Response token i
has position prompt_length + i, sees the whole prompt and its own earlier tokens. A response's last token is not an
input: nothing that is asked for depends on it. Nor are tokens after the last one that trains, nor rows in which none
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from verl.errors import DataError
from verl.models.packed import PackedLayout, Segment
from verl.parallel.device import to_device


@dataclass(frozen=True)
class Row:
    """One row without its padding; `num_inputs` of its response tokens are fed to the model."""

    index: int
    prompt: tuple[int, ...]
    num_inputs: int
    trains: bool


@dataclass(frozen=True)
class PackedBatch:
    """A forward pass. `hidden_index[i]` is where the hidden state lies that predicts `targets[i]`, which is response
    token `column[i]` of row `row[i]` (all [predictions], int64)."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    layout: PackedLayout
    hidden_index: torch.Tensor
    targets: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    shape: tuple[int, int]  # (batch, response)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return self.input_ids.shape[1]

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[predictions] -> [batch, response], zero elsewhere; differentiable."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)


def read_rows(columns: Mapping[str, torch.Tensor], chosen: Sequence[int] | None = None) -> list[Row]:
    """The rows `chosen` (default: all) of the columns prompts, prompt_mask and response_mask.

    Raises DataError for a row that trains without a prompt: nothing predicts its first token.
    """
    prompts, prompt_mask = columns["prompts"].cpu(), columns["prompt_mask"].cpu().bool()
    trained = columns["response_mask"].cpu().bool()
    last = (trained * torch.arange(1, trained.shape[1] + 1)).amax(dim=1).tolist() if trained.shape[1] else []
    rows = []
    for index in range(len(prompts)) if chosen is None else chosen:
        needed = last[index] if last else 0
        ids = tuple(prompts[index][prompt_mask[index]].tolist())
        if needed and not ids:
            raise DataError(
                f"Row {index} of the batch has a response but no prompt tokens; nothing predicts its first token."
            )
        rows.append(Row(index, ids, max(needed - 1, 0), needed > 0))
    return rows


def group_rows(rows: Sequence[Row], share_prompts: bool = True) -> list[list[Row]]:
    """The rows that train, gathered by equal prompt in order of first appearance; each alone when nothing is shared."""
    groups: dict[tuple[int, ...] | int, list[Row]] = {}
    for row in rows:
        if row.trains:
            groups.setdefault(row.prompt if share_prompts else row.index, []).append(row)
    return list(groups.values())


def num_computed(group: Sequence[Row]) -> int:
    """Tokens that a group costs: its prompt once, and the inputs of its responses."""
    return len(group[0].prompt) + sum(row.num_inputs for row in group)


def pack_rows(
    columns: Mapping[str, torch.Tensor],
    *,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
    chunk_tokens: int | None = None,
) -> PackedBatch:
    """Lay out the columns prompts, prompt_mask [batch, prompt], responses, response_mask [batch, response].
    `chunk_tokens` is how many tokens a layer computes at a time, where it can; None: all.

    A response is taken to be contiguous from column 0 up to its last trained token; holes in response_mask (tool
    output) are ordinary inputs that nobody predicts.
    """
    groups = group_rows(read_rows(columns), share_prompts)
    trained, responses = columns["response_mask"].cpu().bool(), columns["responses"].cpu()
    ids: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    segments: list[Segment] = []
    index: list[torch.Tensor] = []
    where: list[torch.Tensor] = []
    start = 0
    for group in groups:
        prompt_length = len(group[0].prompt)
        ids.append(torch.tensor(group[0].prompt))
        ids.extend(responses[row.index, : row.num_inputs] for row in group)
        positions.append(torch.arange(prompt_length))
        positions.extend(torch.arange(prompt_length, prompt_length + row.num_inputs) for row in group)
        segments.extend(_segments(start, prompt_length, [row.num_inputs for row in group]))
        first = start + prompt_length
        for row in group:
            columns_here = trained[row.index].nonzero().squeeze(1)
            index.append(torch.where(columns_here == 0, start + prompt_length - 1, first + columns_here - 1))
            where.append(torch.stack([torch.full_like(columns_here, row.index), columns_here]))
            first += row.num_inputs
        start = first
    row_index, column = torch.cat(where, dim=1) if where else torch.empty(2, 0, dtype=torch.int64)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return to_device(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64), device)

    return PackedBatch(
        input_ids=joined(ids).unsqueeze(0),
        position_ids=joined(positions).unsqueeze(0),
        layout=PackedLayout(segments, chunk_tokens),
        hidden_index=joined(index),
        targets=to_device(responses[row_index, column], device),
        row=to_device(row_index, device),
        column=to_device(column, device),
        shape=(responses.shape[0], responses.shape[1]),
    )


def _segments(start: int, prompt_length: int, inputs: list[int]) -> Iterator[Segment]:
    """A lone row is one causal segment; several see the prompt as their prefix."""
    if len(inputs) == 1:
        yield Segment(start, prompt_length + inputs[0])
        return
    yield Segment(start, prompt_length)
    first = start + prompt_length
    for length in inputs:
        if length:
            yield Segment(first, length, start, prompt_length)
        first += length
