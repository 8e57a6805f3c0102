"""Images of tools, environments and agents: they train as the model sees them, and a repetition has the same ones."""

import asyncio
import re

import numpy as np
import pytest
import torch

from tests.agents.pictures import data_url, picture
from tests.agents.test_ahead import AHEAD
from tests.agents.test_exactness import objects
from tests.agents.test_runs import episodes
from tests.json_lines import read_lines, write_lines
from tests.letters_task import overrides, write_task
from tests.models.test_vision import own_log_probs
from tests.run.conftest import train_run
from tests.vision_families import IMAGE, VIDEO, random_model
from verl.agents.agents import Agents
from verl.agents.episode import Episode, EpisodeTask
from verl.agents.gateway.sessions import EndpointSession, RequestError, _messages, _placed
from verl.agents.images import EpisodeImages
from verl.config import DataConfig, load_config
from verl.data.images import ImageEncoder, image_messages
from verl.data.prompts import PromptEncoder
from verl.data_proto.media import Media
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.models.load import load_model, load_tokenizer
from verl.models.vision import FAMILIES, joined
from verl.programs.specs import agent_spec
from verl.rollout.native.engine import NativeRollout

FAMILY = "qwen2_vl"
ROLLOUT = "actor_rollout_ref.rollout"
HERE = "tests/agents/pictures.py"
TOOLS = (f"{ROLLOUT}.multi_turn.function_tool_path={HERE}", f"{ROLLOUT}.multi_turn.format=asks_for_pictures")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Rows: every second has a picture, and every third a video."""
    folder = write_task(tmp_path_factory.mktemp("pictures"))
    rows = read_lines(folder / "train.jsonl")
    for number, row in enumerate(rows):
        row["images"] = [data_url(picture(number))] if number % 2 else []
        row["videos"] = [] if number % 3 else [[data_url(picture(number + n)) for n in range(4)]]
        media = "<image>" * len(row["images"]) + "<video>" * len(row["videos"])
        row["prompt"][0]["content"] = media + row["prompt"][0]["content"]
    write_lines(folder / "train.jsonl", rows)
    return folder


@pytest.fixture
def agent_run(folder_of, task, tmp_path):
    def run(*changes, folder="run", family=FAMILY):
        settings = overrides(
            folder_of(family), task, "actor_rollout_ref.model.external_lib=tests.agents.pictures", "data.val_files=[]",
            "data.max_prompt_length=300", "data.max_response_length=260", f"{ROLLOUT}.n=3",
            f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.tool_sandbox=False",
            f"{ROLLOUT}.stop_token_ids={list(range(80))}", f"{ROLLOUT}.calculate_log_probs=True",
        )  # fmt: skip
        return train_run(tmp_path / folder, settings, changes)

    return run


WAYS = {
    "tools": TOOLS,
    "sandboxed": (*TOOLS, f"{ROLLOUT}.multi_turn.tool_sandbox=True"),
    "environment": (f"{ROLLOUT}.agent.environment={HERE}:Screen", f"{ROLLOUT}.multi_turn.enable=False"),
    "endpoint": (f"{ROLLOUT}.agent.runner={HERE}:run", f"{ROLLOUT}.multi_turn.enable=False"),
}


@pytest.mark.parametrize("way", WAYS)
def test_images_of_later_turns_train(way, agent_run):
    run = agent_run(*WAYS[way])
    for row in run.training_rows():
        assert row["rollout/num_failed_episodes"] == 0
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["actor/grad_norm"] > 0
    told = episodes(run)
    for mark in ("<image>", "<video>"):
        assert any(mark in m["content"] for episode in told for m in episode["messages"][1:])
    places = [place for episode in told for place in episode.get("media", ())]
    assert any(start >= 0 for start, _, _ in places)
    samples = read_lines(run.folder / "samples/train/step_000001.jsonl")
    assert max(len(sample.get("images", ())) for sample in samples) >= 2


def test_a_damaged_image_is_a_failed_call(agent_run):
    run = agent_run(*TOOLS, "trainer.total_training_steps=1")
    errors = {r["result"]["text"] for r in episodes(run, "tool") if r["result"]["error"]}
    assert errors == {
        "Error executing tool 'look': its answer: image 0 is no image that can be read (PNG, JPEG, WEBP, BMP, GIF, TIFF). "
        "Write it again."
    }


def rows_of(config, tokenizer):
    """Two prompts as the loader gives them, one of them with a picture."""
    encoder, columns = PromptEncoder(tokenizer, config.data), {"ordinal": torch.arange(2)}
    prompts = [image_messages([{"role": "user", "content": text}], {"images": images}, DataConfig())
             for text, images in (("Look.", []), ("<image>And here?", [picture(3)]))]  # fmt: skip
    encoded = [encoder.encode_row(messages, "a row", images) for messages, images in prompts]
    columns |= {"prompt_token_ids": objects([e.ids for e in encoded]), "media": objects([e.media for e in encoded])}
    columns |= {"raw_prompt": objects([m for m, _ in prompts]), "data_source": objects(["pictures"] * 2)}
    return DataProto.from_single_dict(columns)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "internvl"])
def test_log_probs_equal_the_own_forward(family, folder_of, tmp_path):
    settings = [f"actor_rollout_ref.model.path={folder_of(family)}", "data.train_files=x.jsonl", *WAYS["tools"],
                "actor_rollout_ref.model.external_lib=tests.agents.pictures", f"{ROLLOUT}.multi_turn.enable=True",
                "data.max_prompt_length=300", "data.max_response_length=260", f"{ROLLOUT}.multi_turn.tool_sandbox=False",
                f"trainer.default_local_dir={tmp_path}"]  # fmt: skip
    config, tokenizer, ends = load_config(settings).config, load_tokenizer(folder_of(family)), tuple(range(80))
    module, theirs = load_model(folder_of(family)), random_model(family)
    engine = NativeRollout(module, tokenizer, config.actor_rollout_ref.rollout, eos_token_ids=[258])
    agents = Agents(agent_spec(config), tokenizer, engine, stop_token_ids=ends)
    params = SamplingParams(n=4, max_new_tokens=260, stop_token_ids=ends)
    results = agents.generate(
        rows_of(config, tokenizer), params, step=1, split="train", dtype=np.float32, on_finish=lambda _: None
    )
    agents.close()
    num_compared, kinds = 0, set()
    for result in results:
        row, media = result.trajectory.to_row(), [span.media for span in result.trajectory.media]
        prompt, response = tuple(row.prompt_ids.tolist()), tuple(row.response_ids.tolist())
        parts = [text.count(mark) for images in media for text in images.texts for mark in tokenizer.processor.marks]
        if len(media) < 2 or sum(parts) != sum(token in (IMAGE, VIDEO) for token in (*prompt, *response)):
            continue  # it has sampled a token of images, and the model's forward takes it for an image
        kinds |= {kind for images in media[1:] for kind in images.kinds}
        joined_media = Media("", joined([m.tensors for m in media], FAMILIES[family].axis, "cpu"))
        expected = own_log_probs(theirs, prompt, joined_media, response).detach()
        assert torch.allclose(torch.tensor(row.log_probs), expected.double() * row.response_mask, rtol=0, atol=1e-5)
        num_compared += 1
    assert num_compared >= 3
    assert kinds == {"image", "video"}


def trained_samples(run):
    """Tokens, log-probs and score of every sample that trained."""
    files = sorted(run.folder.glob("samples/train/step_*.jsonl"))
    rows = [row for file in files for row in read_lines(file)]
    return sorted((row["ordinal"], row["sample_index"], row["response_ids"], row["log_probs"]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tools", "environment", "endpoint"])
def test_a_resumed_run_has_the_images_of_its_episodes(way, agent_run, ends_after):
    """Episodes that had paused or waited at the checkpoint: bits do not depend on the turns that a batch has together."""
    parts = f"{ROLLOUT}.partial_rollout={way != 'endpoint'}"
    changes = (*AHEAD, *WAYS[way], parts, "trainer.save_freq=1")
    unbroken = agent_run(*changes)
    ends_after(2)
    agent_run(*changes, folder="cut")
    cut = agent_run(*changes, folder="cut")
    samples = trained_samples(cut)
    assert len(samples) == 4 * 12
    assert samples == trained_samples(unbroken)


SENTENCES = {
    "https://example.com/a.png": "image_url must be a data URL in base64: nothing else is read",
    "/etc/passwd": "image_url must be a data URL",
    "data:image/png;base64,AAAA": "image 0 is no image that can be read",
    None: "stands for an image of the row, which has 0",
}


@pytest.mark.parametrize("url", SENTENCES)
def test_a_request_with_a_bad_image_is_refused_with_a_sentence(url):
    messages = _messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    episode = Episode(EpisodeTask(0, 0, 1, "train", (1,), {}, 9, 9), None)
    reader = EpisodeImages(ImageEncoder(FakeProcessor(), {}), None)
    session = EndpointSession("", episode, None, None, frozenset(), "", reader)
    with pytest.raises(RequestError, match=re.escape(SENTENCES[url])):
        asyncio.run(session._media(_placed(messages)[1]))


class FakeProcessor:
    arguments, settings = set(), "{}"
