"""Rejection sampling (RAFT): sample, score, keep the best samples of each prompt, and fine-tune on them.

    prompts ──► rollout, n samples each ──► reward ──► keep ──► actor.update (negative log-likelihood) ──► weights.sync
                                                        └──► kept.jsonl, rows for `verl sft`

A step is one stage of RAFT (2304.06767, algorithm 1): the samples of a stage come from the weights that the stage before has
trained. With data.train_batch_size as large as the data it is the rejection sampling of Llama 2 (2307.09288). The phases are
PPO's, with a selection in place of advantages.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from verl.algorithms.filters import best_of_groups
from verl.config import PPOConfig
from verl.data.prompts import answer_prefix
from verl.data_proto.batch_metrics import scored_rows
from verl.data_proto.extras import media_of
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.programs.api import RunContext
from verl.programs.ppo import PPO
from verl.programs.ppo_data import PPOData
from verl.programs.ppo_program import curves_of
from verl.programs.ppo_roles import mini_batches
from verl.regular_files import make_folder
from verl.roles.api import Roles, RoleSpecs
from verl.roles.guards import RollBack, SkipBatch, StepBatch
from verl.roles.objectives.nll import TokenObjective
from verl.tracking.files import append_rows, truncate_rows

log = logging.getLogger(__name__)

_COPIED = ("score", "data_source", "ordinal", "sample_index")  # to rows of the file, with prompt, completion and step


class RejectionSampling(PPO):
    """Metrics of the samples of a step that have a score: rejection/{kept,kept_ratio,prompt_ratio,score/mean,score/kept_mean}:
    the kept ones, their share, the share of prompts that keep any, mean scores of all and of the kept. Other metrics are of
    the kept ones."""

    reads_data = True
    console_metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "rejection/score/mean": ("reward", "{:.3f}"),
        "rejection/score/kept_mean": ("reward_kept", "{:.3f}"),
        "rejection/kept_ratio": ("kept", "{:.2f}"),
        "response_length/mean": ("length", "{:.1f}"),
        "actor/loss": ("loss", "{:.4f}"),
        "actor/grad_norm": ("grad", "{:.2f}"),
    }
    curves = curves_of({"rejection/score/mean": "training", "rejection/score/kept_mean": "kept"})

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        """See Program: the roles of PPO without critic and reference, and an actor that fine-tunes."""
        specs, actor = super().roles(config, train=train), config.actor_rollout_ref.actor
        schedule = mini_batches(actor, config.rejection.keep)
        # likelihoods are the model's, without the sampling temperature
        trained = partial(replace, objective=partial(TokenObjective, "nll"), schedule=schedule, temperature=1.0)
        return replace(specs, models=tuple(map(trained, specs.models)))

    def __init__(self, config: PPOConfig, data: PPOData, roles: Roles, run: RunContext):
        super().__init__(config, data, roles, run)
        name = config.rejection.write
        self.file = run.folder / name if name is not None and run.is_rank_zero else None

    def train(self, step: int) -> StepBatch:
        """See PPO; afterwards the kept samples are in the file."""
        result = super().train(step)
        if self.file is not None and not result.skipped:
            make_folder(self.file.parent)
            append_rows(self.file, self._rows(result.batch, step))
        return result

    def annotate(self, result: StepBatch) -> None:
        """Nothing: a likelihood is compared with no other policy."""

    def assign_credit(self, result: StepBatch, step: int) -> None:
        """Leave only the kept samples in the batch. A batch that keeps none is skipped."""
        with self.spans("adv"):
            rule, batch = self.config.rejection, result.batch
            uids, scores = list(batch.non_tensor_batch["uid"]), batch.batch["token_level_scores"].sum(dim=1).tolist()
            scored = scored_rows(batch).tolist()
            chosen = best_of_groups(
                scores,
                uids,
                keep=rule.keep,
                min_score=rule.min_score,
                contents=_responses(batch) if rule.dedup else None,
                allowed=[
                    has_score and (rule.truncated or reason == "stop")
                    for has_score, reason in zip(scored, batch.non_tensor_batch["finish_reason"], strict=True)
                ],
            )
            numbers = list(compress(scores, scored))
            values = {
                "kept": len(chosen),
                "kept_ratio": len(chosen) / len(numbers),
                "prompt_ratio": len({uids[row] for row in chosen}) / len(set(uids)),
                "score/mean": sum(numbers) / len(numbers),
                **({"score/kept_mean": sum(scores[row] for row in chosen) / len(chosen)} if chosen else {}),
            }
            result.metrics.update({f"rejection/{name}": Metric.last(float(value)) for name, value in values.items()})
            if not chosen:
                sentence = f"Step {step}: no sample was kept{self._why(numbers)}"
                log.warning("%s. The batch is left out.", sentence)
                raise SkipBatch(sentence)
            result.batch = batch.select_idxs(chosen)

    def load_state_dict(
        self, state: Mapping[str, Any] | None, checkpoint: Path | None, rolled_back: RollBack | None = None
    ) -> None:
        """See Program; samples of later steps leave the file."""
        super().load_state_dict(state, checkpoint, rolled_back)
        if self.file is not None:
            truncate_rows(self.file, 0 if state is None else state["step"])

    def header(self) -> dict[str, object]:
        """See Program."""
        rule, n = self.config.rejection, self.config.actor_rollout_ref.rollout.n
        limit = "" if rule.min_score is None else f" with a score of at least {rule.min_score:g}"
        return {**super().header(), "algorithm": f"rejection sampling, the best {rule.keep} of {n}{limit}, nll loss"}

    def _why(self, scores: list[float]) -> str:
        rule = self.config.rejection
        if rule.min_score is not None and max(scores) < rule.min_score:
            return f": the best score is {max(scores):g}, below rejection.min_score={rule.min_score:g}"
        longest = self.config.data.max_response_length
        return f": those that could be were cut at data.max_response_length={longest} (rejection.truncated=False)"

    def _rows(self, batch: DataProto, step: int) -> list[dict[str, object]]:
        """Rows of the format prompt_completion; of the format tokenized if text would train other tokens than this step."""
        assert self.data.train is not None
        numbers = batch.batch["row_index"].tolist()
        images = {number: self.data.train.images(number) for number in set(numbers)} if media_of(batch) else {}
        objects = batch.non_tensor_batch
        row_kwargs = objects["template_kwargs"] if "template_kwargs" in objects else [None] * len(batch)
        kwargs_of = [{**self.data.train.template_kwargs, **(row_kwarg or {})} for row_kwarg in row_kwargs]
        samples = zip(objects["raw_prompt"], kwargs_of, sample_rows(batch, self.data.tokenizer), numbers, strict=True)
        return [
            {
                **(
                    {
                        "prompt": list(messages),
                        "completion": [{"role": "assistant", "content": row["response"]}],
                        **_columns(kwargs),
                    }
                    if number in images or (self._is_text(row) and answer_prefix(messages, kwargs) is None)
                    else _tokenized(row)
                ),
                **images.get(number, {}),
                **{name: row[name] for name in _COPIED},
                "step": step,
            }
            for messages, kwargs, row, number in samples
        ]

    def _is_text(self, row: Mapping[str, Any]) -> bool:
        """Whether the text of a response has all of its tokens but the last, and all train.

        It has not if it was cut, if a tool or user has answered in between, or if a character is incomplete."""
        text = self.data.tokenizer.decode(row["response_ids"][:-1].tolist(), skip_special_tokens=False)
        return "response_mask" not in row and text == row["response"] and "\ufffd" not in text


def _columns(kwargs: Mapping[str, object]) -> dict[str, object]:
    """A row's arguments of the chat template as its columns."""
    template_kwargs = {name: value for name, value in kwargs.items() if name != "tools"}
    columns = {"tools": kwargs.get("tools"), "chat_template_kwargs": template_kwargs}
    return {name: value for name, value in columns.items() if value}


def _tokenized(row: Mapping[str, Any]) -> dict[str, object]:
    prompt, response = row["prompt_ids"].tolist(), row["response_ids"].tolist()
    mask = row.get("response_mask", np.ones(len(response))).astype(int).tolist()
    return {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + mask}


def _responses(batch: DataProto) -> list[tuple[int, ...]]:
    """The tokens of each response, without padding."""
    tokens = batch.batch["responses"]
    exists = batch.batch["attention_mask"][:, -tokens.shape[1] :].bool()
    return [tuple(row[mask].tolist()) for row, mask in zip(tokens, exists, strict=True)]
