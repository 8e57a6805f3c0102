"""Training runs with rewards from a model: a classifier, a classifier with a rule, a judge."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.roles.test_reward_model import make_classifier
from tests.rollout.service import running
from verl.cli.main import main
from verl.models.tiny import make_tiny_model

COMBINED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_model_score=0.0):
    return {"score": reward_model_score + 10.0, "model": reward_model_score}

def length_of_reply(data_source, solution_str, ground_truth, extra_info=None, reward_model_reply=""):
    return {"score": float(len(reward_model_reply)), "reply": reward_model_reply}
"""


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "rewards.py").write_text(COMBINED)
    return tmp_path / "rewards.py"


def test_a_classifier_trains_a_policy(tiny_run, tmp_path):
    path = make_classifier(tmp_path / "rm")
    model = ("reward.reward_model.enable=True", f"reward.reward_model.model_path={path}",
             "reward.reward_model.rollout.dtype=float32", "reward.custom_reward_function.path=null")  # fmt: skip
    run = tiny_run(*model, "trainer.test_freq=2")
    rows = run.training_rows()
    assert all(row["actor/grad_norm"] > 0 and row["reward/num_defaulted"] == 0 for row in rows)
    scores = [sample["score"] for sample in run.samples_of()]
    assert len(set(scores)) > 4
    assert rows[0]["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
    assert math.isfinite(rows[-1]["val/reward"])
    assert tiny_run(*model, folder="again").repeatable[0]["critic/score/mean"] == rows[0]["critic/score/mean"]


def test_a_rule_with_the_classifier_under_names_of_older_scripts(tiny_run, tmp_path, functions):
    path = make_classifier(tmp_path / "rm")
    run = tiny_run(
        "reward_model.enable=True", f"reward_model.model.path={path}", "reward_model.rollout.dtype=float32",
        f"reward.custom_reward_function.path={functions}",
    )  # fmt: skip
    for sample in run.samples_of():
        assert sample["score"] == pytest.approx(sample["reward_parts"]["model"] + 10.0)


def test_a_judge_trains_a_policy(tiny_run, tmp_path, functions):
    path = make_tiny_model(tmp_path / "judge", seed=5)
    run = tiny_run(
        "reward.reward_model.enable=True", f"reward.reward_model.model_path={path}",
        "reward.reward_model.judge_template='Rate {response}'", "reward.reward_model.rollout.dtype=float32",
        "reward.reward_model.rollout.response_length=4", f"reward.custom_reward_function.path={functions}",
        "reward.custom_reward_function.name=length_of_reply",
    )  # fmt: skip
    logged = run.samples_of()
    assert all(s["score"] == len(s["reward_parts"]["reply"]) for s in logged)
    assert len({s["reward_parts"]["reply"] for s in logged}) > 1


def test_a_judge_at_a_service_trains_a_policy(tiny_run, functions):
    """Only text is exchanged, four questions at a time; the judge has no folder."""

    def chat(body):
        return {"choices": [{"message": {"content": "x" * (len(body["messages"][0]["content"]) % 7)}}]}

    with running({"/v1/models": {"data": [{"id": "judge"}]}, "/v1/chat/completions": chat}) as service:
        run = tiny_run(
            "reward.reward_model.enable=True", "reward.reward_model.judge_template='Rate {response}'",
            "reward.reward_model.rollout.name=http", f"reward.reward_model.rollout.service.url={service.url}",
            "reward_batch_size=4", f"reward.custom_reward_function.path={functions}",
            "reward.custom_reward_function.name=length_of_reply",
        )  # fmt: skip
    logged = run.samples_of()
    assert all(s["score"] == len(s["reward_parts"]["reply"]) for s in logged)
    assert len({s["score"] for s in logged}) > 1


def test_scores_that_are_not_finite_end_the_run_before_it_trains(tiny_overrides, tmp_path, capsys):
    path = make_classifier(tmp_path / "rm")
    weights = load_file(path / "model.safetensors")
    weights["score.weight"].fill_(3e38)  # finite, unlike the sums of products with it
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    code = main([
        "train", *[o for o in tiny_overrides if "custom_reward_function" not in o], "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={path}", "reward.reward_model.rollout.dtype=float32",
        f"trainer.default_local_dir={tmp_path}/run",
    ])  # fmt: skip
    assert code == 8
    assert "The reward model gave" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_reward_model_shares_the_process_and_stays_as_it_is(tiny_run, tmp_path, around):
    from verl.roles.reward_model import RewardModelWorker

    modules = []
    around(RewardModelWorker, "score", lambda score, self, batch: modules.append(self.module) or score(self, batch))
    path = make_classifier(tmp_path / "rm")
    tiny_run(
        "reward.reward_model.enable=True", f"reward.reward_model.model_path={path}",
        "reward.reward_model.rollout.dtype=float32", "reward.custom_reward_function.path=null",
    )  # fmt: skip
    assert len(modules) == 2
    assert modules[0] is modules[1]
    from verl.models.classifier import load_reward_model

    for one, other in zip(modules[0].parameters(), load_reward_model(path).parameters(), strict=True):
        assert torch.equal(one, other)
