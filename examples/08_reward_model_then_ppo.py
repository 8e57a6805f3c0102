"""A mixed flow: a reward model from preferences, PPO against it, rejection sampling from the result. One process, one folder.

python examples/08_reward_model_then_ppo.py
"""

import json
import random
from pathlib import Path

HERE = Path("outputs/example_08")
EVERY = f"""trainer.resume_mode=disable trainer.total_training_steps=20 trainer.save_freq=20 trainer.test_freq=20
data.train_files={HERE}/train.jsonl data.val_files={HERE}/val.jsonl data.train_batch_size=16"""
RL = f"""data.max_prompt_length=32 data.max_response_length=8 algorithm.adv_estimator=rloo reward.reward_model.enable=True
reward.reward_model.rollout.dtype=float32 reward.num_workers=1 rejection.truncated=True
actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.actor.optim.lr=0.003
reward.custom_reward_function.path={__file__}"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_model_score=0.0):
    """The reward model's score; beside it the share of digits, which is what the preferences were about."""
    return {"score": reward_model_score, "digits": sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)}


def stage(program, name, settings):
    """Train in a folder of its own; returns the trained model."""
    from verl.config import SCHEMAS, load_config
    from verl.run.host import train

    overrides = f"{EVERY} {settings} trainer.default_local_dir={HERE}/run/{name}".split()
    train(load_config(overrides, schema=SCHEMAS[program]), program)
    return HERE / "run" / name / "global_step_20" / ("model" if program == "rm" else "actor") / "huggingface"


def report(label, samples, model):
    """Held-out reward, and how it was earned: share of digits, tokens, and KL from the first policy (nats per response)."""
    import torch

    rows, found = [json.loads(line) for line in (HERE / "run" / samples).open()], []
    for row in rows:
        start, ids = len(row["prompt_ids"]), torch.tensor([row["prompt_ids"] + row["response_ids"]])
        first = model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])
        kl = sum(row["log_probs"]) - float(first.sum())
        found.append([row["score"], row["reward_parts"]["digits"], ids.shape[1] - start, kl])
    means = [sum(column) / len(rows) for column in zip(*found, strict=True)]
    print("{}: held-out reward {:.3f}, digits {:.3f}, length {:.2f}, KL {:.3f}".format(label, *means))


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM

    from verl.models.tiny import make_tiny_model

    random.seed(0)
    base, sides = make_tiny_model(HERE / "model"), {"chosen": "0123456789a", "rejected": "abcdef0"}
    for split, numbers in (("train", range(360)), ("val", range(360, 400))):
        with (HERE / f"{split}.jsonl").open("w") as file:
            for i in numbers:
                row = {"data_source": "digits", "reward_model": {"style": "model"}}
                row["prompt"] = [{"role": "user", "content": f"{i}?"}]
                row |= {side: "".join(random.choices(letters, k=3 + i % 6)) for side, letters in sides.items()}
                file.write(json.dumps(row) + "\n")
    judge = stage("rm", "1_reward_model", f"model.path={base} optim.lr=0.003")
    rl = f"{RL} reward.reward_model.model_path={judge} actor_rollout_ref.model.path="
    policy = stage("ppo", "2_ppo", f"actor_rollout_ref.rollout.n=4 {rl}{base}")
    stage("ppo", "3_rejection", f"algorithm.program=rejection_sampling rejection.n=8 {rl}{policy}")
    first = AutoModelForCausalLM.from_pretrained(base)
    report("before", "2_ppo/samples/val/step_000000.jsonl", first)
    report("after PPO", "2_ppo/samples/val/step_000020.jsonl", first)
    report("after rejection sampling", "3_rejection/samples/val/step_000020.jsonl", first)
