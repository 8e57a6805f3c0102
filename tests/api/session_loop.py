"""Three steps of a loop over `verl.Session`: python -m tests.api.session_loop MODEL OUT KEY=VALUE..."""

import json
import sys
from pathlib import Path

import verl

PROMPTS = ["Say 1.", "Say 2.", "Say 3."]
KEYS = [
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "trainer.device=cpu",
]


def reinforce(outputs, rows, totals):
    objective = outputs["log_probs"] * rows["advantage"] * rows["response_mask"]
    return -objective.sum() / totals.num_tokens, {"num_rows": len(rows["advantage"])}


def take_step(session):
    """Metrics and responses of one step on the share of even tokens."""
    samples = session.sample(PROMPTS, n=4)
    scores = [sum(token % 2 == 0 for token in sample["response_ids"]) / 6 for sample in samples]
    rows = [{**sample, "advantage": score - sum(scores) / 12} for sample, score in zip(samples, scores, strict=True)]
    metrics = session.forward_backward(rows, reinforce)
    metrics |= session.optim_step()
    session.sync_weights()
    return {**metrics, "responses": [sample["response_ids"] for sample in samples]}


def main(model, out, *keys):
    with verl.Session(model, config=[*KEYS, *keys]) as session:
        steps = [take_step(session) for _ in range(3)]
        log_probs = session.log_probs([{"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}])
        Path(out).write_text(json.dumps({"steps": steps, "log_probs": log_probs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
