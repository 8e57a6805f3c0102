"""A tiny run whose samples are episodes with tools."""

from pathlib import Path

import pytest

from tests.letters_task import write_task

HERE = Path(__file__).parent
TOOLS = HERE / "echo_tools.py"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="session")
def agent_task(tmp_path_factory):
    """Folder with train.jsonl (24 rows), val.jsonl and reward.py, which also reads what episodes add."""
    return write_task(tmp_path_factory.mktemp("agent_task"))


@pytest.fixture
def agent_overrides(tiny_llama, agent_task):
    """Overrides of a GRPO run of 4 prompts x 3 episodes a step in float32."""
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={tiny_llama}",
        "actor_rollout_ref.model.external_lib=tests.agents.echo_tools",
        f"data.train_files={agent_task}/train.jsonl",
        "data.val_files=[]",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=160",
        f"{ROLLOUT}.n=3",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}",
        f"{ROLLOUT}.multi_turn.format=every_turn",
        f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
        f"{ROLLOUT}.multi_turn.tool_sandbox=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.002",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={agent_task}/reward.py",
        "reward.num_workers=1",
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
    ]


@pytest.fixture
def agent_run(agent_overrides, tmp_path):
    """agent_run("key=value", ...) -> the folder of a run."""
    from tests.run.conftest import Run, merge
    from verl.config import load_config
    from verl.run.host import train

    def run(*changes, folder="run"):
        where = tmp_path / folder
        assert train(load_config(merge([*agent_overrides, f"trainer.default_local_dir={where}"], changes))) == 0
        return Run(where)

    return run
