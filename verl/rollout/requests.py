"""What every engine checks before it makes a token, and how it borrows the training module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ConfigError, ModelError


def vocab_size(module: torch.nn.Module) -> int:
    """Number of tokens that the module can read, with the ranks that hold other parts of it if it is divided."""
    return int(module.get_input_embeddings().num_embeddings)  # type: ignore[operator]


def check_requests(
    prompts: Sequence[PromptRequest], params: SamplingParams, module: torch.nn.Module, max_model_len: int | None
) -> None:
    """Raise ConfigError for parameters without meaning, ModelError for a prompt that is empty, has a token outside the
    vocabulary, or is too long with `max_new_tokens` added. Nothing has been computed then."""
    _check_params(params)
    config: Any = module.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    num_tokens = vocab_size(module)
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length == 0:
            raise ModelError(f"Prompt {prompt.ordinal} is empty: there is nothing to continue.")
        if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= num_tokens:
            bad = next(t for t in prompt.token_ids if not 0 <= t < num_tokens)
            raise ModelError(
                f"Prompt {prompt.ordinal} has token id {bad}, but the model knows {num_tokens} tokens. "
                "Tokenizer and model do not belong together."
            )
        for limit, name in (
            (max_model_len, "rollout.max_model_len"),
            (positions, "the model's max_position_embeddings"),
        ):
            if limit is not None and length + params.max_new_tokens > limit:
                raise ModelError(
                    f"Prompt {prompt.ordinal} of {length} tokens plus {params.max_new_tokens} new tokens exceeds {name} "
                    f"({limit}). Shorten prompts (data.max_prompt_length) or responses (data.max_response_length)."
                )


def _check_params(params: SamplingParams) -> None:
    for name, value, fits, rule in (
        ("n", params.n, params.n >= 1, "at least 1"),
        ("max_new_tokens", params.max_new_tokens, params.max_new_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, 0 <= params.temperature < float("inf"), "0 (greedy) or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "between 0 and 1"),
    ):
        if not fits:
            raise ConfigError(f"Sampling parameter {name} is {value}; it must be {rule}.")


@contextmanager
def borrowed(module: torch.nn.Module) -> Iterator[None]:
    """The module in eval mode without gradients; each submodule's training flag is put back afterwards.

    `no_grad`, not `inference_mode`: some rotary embeddings renew their buffers in forward, and training reads them later.
    """
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training
