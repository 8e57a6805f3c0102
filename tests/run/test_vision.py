"""Programs on rows with images, from files to checkpoints, on a tiny model of every family."""

import base64
import io
from functools import partial

import pytest
from PIL import Image, ImageDraw
from safetensors import safe_open

from tests.json_lines import read_lines, write_lines
from tests.letters_task import REWARD, overrides
from tests.run.conftest import broken_off, row_overrides, train_run
from tests.slow import slow
from tests.vision_families import CONFIGS
from verl.cli.main import main
from verl.config import load_config
from verl.data.dataset import load_dataset
from verl.errors import DataError, ModelError
from verl.models.load import load_model, load_tokenizer
from verl.programs.ppo_data import refuse_images
from verl.run.host import train

pytestmark = pytest.mark.seed("B1")
FAMILY = "qwen2_vl"  # of tests of what is common to all


def dots(count):
    image = Image.new("RGB", (56, 56), "white")
    for i in range(count):
        ImageDraw.Draw(image).ellipse(
            (4 + 16 * (i % 3), 4 + 16 * (i // 3), 14 + 16 * (i % 3), 14 + 16 * (i // 3)), "black"
        )
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folder with train.jsonl (12 rows, every fourth without an image), val.jsonl and reward.py; sft_*.jsonl likewise."""
    folder = tmp_path_factory.mktemp("dots")
    for name, count in (("train", 12), ("val", 3)):
        rows, sft = [], []
        for i in range(count):
            has_image = i % 4 != 3
            question = {"role": "user", "content": f"{'<image>' if has_image else ''}{name} {i}?"}
            images = {"images": [dots(i % 5)] if has_image else []}
            reward = {"style": "rule", "ground_truth": str(i % 5)}
            rows.append({"data_source": "dots", "prompt": [question], "reward_model": reward, **images})
            sft.append({"messages": [question, {"role": "assistant", "content": f"{i % 5} dots"}], **images})
        write_lines(folder / f"{name}.jsonl", rows)
        write_lines(folder / f"sft_{name}.jsonl", sft)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def videos(task, tmp_path_factory):
    """The task with a video of four frames in front of every second question, and its image as the frames."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "reward.py").write_text(REWARD)
    for file in task.glob("*.jsonl"):
        rows = read_lines(file)
        for i, row in enumerate(rows[::2]):
            row["videos"] = [{"video": [dots((i + n) % 5) for n in range(4)], "fps": 2}]
            question = row.get("prompt", row.get("messages"))[0]
            question["content"] = "<video>" + question["content"]
        write_lines(folder / file.name, rows)
    return folder


def has_processor(family):
    return family != "smolvlm"  # its processor needs the package num2words


WITH_PROCESSOR = [family for family in CONFIGS if has_processor(family)]


@pytest.fixture
def grpo(folder_of, task, tmp_path):
    def run(family, *changes, folder="run"):
        base = overrides(folder_of(family), task, "data.max_prompt_length=300")
        return train_run(tmp_path / folder, base, changes)

    return run


@pytest.fixture
def plain(shared_run, folder_of, task):
    return shared_run(overrides(folder_of(FAMILY), task, "data.max_prompt_length=300"))


@pytest.fixture
def sft(folder_of, task, tmp_path):
    def run(family, *changes, folder="run"):
        base = row_overrides(folder_of(family), f"{task}/sft_train.jsonl", f"{task}/sft_val.jsonl")
        return train_run(tmp_path / folder, base, ("trainer.total_training_steps=2", *changes), "sft")

    return run


def weights(run, role="actor", step=2):
    with safe_open(run.folder / f"global_step_{step}/{role}/huggingface/model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def start(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def is_of_tower(name):
    return "visual" in name or "vision" in name


def moved(before, after):
    """Names of the tensors that training has changed: first of the tower, then of the rest."""
    changed = [name for name in after if name in before and not after[name].equal(before[name])]
    return [n for n in changed if is_of_tower(n)], [n for n in changed if not is_of_tower(n)]


@pytest.mark.parametrize("family", [slow(family, when=family not in (FAMILY, "qwen3_vl")) for family in WITH_PROCESSOR])
def test_grpo_trains_and_its_checkpoint_opens(family, grpo, folder_of):
    run = grpo(family, "trainer.save_freq=2", "trainer.test_freq=2")
    rows = run.training_rows()
    assert len(rows) == 2
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert any(key.startswith("val") for key in rows[-1])
    samples = run.samples_of()
    pictures = [name for sample in samples for name in sample.get("images", ())]
    assert len(pictures) == sum("?" in s["prompt"] and "images" in s for s in samples)
    assert {file.name for file in (run.folder / "samples/images").iterdir()} >= set(pictures)
    saved = run.folder / "global_step_2/actor/huggingface"
    original = load_model(folder_of(family)).state_dict()
    trained = load_model(saved).state_dict()
    assert all(moved(original, trained))
    assert load_tokenizer(saved).processor.settings == load_tokenizer(folder_of(family)).processor.settings


@pytest.mark.parametrize("family", [slow(f, when=f not in (FAMILY, "qwen3_vl", "idefics3")) for f in WITH_PROCESSOR])
def test_fine_tuning_trains_the_tower(family, sft, folder_of):
    run = sft(family, "trainer.save_freq=2", "trainer.test_freq=1")
    rows = run.training_rows()
    assert len(rows) == 2
    assert rows[1]["val/loss"] < rows[0]["val/loss"]
    assert all(moved(load_model(folder_of(family)).state_dict(), load_model(saved_model(run)).state_dict()))


def test_programs_train_on_videos(grpo, sft, videos, folder_of):
    original, family = load_model(folder_of("qwen2_5_vl")).state_dict(), "qwen2_5_vl"
    runs = [
        program(family, f"data.train_files={videos}/{kind}train.jsonl", f"data.val_files={videos}/{kind}val.jsonl",
                "trainer.save_freq=2", folder=f"{kind}run")
        for program, kind in ((grpo, ""), (sft, "sft_"))
    ]  # fmt: skip
    for run in runs:
        assert len(run.training_rows()) == 2
        assert all(moved(original, load_model(saved_model(run)).state_dict()))
    assert {len(sample.get("images", ())) for sample in runs[0].samples_of()} >= {
        1,
        2,
    }  # a frame of a video counts as one


def saved_model(run, step=2):
    return next((run.folder / f"global_step_{step}").glob("*/huggingface"))


@pytest.mark.parametrize("family", [slow(name, when=name != FAMILY) for name in WITH_PROCESSOR])
def test_a_resumed_run_equals_the_unbroken_one(family, grpo):
    settings = ("trainer.total_training_steps=2", "trainer.save_freq=1", "actor_rollout_ref.actor.use_kl_loss=True")
    resumed, unbroken = broken_off(partial(grpo, family), *settings, stop=1)
    assert resumed.repeatable == unbroken.repeatable
    ours, theirs = weights(resumed, step=2), weights(unbroken, step=2)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("changes", [
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",),
    slow(("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=350")),
])  # fmt: skip
def test_micro_batches_change_no_loss(changes, grpo, plain):
    divided = grpo(FAMILY, *changes)
    for one, other in zip(plain.training_rows(), divided.training_rows(), strict=True):
        assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-6)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)


def test_hf_and_native_rollout_train_alike(grpo, plain):
    hf = grpo(FAMILY, "actor_rollout_ref.rollout.name=hf")
    for one, other in zip(plain.training_rows(), hf.training_rows(), strict=True):
        assert one["critic/score/mean"] == pytest.approx(other["critic/score/mean"])
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


def test_ppo_trains_a_critic_that_sees_the_images(grpo, folder_of):
    run = grpo(FAMILY, "algorithm.adv_estimator=gae", f"critic.model.path={folder_of(FAMILY)}", "critic.optim.lr=0.002",
               "critic.fsdp.dtype=float32", "trainer.save_freq=2")  # fmt: skip
    assert all(row["critic/grad_norm"] > 0 for row in run.training_rows())
    tower, rest = moved(load_model(folder_of(FAMILY)).state_dict(), weights(run, "critic"))
    assert tower
    assert rest


def test_a_frozen_tower_keeps_its_weights(grpo, folder_of):
    run = grpo(FAMILY, "actor_rollout_ref.actor.freeze_vision_tower=True", "trainer.save_freq=2")
    tower, rest = moved(load_model(folder_of(FAMILY)).state_dict(), load_model(saved_model(run)).state_dict())
    assert not tower
    assert rest


def test_a_text_model_has_no_tower_to_freeze(grpo, tiny_llama, task, tmp_path):
    settings = overrides(tiny_llama, tmp_path, f"data.train_files={task}/text.jsonl", "data.val_files=null",
                         "actor_rollout_ref.actor.freeze_vision_tower=True", f"trainer.default_local_dir={tmp_path}/run",
                         f"reward.custom_reward_function.path={task}/reward.py")  # fmt: skip
    rows = read_lines(task / "train.jsonl")
    texts = [{**row, "images": [], "prompt": [{"role": "user", "content": "text"}]} for row in rows]
    write_lines(task / "text.jsonl", texts)
    with pytest.raises(ModelError, match="has no vision tower"):
        train(load_config(settings))


def test_a_judge_refuses_images(folder_of, task):
    loaded = load_config(overrides(folder_of(FAMILY), task, "data.max_prompt_length=300")).config
    rows = load_dataset(loaded.data.train_files, load_tokenizer(folder_of(FAMILY)), loaded.data)
    for name, value in (("enable", True), ("judge_template", "{response}")):
        object.__setattr__(loaded.reward.reward_model, name, value)
    with pytest.raises(DataError, match="images do not work with reward.reward_model.judge_template"):
        refuse_images(loaded, rows)


def test_check_and_generate_read_images(folder_of, task, tmp_path, capsys):
    settings = overrides(
        folder_of(FAMILY), task, "data.max_prompt_length=300", f"trainer.default_local_dir={tmp_path}/run"
    )
    assert main(["check", *settings]) == 0
    assert "12 training rows" in capsys.readouterr().out
    assert main(["generate", "--output", f"{tmp_path}/samples.jsonl", *settings]) == 0
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3 * 4


def test_a_checkpoint_is_exported_and_evaluated_with_its_processor(grpo, folder_of, task, tmp_path):
    run = grpo(FAMILY, "trainer.save_freq=2")
    assert main(["export", str(run.folder), str(tmp_path / "exported")]) == 0
    assert (
        load_tokenizer(tmp_path / "exported").processor.settings == load_tokenizer(folder_of(FAMILY)).processor.settings
    )
    settings = overrides(
        tmp_path / "exported", task, "data.max_prompt_length=300", f"trainer.default_local_dir={tmp_path}/eval"
    )
    assert main(["eval", *settings]) == 0


def test_an_agent_begins_with_images_and_answers_a_user(grpo, task, tmp_path):
    (tmp_path / "users.yaml").write_text(
        "interaction: [{name: judge, class_name: tests.agents.loops_of_users.Judge, config: {patience: 2}}]\n"
    )
    rows = read_lines(task / "train.jsonl")
    more = {"extra_info": {"interaction_kwargs": {"name": "judge", "want": "a"}}}
    write_lines(tmp_path / "rows.jsonl", ({**row, **more} for row in rows))
    rollout = "actor_rollout_ref.rollout"
    run = grpo(
        FAMILY, f"data.train_files={tmp_path}/rows.jsonl", f"{rollout}.multi_turn.enable=True", "data.val_files=null",
        f"{rollout}.multi_turn.interaction_config_path={tmp_path}/users.yaml", f"{rollout}.calculate_log_probs=True",
        f"{rollout}.stop_token_ids={list(range(80))}", "data.max_response_length=120", "trainer.total_training_steps=1",
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["rollout/num_failed_episodes"] == 0
    assert row["num_turns/max"] == 5
    assert row["training/rollout_probs_diff_max"] < 1e-5
    assert row["actor/grad_norm"] > 0
