"""Runs of every kind on a tiny model, of two steps each."""

from pathlib import Path

from tests.json_lines import write_lines
from tests.letters_task import write_task
from tests.run.conftest import train_run

COMMON = [
    "data.train_batch_size=4", "trainer.logger=[file]", "trainer.total_training_steps=2", "trainer.test_freq=1",
]  # fmt: skip
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TOOLS = Path(__file__).parents[1] / "agents" / "echo_tools.py"
# kind -> (program, rows that it reads)
ON_ROWS = {"sft": ("sft", "sft"), "dpo": ("preference", "pairs"), "rm": ("rm", "pairs")}
ON_PROMPTS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "ppo": ["algorithm.adv_estimator=gae"],
    "agent": [
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.external_lib=tests.agents.echo_tools",
        f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}",
        f"{ROLLOUT}.multi_turn.format=every_turn", f"{ROLLOUT}.multi_turn.tool_sandbox=False",
        f"{ROLLOUT}.stop_token_ids={list(range(80))}", "data.max_response_length=160",
    ],
}  # fmt: skip
KINDS = (*ON_PROMPTS, *ON_ROWS)


def conversation(i):
    return {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "ab" * (i % 3 + 1)}]}


def pair(i):
    return {"prompt": f"say {i}", "chosen": "ab" * (i % 3 + 1), "rejected": "x" * (i % 2 + 1)}


def write_rows(folder):
    """sft.jsonl and pairs.jsonl."""
    for name, row_of in (("sft", conversation), ("pairs", pair)):
        write_lines(folder / f"{name}.jsonl", (row_of(i) for i in range(12)))
    return folder


def train_kind(kind, folder, model):
    """Train in `folder`/run; the folder of the run."""
    if kind in ON_ROWS:
        program, rows = ON_ROWS[kind]
        file = write_rows(folder) / f"{rows}.jsonl"
        keys = [f"model.path={model}", f"data.train_files={file}", f"data.val_files={file}"]
    else:
        program, task = "ppo", write_task(folder)
        keys = [
            f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}", f"data.train_files={task}/train.jsonl",
            f"data.val_files={task}/val.jsonl", "data.max_prompt_length=64", "data.max_response_length=6", f"{ROLLOUT}.n=4",
            f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.fsdp_config.dtype=float32", f"{ACTOR}.entropy_coeff=0.001",
            f"reward.custom_reward_function.path={task}/reward.py", "reward.debug=True", *ON_PROMPTS[kind],
        ]  # fmt: skip
    return train_run(folder / "run", [*COMMON, *keys], program=program).folder
