"""PPO with generation and training on devices of their own: the smallest run of the whole dataflow.

    python examples/ppo_simple.py --num_rollout_workers 1 --num_update_workers 1
    torchrun --nproc_per_node=2 examples/ppo_simple.py --config-path configs/ppo_llama3.yaml \\
        --num-rollout-workers 1 --num-update-workers 1 actor_rollout_ref.model.path=MODEL

Plain Python runs one worker of each kind in one process, which shares the weights; more of them run on Ray. Under torchrun
every rank has a device: the first ones train, the others generate. Without a config a tiny random model learns to write digits;
the files of the task are made under outputs/ppo_simple.
"""

import argparse
import json
import os
from pathlib import Path

from verl import DataParallelConfig
from verl.cli.main import main
from verl.models.tiny import make_tiny_model
from verl.utils import set_device_map

HERE = Path("outputs/ppo_simple")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of characters that are digits."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)


def make_task(folder: Path) -> list[str]:
    """Prompts and a model, and the overrides that name them. Every rank makes its own: they are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w") as file:
        for number in range(64):
            row = {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": f"Say {number}."}],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"index": number},
            }
            file.write(json.dumps(row) + "\n")
    return [
        f"data.train_files={folder}/train.jsonl",
        "data.val_files=[]",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.num_workers=1",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "critic.optim.lr=0.003",
        "trainer.total_training_steps=5",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={HERE}/run",
        "trainer.resume_mode=disable",
    ]


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rollout_workers", "--num-rollout-workers", type=int, default=1)
    parser.add_argument("--num_update_workers", "--num-update-workers", type=int, default=1)
    parser.add_argument(
        "--config-path", "--config_path", help="a YAML file; its name is also looked for beside this script"
    )
    return parser.parse_known_args()


def config_file(name: str) -> Path:
    beside = Path(__file__).parent / name
    return Path(name) if Path(name).exists() or not beside.exists() else beside


if __name__ == "__main__":
    options, overrides = arguments()
    updates, rollouts = options.num_update_workers, options.num_rollout_workers
    rank = os.environ.get("RANK")
    if rank is not None or updates + rollouts > 2:
        set_device_map(
            DataParallelConfig(
                actor_devices=list(range(updates)), rollout_devices=list(range(updates, updates + rollouts))
            )
        )
    task = HERE / f"task_{rank or 0}"
    settings = make_task(task)
    if options.config_path:
        settings = ["--config-path", str(config_file(options.config_path)), *settings]
    else:
        settings.append(f"actor_rollout_ref.model.path={make_tiny_model(task / 'model')}")
    raise SystemExit(main(["train", *settings, *overrides]))
