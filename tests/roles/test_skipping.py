"""Samples with only zero advantages are not computed, and nothing that is trained changes by it."""

from dataclasses import replace

import pytest
import torch

from tests.engines import tiny
from tests.engines.test_contract import weights_of
from tests.models.reference import make_columns, random_rows
from tests.slow import each_value
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.algorithms.policy_losses.terms import is_zero_without_advantage
from verl.algorithms.reduce import LOSS_AGG_MODES
from verl.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig, RolloutCorrectionConfig
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching
from verl.models.tiny import make_tiny_model
from verl.roles.api import RoleSpec
from verl.roles.model import ModelRole
from verl.roles.objectives.policy import PolicyObjective, all_rows, rows_with_advantage, skips_zero_advantages
from verl.roles.updates import MiniBatchSchedule

DECLARED = sorted(n for n in POLICY_LOSSES.built_in if is_zero_without_advantage(POLICY_LOSSES.declared(n)))
CUTS = [MicroBatching(max_tokens=40), MicroBatching(max_rows=3)]
SIZES = [4, 1, 3, 2, 4]
SILENT = [0, 1, 2, 3, 5, 9]  # a whole group of four, and single rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=32, intermediate_size=48, head_dim=8)


def make_engine(folder, **optim):
    return tiny.make_engine(folder, model={"enable_gradient_checkpointing": False}, optim={"clip_grad": 0.0, **optim})


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder)


def make_batch(silent=SILENT, seed=0):
    prompts, responses = random_rows(seed, SIZES)
    columns = make_columns(prompts, responses)
    shape, generator = columns["responses"].shape, torch.Generator().manual_seed(seed + 1)
    mask = columns["response_mask"]
    columns["advantages"] = torch.randn(shape, generator=generator)
    columns["advantages"][silent] = torch.where(mask[silent], 0.0, columns["advantages"][silent])
    columns["old_log_probs"] = torch.where(mask, -5 + torch.randn(shape, generator=generator), 0.0)
    columns["rollout_log_probs"] = columns["old_log_probs"] + 0.1
    columns["rollout_is_weights"] = torch.where(mask, torch.rand(shape, generator=generator) + 0.5, 0.0)
    return DataProto.from_dict(columns)


def make_config(mode="vanilla", **changes):
    config = replace(ActorConfig(), **changes)
    return replace(config, policy_loss=replace(config.policy_loss, loss_mode=mode, dro_beta=0.1))


def make_actor(engine, config, micro=MicroBatching(max_tokens=40)):
    correction = RolloutCorrectionConfig()
    needed = rows_with_advantage if skips_zero_advantages(config, correction) else all_rows
    spec = RoleSpec(
        "actor",
        "lm",
        ModelConfig(),
        FSDPConfig(),
        OptimConfig(),
        lambda guard: PolicyObjective(config, correction, max_response_length=8),
        micro=micro,
        forward_micro=micro,
        schedule=MiniBatchSchedule(needed=needed),
    )
    return ModelRole(spec, engine, lambda folder: None)


class Gradients:
    """A StepCheck that keeps the gathered gradients and refuses the step."""

    names = {}

    def __init__(self, engine):
        self.engine, self.gradients = engine, {}

    def __call__(self, figures):
        masters = self.engine.optimizer.masters
        self.gradients = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
        return False


def gradients(engine, config, batch, micro, rows):
    objective = PolicyObjective(config, RolloutCorrectionConfig(), max_response_length=8)
    objective.start_mini_batch(0, 0)
    check = Gradients(engine)
    metrics = engine.train_batch(batch, objective, objective.outputs, micro, 1.2, check, rows=rows)
    return check.gradients, metrics


def relative_gap(a, b):
    assert a.keys() == b.keys()
    assert a
    scale = max(float(tensor.abs().max()) for tensor in b.values())
    assert scale > 0
    return max(float((a[name] - b[name]).abs().max()) for name in a) / scale


@pytest.mark.parametrize(("mode", "micro"), each_value(DECLARED, CUTS))
def test_gradients_match_all_rows(engine, mode, micro):
    for agg_mode in LOSS_AGG_MODES:
        config, batch = make_config(mode, loss_agg_mode=agg_mode), make_batch()
        computed = make_actor(engine, config).schedule.computed(batch)
        assert computed == [row for row in range(sum(SIZES)) if row not in SILENT]
        expected, full = gradients(engine, config, batch, micro, None)
        actual, metrics = gradients(engine, config, batch, micro, computed)
        assert relative_gap(actual, expected) < 1e-6, agg_mode
        for name in ("loss", "pg_loss", "grad_norm"):
            assert metrics[name].value == pytest.approx(full[name].value, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("columns", [(), ("old_log_probs",), ("rollout_is_weights",)])
def test_it_does_not_matter_which_columns_a_loss_gets(engine, columns):
    """Without old log-probs the current policy is its own old one; without weights nothing is weighted."""
    batch = make_batch()
    batch.pop(batch_keys=list(columns))
    computed = make_actor(engine, make_config()).schedule.computed(batch)
    micro = MicroBatching(max_tokens=40)
    expected, actual = (gradients(engine, make_config(), batch, micro, rows)[0] for rows in (None, computed))
    assert relative_gap(actual, expected) < 1e-6


@pytest.mark.parametrize(
    "config",
    [
        make_config(entropy_coeff=0.01),
        make_config(use_kl_loss=True),
        make_config(use_kl_loss=True, kl_loss_coef=0.0),
        make_config(skip_zero_advantages=False),
        *(make_config(mode) for mode in ("dro", "clip_cov", "kl_cov")),
    ],
)
def test_all_rows_are_computed_where_something_else_acts_on_them(engine, config):
    assert make_actor(engine, config).schedule.computed(make_batch()) == list(range(sum(SIZES)))


def test_bypass_mode_and_users_losses_compute_all_rows(tmp_path):
    assert not skips_zero_advantages(make_config(), replace(RolloutCorrectionConfig(), bypass_mode=True))
    loss_file = tmp_path / "own.py"
    loss_file.write_text(
        "def loss(old_log_prob, log_prob, advantages, response_mask, *, agg):\n    return log_prob.sum(), {}\n"
    )
    assert not skips_zero_advantages(make_config(f"{loss_file}:loss"), RolloutCorrectionConfig())


def test_updates_report_the_share_and_metrics_of_computed_rows(folder):
    silent, remaining = set(SILENT), [row for row in range(sum(SIZES)) if row not in SILENT]
    config = make_config(
        calculate_entropy=True, loss_agg_mode="seq-mean-token-sum"
    )  # the entropy stays a mean over tokens
    batch = make_batch()
    engine = make_engine(folder)
    mask = batch.batch["response_mask"]
    entropys = make_actor(engine, config).forward(batch, {"entropy": "entropys"}).batch["entropys"]
    updates = make_actor(engine, config).update(batch, 1)
    metrics = {name: metric.value for name, metric in updates.metrics().items()}
    assert metrics["actor/skipped_row_ratio"] == pytest.approx(len(silent) / sum(SIZES))
    assert metrics["actor/entropy"] == pytest.approx(float(entropys[remaining][mask[remaining]].mean()), rel=1e-5)
    assert len(updates.observed[0]) == int(mask[remaining].sum())

    other = make_engine(folder)
    everything = make_actor(other, replace(config, skip_zero_advantages=False)).update(batch, 1)
    whole_found = {name: metric.value for name, metric in everything.metrics().items()}
    assert whole_found["actor/skipped_row_ratio"] == 0
    assert set(whole_found) == set(metrics)
    assert metrics["actor/pg_loss"] == pytest.approx(whole_found["actor/pg_loss"], rel=1e-5)
    assert metrics["actor/entropy"] != pytest.approx(whole_found["actor/entropy"], rel=1e-5)
    assert relative_gap(weights_of(engine), weights_of(other)) < 1e-6


def test_where_no_row_has_an_advantage_the_optimizer_steps_on_a_zero_gradient(folder):
    """Momentum and weight decay continue as they would after computing every row."""
    batches = [make_batch(), make_batch(list(range(sum(SIZES))), seed=1), make_batch(seed=2)]
    engines = []
    for skip in (True, False):
        engines.append(make_engine(folder, weight_decay=0.1))
        actor = make_actor(engines[-1], make_config(skip_zero_advantages=skip))
        before = weights_of(engines[-1])
        actor.update(batches[0], 1)
        moved = weights_of(engines[-1])
        assert relative_gap(moved, before) > 1e-6
        metrics = actor.update(batches[1], 2).metrics()
        assert metrics["actor/grad_norm"].value == 0
        assert metrics["actor/skipped_row_ratio"].value == ((sum(SIZES) - 1) / sum(SIZES) if skip else 0)
        assert relative_gap(weights_of(engines[-1]), moved) > 1e-6
        actor.update(batches[2], 3)
    assert engines[0].optimizer.num_steps == engines[1].optimizer.num_steps == 3
    assert relative_gap(weights_of(engines[0]), weights_of(engines[1])) < 1e-5
