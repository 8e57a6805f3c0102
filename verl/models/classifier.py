"""Reward models of Hugging Face's sequence classification form: one score for a whole sequence, read at its last token.

A batch is packed without padding, and what several sequences begin with in common is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from verl.errors import ModelError
from verl.models.heads import ScalarHeadModel
from verl.models.load import load_model, load_model_config, locate
from verl.models.packed import PackedLayout, Segment
from verl.parallel.balance import pack_by_tokens

Tokens = tuple[int, ...]


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
    config = load_model_config(path, trust_remote_code, None)
    if is_causal_lm(config):
        raise ModelError(
            f"{path} is a causal language model ({config.architectures[0]}), not a reward model. Give a model of "
            "AutoModelForSequenceClassification with one label, or set reward.reward_model.judge_template to let this "
            "one judge in words."
        )
    module = load_model(path, "token_value", device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    # a hub name is in the cache by now; load_model takes heads from folders alone, and may have done so
    folder = Path(str(cached_file(locate(path), "config.json"))).parent
    if not module.load_head(folder):
        raise ModelError(
            f"{path} has no reward head (score.weight, classifier.weight or v_head.weight): every response would get the "
            "same score. Use a model saved by AutoModelForSequenceClassification with num_labels=1."
        )
    return module.requires_grad_(False).eval()


def is_causal_lm(config: Any) -> bool:
    """Whether a transformers config says that its weights are those of a language model."""
    architectures = getattr(config, "architectures", None) or [""]
    return str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel"))


@torch.no_grad()
def sequence_scores(module: ScalarHeadModel, sequences: Sequence[Tokens], *, max_tokens: int) -> torch.Tensor:
    """float32 (float64 for a float64 model) [sequences] on the CPU: the head's output at the last token of each.

    A forward computes at most `max_tokens` tokens, or one sequence. Neighbours that begin alike share that part, so the
    samples of a prompt should be adjacent. Raises ModelError for a sequence that is empty or longer than the model
    allows.
    """
    _require_fit(module, sequences)
    device = next(module.parameters()).device
    scores = torch.zeros(len(sequences), dtype=module.score.weight.dtype)
    families = list(_families(sequences, max_tokens))
    for numbers in pack_by_tokens([family.num_computed for family in families], max_tokens):
        chosen = [families[number] for number in numbers]
        ids, positions, layout, last = _pack(chosen, sequences)
        hidden = module.get_decoder()(
            input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False, layout=layout
        ).last_hidden_state[0]
        rows = [i for family in chosen for i in family.members]
        scores[rows] = module.value(hidden.index_select(0, last.to(device))).to("cpu", scores.dtype)
    return scores


@dataclass(frozen=True)
class _Family:
    """Sequences that begin with the same `shared` tokens, each with at least one token of its own."""

    members: tuple[int, ...]
    shared: int
    num_tokens: int  # of all members, before sharing

    @property
    def num_computed(self) -> int:
        return self.num_tokens - (len(self.members) - 1) * self.shared


def _families(sequences: Sequence[Tokens], max_tokens: int) -> Iterator[_Family]:
    """Neighbours together as long as that saves tokens and they fit."""
    family: _Family | None = None
    for i, tokens in enumerate(sequences):
        joined = family and _joined(family, i, sequences)
        if family and joined and joined.num_computed <= min(max_tokens, family.num_computed + len(tokens) - 1):
            family = joined
            continue
        if family:
            yield family
        family = _Family((i,), 0, len(tokens))
    if family:
        yield family


def _joined(family: _Family, i: int, sequences: Sequence[Tokens]) -> _Family:
    first, tokens = sequences[family.members[0]], sequences[i]
    limit = family.shared if len(family.members) > 1 else len(first) - 1
    shared = _common(first, tokens, min(limit, len(tokens) - 1))
    return _Family((*family.members, i), shared, family.num_tokens + len(tokens))


def _common(a: Tokens, b: Tokens, limit: int) -> int:
    """Length of the common beginning, at most `limit`."""
    if a[:limit] == b[:limit]:
        return limit
    return next(n for n in range(limit) if a[n] != b[n])


def _pack(
    families: Sequence[_Family], sequences: Sequence[Tokens]
) -> tuple[torch.Tensor, torch.Tensor, PackedLayout, torch.Tensor]:
    """(input_ids [1, tokens], position_ids [1, tokens], layout, index of each sequence's last token [sequences])."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    last: list[int] = []
    for family in families:
        shared, start = family.shared, len(ids)
        if shared:
            ids.extend(sequences[family.members[0]][:shared])
            positions.extend(range(shared))
            segments.append(Segment(start, shared))
        for i in family.members:
            own = sequences[i][shared:]
            segments.append(Segment(len(ids), len(own), start if shared else 0, shared))
            ids.extend(own)
            positions.extend(range(shared, shared + len(own)))
            last.append(len(ids) - 1)
    return torch.tensor([ids]), torch.tensor([positions]), PackedLayout(segments), torch.tensor(last)


def _require_fit(module: ScalarHeadModel, sequences: Sequence[Tokens]) -> None:
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    for number, tokens in enumerate(sequences):
        if not tokens:
            raise ModelError(f"Sequence {number} of the batch is empty; a reward model needs at least one token.")
        if limit is not None and len(tokens) > limit:
            raise ModelError(
                f"Sequence {number} of the batch has {len(tokens)} of the reward model's tokens, more than its "
                f"max_position_embeddings ({limit}). Lower data.max_response_length, or use a reward model for longer "
                "texts."
            )
