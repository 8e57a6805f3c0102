"""Distillation on two ranks: losses and gradient norms equal one process's; the teacher is divided like the student."""

import json

import pytest

from tests.run.conftest import Run, merge, train_run
from tests.runtime.ranks import run
from verl.models.tiny import make_tiny_model

LOSS = "distillation.distillation_loss"
SPMD = {
    "fsdp2": ["actor_rollout_ref.actor.strategy=fsdp2"],
    "tensor2": ["actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"],
}
METRICS = (
    "distillation/loss",
    "distillation/student_mass",
    "distillation/teacher_mass",
    "actor/loss",
    "actor/grad_norm",
)


@pytest.mark.slow
def test_two_ranks_are_one_process(tiny_overrides, tmp_path):
    from tests.runtime.wide_norms import widen

    teacher = make_tiny_model(tmp_path / "teacher", seed=11)
    common = merge(
        tiny_overrides,
        (
            "actor_rollout_ref.model.external_lib=tests.runtime.wide_norms",
            "actor_rollout_ref.actor.fsdp_config.dtype=float64",
            "actor_rollout_ref.actor.optim.lr=0.0002",
            "distillation.enabled=True",
            f"distillation.teacher_models.teacher_model.model_path={teacher}",
            "distillation.teacher_models.teacher_model.inference.dtype=float64",
            f"{LOSS}.loss_mode=jsd",
            f"{LOSS}.topk=8",
            f"{LOSS}.use_task_rewards=False",
        ),
    )
    jobs = [
        {"program": "ppo", "overrides": [*common, *changes, f"trainer.default_local_dir={tmp_path / name}"]}
        for name, changes in SPMD.items()
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run(2, "tests.runtime.several_runs", tmp_path / "jobs.json", timeout_s=180)
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        expected = train_run(tmp_path / "alone", common).training_rows()
    for name in SPMD:
        for row, expected_row in zip(Run(tmp_path / name).training_rows(), expected, strict=True):
            values = {metric: row[metric] for metric in METRICS}
            assert values == pytest.approx({metric: expected_row[metric] for metric in METRICS}, rel=1e-6), name
