"""A mixed flow: a reward model from preferences, PPO against it, rejection sampling from the result. One process, one folder.

python examples/08_reward_model_then_ppo.py
"""

import json
import random

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_08"
STEPS = {"total_training_steps": 20, "test_freq": 20, "resume_mode": "disable"}
DATA = {"data.train_batch_size": 16}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_model_score=0.0):
    """The reward model's score, and the share of digits, which the preferences were about."""
    return {"score": reward_model_score, "digits": sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)}


def report(label, samples, model):
    """Held-out reward, and how it was earned: share of digits, tokens, and KL from the first policy (nats per response)."""
    import torch

    rows, columns = [json.loads(line) for line in open(f"{HERE}/run/{samples}")], []
    for row in rows:
        start, ids = len(row["prompt_ids"]), torch.tensor([row["prompt_ids"] + row["response_ids"]])
        first = model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])
        kl = sum(row["log_probs"]) - float(first.sum())
        columns.append([row["score"], row["reward_parts"]["digits"], ids.shape[1] - start, kl])
    means = [sum(column) / len(rows) for column in zip(*columns, strict=True)]
    print("{}: held-out reward {:.3f}, digits {:.3f}, length {:.2f}, KL {:.3f}".format(label, *means))


def pair(n):
    sides = {"chosen": "0123456789a", "rejected": "abcdef0"}
    return {
        "prompt": f"{n}?",
        **{side: "".join(random.choices(letters, k=3 + n % 6)) for side, letters in sides.items()},
    }


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM

    random.seed(0)
    base, pairs = make_tiny_model(f"{HERE}/model"), [pair(n) for n in range(400)]
    judge = verl.reward_model(
        base, pairs[:360], eval_data=pairs[360:], output_dir=f"{HERE}/run/1_reward_model", config=DATA, optim={"lr": 0.003},
        trainer=STEPS,
    )  # fmt: skip
    prompts = [{"prompt": row["prompt"]} for row in pairs]
    rl = {
        **DATA, "data.max_prompt_length": 32, "data.max_response_length": 8, "rejection.truncated": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0, "actor_rollout_ref.actor.optim.lr": 0.003,
        "reward.num_workers": 1,
        "reward.reward_model": {"enable": True, "model_path": str(judge.model_path), "rollout.dtype": "float32"},
    }  # fmt: skip
    settings = {"reward": __file__, "eval_data": prompts[360:], "algorithm": "rloo", "config": rl, "trainer": STEPS}
    policy = verl.train(
        base, prompts[:360], output_dir=f"{HERE}/run/2_ppo", **{"actor_rollout_ref.rollout.n": 4}, **settings
    )
    verl.train(
        policy.model_path, prompts[:360], output_dir=f"{HERE}/run/3_rejection",
        **{"algorithm.program": "rejection_sampling", "rejection.n": 8}, **settings,
    )  # fmt: skip
    first = AutoModelForCausalLM.from_pretrained(base)
    report("before", "2_ppo/samples/val/step_000000.jsonl", first)
    report("after PPO", "2_ppo/samples/val/step_000020.jsonl", first)
    report("after rejection sampling", "3_rejection/samples/val/step_000020.jsonl", first)
