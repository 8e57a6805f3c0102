"""A tiny task as a tree of keys, for runs that are started from Python."""

import pytest

from tests.json_lines import write_lines

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory):
    """Folder with train.jsonl (8 rows), val.jsonl (2 rows) and score.py."""
    folder = tmp_path_factory.mktemp("compat")
    for name, count in (("train", 8), ("val", 2)):
        rows = [
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": f"{name} {i}"}],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
            }
            for i in range(count)
        ]
        write_lines(folder / f"{name}.jsonl", rows)
    (folder / "score.py").write_text(SCORER)
    return folder


@pytest.fixture
def tiny_tree(tiny_llama, tiny_files, tmp_path):
    """One step of GRPO on 2 prompts x 2 samples, as a script's own dict."""
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "model": {"path": str(tiny_llama)},
            "rollout": {"n": 2},
            "actor": {"ppo_mini_batch_size": 2, "fsdp_config": {"dtype": "float32"}},
        },
        "data": {
            "train_files": f"{tiny_files}/train.jsonl",
            "val_files": f"{tiny_files}/val.jsonl",
            "train_batch_size": 2,
            "max_prompt_length": 64,
            "max_response_length": 4,
        },
        "custom_reward_function": {"path": f"{tiny_files}/score.py"},
        "reward": {"num_workers": 1, "debug": True},
        "trainer": {
            "logger": ["file"],
            "total_training_steps": 1,
            "val_before_train": False,
            "default_local_dir": f"{tmp_path}/run",
        },
    }
