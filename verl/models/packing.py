"""Layout of a batch's rows for one padding-free forward. A prompt that several rows share is computed once.

Three samples of one prompt:  [ prompt | response 1 | response 2 | response 3 ], one row of tokens. Response token i
has position prompt_length + i, sees all of the prompt and its own earlier tokens. Tokens after the last trained one are
not computed, nor are rows without a trained token. The last trained token is an input only if a score is read at it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.data_proto.extras import BatchExtras
from verl.data_proto.media import Media, MediaSpan, RowMedia, Spans
from verl.errors import DataError
from verl.models.ops.varlen import PackedSegment
from verl.models.packed import PackedLayout
from verl.models.routing import UNKNOWN, Routing
from verl.models.vision import PlacedMedia
from verl.parallel.device import to_device


@dataclass(frozen=True)
class Reads:
    """Positions of a row with needed hidden states. `predictions`: the positions that predict a trained response token.
    `last_token`: the last trained token itself, for scores of sequences. `columns` [batch, response, ...] of the
    batch are read at the same positions.

    >>> Reads(predictions=False, last_token=True).columns
    ()
    """

    predictions: bool = True
    last_token: bool = False
    columns: tuple[str, ...] = ()


_PREDICTIONS, _NO_EXTRAS = Reads(), BatchExtras()


@dataclass(frozen=True)
class PackedRow:
    """One row without its padding; `num_inputs` of its response tokens are fed to the model. `is_inside`: the response is the
    end of the prompt that has it."""

    index: int
    prompt: tuple[int, ...]
    num_inputs: int
    trains: bool
    media: Spans = ()
    is_inside: bool = False
    experts: np.ndarray | None = field(default=None, compare=False)  # [tokens, layers, k], see verl.models.routing
    costs: tuple[int, int] = (0, 0)  # of the images of prompt and response, in tokens

    @property
    def num_added(self) -> int:
        """Tokens that the row costs next to its prompt."""
        return self.num_inputs + self.costs[1]

    @property
    def origin(self) -> object:
        """The prompt with its images, and the experts that compute it: rows of equal origin may share it."""
        experts = None if self.experts is None else self.experts[: len(self.prompt)].tobytes()
        media = tuple(span for span in self.media if span.start < 0)
        return (self.prompt, media, experts) if media or experts else self.prompt


@dataclass(frozen=True)
class PackedBatch:
    """A forward pass. `hidden_index[i]` is a token whose hidden state is read. First are the tokens that predict `targets[i]`,
    response token `column[i]` of row `row[i]`. Then come `num_last` last tokens of rows. They predict nothing (target 0).
    All are int64 [positions]."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    layout: PackedLayout
    hidden_index: torch.Tensor
    targets: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    shape: tuple[int, int]  # (batch, response)
    num_last: int = 0
    noise: torch.Tensor | None = None  # [tokens, hidden_size], added to the embeddings
    columns: dict[str, torch.Tensor] = field(default_factory=dict)  # [positions, ...], of Reads.columns
    media: tuple[PlacedMedia, ...] = ()  # in the order of tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return self.input_ids.shape[1]

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[positions, ...] -> [batch, response, ...], the values of the predictions, zero elsewhere; differentiable."""
        row, column = self.row, self.column
        if self.num_last:
            row, column, values = (x[: -self.num_last] for x in (row, column, values))
        return values.new_zeros(*self.shape, *values.shape[1:]).index_put((row, column), values)

    def scatter_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[positions] -> [batch], the values at the last tokens, zero for rows that are not computed; differentiable."""
        first = len(self.row) - self.num_last
        return values.new_zeros(self.shape[0]).index_put((self.row[first:],), values[first:])


def placed_in(media: RowMedia, prompt_length: int) -> Spans:
    """The images of a row with their places; images of a data row are in all of the prompt."""
    if isinstance(media, tuple):
        return media
    return () if media is None else (MediaSpan(-prompt_length, prompt_length, media),)


def unpadded_rows(
    columns: Mapping[str, torch.Tensor],
    chosen: Sequence[int] | None = None,
    reads: Reads = _PREDICTIONS,
    extras: BatchExtras = _NO_EXTRAS,
    cost_of: Callable[[Media], int] | None = None,
) -> list[PackedRow]:
    """The rows `chosen` (default: all) of the columns prompts, prompt_mask, response_mask and, if present, response_is_inside,
    with their images and experts in `extras`. `cost_of` gives the cost of images in tokens (None: 0).

    Raises DataError for a row that trains on its very first token: nothing predicts it.
    """
    media, experts = extras.media, extras.experts
    prompts, prompt_mask = columns["prompts"].cpu(), columns["prompt_mask"].cpu().bool()
    trained = columns["response_mask"].cpu().bool()
    last = (trained * torch.arange(1, trained.shape[1] + 1)).amax(dim=1).tolist() if trained.shape[1] else []
    inside = columns["response_is_inside"].tolist() if "response_is_inside" in columns else [False] * len(prompts)
    rows = []
    for index in range(len(prompts)) if chosen is None else chosen:
        needed = last[index] if last else 0
        ids = tuple(prompts[index][prompt_mask[index]].tolist())
        if needed and not ids and reads.predictions and trained[index, 0]:
            raise DataError(
                f"Row {index} of the batch trains on its first token and has no prompt tokens; nothing predicts that token. "
                "Set response_mask to false there."
            )
        num_inputs = 0 if inside[index] else needed if reads.last_token else max(needed - 1, 0)
        images = () if media is None else placed_in(media[index], len(ids))
        picks = None if experts is None else experts[index]
        costs = [0, 0]
        for span in images:
            costs[span.start >= 0] += 0 if cost_of is None else cost_of(span.media)
        rows.append(PackedRow(index, ids, num_inputs, needed > 0, images, inside[index], picks, (costs[0], costs[1])))
    return rows


def group_rows(rows: Sequence[PackedRow], share_prompts: bool = True) -> list[list[PackedRow]]:
    """The rows that train, grouped by equal prompt in order of first appearance; each by itself when nothing is shared."""
    groups: dict[object, list[PackedRow]] = {}
    for row in rows:
        if row.trains:
            groups.setdefault(row.origin if share_prompts and row.prompt else row.index, []).append(row)
    return list(groups.values())


def num_computed(rows: Sequence[PackedRow], share_prompts: bool = True) -> int:
    """Tokens that one forward of `rows` computes: each prompt once, the inputs of the responses, and the costs of images."""
    groups = group_rows(rows, share_prompts)
    return sum(len(group[0].prompt) + group[0].costs[0] + sum(row.num_added for row in group) for group in groups)


def pack_rows(
    columns: Mapping[str, torch.Tensor],
    *,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
    chunk_tokens: int | None = None,
    reads: Reads = _PREDICTIONS,
    extras: BatchExtras = _NO_EXTRAS,
) -> PackedBatch:
    """Lay out the columns prompts, prompt_mask [batch, prompt], responses, response_mask [batch, response] and the extras of
    their rows. Rows with noise share no prompts. A layer that can computes `chunk_tokens` tokens at a time; None: all.

    A response is contiguous from column 0 up to its last trained token; holes in response_mask (user turns, tool output)
    are ordinary inputs that nothing predicts. A prompt may be empty if response_mask is false at the first token.
    """
    groups = group_rows(unpadded_rows(columns, None, reads, extras), share_prompts)
    trained, responses = columns["response_mask"].cpu().bool(), columns["responses"].cpu()
    ids, positions = list[torch.Tensor](), list[torch.Tensor]()
    segments: list[PackedSegment] = []
    index, where = list[torch.Tensor](), list[torch.Tensor]()
    last: list[tuple[int, int, int]] = []  # (position, row, column)
    start = 0
    for group in groups:
        prompt_length = len(group[0].prompt)
        prompt = torch.tensor(group[0].prompt, dtype=torch.int64)
        ids.append(torch.cat([prompt, *(responses[r.index, : r.num_inputs] for r in group)]))
        positions += [torch.arange(prompt_length), *(torch.arange(r.num_inputs) + prompt_length for r in group)]
        segments.extend(_segments(start, prompt_length, [row.num_inputs for row in group]))
        first = start + prompt_length
        for row in group:
            if reads.predictions:
                column = trained[row.index].nonzero().squeeze(1)
                begin = start + prompt_length - len(column) if row.is_inside else first
                index.append(torch.where(column == 0, min(begin, start + prompt_length) - 1, begin + column - 1))
                where.append(torch.stack([torch.full_like(column, row.index), column]))
            first += row.num_inputs
            last.append((first - 1, row.index, row.num_inputs - 1))
        start = first
    if num_last := len(last) if reads.last_token else 0:
        position, *of = torch.tensor(last).unbind(1)
        index, where = [*index, position], [*where, torch.stack(of)]
    row_index, column = torch.cat(where, dim=1) if where else torch.empty(2, 0, dtype=torch.int64)
    targets = responses[row_index, column]
    targets[len(targets) - num_last :] = 0
    media, routing = tuple(_placed(groups)), _replayed(groups, device)
    return PackedBatch(
        input_ids=_joined(ids, device).unsqueeze(0),
        position_ids=_joined(positions, device).unsqueeze(0),
        layout=PackedLayout(segments, chunk_tokens, routing),
        hidden_index=_joined(index, device),
        targets=to_device(targets, device),
        row=to_device(row_index, device),
        column=to_device(column, device),
        shape=(responses.shape[0], responses.shape[1]),
        num_last=num_last,
        noise=_joined([extras.noise(tokens) for tokens in ids], device) if extras.noise and ids else None,
        columns={name: to_device(columns[name].cpu()[row_index, column], device) for name in reads.columns},
        media=media,
    )


def _joined(parts: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    return to_device(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64), device)


def _placed(groups: Sequence[Sequence[PackedRow]]) -> Iterator[PlacedMedia]:
    """The images of the groups' prompts and responses, back to back. Behind its last input a row has none."""
    start = 0
    for group in groups:
        first = start + len(group[0].prompt)
        start = first + sum(row.num_inputs for row in group)
        for image in group[0].media:
            if image.start < 0:
                yield PlacedMedia(first + image.start, image.length, start, image.media)
        for row in group:
            for image in row.media:
                if 0 <= image.start < row.num_inputs:
                    yield PlacedMedia(first + image.start, image.length, first + row.num_inputs, image.media)
            first += row.num_inputs


def _replayed(groups: Sequence[Sequence[PackedRow]], device: torch.device | str) -> Routing | None:
    """The Routing of a packed forward of `groups`; None if no row has a record."""
    shape = next((row.experts.shape[1:] for group in groups for row in group if row.experts is not None), None)
    if shape is None:
        return None
    parts = [part for group in groups for part in _parts(group, shape)]
    return Routing(torch.from_numpy(np.concatenate(parts)).to(device))


def _parts(group: Sequence[PackedRow], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The records of a prompt, then of the responses to it; of the experts that are not in a record, -1."""
    num_prompt = len(group[0].prompt)
    spans = [(group[0], 0, num_prompt), *((row, num_prompt, num_prompt + row.num_inputs) for row in group)]
    for row, start, end in spans:
        part = np.full((end - start, *shape), UNKNOWN, dtype=np.int64)
        record = None if row.experts is None else row.experts[start:end]
        if record is not None:
            part[: len(record)] = record
        yield part


def by_row(groups: Sequence[Sequence[PackedRow]], record: np.ndarray) -> Mapping[int, np.ndarray]:
    """Row index -> its record [tokens, layers, k], of the record of a packed forward of `groups`."""
    rows, start = {}, 0
    for group in groups:
        prompt = record[start : start + len(group[0].prompt)]
        start += len(prompt)
        for row in group:
            rows[row.index] = np.concatenate([prompt, record[start : start + row.num_inputs]])
            start += row.num_inputs
    return rows


def _segments(start: int, prompt_length: int, inputs: list[int]) -> Iterator[PackedSegment]:
    """A lone row is one causal segment; several see the prompt as their prefix."""
    if len(inputs) == 1:
        yield PackedSegment(start, prompt_length + inputs[0])
        return
    yield PackedSegment(start, prompt_length)
    first = start + prompt_length
    for length in inputs:
        if length:
            yield PackedSegment(first, length, start, prompt_length)
        first += length
