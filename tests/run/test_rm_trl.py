"""Ten steps of a reward model equal ten steps of TRL's RewardTrainer on the same pairs, both in float64.

In float32 TRL's own losses differ from its float64 ones by up to 1.2e-5 within ten steps, since gradients are steep here.
"""

import pytest

from tests.roles.test_reward_model import make_classifier
from tests.run.test_sft_trl import words
from tests.run.trl_oracle import BATCH_SIZE, NUM_STEPS, paired_steps, trl_case

# TRL scores the last token of a rendering, and verl the token that ends the answer: here they are the same
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    {
        "prompt": words(i, i % 4 + 1),
        "chosen": " " + words(i + 2, i % 6 + 1),
        "rejected": " " + words(i + 3, i % 3 + 1),
        "margin": (i % 4) / 2,
    }
    for i in range(NUM_STEPS * BATCH_SIZE)
]


def _messages(row):
    turns = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": role, "content": row[name].strip()}] for name, role in turns.items()}


# name: rows, family, RewardConfig in addition to the common settings, our overrides
CASES = {
    f"texts {family}": ([{k: v for k, v in row.items() if k != "margin"} for row in TEXTS], family, {}, [])
    for family in ("llama", "qwen2")
} | {
    "margins llama": (TEXTS, "llama", {}, []),
    "centred llama": (TEXTS, "llama", {"center_rewards_coefficient": 0.01}, ["rm.center_rewards_coefficient=0.01"]),
    "messages llama": ([_messages(row) for row in TEXTS], "llama", {}, []),
    "two micro-batches llama": (
        TEXTS,
        "llama",
        {"per_device_train_batch_size": BATCH_SIZE // 2, "gradient_accumulation_steps": 2},
        ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2"],
    ),
}
LR = 1e-4  # TRL's default for reward models
METRICS = {"loss": "loss", "grad_norm": "grad_norm", "accuracy": "accuracy", "margin": "margin", "lr": "learning_rate"}
METRICS |= {name: name for name in ("mean_reward", "min_reward", "max_reward")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: make_classifier(folder / family, family) for family in ("llama", "qwen2")}


@pytest.fixture(scope="module")
def cases(models):
    more = {"trainer": "Reward", "in_float64": True}
    return {
        name: trl_case(models[family], rows, TEMPLATE, LR, args=args, **more)
        for name, (rows, family, args, _) in CASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_match_trl(case, cases, theirs, tmp_path):
    overrides = CASES[case][-1]
    for row, log in paired_steps(theirs[case], "rm", tmp_path, cases[case], "float64", *overrides):
        # differences and means of scores are as exact as the scores, however small they are themselves
        largest = max(abs(log["min_reward"]), abs(log["max_reward"]))
        for name, their_name in METRICS.items():
            if name.startswith(("min", "max")) and case.startswith("two"):
                continue  # TRL averages these over micro-batches
            is_score = name == "margin" or name.endswith("reward")
            expected = pytest.approx(log[their_name], rel=1e-5, abs=1e-5 * largest if is_score else 0.0)
            assert row[f"train/{name}"] == expected, name
