"""Losses and gradient norms of GRPO on rows with pictures equal the values of TRL's GRPOTrainer on the same samples."""

from pathlib import Path

import pytest

from tests.data.conversations.templates import chat
from tests.json_lines import write_lines
from tests.letters_task import overrides, write_task
from tests.run.conftest import train_run
from tests.run.test_vision import dots
from tests.run.trl_oracle import trl_case, trl_logs
from tests.vision_families import vision_folder
from verl.data_proto.samples import Completion
from verl.rollout.native.engine import NativeRollout

N, EPOCHS, LENGTH, LR, KL = 4, 2, 8, 1e-3, 0.1
NUM_STEPS = 3 * EPOCHS
ROWS = [(f"{'x' * i}?", dots(i)) for i in range(6)]
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.slow
def test_steps_on_pictures_match_trl(tmp_path, monkeypatch):
    """Two optimizer steps on each batch of two prompts: the second with ratios and a reference."""
    model = vision_folder(tmp_path / "model", "idefics3")
    args = {
        "per_device_train_batch_size": 2 * N, "num_generations": N, "num_iterations": EPOCHS, "beta": KL, "loss_type": "grpo",
        "max_completion_length": LENGTH, "max_steps": NUM_STEPS, "scale_rewards": "none",
        "use_bias_correction_kl": False,
    }  # fmt: skip
    pictured = [{"prompt": chat(text), "image": image} for text, image in ROWS]
    case = trl_case(model, pictured, None, LR, trainer="GRPO", args=args)
    answer = trl_logs({"GRPO": case}, tmp_path)["GRPO"]
    logs, samples = answer[:NUM_STEPS], answer[NUM_STEPS:]

    def generate(engine, prompts, params, *, step, on_finish=None):
        done = []
        for prompt in prompts:
            for number, (ids, reply, log_probs) in enumerate(samples[prompt.ordinal * N : prompt.ordinal * N + N]):
                assert ids == list(prompt.token_ids)
                reason = "stop" if len(reply) < LENGTH else "length"
                done.append(Completion(prompt.ordinal, number, reply, log_probs, reason, engine.weight_version))
                on_finish(done[-1])
        return done

    monkeypatch.setattr(NativeRollout, "generate", generate)
    task = write_task(tmp_path)
    rows = [
        {
            "data_source": "letters",
            "prompt": chat(f"<image>{text}"),
            "images": [image],
            "reward_model": {"ground_truth": ""},
        }
        for text, image in ROWS
    ]
    write_lines(Path(task / "train.jsonl"), rows)
    settings = overrides(
        model, task, "data.max_prompt_length=300", f"data.max_response_length={LENGTH}", "data.train_batch_size=2",
        "data.shuffle=False", "data.val_files=[]", "algorithm.norm_adv_by_std_in_grpo=False",
        f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs={EPOCHS}", f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef={KL}", f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.optim.lr={LR}", f"{ACTOR}.optim.weight_decay=0.0",
        f"trainer.total_training_steps={NUM_STEPS // EPOCHS}",
    )  # fmt: skip
    for number, row in enumerate(train_run(tmp_path / "run", settings).training_rows()):
        theirs = logs[number * EPOCHS : number * EPOCHS + EPOCHS]
        assert theirs[1]["kl"] > 1e-4
        for name in ("loss", "grad_norm"):
            expected = sum(log[name] for log in theirs) / EPOCHS
            assert row[f"actor/{name}"] == pytest.approx(expected, rel=1e-5, abs=1e-6), name
