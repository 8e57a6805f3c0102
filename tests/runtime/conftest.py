"""A tiny task and runs of it, compared with the run of a single process."""

import json

import pytest

from tests import letters_task
from tests.json_lines import read_lines
from tests.run import conftest

REWARD = letters_task.REWARD.replace('"score": share', '"score": share + 0.1 * len(text)')

# what depends on how the work was divided, or on the clock
DIVIDED = ("timing_s/", "timing_per_token_ms/", "perf/", "rollout/", "time", "utilisation/", "busy", "comm")
# shares of tokens, whatever the dtype of the model
COUNTED_IN_FLOAT32 = ("clipfrac", "clipfrac_lower")


class Run(conftest.Run):
    def samples(self):
        files = sorted((self.folder / "samples").glob("*/step_*.jsonl"))
        return {str(f.relative_to(self.folder)): read_lines(f) for f in files}

    def weights(self, step, role="actor"):
        from safetensors.torch import load_file

        return load_file(self.folder / f"global_step_{step}" / role / "huggingface" / "model.safetensors")


def assert_same(run, reference, rel):
    """Tokens identical; every metric that does not depend on the division of work within `rel`."""
    ours, theirs = run.samples(), reference.samples()
    assert ours.keys() == theirs.keys()
    for name, rows in ours.items():
        for key in ("response_ids", "response", "prompt", "score", "uid"):
            if key in rows[0]:
                assert [r[key] for r in rows] == [r[key] for r in theirs[name]], (name, key)
    assert len(run.rows) == len(reference.rows) > 0
    for row, expected in zip(run.rows, reference.rows, strict=True):
        names = {n for n in expected if not n.startswith(DIVIDED)}
        assert names == {n for n in row if not n.startswith(DIVIDED)}
        for name in names:
            bound = max(rel, 1e-6) if name.endswith(COUNTED_IN_FLOAT32) else rel
            # near zero a sum in another order differs by its terms, not by itself
            assert row[name] == pytest.approx(expected[name], rel=bound, abs=bound, nan_ok=True), (row["step"], name)


def assert_same_weights(run, reference, step, rel, role="actor"):
    """Every weight tensor within `rel` of the reference, relative to the tensor's norm."""
    ours, theirs = run.weights(step, role), reference.weights(step, role)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        gap = (ours[name].double() - expected.double()).norm() / expected.double().norm()
        assert gap <= rel, f"{role} {name}: {gap:.3g}"


@pytest.fixture(scope="module", autouse=True)
def wide():
    """Runs in this process use the same norms as runs on ranks."""
    from tests.runtime import wide_norms

    with pytest.MonkeyPatch.context() as patch:
        wide_norms.widen(patch)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_llama):
    """Overrides of 3 steps of GRPO with 5 prompts x 3 samples in two optimizer steps: nothing divides by 2."""
    folder = letters_task.write_task(tmp_path_factory.mktemp("task"), num_val=3, reward=REWARD)
    return letters_task.overrides(
        tiny_llama,
        folder,
        "actor_rollout_ref.model.external_lib=tests.runtime.wide_norms",
        "reward.debug=False",
        "data.train_batch_size=5",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.actor.optim.lr=0.0002",
        "actor_rollout_ref.actor.fsdp_config.dtype=float64",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        "trainer.save_freq=3",
    )


PPO = [
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=0.0001",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=True",
]


TWO_STEPS = [f"trainer.{key}=2" for key in ("total_training_steps", "test_freq", "save_freq")]

# a batch of step t starts in step t - 1, and weights are sent after steps 2 and 4
EVERY_SECOND = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2"]
EVERY_SECOND += ["trainer.placement={actor:[0],rollout:[1],reward:[1]}", "trainer.save_freq=2"]
EVERY_SECOND += ["trainer.total_training_steps=5"]


def assert_versions(run):
    assert [row["training/off_policy/trajectory_staleness/max"] for row in run.rows] == [0, 1, 2, 1, 2]
    assert [row["training/weight_version"] for row in run.rows] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def jobs(base, tmp_path_factory):
    """`add(name, *changes)` notes a run, `file()` writes the jobs of several_runs.py; `run(name)` is its folder."""

    class Jobs:
        def __init__(self):
            self.root = tmp_path_factory.mktemp("runs")
            self.noted = []

        def add(self, name, *changes, **more):
            self.noted.append({"overrides": self.overrides(name, *changes), **more})
            return self.run(name)

        def overrides(self, name, *changes):
            return letters_task.merge(base, [f"trainer.default_local_dir={self.root}/{name}", *changes])

        def run(self, name):
            return Run(self.root / name)

        def file(self):
            path = self.root / f"jobs_{len(list(self.root.glob('jobs_*')))}.json"
            path.write_text(json.dumps(self.noted))
            self.noted = []
            return path

    return Jobs()


def train_here(jobs, name, *changes):
    """The same run in this process."""
    from verl.config import load_config
    from verl.run.host import train

    is_one_process = not any(change.startswith(("ray_kwargs.", "trainer.n_gpus_per_node")) for change in changes)
    assert train(load_config(jobs.overrides(name, f"reward.debug={is_one_process}", *changes))) == 0
    return jobs.run(name)
