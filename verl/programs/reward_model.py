"""Reward models: a scalar head above a language model, trained on pairs, ratings, or labelled steps.

    rows ──tokens──► batch, the two rows of a pair together ──► model.update ──► metrics
                                                      (validation: model.forward ──► accuracy, calibration, length bias)

The saved model opens as
reward.reward_model.model_path of `verl train`, and with transformers' class for sequence (process: token) classification.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from verl.algorithms.reward_losses import calibration_error, correlation, pair_loss, pair_measures, spread
from verl.config.roots.reward_model import RMConfig
from verl.data.conversations.dataset import ConversationDataset, read_into
from verl.data.files import Files
from verl.data.preferences.dataset import load_preferences
from verl.data.preferences.scored import RatedDataset, StepDataset
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.data_proto.tokenizer import Tokenizer
from verl.models.load import eos_token_ids_of
from verl.programs.given_rows import GivenRowsProgram, line_of_step, model_spec, specs_of, with_held_out
from verl.roles.api import Objective, RoleSpecs
from verl.roles.guards import StepGuard
from verl.roles.objectives.reward import PairObjective, RatingObjective, StepObjective, sides

Tensors = Mapping[str, torch.Tensor]


class RewardModelProgram(GivenRowsProgram[RMConfig]):
    """Metrics of a step: train/{loss,grad_norm,lr,global_tokens,total_tokens(B)} and the objective's metrics. Of a validation:
    val/{loss,mean_reward,min_reward,max_reward}, and by kind of loss
    pairs: accuracy, accuracy_chosen_longer, accuracy_chosen_shorter, margin, calibration_error, length_correlation;
    regression: absolute_error, correlation (with the ratings), length_correlation;
    process: accuracy, calibration_error.
    """

    console_metrics = line_of_step({"accuracy": "accuracy", "margin": "margin", "absolute_error": "error"})
    labels = {
        "loss": "held-out loss",
        "accuracy": "held-out accuracy",
        "absolute_error": "held-out distance to the rating",
        "correlation": "held-out correlation with the rating",
        "calibration_error": "held-out calibration error",
        "length_correlation": "held-out correlation with length",
    }
    always = ()
    curves = {
        "accuracy": with_held_out("accuracy"),
        "loss": with_held_out("loss"),
        "mean score": with_held_out("mean_reward"),
        "bias": {"val/length_correlation": "correlation with length", "val/calibration_error": "calibration error"},
    }

    @classmethod
    def roles(cls, config: RMConfig, *, train: bool = True) -> RoleSpecs:
        """See Program."""
        head = "token_value" if config.rm.loss == "process" else "sequence_score"
        return specs_of(config, (model_spec(config, cls.objective(config), train=train, head=head),))

    @classmethod
    def objective(cls, config: RMConfig) -> Callable[[StepGuard], Objective]:
        if config.rm.loss in ("regression", "process"):
            return RatingObjective if config.rm.loss == "regression" else StepObjective
        return partial(PairObjective, config.rm.loss, config.rm.center_rewards_coefficient)

    @classmethod
    def load_rows(cls, config: RMConfig, files: Files, tokenizer: Tokenizer, **chosen: Any) -> ConversationDataset:
        rule = config.rm
        chosen["stop_token_ids"] = eos_token_ids_of(config.model, tokenizer)
        if rule.loss == "regression":
            return read_into(RatedDataset(), files, tokenizer, config.data, **chosen)
        if rule.loss == "process":
            steps = StepDataset(rule.step_separator, last_step_only=rule.train_on_last_step_only)
            return read_into(steps, files, tokenizer, config.data, **chosen)
        return load_preferences(files, tokenizer, config.data, **chosen)

    def loss_name(self) -> str:
        unit = {"regression": "{} rows", "process": "steps of {} rows"}.get(self.config.rm.loss, "{} pairs")
        return f"{self.config.rm.loss}, mean over the {unit.format(self.config.data.train_batch_size)}"

    def validate(self, step: int) -> dict[str, float]:
        """See Program; the held-out completions are logged with their scores."""
        columns: dict[str, list[torch.Tensor]] = defaultdict(list)
        logged: list[dict[str, object]] = []
        for batch, scores in self._scored():
            for name, values in self._columns(batch, scores).items():
                columns[name].append(values)
            rows = sample_rows(batch, self.data.tokenizer)
            logged += [{**row, **extra} for row, extra in zip(rows, _shown(batch, scores), strict=True)]
        self.run.log_samples("val", step, logged)
        measures = self._measures({name: torch.cat(values).double() for name, values in columns.items()})
        return {f"val/{name}": value for name, value in measures.items() if not math.isnan(value)}

    def _scored(self) -> Iterator[tuple[DataProto, torch.Tensor]]:
        """Batches of the held-out rows, each with the scores of its rows or steps."""
        assert self.data.validation is not None
        output = "values" if self.config.rm.loss == "process" else "sequence_scores"
        for batch in map(self.data.validation.batch, self.held_out()):
            yield batch, self.model.forward(batch, {output: "scores"}).get().batch["scores"]

    def _columns(self, batch: DataProto, scores: torch.Tensor) -> Tensors:
        """The numbers of one batch that `_measures` reads, flat."""
        columns, mask = batch.batch, batch.batch["response_mask"]
        lengths = mask.sum(dim=1)
        if "step_labels" in columns.keys():
            return {"scores": scores[mask], "labels": columns["step_labels"][mask]}
        if "rating" in columns.keys():
            return {"scores": scores, "ratings": columns["rating"], "lengths": lengths}
        won, lost = sides(columns["ordinal"], columns["chosen"])
        return {
            "chosen": scores[won],
            "rejected": scores[lost],
            "margin": columns["margin"][won],
            "chosen_lengths": lengths[won],
            "rejected_lengths": lengths[lost],
        }

    def _measures(self, columns: Tensors) -> dict[str, float]:
        """Metrics of all held-out rows."""
        rule = self.config.rm
        if "labels" in columns:
            scores, labels = columns["scores"], columns["labels"]
            correct = (scores > 0) == (labels > 0.5)
            return {
                "loss": float(F.binary_cross_entropy_with_logits(scores, labels)),
                "accuracy": float(correct.double().mean()),
                "calibration_error": calibration_error(scores, correct),
                **spread(scores),
            }
        if "ratings" in columns:
            scores, error = columns["scores"], columns["scores"] - columns["ratings"]
            return {
                "loss": float(error.square().mean()),
                "absolute_error": float(error.abs().mean()),
                "correlation": correlation(scores, columns["ratings"]),
                "length_correlation": correlation(scores, columns["lengths"]),
                **spread(scores),
            }
        sides_of_pairs = dict(columns)
        margin = sides_of_pairs.pop("margin")
        losses = pair_loss(rule.loss, columns["chosen"], columns["rejected"], margin, rule.center_rewards_coefficient)
        return {"loss": float(losses.mean()), **pair_measures(**sides_of_pairs)}


def _shown(batch: DataProto, scores: torch.Tensor) -> list[dict[str, object]]:
    """The score of each row with its `rating` or `chosen` column, or the scores of its steps with their labels."""
    columns = batch.batch
    if "step_labels" in columns.keys():
        rows = zip(scores, columns["step_labels"], columns["response_mask"], strict=True)
        return [{"scores": s[mask].tolist(), "labels": labels[mask].tolist()} for s, labels, mask in rows]
    name = "rating" if "rating" in columns.keys() else "chosen"
    return [{"score": s, name: v} for s, v in zip(scores.tolist(), columns[name].tolist(), strict=True)]
