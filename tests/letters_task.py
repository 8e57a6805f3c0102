"""A tiny task for tiny models: the share of letters in a response."""

import textwrap

from tests.json_lines import write_lines

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    text = solution_str
    share = sum(c.isalpha() for c in text) / max(len(text), 1)
    return {"score": share, "letters": share, "short": 1.0 / (1 + len(text))}
"""


def write_task(folder, *, num_val=4, reward=REWARD):
    """Write train.jsonl (24 rows), val.jsonl and reward.py into `folder`, and return it."""
    for name, count in (("train", 24), ("val", num_val)):
        rows = [
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": f"{name} {'x' * (i % 5)} {i}"}],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i},
            }
            for i in range(count)
        ]
        write_lines(folder / f"{name}.jsonl", rows)
    (folder / "reward.py").write_text(reward)
    return folder


def write_reward(folder, body, name="reward"):
    """The override of a run that scores by a function with this body, written to `folder`."""
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (folder / f"{name}.py").write_text(signature + textwrap.indent(body, "    ") + "\n")
    return f"reward.custom_reward_function.path={folder}/{name}.py"


def merge(base, changes):
    """`base` with the overrides of `changes` put in place of those for the same key."""
    taken = {c.split("=", 1)[0].lstrip("+") for c in changes}
    return [b for b in base if b.split("=", 1)[0] not in taken] + list(changes)


def overrides(model, task, *changes):
    """Overrides of two steps of GRPO on the task in the folder `task`: 4 prompts x 4 samples, float32, then `changes`. The
    rewards are computed in the process of the run."""
    base = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={task}/train.jsonl",
        f"data.val_files={task}/val.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.002",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={task}/reward.py",
        "reward.num_workers=1",
        "reward.debug=True",  # scorers in processes take longer than the steps
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
    ]
    return merge(base, changes)
