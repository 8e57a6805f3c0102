"""Losses of micro-batches do not wait for the device; tests/run/test_simulated_gpu.py has whole runs."""

import pytest
import torch

from tests.models.reference import make_columns, random_rows
from verl.config import ActorConfig, RolloutCorrectionConfig
from verl.config.sections.actor import CriticConfig
from verl.config.sections.algorithm import PreferenceLossConfig
from verl.config.sections.trainer import StepGuardsConfig
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.roles.guards import StepGuard
from verl.roles.objectives.nll import TokenObjective
from verl.roles.objectives.policy import PolicyObjective, ValueObjective
from verl.roles.objectives.preference import PreferenceObjective
from verl.roles.objectives.reward import PairObjective, RatingObjective, StepObjective

_OF_TOKENS = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_prob", "returns", "values", "step_labels")
_OF_ROWS = ("margin", "rating", "ref_logp", "shift", "matched_margin", "matched_ratio")
LENGTH = 8


def guard():
    return StepGuard(StepGuardsConfig())


def preference(*losses, **changes):
    settings = {"loss": list(losses), "loss_weights": [1.0] * len(losses), **changes}
    return PreferenceObjective(PreferenceLossConfig(**settings), guard())


OBJECTIVES = {
    "policy": lambda: PolicyObjective(
        ActorConfig(entropy_coeff=0.01, use_kl_loss=True),
        RolloutCorrectionConfig(),
        max_response_length=LENGTH,
        guard=guard(),
    ),
    "value": lambda: ValueObjective(CriticConfig(), max_response_length=LENGTH, guard=guard()),
    "tokens": lambda: TokenObjective("nll", guard()),
    "preference": lambda: preference("sigmoid", "orpo", use_weighting=True, ld_alpha=0.5),
    "labels": lambda: preference("kto"),
    "pairs": lambda: PairObjective("sigmoid", 0.01, guard()),
    "ratings": lambda: RatingObjective(guard()),
    "steps": lambda: StepObjective(guard()),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_does_not_wait_for_the_device(name):
    """On the meta device, every read of a value fails; observed values are read after the step."""
    columns = make_columns(*random_rows(3, [2, 2, 2], longest_prompt=5, longest_response=6))
    rows, length = columns["responses"].shape
    columns |= {column: torch.zeros(rows, length) for column in _OF_TOKENS}
    columns |= {column: torch.zeros(rows) for column in _OF_ROWS}
    columns |= {"ordinal": torch.arange(rows) // 2, "sample_index": torch.arange(rows) % 2}
    columns |= {"chosen": torch.arange(rows) % 2 == 0}
    objective = OBJECTIVES[name]()
    objective.start_mini_batch(0, 0)
    shapes = {"sequence_scores": (rows,)}
    outputs = {
        output: torch.zeros(shapes.get(output, (rows, length)), device="meta", requires_grad=True)
        for output in objective.outputs
    }
    loss, metrics = objective(
        outputs,
        DataProto.from_dict(columns),
        BatchTotals(int(columns["response_mask"].sum()), rows, rows // 2),  # no chosen token trains
    )
    assert loss.device.type == "meta"
    assert any(isinstance(value, torch.Tensor) for metric in metrics.values() for value, _ in metric.observations)
