"""Preference optimization and reward models on two ranks: losses and validation equal the values of one process in
every arrangement."""

import json

import pytest

from tests.run.conftest import Run
from tests.run.test_rm import KINDS, ROWS
from tests.runtime.ranks import run

REWARD_MODELS = ("sigmoid", "regression", "process")
LOSSES = {
    **{kind: KINDS[kind][1:] for kind in REWARD_MODELS},
    "dpo": ["preference.loss=[sigmoid,aot_unpaired,sft]", "preference.ld_alpha=0.5", "preference.use_weighting=True"],
    "kto": ["preference.loss=kto"],
    "orpo": ["preference.loss=orpo"],
    "reference": ["ref.precompute=False"],
    "moving": ["ref.sync_steps=2"],
}
# as long as two completions; one completion at a time would be cheaper, and a pair on each rank better balanced
SMALL = ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1"]
SPMD = {
    "dpo fsdp2": ("dpo", ["engine.strategy=fsdp2"]),
    "dpo tensor2": ("dpo", ["engine.tensor_parallel_size=2"]),
    "dpo small": ("dpo", SMALL),
    "kto fsdp2": ("kto", ["engine.strategy=fsdp2"]),
    "orpo fsdp2": ("orpo", ["engine.strategy=fsdp2"]),
    "reference tensor2": ("reference", ["engine.tensor_parallel_size=2"]),
    "moving fsdp2": ("moving", ["engine.strategy=fsdp2"]),
    **{f"{kind} fsdp2": (kind, ["engine.strategy=fsdp2"]) for kind in REWARD_MODELS},
    **{f"{kind} tensor2": (kind, ["engine.tensor_parallel_size=2"]) for kind in ("sigmoid", "process")},
    "sigmoid small": ("sigmoid", SMALL),
}
METRICS = (
    "train/loss", "train/grad_norm", "train/rewards/chosen", "train/rewards/margins", "train/kl", "train/accuracy", "val/loss"
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def job(tiny_llama, folder):
    """`job(name, loss, *changes)`: two epochs of 11 rows in batches of 5, in float64: nothing divides by 2, and the completions
    of a pair differ much in length."""
    pairs = [
        {"prompt": f"{i}?", "chosen": "ab" * (i % 5 + 1), "rejected": "c" * (1 if i % 2 else 30)} for i in range(11)
    ]
    for name, rows in {"preference": pairs, **{kind: ROWS[KINDS[kind][0]](11) for kind in REWARD_MODELS}}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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

    def make(name, loss, *changes):
        rows = folder / f"{loss if loss in REWARD_MODELS else 'preference'}.jsonl"
        files = [f"data.train_files={rows}", f"data.val_files={rows}", f"trainer.default_local_dir={folder / name}"]
        overrides = [*common, *files, *LOSSES[loss], *changes]
        return {"program": "rm" if loss in REWARD_MODELS else "preference", "overrides": overrides}

    return make


@pytest.fixture(scope="module")
def alone(job, folder):
    """The rows of metrics of one process, by loss."""
    from tests.runtime.wide_norms import widen
    from verl.config import SCHEMAS, load_config
    from verl.run.host import train

    by_loss = {}
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        for loss in LOSSES:
            arguments = job(f"alone {loss}", loss)
            assert (
                train(load_config(arguments["overrides"], schema=SCHEMAS[arguments["program"]]), arguments["program"])
                == 0
            )
            by_loss[loss] = Run(folder / f"alone {loss}").rows
    return by_loss


@pytest.mark.slow
def test_two_ranks_under_torchrun_are_one_process(alone, job, folder):
    jobs = [job(name, loss, *changes) for name, (loss, changes) in SPMD.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run(2, "tests.runtime.several_runs", folder / "jobs.json", timeout_s=240)
    for name, (loss, _) in SPMD.items():
        rows = Run(folder / name).rows
        assert [row["step"] for row in rows] == list(
            range(1, 9 if loss == "kto" else 5)
        )  # kto: a pair is two completions
        for row, expected in zip(rows, alone[loss], strict=True):
            values, compared = ({key: r[key] for key in METRICS if key in r} for r in (row, expected))
            assert values == pytest.approx(compared, rel=1e-6, abs=1e-9), (name, row["step"])
