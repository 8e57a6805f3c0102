"""Reward models of Hugging Face's sequence classification form: one score for a sequence, read at its last token.

A batch is packed without padding, and what several sequences begin with in common is computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from verl.data_proto.extras import BatchExtras
from verl.data_proto.media import Spans
from verl.errors import ModelError
from verl.models.folder import fetch
from verl.models.forward import packed_outputs
from verl.models.frozen import load_frozen
from verl.models.heads import ScalarHeadModel, TokenValueModel
from verl.models.load import load_model_config
from verl.models.packing import Reads, pack_rows
from verl.models.rope import row_limits
from verl.parallel.balance import pack_by_tokens

Tokens = tuple[int, ...]


def reward_model_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The config of a reward model. Raises ModelError for a causal language model."""
    config = load_model_config(path, trust_remote_code, None)
    if is_causal_lm(config):
        raise ModelError(
            f"{path} is a causal language model ({config.architectures[0]}), not a reward model. Give a model of "
            "AutoModelForSequenceClassification with one label, or set reward.reward_model.judge_template to let this "
            "one judge in words."
        )
    return config


def load_reward_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> ScalarHeadModel:
    """The model that `AutoModelForSequenceClassification` saved with one label. The head computes in float32 or wider.

    Raises ModelError when there is no head (it would score everything alike) or one with several labels.
    """
    reward_model_config(path, trust_remote_code)
    module = load_frozen(path, "token_value", device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if not module.load_head(fetch(path, weights=True)):
        raise ModelError(
            f"{path} has no reward head (score.weight, classifier.weight or v_head.weight): every response would get the "
            "same score. Use a model saved by AutoModelForSequenceClassification with num_labels=1."
        )
    frozen: ScalarHeadModel = module.eval()
    return frozen


def is_causal_lm(config: PreTrainedConfig) -> bool:
    """Whether a transformers config names the architecture of a language model."""
    architectures = getattr(config, "architectures", None) or [""]
    return str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel"))


def scores_steps(config: PreTrainedConfig) -> bool:
    """Whether a transformers config is of a process reward model: its score is of the state at the end of a step."""
    return str((getattr(config, "architectures", None) or [""])[0]).endswith(TokenValueModel.architecture)


@torch.no_grad()
def sequence_scores(
    module: ScalarHeadModel, sequences: Sequence[Tokens], *, max_tokens: int, media: Sequence[Spans] | None = None
) -> torch.Tensor:
    """float32 (float64 for a float64 model) [sequences] on the CPU: the head's output at the last token of each. `media` are
    the images of each, at places from its first token.

    A forward computes at most `max_tokens` tokens, or one sequence. Neighbours that begin alike share that part, so the
    samples of a prompt should be adjacent. Raises ModelError for a sequence that is empty or longer than the model
    allows.
    """
    _require_fit(module, sequences)
    device = next(module.parameters()).device
    scores = torch.zeros(len(sequences), dtype=module.score.weight.dtype)
    images: list[Spans] = [()] * len(sequences) if media is None else list(media)
    families = list(_families(sequences, images, max_tokens))
    for numbers in pack_by_tokens([family.num_computed for family in families], max_tokens):
        members = [(i, families[number].shared) for number in numbers for i in families[number].members]
        packed = pack_rows(
            _columns(members, sequences),
            device=device,
            reads=Reads(predictions=False, last_token=True),
            extras=BatchExtras([tuple(span.moved(-shared) for span in images[i]) for i, shared in members]),
        )
        outputs = packed_outputs(module, packed, ("sequence_scores",))["sequence_scores"]
        scores[[i for i, _ in members]] = outputs.to("cpu", scores.dtype)
    return scores


@dataclass(frozen=True)
class _Family:
    """Sequences that begin with the same `shared` tokens, each with at least one further token."""

    members: tuple[int, ...]
    shared: int
    num_tokens: int  # of all members, before sharing

    @property
    def num_computed(self) -> int:
        return self.num_tokens - (len(self.members) - 1) * self.shared


def _families(sequences: Sequence[Tokens], images: Sequence[Spans], max_tokens: int) -> Iterator[_Family]:
    """Neighbours together as long as that saves tokens and they fit."""
    family: _Family | None = None
    for i, tokens in enumerate(sequences):
        joined = _joined(family, i, sequences, images) if family else None
        if family and joined and joined.num_computed <= min(max_tokens, family.num_computed + len(tokens) - 1):
            family = joined
            continue
        if family:
            yield family
        family = _Family((i,), 0, len(tokens))
    if family:
        yield family


def _joined(family: _Family, i: int, sequences: Sequence[Tokens], images: Sequence[Spans]) -> _Family:
    leader = family.members[0]
    first, tokens = sequences[leader], sequences[i]
    limit = family.shared if len(family.members) > 1 else len(first) - 1
    shared = _common(first, tokens, min(limit, len(tokens) - 1))
    for image, other in zip_longest(images[leader], images[i]):
        if image != other or image.start + image.length > shared:  # an image is shared whole, or not at all
            shared = min(shared, *(span.start for span in (image, other) if span is not None))
            break
    return _Family((*family.members, i), shared, family.num_tokens + len(tokens))


def _common(a: Tokens, b: Tokens, limit: int) -> int:
    """Length of the common beginning, at most `limit`."""
    if a[:limit] == b[:limit]:
        return limit
    return next(n for n in range(limit) if a[n] != b[n])


def _columns(members: Sequence[tuple[int, int]], sequences: Sequence[Tokens]) -> dict[str, torch.Tensor]:
    """The columns that pack_rows reads, for (sequence, number of its tokens that are a shared prompt)."""

    def padded(parts: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.tensor(part, dtype=torch.int64) for part in parts]
        masks = [torch.ones(len(part), dtype=torch.bool) for part in parts]
        return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)

    prompts, prompt_mask = padded([sequences[i][:shared] for i, shared in members])
    responses, response_mask = padded([sequences[i][shared:] for i, shared in members])
    return {"prompts": prompts, "prompt_mask": prompt_mask, "responses": responses, "response_mask": response_mask}


def _require_fit(module: ScalarHeadModel, sequences: Sequence[Tokens]) -> None:
    limits = row_limits(module.config.get_text_config())
    for number, tokens in enumerate(sequences):
        if not tokens:
            raise ModelError(f"Sequence {number} of the batch is empty; a reward model needs at least one token.")
        for limit, name in limits:
            if len(tokens) > limit:
                raise ModelError(
                    f"Sequence {number} of the batch has {len(tokens)} of the reward model's tokens, more than {name} "
                    f"({limit}). Lower data.max_response_length, or use a reward model for longer texts."
                )
