"""Choice and check of a model's forward on a few tokens: packed if the results agree with its own attention."""

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from verl.errors import ConfigError, ModelError
from verl.models.attention import ATTENTION_NAME, Scoring
from verl.models.delta_net import DeltaInputs
from verl.models.folder import reason
from verl.models.forward import hidden_states, packed_outputs
from verl.models.hf_module import HFModule
from verl.models.packed import PackedLayout
from verl.models.packing import PackedBatch, pack_rows
from verl.models.padded import forward_kind, own_logits
from verl.models.randomness import require_repeatable
from verl.models.vision import attention_of, is_vision_model

log = logging.getLogger(__name__)

# two samples of one prompt, of unequal length; a vocabulary of fewer tokens has their remainders
_PROMPT, _RESPONSES = (1, 2, 3, 4, 9), ((5, 6, 7, 8, 2, 6), (7, 5, 3))
_PROBED_TOKENS = 128
_RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
_NUM_ROUNDINGS = 8
# choices of model.override_config.attn_implementation besides verl's packed one
PADDED = ("sdpa", "eager")
FLASH = ("flash_attention_2", "flash_attention_3")  # packed batches take FlashAttention on a GPU anyway
_noticed: set[str] = set()


class _NotingLayout(PackedLayout):
    """Remembers the layers that called it."""

    def __init__(self, layout: PackedLayout):
        super().__init__(layout.segments)
        self.layers: list[int] = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        self.layers.append(layer)
        return super().attend(layer, q, k, v, scoring)

    def recur(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        self.layers.append(layer)
        return super().recur(layer, inputs)


@torch.no_grad()
def choose_forward(module: Any, attention: str | None = None) -> None:
    """Set `module.forward_kind` to the first of verl.models.padded.KINDS whose results agree with the model's own forward.
    `attention` is the user's choice, for the padded ones.

    Raises ModelError when none does, when the model is not causal, or when its forward is random.
    """
    name = type(module).__name__
    problem = "its class takes no other attention than its own"
    if attention in PADDED:
        problem = f"model.override_config.attn_implementation={attention} asks for a padded forward"
    if module.config._attn_implementation == ATTENTION_NAME:
        module.forward_kind = "packed"
        problem = _problem_of(packed_problem, module)
        if not problem:
            return
        if not is_vision_model(module):
            _attending(module).set_attn_implementation(own_attention(module, attention))
    if is_vision_model(module):
        raise ModelError(f"{name} is not supported: {problem}.")
    for kind in ("padded", "logits") if _has_logits(module) else ("padded",):
        module.forward_kind = kind
        own_problem = _problem_of(padded_problem, module)
        if not own_problem:
            _notice(name, problem)
            return
    raise ModelError(f"{name} is not supported: {own_problem}.")


@torch.no_grad()
def largest_difference(module: HFModule, other: HFModule) -> float:
    """Largest difference of the log-probs of a few tokens: of `module` by its chosen forward, of `other`, a causal language
    model of transformers, by its own."""
    packed = _describe(module, pack_rows(_columns(module), device=next(module.parameters()).device))
    return float((packed.cpu() - _in_rows(other).cpu()).abs().max())


@torch.no_grad()
def require_dtype(module: HFModule) -> None:
    """Raise ModelError if the own forward of `module`, chosen in a wider dtype, fails in the dtype that it has now: some
    families multiply tensors of two dtypes."""
    if forward_kind(module) == "packed" or next(module.parameters()).dtype == torch.float32:
        return
    config = module.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _PROBED_TOKENS
    first = (getattr(config, "pad_token_id", None) or 0) + 1  # position of the first token in RoBERTa's families
    # longer than the chunks of some families
    prompt, _ = _samples(module)
    tokens = (prompt * _PROBED_TOKENS)[: min(longest - first if first < longest else longest, _PROBED_TOKENS)]
    try:
        _own(module, tokens)
    except RuntimeError as error:
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        raise ModelError(
            f"The forward of {type(module).__name__} fails in {dtype} ({reason(error)}). Set fsdp_config.dtype=float32."
        ) from error


def own_attention(module: HFModule, requested: str | None = None) -> str:
    """The attention of transformers for a padded forward of `module`: `requested`, if it is FlashAttention that can run here,
    else the fastest one that its class has."""
    if requested in FLASH and _has_flash(requested):
        return requested
    if requested in FLASH:
        log.info("%s is not installed for a GPU of this machine: a padded forward takes sdpa or eager.", requested)
    return "sdpa" if getattr(module.get_decoder(), "_supports_sdpa", False) else "eager"


def check_attention(name: object) -> None:
    """Raise ModelError for an entry attn_implementation of model.override_config that is unknown."""
    if name not in (None, ATTENTION_NAME, *PADDED, *FLASH):
        raise ModelError(
            f"model.override_config.attn_implementation={name} is unknown. There are {ATTENTION_NAME} and "
            f"{', '.join(FLASH)} for packed batches, and {' and '.join(PADDED)} for the model's own padded forward."
        )


def _has_flash(name: str) -> bool:
    has = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return bool(has[name]())


def packed_problem(module: HFModule) -> str:
    """The reason why packed batches differ from single rows in the model's own eager attention (sinks, biases, state other
    than keys and values); "" if they agree."""
    if "position_ids" not in inspect.signature(module.get_decoder().forward).parameters:
        return "it counts positions by itself, and those of packed rows start again"
    if _has_logits(module) and "logits_to_keep" not in inspect.signature(module.forward).parameters:
        return "it computes the logits of all tokens, and generation needs those of some"
    packed = pack_rows(_columns(module), device=next(module.parameters()).device)
    layout = _NotingLayout(packed.layout)
    packed = PackedBatch(**{**vars(packed), "layout": layout})
    actual = require_repeatable(module, type(module).__name__, partial(_describe, module, packed))
    calls = Counter(layout.layers)  # of two forwards
    passed_by = [layer for layer in range(module.config.get_text_config().num_hidden_layers) if layer not in calls]
    if passed_by:
        return f"its layers {passed_by[:4]} do not go through the attention interface that packed batches need"
    if set(calls.values()) != {2}:
        return "its layers call attention more than once, and a cache holds one set of keys for each"
    with _eager_attention(module):
        expected = _in_rows(module)
        if problem := _difference(module, actual, expected, "packed"):
            # bfloat16 by itself moves log-probs that far if logits are steep, as after fine-tuning on one task
            if _distance(actual, expected) < 2 * max(_moved_by_rounding(module, expected)):
                return ""
    return problem


def _moved_by_rounding(module: HFModule, expected: torch.Tensor) -> Iterator[float]:
    """Distances from `expected` of equal forwards that round the embeddings otherwise. One differs from another by a factor of
    three."""
    for seed in range(_NUM_ROUNDINGS):
        with _rounded_embeddings(module, seed):
            yield _distance(_in_rows(module), expected)


def padded_problem(module: nn.Module) -> str:
    """The reason why padded rows do not give what each token gets from a forward over the tokens before it; "" if they
    do."""
    packed = pack_rows(_columns(module), device=next(module.parameters()).device)
    actual = require_repeatable(module, type(module).__name__, partial(_describe, module, packed))
    _require_backward(module, packed)
    return _difference(module, actual, _by_prefixes(module), "padded")


def _require_backward(module: nn.Module, packed: PackedBatch) -> None:
    """Run the backward for the gradient of only the model's first parameter. Some models have their own backward, and it may
    raise any error."""
    first = next(module.parameters())  # mostly the embedding
    if first.requires_grad:
        with torch.enable_grad():
            torch.autograd.grad(_describe(module, packed).sum(), first, allow_unused=True)


def _problem_of(find: Any, module: HFModule) -> str:
    try:
        problem: str = find(module)
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # noqa: BLE001 - of a family's own code, called in a way that it does not know
        return f"its forward fails ({type(error).__name__}: {reason(error)})"
    return problem


def _difference(module: nn.Module, actual: torch.Tensor, expected: torch.Tensor, kind: str) -> str:
    if not expected.isfinite().all():
        raise ModelError(
            f"{type(module).__name__} computes NaN or infinities on a few tokens, so its weights or an entry of its "
            "config.json are damaged. Download or convert the model again."
        )
    error = _distance(actual, expected)
    # of padded rows there is a slower way that is exact, so that they may be judged more strictly
    if error < _RELATIVE_TOLERANCE[next(module.parameters()).dtype] * (1.0 if kind == "packed" else 0.2):
        return ""
    if kind == "packed":
        return f"its packed forward differs from its own attention (relative error {error:.2g})"
    return (
        f"log-probs of padded rows depend on more than the tokens before each (relative error {error:.2g}), "
        "so it is not causal or padding changes it"
    )


def _distance(values: torch.Tensor, reference: torch.Tensor) -> float:
    return float((values - reference).norm() / reference.norm())


def _has_logits(module: nn.Module) -> bool:
    return hasattr(module, "get_output_embeddings")


def _describe(module: nn.Module, packed: PackedBatch) -> torch.Tensor:
    """The compared values: log-probs of a policy, hidden states of a value model; float32 [predictions, ...]."""
    if _has_logits(module):
        return packed_outputs(module, packed, ("log_probs",))["log_probs"][packed.row, packed.column].float()
    return hidden_states(module, packed).float()


@contextmanager
def _eager_attention(module: nn.Module) -> Iterator[None]:
    """The model's own eager attention within the block."""
    model = _attending(module)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention_of(model.config, ATTENTION_NAME))


@contextmanager
def _rounded_embeddings(module: nn.Module, seed: int) -> Iterator[None]:
    """Embeddings that are rounded once more within the block: each moves by one unit in its last place, up or down."""
    draws = torch.Generator().manual_seed(seed)

    def rounded(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, output.shape, generator=draws).to(output) * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs)

    with _attending(module).get_input_embeddings().register_forward_hook(rounded):
        yield


def _in_rows(module: nn.Module) -> torch.Tensor:
    """The compared values by the model's own forward, one row at a time."""
    prompt, responses = _samples(module)
    return torch.cat([_at(module, _own(module, prompt + r)[len(prompt) - 1 : -1], r) for r in responses])


def _by_prefixes(module: nn.Module) -> torch.Tensor:
    """The compared values by the definition of a causal model: each token from a forward over only the tokens before it."""
    prompt, responses = _samples(module)
    last = [[_own(module, prompt + response[:n])[-1:] for n in range(len(response))] for response in responses]
    return torch.cat([_at(module, torch.cat(values), r) for values, r in zip(last, responses, strict=True)])


def _attending(module: Any) -> Any:
    """The part of `module` of transformers, with the choice of attention."""
    return module if _has_logits(module) else module.get_decoder()


def _own(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """[tokens, size]: logits, or hidden states of a value model, by the model's own forward."""
    ids = torch.tensor([tokens], device=next(module.parameters()).device)
    if _has_logits(module):
        return own_logits(module, ids)[0].float()
    return cast("torch.Tensor", module.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0].float())


def _at(module: nn.Module, values: torch.Tensor, response: tuple[int, ...]) -> torch.Tensor:
    if not _has_logits(module):
        return values
    chosen = torch.tensor(response, device=values.device).unsqueeze(1)
    return values.log_softmax(-1).gather(1, chosen).squeeze(1)


def _notice(name: str, problem: str) -> None:
    if name not in _noticed:
        _noticed.add(name)
        log.warning(
            "%s runs by its own padded forward, since %s. It trains and generates correctly but slower: prompts are not "
            "shared and padding is computed.",
            name,
            problem,
        )


def _samples(module: nn.Module) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The prompt, and its responses."""
    size = getattr(cast(Any, module).config.get_text_config(), "vocab_size", None) or 10
    prompt, *responses = [tuple(token % size for token in tokens) for tokens in (_PROMPT, *_RESPONSES)]
    return prompt, responses


def _columns(module: nn.Module) -> dict[str, torch.Tensor]:
    prompt, rows = _samples(module)
    width = max(len(r) for r in rows)
    responses = torch.tensor([[*r, *[0] * (width - len(r))] for r in rows])
    prompts = torch.tensor([prompt] * len(rows))
    mask = torch.tensor([[i < len(r) for i in range(width)] for r in rows])
    return {
        "prompts": prompts,
        "prompt_mask": torch.ones_like(prompts).bool(),
        "responses": responses,
        "response_mask": mask,
    }
