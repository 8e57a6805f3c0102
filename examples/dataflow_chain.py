"""A program of your own: GRPO whose dataflow is written as a chain of stages over the groups of the run.

python examples/dataflow_chain.py

Checkpoints, resuming, guards, the ledger of samples, metrics and the console work as in every program.
"""

import json
from pathlib import Path

from verl import Controller
from verl.programs.ppo import PPO
from verl.tracking.ledger.records import keys_of

HERE = Path("outputs/dataflow_chain")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of characters that are digits, and a bonus when the first is the right one."""
    share = sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
    return 0.5 * share + 0.5 * solution_str.startswith(ground_truth)


class Chained(PPO):
    """`verl.programs.ppo.PPO` has what each stage calls; a stage of your own goes between any two."""

    def __init__(self, config, data, roles, run):
        super().__init__(config, data, roles, run)
        self.controller = Controller(roles)

    def train(self, step):
        """One step of the run."""
        result, next_ordinal = (
            self.controller
            .broadcast(step)
            .scatter(lambda group, step: self.collect(step), worker_group="rollout_group")  # prompts to scored samples
            .sync()
        )  # fmt: skip

        def experience(result):
            self.annotate(result)
            self.guards.check_samples(result)
            return result

        def advantages(result):
            self.assign_credit(result, step)
            self.guards.check_credit(result)
            return result

        def updates(group, result):
            self.update(result, step)
            return result

        with self.guards.step(step, result, next_ordinal):
            (
                self.controller
                .broadcast(result)
                .gather(experience)
                .all_reduce(advantages)
                .scatter(updates, worker_group="update_group")
                .sync()
            )  # fmt: skip
        self.samples.train(step, [] if result.skipped else keys_of(result.batch))
        return result


if __name__ == "__main__":
    from verl.config import load_config
    from verl.models.tiny import make_tiny_model
    from verl.run.host import train

    HERE.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"Say {n % 10}.", "data_source": "digits", "reward_model": {"ground_truth": str(n % 10)}}
        for n in range(160)
    ]
    (HERE / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={make_tiny_model(HERE / 'model')}",
        f"data.train_files={HERE}/train.jsonl",
        "data.val_files=[]",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=0.003",
        f"reward.custom_reward_function.path={__file__}",
        "trainer.total_training_steps=15",
        f"trainer.default_local_dir={HERE}/run",
        "trainer.resume_mode=disable",
    ]
    raise SystemExit(train(load_config(settings), program=f"{__file__}:Chained"))
