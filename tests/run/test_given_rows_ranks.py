"""Fine-tuning, preference optimization, reward models and distillation on two ranks: losses and validation equal the values of
one process in every arrangement; the teacher is divided like the student."""

import json
import sys

import pytest

from tests.commands import ran
from tests.json_lines import write_lines
from tests.run.conftest import Run, merge, train_run
from tests.run.test_rm import KINDS, ROWS
from tests.runtime.ranks import ROOT, environment, run
from verl.models.tiny import make_tiny_model

REWARD_MODELS = ("sigmoid", "regression", "process")
LOSSES = {
    "sft": ["trainer.save_freq=after_each_epoch"],
    **{kind: KINDS[kind][1:] for kind in REWARD_MODELS},
    "dpo": ["preference.loss=[sigmoid,aot_unpaired,sft]", "preference.ld_alpha=0.5", "preference.use_weighting=True"],
    "kto": ["preference.loss=kto"],
    "orpo": ["preference.loss=orpo"],
    "reference": ["ref.precompute=False"],
    "moving": ["ref.sync_steps=2"],
}
# as long as two completions; one completion at a time would be cheaper, and a pair on each rank better balanced
SMALL = ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1"]
WAYS = {
    "fsdp2": ["engine.strategy=fsdp2"],
    "tensor2": ["engine.tensor_parallel_size=2"],
    "sequence2": ["engine.ulysses_sequence_parallel_size=2"],
    "small": SMALL,
}
RAY = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4"]
SPMD = [
    *((loss, way) for loss in ("sft", "sigmoid") for way in WAYS),
    *((loss, way) for loss in ("dpo", "process") for way in ("fsdp2", "tensor2")),
    *((loss, "fsdp2") for loss in ("kto", "orpo", "moving", "regression")),
    ("dpo", "small"),
    ("reference", "tensor2"),
]
METRICS = (
    "train/loss", "train/grad_norm", "train/global_tokens", "train/token_accuracy", "train/entropy", "train/rewards/chosen",
    "train/rewards/margins", "train/kl", "train/accuracy", "train/margin", "train/mean_reward", "train/min_reward",
    "train/max_reward", "val/loss", "val/margin",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def program_of(loss):
    return loss if loss == "sft" else "rm" if loss in REWARD_MODELS else "preference"


@pytest.fixture(scope="module")
def job(tiny_llama, folder):
    """`job(loss, name, *changes)`: two epochs of 11 rows in batches of 5, in float64: nothing divides by 2, and the completions
    of a pair differ much in length."""
    pairs = [
        {"prompt": f"{i}?", "chosen": "ab" * (i % 5 + 1), "rejected": "c" * (1 if i % 2 else 30)} for i in range(11)
    ]
    files = {"preference": pairs, **{kind: ROWS[KINDS[kind][0]](11) for kind in REWARD_MODELS}}
    files["sft"] = [{"prompt": f"{i}?", "completion": "ab" * (i % 5 + 1)} for i in range(11)]
    for name, rows in files.items():
        write_lines(folder / f"{name}.jsonl", rows)
    common = [
        f"model.path={tiny_llama}",
        "model.external_lib=tests.runtime.wide_norms",
        "data.train_batch_size=5",
        "engine.dtype=float64",
        "optim.lr=0.0002",
        "trainer.logger=[file]",
        "trainer.total_epochs=2",
        "trainer.test_freq=after_each_epoch",
    ]

    def make(loss, name, *changes):
        rows = folder / f"{loss if loss in files else 'preference'}.jsonl"
        places = [f"data.train_files={rows}", f"data.val_files={rows}"]
        places.append(f"trainer.default_local_dir={folder / loss / name}")
        return {"program": program_of(loss), "overrides": [*common, *places, *LOSSES[loss], *changes]}

    return make


@pytest.fixture(scope="module")
def alone(job, folder):
    """The rows of metrics of one process, by loss."""
    from tests.runtime.wide_norms import widen
    from verl.config import SCHEMAS, load_config
    from verl.run.host import train

    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        for loss in LOSSES:
            program = program_of(loss)
            assert train(load_config(job(loss, "alone")["overrides"], schema=SCHEMAS[program]), program) == 0
    return {loss: Run(folder / loss / "alone").rows for loss in LOSSES}


def write(folder, name, jobs):
    file = folder / f"{name}.json"
    file.write_text(json.dumps(jobs))
    return file


def assert_same(loss, rows, expected):
    last = 8 if loss == "kto" else 4  # a pair is two completions
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(1, last + 1))
    for row, expected_row in zip(rows, expected, strict=True):
        values, compared = ({name: r[name] for name in METRICS if name in r} for r in (row, expected_row))
        assert values == pytest.approx(compared, rel=1e-6, abs=1e-9), (loss, row["step"])


@pytest.mark.slow
def test_two_ranks_under_torchrun_are_one_process(alone, job, folder):
    jobs = [job(loss, way, *WAYS[way]) for loss, way in SPMD]
    run(2, "tests.runtime.several_runs", write(folder, "spmd", jobs), timeout_s=300)
    for loss, way in SPMD:
        assert_same(loss, Run(folder / loss / way).rows, alone[loss])


@pytest.mark.slow
def test_two_actors_on_ray_are_one_process(alone, job, folder):
    pytest.importorskip("ray")
    file = write(folder, "ray", [job(loss, "ray", *RAY) for loss in ("sft", "sigmoid")])
    command = [sys.executable, "-m", "tests.runtime.several_runs", str(file)]
    ran(*command, cwd=ROOT, env=environment(RAY_AUTH_MODE="disabled"), timeout=280)
    for loss in ("sft", "sigmoid"):
        assert_same(loss, Run(folder / loss / "ray").rows, alone[loss])


LOSS = "distillation.distillation_loss"
TEACHER_WAYS = {
    "fsdp2": ["actor_rollout_ref.actor.strategy=fsdp2"],
    "tensor2": ["actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"],
}
DISTILLED = (
    "distillation/loss",
    "distillation/student_mass",
    "distillation/teacher_mass",
    "actor/loss",
    "actor/grad_norm",
)


@pytest.mark.slow
def test_distillation_on_two_ranks_is_one_process(tiny_overrides, tmp_path):
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
        for name, changes in TEACHER_WAYS.items()
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run(2, "tests.runtime.several_runs", tmp_path / "jobs.json", timeout_s=180)
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        expected = train_run(tmp_path / "alone", common).training_rows()
    for name in TEACHER_WAYS:
        for row, expected_row in zip(Run(tmp_path / name).training_rows(), expected, strict=True):
            values = {metric: row[metric] for metric in DISTILLED}
            assert values == pytest.approx({metric: expected_row[metric] for metric in DISTILLED}, rel=1e-6), name
