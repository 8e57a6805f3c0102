"""Preferences and reward models on rows with images, on a tiny model."""

import json
from dataclasses import replace

import pytest
import torch

from tests.json_lines import read_lines, write_lines
from tests.letters_task import REWARD, overrides
from tests.models.test_vision import episode_of
from tests.run.conftest import row_overrides, train_run
from tests.run.test_vision import FAMILY, dots, is_of_tower, weights
from verl.config import PREFERENCE, SFT, load_config
from verl.data.conversations.dataset import load_conversations
from verl.data.preferences.dataset import load_preferences
from verl.data_proto.media import MediaSpan
from verl.errors import DataError
from verl.models.classifier import load_reward_model, sequence_scores
from verl.models.load import load_model, load_tokenizer

PROMPT = [{"role": "user", "content": "<image>How many?"}]


def pair(i):
    chosen, rejected = f"{i % 3} dots", f"{i % 3 + 1} dots, I say"
    return {"prompt": PROMPT, "chosen": chosen, "rejected": rejected, "images": [dots(i % 3)]}


def labelled(i):
    return {"prompt": PROMPT, "completion": f"{i % 3} dots", "label": i % 2 == 0, "images": [dots(i % 3 + i % 2)]}


def rated(i):
    return {"prompt": PROMPT, "completion": f"{i % 3} dots", "rating": i % 3, "images": [dots(i % 3)]}


def steps(i):
    return {"prompt": PROMPT, "completions": ["One.", "Two."], "labels": [True, False], "images": [dots(i % 3)]}


CASES = {
    "dpo": ("preference", pair, []),
    "dpo_in_each_step": ("preference", pair, ["ref.precompute=False"]),
    "kto": ("preference", labelled, ["preference.loss=kto"]),
    "rm": ("rm", pair, []),
    "rating": ("rm", rated, ["rm.loss=regression"]),
    "steps": ("rm", steps, ["rm.loss=process"]),
}


@pytest.fixture(scope="module")
def model(folder_of):
    return folder_of(FAMILY)


@pytest.fixture
def preferences(model, tmp_path):
    def run(name):
        program, row, changes = CASES[name]
        file = tmp_path / f"{name}.jsonl"
        write_lines(file, (row(i) for i in range(8)))
        steps = ("trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2")
        return train_run(tmp_path / f"run_{name}", row_overrides(model, file, file), (*steps, *changes), program)

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_tower_learns_from_preferences(name, preferences, model):
    run = preferences(name)
    assert all(row["train/grad_norm"] > 0 for row in run.training_rows())
    before, after = load_model(model).state_dict(), weights(run, "model")
    changed = [tensor for tensor in after if tensor in before and not after[tensor].equal(before[tensor])]
    assert any(map(is_of_tower, changed))
    assert not all(map(is_of_tower, changed))


def test_log_probs_computed_once_are_the_same_as_in_each_step(preferences):
    once, each = preferences("dpo"), preferences("dpo_in_each_step")
    for one, other in zip(once.training_rows(), each.training_rows(), strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-6)


def test_a_name_of_a_sequence_tells_its_images(model, tmp_path):
    rows = [{**pair(0), "images": [dots(count)]} for count in (1, 2)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    section = load_config(
        [f"model.path={model}", f"data.train_files={tmp_path}/pairs.jsonl"], schema=PREFERENCE
    ).config.data
    dataset = load_preferences([tmp_path / "pairs.jsonl"], load_tokenizer(model), section)
    media = dataset.batch([0, 1]).non_tensor_batch["media"]
    names = [s.digest(m) for s, m in zip(dataset.sequences([0, 1]), media, strict=True)]
    assert media[0] is media[1]
    assert len(set(names)) == 4


IN_ANSWER = [{"role": "assistant", "content": [{"type": "image", "image": dots(1)}]}]


@pytest.mark.parametrize(("row", "message"), [
    ({**pair(0), "images": [dots(1), dots(2)]}, "has 2 images, and the messages have 1 places"),
    ({**pair(0), "chosen": IN_ANSWER}, "the rendered messages have 2 times"),
    ({**pair(0), "images": ["nowhere.png"]}, "nowhere.png"),
])  # fmt: skip
def test_bad_rows_are_one_sentence(row, message, model, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    section = load_config(
        [f"model.path={model}", f"data.train_files={tmp_path}/pairs.jsonl"], schema=PREFERENCE
    ).config.data
    with pytest.raises(DataError, match=message):
        load_preferences([tmp_path / "pairs.jsonl"], load_tokenizer(model), section)


@pytest.fixture
def policy(model, tmp_path):
    """Overrides of a PPO run on rows with images, with rewards of a reward model or a function."""
    rows = [
        {"data_source": "dots", "prompt": PROMPT, "images": [dots(i % 3)], "reward_model": {"ground_truth": str(i % 3)}}
        for i in range(8)
    ]
    write_lines(tmp_path / "train.jsonl", rows)
    (tmp_path / "reward.py").write_text(REWARD)
    return overrides(model, tmp_path, "data.max_prompt_length=300", "data.val_files=null")


def test_a_reward_model_sees_the_images(preferences, policy, tmp_path):
    saved = preferences("rm").folder / "global_step_2/model/huggingface"
    scored = ["reward.reward_model.enable=True", f"reward.reward_model.model_path={saved}",
              "reward.reward_model.rollout.dtype=float32", "reward.custom_reward_function.path=null"]  # fmt: skip
    run = train_run(tmp_path / "policy", policy, scored)
    assert len({row["critic/score/mean"] for row in run.training_rows()}) == 2


@torch.no_grad()
def test_scores_depend_on_the_images_and_not_on_neighbours(preferences, model, tmp_path):
    saved = preferences("rm").folder / "global_step_2/model/huggingface"
    write_lines(tmp_path / "pairs.jsonl", (pair(i) for i in range(3)))
    section = load_config(
        [f"model.path={model}", f"data.train_files={tmp_path}/pairs.jsonl"], schema=PREFERENCE
    ).config.data
    dataset = load_preferences([tmp_path / "pairs.jsonl"], load_tokenizer(model), section)
    batch, module = dataset.batch(range(3)), load_reward_model(saved)
    sequences = [tuple(s.input_ids.tolist()) for s in dataset.sequences(range(3))]
    media = [
        (MediaSpan(0, s.num_prompt_tokens - 1, images),)
        for images, s in zip(batch.non_tensor_batch["media"], dataset.sequences(range(3)), strict=True)
    ]
    together = sequence_scores(module, sequences, max_tokens=900, media=media)
    apart = [sequence_scores(module, [ids], max_tokens=900, media=[m]) for ids, m in zip(sequences, media, strict=True)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-5)
    swapped = (replace(media[0][0], media=media[2][0].media),)
    other = sequence_scores(module, sequences[:1], max_tokens=900, media=[swapped])
    assert abs(float(other - together[0])) > 1e-4


@torch.no_grad()
def test_scores_of_episodes_depend_on_images_of_later_turns(preferences):
    """Episodes of one prompt, with other images in later turns, and without its last turn; and the images as one block."""
    module = load_reward_model(preferences("rm").folder / "global_step_2/model/huggingface")
    prompt, response, _, relative, all_images = episode_of(FAMILY, 0)
    spans = tuple(span.moved(len(prompt)) for span in relative)
    ids = (*prompt, *response)
    swapped = (spans[0], replace(spans[1], media=episode_of(FAMILY, 1)[3][1].media), spans[2])
    episodes = [(ids, spans), (ids, swapped), (ids[: spans[2].start - 2], spans[:2])]
    sequences, media = [list(part) for part in zip(*episodes, strict=True)]
    together = sequence_scores(module, sequences, max_tokens=900, media=media)
    apart = [sequence_scores(module, [i], max_tokens=900, media=[m]) for i, m in episodes]
    block = sequence_scores(module, [ids], max_tokens=900, media=[(MediaSpan(0, len(ids) - 1, all_images),)])
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-5)
    torch.testing.assert_close(together[:1], block, rtol=0, atol=1e-5)
    assert abs(float(together[0] - together[1])) > 1e-4


def test_kept_samples_are_rows_with_images(model, policy, tmp_path):
    changes = [
        "rejection.keep=1",
        "rejection.write=kept.jsonl",
        "rejection.truncated=True",
        "trainer.total_training_steps=1",
        "algorithm.program=rejection_sampling",
    ]
    run = train_run(tmp_path / "policy", policy, changes, "rejection_sampling")
    rows = read_lines(run.folder / "kept.jsonl")
    assert len(rows) == 4
    assert all(row["images"][0] in [dots(i) for i in range(3)] for row in rows)
    section = [f"model.path={model}", f"data.train_files={run.folder}/kept.jsonl"]
    dataset = load_conversations(
        [run.folder / "kept.jsonl"], load_tokenizer(model), load_config(section, schema=SFT).config.data
    )
    assert all(dataset.batch(range(4)).non_tensor_batch["media"])
