"""Other launchers than torchrun: accelerate's, and a function that is shipped to another process, as services do."""

import textwrap

import pytest

from tests.commands import python
from tests.json_lines import read_lines
from tests.letters_task import overrides, write_task
from tests.run.conftest import train_run

SCRIPT = """
import os
import sys

import verl


def letters(completions, **kwargs):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    run = verl.train(
        sys.argv[1], [{"prompt": f"Say {i}."} for i in range(8)], reward=letters, output_dir=sys.argv[2],
        config={"data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 2, "trainer.total_training_steps": 1,
                "data.max_prompt_length": 64, "data.max_response_length": 8,
                "actor_rollout_ref.actor.fsdp_config.dtype": "float32"},
    )
    print(f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}", flush=True)
"""


def rows(folder):
    return read_lines(folder / "metrics.jsonl")


def launched(*words, cwd):
    """By accelerate, as two processes; on a machine without GPUs, --multi_gpu starts them as it does with GPUs."""
    options = ("--multi_gpu", "--num_processes=2", "--main_process_port=0")
    return python("-m", "accelerate.commands.launch", *options, *words, cwd=cwd, timeout=230)


@pytest.mark.slow
def test_accelerate_launches_the_ranks_of_a_run(tiny_llama, tmp_path):
    """With the rewards and gradients of one process, as under torchrun."""
    pytest.importorskip("accelerate")
    settings = overrides(tiny_llama, write_task(tmp_path), "data.val_files=[]", "trainer.total_training_steps=1")
    launched("-m", "verl.trainer.main_ppo", *settings, f"trainer.default_local_dir={tmp_path}/run", cwd=tmp_path)
    ours, theirs = rows(tmp_path / "run")[-1], rows(train_run(tmp_path / "one", settings).folder)[-1]
    for name in ("critic/score/mean", "actor/grad_norm", "response_length/mean"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


@pytest.mark.slow
def test_accelerate_launches_a_script(tiny_llama, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launched("train.py", tiny_llama, tmp_path / "run", cwd=tmp_path)
    assert rows(tmp_path / "run")[-1]["step"] == 1
    assert {f"rank {rank} of 2" for rank in (0, 1)} <= set(done.stdout.splitlines())


def test_a_function_that_is_shipped_by_value_trains(tiny_llama, tmp_path):
    """As Modal and others call a function: its code comes as bytes, and no file has it."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    space = {"__name__": "__main__"}
    code = """
    def train(model, folder):
        import verl

        def letters(completions, **kwargs):
            return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]

        run = verl.train(
            model, [{"prompt": f"Say {i}."} for i in range(8)], reward=letters, output_dir=folder,
            config={"data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 2, "trainer.total_training_steps": 1,
                    "data.max_prompt_length": 64, "data.max_response_length": 8,
                    "actor_rollout_ref.actor.fsdp_config.dtype": "float32"},
        )
        return str(run.model_path)
    """
    exec(textwrap.dedent(code), space)
    (tmp_path / "function.bin").write_bytes(cloudpickle.dumps(space["train"]))
    called = "import sys, pickle; f = pickle.load(open('function.bin', 'rb')); print('MODEL', f(*sys.argv[1:]))"
    done = python("-c", called, tiny_llama, tmp_path / "run", cwd=tmp_path)
    (place,) = [line.removeprefix("MODEL ") for line in done.stdout.splitlines() if line.startswith("MODEL ")]
    assert place.startswith(str(tmp_path / "run"))
    assert rows(tmp_path / "run")[-1]["critic/score/mean"] >= 0
