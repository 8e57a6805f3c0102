"""A small run with its samples, and the distance of its weights to the weights of another computation."""

import torch
from safetensors.torch import load_file

from tests.letters_task import overrides, write_task
from tests.run.conftest import train_run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PROMPTS, N, LENGTH, STEPS = 4, 4, 12, 2
# groups always differ, and a reply's reward does not depend on anything but its text
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) / 2**32
"""
REWARDS_0_OR_1 = REWARD.replace("zlib.crc32(solution_str.encode()) / 2**32", "float(len(solution_str) % 4 == 0)")


def small_run(model, folder, changes, reward=REWARD):
    """The Run of two steps, saved at its end."""
    (folder / "task").mkdir()
    task = write_task(folder / "task", reward=reward)
    base = overrides(
        model, task, "data.val_files=[]", f"data.max_response_length={LENGTH}", f"{ACTOR}.optim.weight_decay=0.0",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False", f"trainer.save_freq={STEPS}",
    )  # fmt: skip
    return train_run(folder / "run", base, changes)


def weights_of(run, role="actor"):
    return load_file(run.folder / f"global_step_{STEPS}" / role / "huggingface" / "model.safetensors")


def distance(ours, theirs, start):
    """The relative difference of the changes from `start` (0 if it lacks a weight) of the weights of `theirs`."""
    difference = size = 0.0
    for name, value in theirs.items():
        begin = start[name].double() if name in start else torch.zeros(value.shape, dtype=torch.float64)
        change = value.double() - begin
        difference += float((ours[name].double() - begin - change).square().sum())
        size += float(change.square().sum())
    return (difference / size) ** 0.5
