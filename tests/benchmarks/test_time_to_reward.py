"""Time to reward: conclusions from answers, and the script end to end on a tiny model."""

import json

import pytest
import time_to_reward
from peer_env import default_folder, is_ready
from peers_cpu import Unequal
from report import Report
from time_to_reward import Point, Run, check_same_prompts, fill, gaps_to_float32

from tests.letters_task import REWARD, write_task


def run_of(side, seed, *points):
    return Run(side, seed, [Point(*point, None) for point in points], [{"step_s": 2.0}])


class FakePeer:
    def ask(self, command, limit_s):
        assert command == "step"
        return {"step_s": 1.5, "prompts": "d", "num_sequences": 4}


def rewards(*values):
    left = list(values)
    return lambda: {"sampled": left.pop(0), "greedy": None}


def options_of(*extra):
    return time_to_reward.parse(["--steps", "5", "--every", "2", "--target", "0.5", *extra])


def test_a_run_ends_at_the_target():
    run = Run("float32", 1)
    time_to_reward.train(run, options_of(), FakePeer(), rewards(0.1, 0.2, 0.5, 0.9))
    assert [(p.step, p.seconds, p.sampled) for p in run.points] == [(0, 0.0, 0.1), (2, 3.0, 0.2), (4, 6.0, 0.5)]
    assert run.reached(0.5).step == 4


def test_all_steps_are_taken_when_asked_and_the_last_is_evaluated():
    run = Run("float32", 1)
    time_to_reward.train(run, options_of("--all-steps"), FakePeer(), rewards(0.1, 0.6, 0.7, 0.4))
    assert [p.step for p in run.points] == [0, 2, 4, 5]
    assert run.reached(0.5).step == 2
    assert run.reached(0.8) is None


def test_ratios_are_of_the_same_seed():
    ours = [run_of("dithered", 1, (0, 0, 0.1), (2, 10.0, 0.6)), run_of("dithered", 2, (0, 0, 0.1), (4, 20.0, 0.6))]
    trl = [run_of("trl shipped", 1, (0, 0, 0.1), (2, 50.0, 0.6)), run_of("trl shipped", 2, (0, 0, 0.1), (4, 60.0, 0.7))]
    report = Report("t")
    fill(report, [*ours, *trl, run_of("nearest", 1, (0, 0, 0.1))], 0.5)
    rows = {row[0]: row[1:] for row in report.tables[0][1]}
    assert rows["dithered"][:4] == ["2 of 2", "3.00", "15.0 s", "1.00x"]
    assert rows["trl shipped"][:4] == ["2 of 2", "3.00", "55.0 s", "4.00x"]
    assert rows["nearest"][:4] == ["0 of 1", "-", "-", "-"]
    assert report.results["seconds_to_target"]["nearest"] == [None]


def test_rewards_are_compared_with_float32_of_the_same_seed():
    of_side = {
        "float32": [
            run_of("float32", 1, (0, 0, 0.1), (20, 9.0, 0.7)),
            run_of("float32", 2, (0, 0, 0.1), (20, 9.0, 0.6)),
        ],
        "dithered": [run_of("dithered", 1, (20, 9.0, 0.75)), run_of("dithered", 2, (20, 9.0, 0.5), (22, 9.9, 0.9))],
    }
    assert gaps_to_float32(of_side)["dithered"] == pytest.approx([0.05, -0.1])


def test_other_prompts_are_refused():
    run = Run("trl shipped", 1, steps=[{"prompts": "a", "num_sequences": 8}])
    check_same_prompts(run, ["a", "b"], 8)
    for digests, count in ((["b"], 8), (["a"], 7)):
        with pytest.raises(Unequal, match="step 1"):
            check_same_prompts(run, digests, count)


@pytest.fixture
def job(tiny_llama, tmp_path):
    """A GRPO job of 4 prompts x 4 samples a step, with held-out prompts and a reward that groups agree on at times."""
    write_task(tmp_path, reward=REWARD.replace('"score": share', '"score": float(share > 0.6)'))
    file = tmp_path / "job.yaml"
    file.write_text(
        f"""
data: {{train_files: {tmp_path}/train.jsonl, val_files: {tmp_path}/val.jsonl, train_batch_size: 4,
  max_prompt_length: 64, max_response_length: 6}}
actor_rollout_ref:
  model: {{path: {tiny_llama}}}
  actor: {{ppo_mini_batch_size: 4, optim: {{lr: 0.002, lr_warmup_steps: 2, weight_decay: 0.0}}, use_dynamic_bsz: true,
    fsdp_config: {{dtype: float32}}}}
  rollout: {{name: native, n: 4, temperature: 1.0, val_kwargs: {{do_sample: true, temperature: 1.0, n: 2, also_greedy: true}}}}
algorithm: {{adv_estimator: grpo}}
reward: {{num_workers: 1, custom_reward_function: {{path: {tmp_path}/reward.py}}}}
trainer: {{logger: [file], total_training_steps: 2, default_local_dir: {tmp_path}/run}}
"""
    )
    return file


@pytest.mark.slow
def test_time_to_reward(job, tmp_path):
    sides = ["float32", *(["trl shipped"] if is_ready("trl", default_folder("trl")) else [])]
    report = time_to_reward.main(
        [
            *(
                "--config",
                str(job),
                "--sides",
                *sides,
                "--steps",
                "2",
                "--every",
                "1",
                "--target",
                "2",
                "--limit-s",
                "150",
            ),
            *("--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "r.json")),
        ]
    )
    runs = json.loads((tmp_path / "r.json").read_text())["results"]["runs"]
    assert [run["side"] for run in runs] == sides
    for run in runs:
        assert [point["step"] for point in run["points"]] == [0, 1, 2]
        assert run["points"][0]["seconds"] == 0 < run["points"][1]["seconds"] < run["points"][2]["seconds"]
        # the same evaluator on the same weights
        assert run["points"][0]["sampled"] == runs[0]["points"][0]["sampled"]
    assert report.results["seconds_to_target"] == {side: [None] for side in sides}
