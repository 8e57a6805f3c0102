"""A tiny task for tiny models: the share of letters in a response."""

import json

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    text = solution_str
    share = sum(c.isalpha() for c in text) / max(len(text), 1)
    return {"score": share, "letters": share, "short": 1.0 / (1 + len(text))}
"""


def write_task(folder, *, num_val=4, reward=REWARD):
    """Write train.jsonl (24 rows), val.jsonl and reward.py into `folder`, which is returned."""
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
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    return folder
