"""Plain float64 references: dense attention with a mask, one unpadded row at a time, logits in full.

The families' normalisations and routers compute in float32 whatever they are given; `widen_norms` lets them keep float64,
so that the packed path can be held to 1e-10.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from verl.models.attention import ATTENTION_NAME


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def dense_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(query.shape[2])
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value), None


AttentionInterface.register("reference_dense", dense_attention)
AttentionMaskInterface.register("reference_dense", lambda *args, **kwargs: None)


def widen_norms(module: Any) -> Any:
    """Make the forwards of RMS norms, of mixtures' routers and of linear attention stay in float64. Returns the module.

    A router that multiplies in float32 differs by 1e-8 between row counts for which the library has other kernels.
    """

    def exact(self: Any, x: torch.Tensor) -> torch.Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        adds_one = any(name in type(self).__name__ for name in ("Gemma", "Qwen3_5", "Qwen3Next"))
        weight = 1.0 + self.weight if adds_one else self.weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = types.MethodType(exact, part)
        elif type(part).__name__.endswith(("Router", "RMSNormGated")):
            part.forward = types.MethodType(_in_float64(type(part).forward), part)
        elif type(part).__name__.endswith("GatedDeltaNet"):  # a forward of the instance asks its class
            rule = _in_float64(sys.modules[type(part).__module__].torch_chunk_gated_delta_rule)
            forward = _in_float64(type(part).forward, torch_chunk_gated_delta_rule=rule)
            part.__class__ = type(type(part).__name__, (type(part),), {"forward": forward})
            if "chunk_gated_delta_rule" in vars(part):  # transformers 5.6
                part.chunk_gated_delta_rule = rule
    return module


class _Float64Torch:
    """`torch`, but for the names of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _in_float64(forward: Any, **names: Any) -> Any:
    """The same function, computing in float64 in place of float32, with other values of its module's `names`."""
    forward = inspect.unwrap(forward)
    scope = {**forward.__globals__, "torch": _Float64Torch(), **names}
    wide = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__)

    def in_float64(*args: Any, **settings: Any) -> Any:
        with _NoFloat():
            return wide(*args, **settings)

    return in_float64


class _NoFloat(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.float else function(*args, **(kwargs or {}))


class _RoundedByRows(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            rows = y.numel() // max(1, y.shape[-1])
            y = y * (1 + rows % 5 * torch.finfo(y.dtype).eps)
        return y


@contextlib.contextmanager
def rounded_by_rows() -> Iterator[None]:
    """The matrix library of another processor: the last bits of `linear` change with the number of rows."""
    with _RoundedByRows():
        yield


def row_logits(module: Any, ids: torch.Tensor, attention: str = "reference_dense") -> torch.Tensor:
    """[tokens, vocabulary] logits of one unpadded row through another attention than ours."""
    module.set_attn_implementation(attention)
    try:
        return module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)


def reference_outputs(
    module: Any, columns: dict[str, torch.Tensor], temperature: float = 1.0, attention: str = "reference_dense"
) -> dict[str, torch.Tensor]:
    """log_probs, entropy, sum_pi_squared and mean_logit [batch, response], row by row from full logits."""
    responses, mask = columns["responses"], columns["response_mask"]
    dtype = next(module.parameters()).dtype
    outputs = {name: [] for name in ("log_probs", "entropy", "sum_pi_squared", "mean_logit")}
    for row in range(len(responses)):
        prompt = columns["prompts"][row][columns["prompt_mask"][row]]
        logits = row_logits(module, torch.cat([prompt, responses[row]]), attention)[len(prompt) - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)
        p = log_p.exp()
        outputs["log_probs"].append(log_p.gather(1, responses[row].unsqueeze(1)).squeeze(1))
        outputs["entropy"].append(-(p * log_p).sum(-1))
        outputs["sum_pi_squared"].append(p.square().sum(-1))
        outputs["mean_logit"].append(logits.mean(-1))
    return {name: torch.stack(values) * mask.to(dtype) for name, values in outputs.items()}


def make_columns(
    prompts: list[list[int]], responses: list[list[int]], *, pad_prompt: int = 0, pad_response: int = 0
) -> dict[str, torch.Tensor]:
    """The columns of the column table for these rows, with extra padding on both sides if asked."""
    width_p = max(len(p) for p in prompts) + pad_prompt
    width_r = max(len(r) for r in responses) + pad_response
    padding = [[0] * (width_p - len(p)) for p in prompts]
    prompt_mask = torch.tensor(
        [[False] * len(pad) + [True] * len(p) for pad, p in zip(padding, prompts, strict=True)]
    ).bool()
    response_mask = torch.tensor([[i < len(r) for i in range(width_r)] for r in responses])
    return {
        "prompts": torch.tensor([[*pad, *p] for pad, p in zip(padding, prompts, strict=True)], dtype=torch.int64),
        "prompt_mask": prompt_mask,
        "responses": torch.tensor([[*r, *[0] * (width_r - len(r))] for r in responses]),
        "response_mask": response_mask,
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
    }


def random_rows(
    seed: int, group_sizes: list[int], *, longest_prompt: int = 9, longest_response: int = 8, vocabulary: int = 256
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts (repeated within a group) and responses of random lengths, at least 1 token each."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(longest: int) -> list[int]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        return torch.randint(0, vocabulary, (length,), generator=generator).tolist()

    prompts, responses = [], []
    for size in group_sizes:
        prompt = tokens(longest_prompt)
        prompts.extend([prompt] * size)
        responses.extend(tokens(longest_response) for _ in range(size))
    return prompts, responses
