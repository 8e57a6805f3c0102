"""Distillation from end to end on tiny models: every loss, several teachers, GKD's steps on rows, stored outputs, refusals."""

import json
import shutil

import pytest

from tests.json_lines import read_lines, write_lines
from tests.letters_task import write_reward
from tests.run.conftest import broken_off, merge
from tests.run.test_resume import weights
from tests.slow import slow
from verl.cli.checklist import Subject
from verl.cli.checklist.data import check_rows_of_data
from verl.config import load_config
from verl.errors import ConfigError, DataError
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model
from verl.programs.distillation import check_teachers

ACTOR = "actor_rollout_ref.actor"
LOSS = "distillation.distillation_loss"
TEACHERS = "distillation.teacher_models"
ALONE = (f"{LOSS}.use_task_rewards=False",)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Two models of the student's family with other weights."""
    folder = tmp_path_factory.mktemp("teachers")
    return [make_tiny_model(folder / str(seed), "llama", seed=seed) for seed in (11, 12)]


@pytest.fixture
def distill(tiny_run, shared_run, tiny_overrides, teachers):
    """A run of three steps with only the first teacher; `shared`: a run that tests only read."""

    def run(*changes, folder="run", teacher=True, shared=False):
        one = (f"{TEACHERS}.teacher_model.model_path={teachers[0]}",) if teacher else ()
        settings = ("distillation.enabled=True", f"{TEACHERS}.teacher_model.inference.dtype=float32", *one)
        settings = (*settings, "trainer.total_training_steps=3", *changes)
        return shared_run(tiny_overrides, *settings) if shared else tiny_run(*settings, folder=folder)

    return run


def values(run, *names):
    names = names or ("distillation/loss", "actor/loss", "actor/grad_norm")
    return [[row[name] for name in names] for row in run.training_rows()]


@pytest.mark.parametrize(
    "loss",
    [
        ("k2",),
        slow(("k3",)),
        slow(("abs",)),
        ("k1", "use_policy_gradient=True"),
        ("forward_kl_topk", "topk=8", "log_prob_min_clamp=-10"),
        ("jsd", "topk=8", "jsd_beta=0.9"),
        ("jsd", "topk=-1", "jsd_beta=0"),
    ],
    ids=" ".join,
)
def test_a_student_comes_closer_to_its_teacher(distill, loss):
    rate = f"{ACTOR}.optim.lr=0.01"
    run = distill(f"{LOSS}.loss_mode={loss[0]}", *(f"{LOSS}.{key}" for key in loss[1:]), *ALONE, rate,
                  "trainer.total_training_steps=8")  # fmt: skip
    distances = [row["distillation/abs_loss"] for row in run.training_rows()]
    assert sum(distances[-2:]) < 0.9 * sum(distances[:2])
    assert all("actor/pg_loss" not in row for row in run.training_rows())
    lists_tokens = loss[0] in ("jsd", "forward_kl_topk")
    assert all(("distillation/teacher_mass" in row) == lists_tokens for row in run.training_rows())


def test_a_teacher_with_the_students_weights_has_nothing_to_teach(distill, tiny_llama):
    run = distill(f"{LOSS}.loss_mode=jsd", *ALONE, f"{TEACHERS}.teacher_model.model_path={tiny_llama}",
                  "trainer.total_training_steps=1")  # fmt: skip
    (row,) = run.training_rows()
    assert row["distillation/abs_loss"] < 1e-6
    assert row["actor/grad_norm"] < 1e-4
    assert row["distillation/overlap_ratio"] == 1
    assert row["distillation/student_mass"] == pytest.approx(row["distillation/teacher_mass"], abs=1e-5)


def test_task_rewards_and_distance_add_up(distill, tiny_run):
    """The gradient step of both terms has the loss of each, weighed."""
    one = ("trainer.total_training_steps=1",)
    rewards = tiny_run(*one, folder="rewards").training_rows()[0]
    alone = distill(*ALONE, *one, folder="alone").training_rows()[0]
    both = distill(f"{LOSS}.distillation_loss_coef=0.5", *one, folder="both").training_rows()[0]
    assert both["actor/pg_loss"] == pytest.approx(rewards["actor/pg_loss"], abs=1e-6)
    assert both["distillation/loss"] == pytest.approx(alone["distillation/loss"], rel=1e-6)
    assert both["actor/loss"] == pytest.approx(rewards["actor/loss"] + 0.5 * alone["actor/loss"], rel=1e-5)


def test_policy_gradient_is_the_loss_of_the_distance_as_advantage(distill):
    """On policy at ratio 1 the loss is the mean of k1. Its gradient differs from k1's gradient, with expectation 0."""
    row = distill(f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True", *ALONE).training_rows()[0]
    assert row["actor/loss"] == pytest.approx(row["distillation/loss"], rel=1e-5)
    assert row["actor/grad_norm"] > 1e-3
    assert row["distillation/pg_clipfrac"] == 0


@pytest.mark.parametrize(
    "change",
    [
        (f"{ACTOR}.ppo_max_token_len_per_gpu=40", f"{TEACHERS}.teacher_model.inference.max_num_batched_tokens=30"),
        slow((f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",)),
        ("data.max_prompt_length=80", "data.max_response_length=6"),
    ],
    ids=["tokens", "rows", "padding"],
)
def test_micro_batches_and_padding_change_nothing(distill, change):
    loss = (f"{LOSS}.loss_mode=jsd", f"{LOSS}.topk=6", *ALONE)
    for one, other in zip(values(distill(*loss, shared=True)), values(distill(*loss, *change)), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-7)


@pytest.fixture
def sources(tiny_task, tmp_path):
    """Training rows of two data sources, in turn."""
    rows = read_lines(tiny_task / "train.jsonl")
    for number, row in enumerate(rows):
        row["data_source"] = ("even", "odd")[number % 2]
    file = tmp_path / "sources.jsonl"
    write_lines(file, rows)
    return file


def test_each_row_has_the_teacher_of_its_source(distill, sources, teachers, tiny_llama):
    """The teacher of even rows has the student's own weights: only odd rows are at a distance."""
    loss = (f"{LOSS}.loss_mode=jsd", f"{LOSS}.topk=4", *ALONE, f"data.train_files={sources}", "data.shuffle=False",
            "trainer.total_training_steps=1")  # fmt: skip
    run = distill(
        *loss, f"{TEACHERS}.own.key=even", f"{TEACHERS}.own.model_path={tiny_llama}",
        f"{TEACHERS}.own.inference.dtype=float32", f"{TEACHERS}.teacher_model.key=odd",
    )  # fmt: skip
    alone = distill(*loss, folder="alone")
    for row, one in zip(run.samples_of(), alone.samples_of(), strict=True):
        assert row["response_ids"] == one["response_ids"]
        assert (row["teacher_log_probs"] == one["teacher_log_probs"]) == (row["data_source"] == "odd")
    with pytest.raises(DataError, match="data_source='odd' chooses no teacher"):
        distill(*loss, f"{TEACHERS}.own.key=even", f"{TEACHERS}.own.model_path={tiny_llama}",
                f"{TEACHERS}.teacher_model.key=other", folder="refused")  # fmt: skip


@pytest.mark.parametrize("has_reward", [True, False], ids=["own reward", "built-in"])
def test_rows_need_no_reference_answer(distill, tiny_task, tmp_path, has_reward):
    """A teacher by itself trains on prompts. The user's reward function is still called; a built-in one is not."""
    rows = read_lines(tiny_task / "train.jsonl")
    file = write_lines(tmp_path / "prompts.jsonl", ({"prompt": row["prompt"]} for row in rows))
    reward = write_reward(tmp_path, "return 2.0 if ground_truth is None else 1.0")
    reward = reward if has_reward else "reward.custom_reward_function.path=null"
    files = (f"data.train_files={file}", f"data.val_files={file}")
    (row,) = distill(*ALONE, *files, "trainer.total_training_steps=1", reward).training_rows()
    assert row["distillation/abs_loss"] > 0
    assert row["critic/score/mean"] == (2.0 if has_reward else 0.0)
    with pytest.raises(DataError, match="row 0.*field 'data_source' must be a text"):
        distill(f"data.train_files={file}", folder="rewarded")


@pytest.fixture
def answers(tiny_task, tmp_path):
    rows = read_lines(tiny_task / "train.jsonl")
    answered = (row | {"response": f"the answer {n % 5}"} for n, row in enumerate(rows))
    return write_lines(tmp_path / "answers.jsonl", answered)


GKD = (*ALONE, f"{LOSS}.loss_mode=jsd", f"{LOSS}.topk=8", "actor_rollout_ref.rollout.n=1", "data.val_files=[]",
       "data.shuffle=False", "data.max_response_length=24")  # fmt: skip


def test_gkd_trains_on_samples_in_a_share_of_steps(distill, answers):
    settings = (*GKD, f"data.train_files={answers}", "trainer.total_training_steps=6")
    run = distill(*settings, "distillation.on_policy_share=0.5")
    kinds = []
    for step in range(1, 7):
        rows = run.samples_of(step)
        are_rows = {row["response"].startswith("the answer") for row in rows}
        assert len(are_rows) == 1
        assert all(("log_probs" in row) != are_rows.copy().pop() for row in rows)
        kinds.append(are_rows.pop())
    assert {True, False} == set(kinds)
    again = distill(*settings, "distillation.on_policy_share=0.5", folder="again")
    assert again.repeatable == run.repeatable


def test_a_student_learns_from_stored_outputs(distill, answers):
    """The sample files of a run train another student as the teacher itself does."""
    settings = (*GKD, "distillation.on_policy_share=0")
    online = distill(*settings, f"data.train_files={answers}")
    files = sorted(str(f) for f in (online.folder / "samples/train").glob("*.jsonl"))
    offline = distill(
        *settings, f"data.train_files=[{','.join(files)}]", "data.prompt_key=raw_prompt",
        "distillation.response_key=response_ids", "distillation.stored_outputs=True", folder="offline", teacher=False,
    )  # fmt: skip
    for one, other in zip(values(online), values(offline), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_resumed_run_ends_with_the_same_weights(distill):
    settings = (
        *ALONE,
        f"{LOSS}.loss_mode=jsd",
        f"{LOSS}.topk=8",
        "trainer.save_freq=2",
        "trainer.total_training_steps=4",
    )
    resumed, unbroken = broken_off(distill, *settings, stop=2)
    assert weights(resumed, 4) == weights(unbroken, 4)


STORED_KEYS = (
    "distillation.enabled=True", "distillation.on_policy_share=0", "distillation.stored_outputs=True", *ALONE,
    f"{LOSS}.loss_mode=forward_kl_topk", "distillation.response_key=response",
)  # fmt: skip


class TestRefusals:
    def test_other_tokens(self, distill, tmp_path, teachers):
        other = tmp_path / "other"
        shutil.copytree(teachers[0], other)
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ConfigError, match="splits text into other tokens than the student: 2 of the student's"):
            distill(f"{TEACHERS}.teacher_model.model_path={other}")

    def test_rows_without_a_response(self, distill, answers, tiny_task):
        with pytest.raises(DataError, match="row 0.*field 'response'.*must be a text or a list of token ids"):
            distill(*GKD, "distillation.on_policy_share=0")
        with pytest.raises(DataError, match="row 0.*field 'teacher_ids' must have a list"):
            distill(
                *GKD, "distillation.on_policy_share=0", f"data.train_files={answers}", "distillation.stored_outputs=True",
                teacher=False,
            )  # fmt: skip

    def test_verl_check_reads_stored_outputs_as_a_run_does(self, answers, tiny_llama, tmp_path):
        row = json.loads(answers.read_text().splitlines()[0])
        settings = (
            f"actor_rollout_ref.model.path={tiny_llama}", *STORED_KEYS, f"data.train_files={tmp_path}/rows.jsonl",
            "data.val_files=[]", "data.train_batch_size=1",
        )  # fmt: skip
        for token, right in ((6, True), (264, False)):
            stored = {**self.STORED, "teacher_ids": [[5, 7], [token, 8]]}
            (tmp_path / "rows.jsonl").write_text(json.dumps({**row, **stored}))
            subject = Subject(load_config(list(settings)), load_tokenizer(str(tiny_llama)))
            if right:
                assert "every row has its teacher" in list(check_rows_of_data(subject))[-1].text
                continue
            with pytest.raises(DataError, match=r"rows\.jsonl, row 0 .*field 'teacher_ids\[1\]\[0\]' is 264;"):
                list(check_rows_of_data(subject))

    STORED = {"response": [5, 6], "teacher_ids": [[5, 7], [6, 8]], "teacher_log_probs": [[-0.5, -1.5], [-0.1, -3]]}

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"response": [5, 10**9]}, "field 'response.1.' is 1000000000; a token id is .* 264 embeddings"),
            ({"response": [-1, 5]}, "field 'response.0.' is -1; a token id is"),
            ({"response": [True, 5]}, "field 'response.0.' is True; a token id is"),
            ({"response": [5.0, 6]}, "field 'response.0.' is 5.0; a token id is"),
            ({"teacher_ids": [5, 6]}, "field 'teacher_ids' must have a list of equally many"),
            ({"teacher_ids": [[5, 7], [6]]}, "field 'teacher_ids' must have a list of equally many"),
            ({"teacher_log_probs": [[-1], [-1]]}, "field 'teacher_log_probs' must have a list of equally many"),
            ({"teacher_ids": [[5, -7], [6, 8]]}, "field 'teacher_ids.0..1.' is -7; a token id is"),
            ({"teacher_ids": [[5, 264], [6, 8]]}, "field 'teacher_ids.0..1.' is 264; .* from 0 to 263"),
            ({"teacher_ids": [["a", "b"], ["c", "d"]]}, "field 'teacher_ids.0..0.' is 'a'; a token id is"),
            ({"teacher_ids": [[5.5, 7], [6, 8]]}, "field 'teacher_ids.0..0.' is 5.5; a token id is"),
            ({"teacher_log_probs": [[5.0, -1], [-1, -1]]}, "field 'teacher_log_probs' must have log-probabilities"),
            ({"teacher_log_probs": [[-0.1, -0.1], [-1, -1]]}, "add up to at most 1"),
            ({"teacher_log_probs": [[None, -0.1], [-1, -1]]}, "field 'teacher_log_probs' must have log-probabilities"),
        ],
    )  # fmt: skip
    def test_stored_outputs_of_no_teacher(self, tiny_llama, tmp_path, change, sentence):
        class Rows(list):
            def place(self, number):
                return f"rows.jsonl, row {number}"

        settings = (f"actor_rollout_ref.model.path={tiny_llama}", *STORED_KEYS, "data.train_files=rows.jsonl")
        config, tokenizer = load_config(list(settings)).config, load_tokenizer(str(tiny_llama))
        check_teachers(config, tokenizer, Rows([self.STORED]))
        with pytest.raises(DataError, match=f"rows.jsonl, row 1: .*{sentence}"):
            check_teachers(config, tokenizer, Rows([self.STORED, {**self.STORED, **change}]))

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            (["distillation.enabled=True"], "needs distillation.teacher_models.teacher_model.model_path"),
            ([f"{LOSS}.loss_mode=k1"], "expectation of its gradient is 0"),
            ([f"{TEACHERS}.more.modelpath=x"], "has no key 'modelpath'"),
            ([f"{TEACHERS}.more.model_path=x"], "Give each one a key of its own"),
            (["distillation.on_policy_share=0.5"], "Set distillation.distillation_loss.use_task_rewards=False"),
            (["distillation.on_policy_share=0", "distillation.stored_outputs=True"], f"Set {LOSS}.loss_mode"),
            ([f"{LOSS}.jsd_beta=0.3"], "loss_mode is not jsd"),
        ],
    )  # fmt: skip
    def test_settings_that_do_not_go_together(self, tiny_overrides, settings, sentence):
        taught = ["distillation.enabled=True", f"{TEACHERS}.teacher_model.model_path=x"] * (len(settings[0]) > 25)
        with pytest.raises(ConfigError, match=sentence):
            load_config(merge(tiny_overrides, (*taught, *settings)))
