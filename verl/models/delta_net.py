"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), by the layout of a forward.

    S_t = a_t S_{t-1} + k_t (beta_t (v_t - a_t S_{t-1}^T k_t))^T      o_t = S_t^T q_t      a_t = exp(decay_t)

A layer has a causal convolution of its last few inputs and a matrix S [key_dim, value_dim] for each head in place of keys and
values. The modules of transformers stay as they are, and call `layout.recur` in place of their own rule if they get a layout.
Training computes chunks of tokens (section 3.2 of arXiv:2406.06484) along the rows of a packed batch, sampling one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.ops.varlen import PackedSegment
from verl.parallel.device import to_device

CHUNK = 64  # tokens
_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")
# inputs of the convolution [rows, channels, kernel - 1], and matrices [rows, heads, key_dim, value_dim]
States = Sequence[torch.Tensor]


def lay_out_delta_nets(module: nn.Module) -> None:
    """Let the layers of `module` with linear attention follow a layout, if they get one."""
    for part in module.modules():
        if type(part).__name__ in _NETS:
            part.forward = MethodType(_forward, part)
        elif type(getattr(part, "linear_attn", None)).__name__ in _NETS:  # transformers 5.6 to 5.9
            part.register_forward_pre_hook(_hand_down, with_kwargs=True)


def _hand_down(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    layer.linear_attn.layout = kwargs.get("layout")


def _forward(self: Any, hidden_states: torch.Tensor, *args: Any, layout: Any = None, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor
    handed, layout = layout, vars(self).pop("layout", None)
    layout = handed if layout is None else layout
    if layout is None:
        result = type(self).forward(self, hidden_states, *args, **kwargs)
        return result
    inputs, gate = DeltaInputs.of(self, hidden_states)
    out = layout.recur(self.layer_idx, inputs).to(hidden_states.dtype)
    result = self.out_proj(self.norm(out.flatten(0, 1), gate).view(*hidden_states.shape[:2], -1))
    return result


@dataclass(frozen=True)
class DeltaInputs:
    """Tokens of a layer: `mixed` [tokens, channels] enter the convolution with `kernel` [channels, 1, inputs] and `bias`, which
    gives queries, keys and values. `decay` and `beta` [tokens, heads] are float32 or wider, as all that comes behind the
    convolution. `num_keys` heads have keys, of `key_dim` elements; each serves as many heads of values."""

    mixed: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    kernel: torch.Tensor
    bias: torch.Tensor | None
    num_keys: int
    key_dim: int

    @classmethod
    def of(cls, net: Any, x: torch.Tensor) -> tuple[DeltaInputs, torch.Tensor]:
        """The inputs of x [1, tokens, hidden_size], and the gate [tokens * heads, value_dim] of the outputs."""
        if hasattr(net, "in_proj_qkvz"):  # Qwen3-Next
            *heads, z, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(x), net.in_proj_ba(x))
            mixed = torch.cat([part.flatten(2) for part in heads], dim=2)
        else:
            mixed, z, b, a = net.in_proj_qkv(x), net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        decay = -net.A_log.to(wide).exp() * F.softplus(a[0].to(wide) + net.dt_bias.to(wide))
        beta, kernel = b[0].sigmoid().to(wide), net.conv1d.weight
        inputs = cls(mixed[0], decay, beta, kernel, net.conv1d.bias, net.num_k_heads, net.head_k_dim)
        return inputs, z.reshape(-1, net.head_v_dim)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.num_keys * self.key_dim
        return keys, keys, self.mixed.shape[1] - 2 * keys

    @property
    def first_states(self) -> States:
        """The states of a row without tokens."""
        (_, heads), (channels, _, context) = self.decay.shape, self.kernel.shape
        past = self.mixed.new_zeros(()).expand(1, channels, context - 1)
        return past, self.decay.new_zeros(()).expand(1, heads, self.key_dim, self.sizes[2] // heads)

    def part(self, start: int, end: int) -> DeltaInputs:
        """The tokens [start, end)."""
        tokens = slice(start, end)
        return replace(self, mixed=self.mixed[tokens], decay=self.decay[tokens], beta=self.beta[tokens])

    def heads(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [..., heads, key_dim] and values [..., heads, value_dim] of `rows` [rows, channels, inputs], each
        with the inputs of the convolution before it: [rows, outputs, ...]."""
        out = F.silu(F.conv1d(rows, self.kernel, self.bias, groups=rows.shape[1]))
        q, k, v = out.transpose(1, 2).to(self.decay.dtype).split(self.sizes, dim=2)
        heads = self.decay.shape[1]
        copies = heads // self.num_keys
        q, k = (_unit(x.unflatten(2, (self.num_keys, -1))).repeat_interleave(copies, dim=2) for x in (q, k))
        return q * self.key_dim**-0.5, k, v.unflatten(2, (heads, -1))

    def packed(self, plan: DeltaPlan) -> torch.Tensor:
        """Outputs [tokens, heads, value_dim] of packed rows, differentiable."""
        rows = _rows(self.mixed, plan.inputs).t().unsqueeze(0)
        q, k, v = (x[0].index_select(0, plan.outputs) for x in self.heads(rows))
        return delta_rule((q, k, v, self.decay, self.beta), plan)[0]

    def continued(self, states: States) -> torch.Tensor:
        """Outputs of the tokens that follow `states` [1, ...], which are renewed in place."""
        past, matrices = states
        row = torch.cat([past, self.mixed.t().unsqueeze(0)], dim=2)
        past.copy_(row[:, :, row.shape[2] - past.shape[2] :])
        plan = DeltaPlan([PackedSegment(0, len(self.mixed))], 0, self.mixed.device)
        out, last = delta_rule((*(x[0] for x in self.heads(row)), self.decay, self.beta), plan, matrices)
        matrices.copy_(last)
        return out

    def stepped(self, states: States) -> torch.Tensor:
        """Outputs of the next token of each row of `states`, which are renewed in place."""
        past, matrices = states
        row = torch.cat([past, self.mixed.unsqueeze(2)], dim=2)
        past.copy_(row[:, :, 1:])
        q, k, v = (x[:, 0] for x in self.heads(row))
        matrices.mul_(self.decay.exp()[..., None, None])
        change = (v - _read(matrices, k)) * self.beta[..., None]
        matrices.addcmul_(k[..., None], change[..., None, :])
        return _read(matrices, q)


class DeltaPlan:
    """Segments as a convolution with `context` inputs before each token and a recurrence read them.

    `inputs` are the tokens that enter the convolution, each segment behind the end of its prefix, and `outputs` the places of
    all tokens among its results. `chunks` [chunks, tokens] are the tokens of each chunk; -1 is no token. `places` are the
    places of all tokens in the chunks. Chunks with as many before them in their rows are a level. `levels` are (first chunk,
    one behind the last, for each of them the chunk of the level before that gives its state; None at the starts of rows).
    """

    def __init__(self, segments: Sequence[PackedSegment], context: int, device: torch.device):
        size = min(CHUNK, max(segment.length for segment in segments))
        inputs, outputs, num_inputs = list[torch.Tensor](), list[torch.Tensor](), 0
        chunks: list[tuple[int, int, torch.Tensor]] = []  # (level, number of the chunk before, tokens)
        last: dict[tuple[int, int], int] = {}  # chunk of the segment with this start and length
        for segment in segments:
            span = torch.arange(segment.start, segment.start + segment.length)
            start, count = segment.prefix_start, segment.prefix_length
            before = torch.arange(start + count - context, start + count)
            inputs += [before.masked_fill(before < start, -1) if count else torch.full((context,), -1), span]
            outputs.append(num_inputs + torch.arange(segment.length))
            num_inputs += context + segment.length
            number = last[start, count] if count else -1
            for tokens in span.split(size) if segment.length else ():
                level = 0 if number < 0 else chunks[number][0] + 1
                chunks.append((level, number, F.pad(tokens, (0, size - len(tokens)), value=-1)))
                number = len(chunks) - 1
            last[segment.start, segment.length] = number
        self.inputs, self.outputs = to_device(torch.cat(inputs), device), to_device(torch.cat(outputs), device)
        order = sorted(range(len(chunks)), key=lambda number: chunks[number][0])
        tokens = torch.stack([chunks[number][2] for number in order])
        real = (tokens >= 0).flatten().nonzero()[:, 0]
        self.chunks, self.places = to_device(tokens, device), to_device(real[tokens.flatten()[real].argsort()], device)
        self.levels: list[tuple[int, int, torch.Tensor | None]] = []
        end, place = 0, dict[int, int]()
        for level, members in itertools.groupby(order, key=lambda number: chunks[number][0]):
            numbers = list(members)
            states = torch.tensor([place[chunks[number][1]] for number in numbers] if level else [])
            self.levels.append((end, end + len(numbers), to_device(states, device) if level else None))
            end, place = end + len(numbers), {number: i for i, number in enumerate(numbers)}


def delta_rule(
    streams: Sequence[torch.Tensor], plan: DeltaPlan, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, heads, value_dim] of `streams`: q, k, v [tokens, heads, width], decay and beta [tokens, heads]. `state`
    [rows, heads, key_dim, value_dim] are the matrices before the first chunks. Also returns the last ones."""
    # [chunks, heads, tokens, ...]; products would copy what is not contiguous, and keep both
    q, k, v, decay, beta = (_rows(x, plan.chunks).transpose(1, 2).contiguous() for x in streams)
    total, k_beta = decay.cumsum(2), k * beta[..., None]
    later = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=total.device).triu(1)
    fade = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    # what each token writes depends on what the ones before it in the chunk have written
    system = k_beta @ k.mT * fade
    sides = v * beta[..., None], k_beta * total.exp()[..., None]
    written, from_state = (torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in sides)
    scores, q = q @ k.mT * fade, q * total.exp()[..., None]
    k, remains = k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp()[..., None, None]
    outs = []
    for first, end, before in plan.levels:
        if state is None:
            state = v.new_zeros(end - first, v.shape[1], k.shape[3], v.shape[3])
        elif before is not None:
            state = state.index_select(0, before)
        change = written[first:end] - from_state[first:end] @ state
        outs.append(q[first:end] @ state + scores[first:end] @ change)
        state = state * remains[first:end] + k[first:end].mT @ change
    assert state is not None
    return torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, plan.places), state


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows `index` of x; -1 is a row of zeros."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))[index]


def _read(matrices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """matrices [rows, heads, key_dim, value_dim], x [rows, heads, key_dim] -> [rows, heads, value_dim]."""
    return (x.unsqueeze(2) @ matrices).squeeze(2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
