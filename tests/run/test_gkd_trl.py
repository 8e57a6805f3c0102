"""Loss and gradient norm of ten steps of GKD on given responses equal the values of TRL's GKDTrainer."""

import json

import pytest

from tests.data.conversations.templates import MARKED_CHATML, chat
from tests.run.conftest import train_run
from tests.run.test_sft_trl import words
from tests.run.trl_oracle import NUM_STEPS, trl_case, trl_logs
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model

BETAS = {"forward KL": 0.0, "jsd 0.5": 0.5, "jsd 0.9": 0.9, "reverse KL": 1.0}
ROWS = [(words(i, 2), words(i + 1, i % 5 + 1)) for i in range(40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), "llama", seed=seed) for seed in (0, 7)]


@pytest.fixture(scope="module")
def theirs(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    args = {"lmbda": 0.0, "max_length": 512, "teacher_model_init_kwargs": {"dtype": "float32"}}
    rows, more = [{"messages": chat(*row)} for row in ROWS], {"trainer": "GKD", "teacher": str(models[1])}
    cases = {
        name: trl_case(models[0], rows, MARKED_CHATML, 1e-3, **more, args={**args, "beta": beta})
        for name, beta in BETAS.items()
    }
    return trl_logs(cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", BETAS)
def test_ten_steps_match_trl(case, theirs, models, tiny_overrides, tmp_path):
    tokenizer = load_tokenizer(str(models[0]))
    with (tmp_path / "rows.jsonl").open("w") as file:
        for question, answer in ROWS:
            ids = tokenizer.encode(f"{answer}<|im_end|>\n", add_special_tokens=False)  # TRL trains the line break too
            row = {
                "data_source": "letters",
                "prompt": chat(question),
                "response": ids,
                "reward_model": {"ground_truth": answer},
            }
            file.write(json.dumps(row) + "\n")
    (tmp_path / "template.jinja").write_text(MARKED_CHATML)
    settings = (
        f"actor_rollout_ref.model.path={models[0]}",
        f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'template.jinja'}",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.shuffle=False",
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "distillation.enabled=True",
        "distillation.on_policy_share=0",
        f"distillation.teacher_models.teacher_model.model_path={models[1]}",
        "distillation.teacher_models.teacher_model.inference.dtype=float32",
        "distillation.distillation_loss.loss_mode=jsd",
        "distillation.distillation_loss.topk=-1",
        f"distillation.distillation_loss.jsd_beta={BETAS[case]}",
        "distillation.distillation_loss.use_task_rewards=False",
        f"trainer.total_training_steps={NUM_STEPS}",
    )
    ours = train_run(tmp_path / "run", tiny_overrides, settings).training_rows()
    assert len(ours) == len(theirs[case]) == NUM_STEPS
    for row, log in zip(ours, theirs[case], strict=True):
        assert row["actor/loss"] == pytest.approx(log["loss"], rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
