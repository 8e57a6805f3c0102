"""Videos of rows through packed batches and both engines, against transformers' own forward and `generate`."""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.test_vision import columns_of, require_equal, require_equal_from_the_cache
from tests.rollout.test_vision import ENGINES, engine_of, require_greedy
from tests.slow import slow
from tests.vision_families import FEW, IMAGE, VIDEO
from verl.config import DataConfig
from verl.data.images import image_messages
from verl.data.prompts import PromptEncoder
from verl.data_proto.samples import PromptRequest
from verl.errors import DataError
from verl.models.load import load_model, load_tokenizer
from verl.models.vision import FAMILIES

WITHOUT = () if importlib.util.find_spec("num2words") else ("smolvlm",)  # its processor needs the package
WITHOUT_VIDEOS = [family for family, row in FAMILIES.items() if row.no_videos]
VIDEOS = [family for family in FAMILIES if family not in (*WITHOUT_VIDEOS, *WITHOUT)]
LEVELS = (0, 80, 160, 240)


def frames(count=4, size=(56, 56), seed=0):
    noise = np.random.default_rng(seed)
    return [Image.fromarray(noise.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)) for _ in range(count)]


def encoded(folder, text, row, tokenizer=None):
    """Tokens and media of a row."""
    config = DataConfig(max_prompt_length=2048)
    messages, sources = image_messages([{"role": "user", "content": text}], row, config)
    return PromptEncoder(tokenizer or load_tokenizer(folder), config).encode_row(messages, "row", sources)


def prompts_of(folder):
    """(tokens, media) of a video of 4 frames, one of 3 between two images, and a text."""
    rows = [
        ("<video>What?", {"videos": [frames()]}),
        ("<image>A<video>B<image>?", {"images": frames(2, seed=1), "videos": [frames(3, (84, 56), seed=2)]}),
        ("Plain?", {}),
    ]
    return [(tuple(p.ids), p.media) for p in (encoded(folder, text, row) for text, row in rows)]


@pytest.mark.parametrize("family", VIDEOS)
def test_log_probs_and_gradients_equal_the_own_forward(family, folder_of):
    folder = folder_of(family)
    rows = [(*prompt, r) for prompt in prompts_of(folder) for r in ((11, 12, 13), (21, 22, 23, 24))]
    require_equal(family, folder, *columns_of(rows))


@pytest.mark.parametrize("family", VIDEOS)
def test_a_sampled_placeholder_is_a_token_like_any_other(family, folder_of):
    rows = [(*prompt, (11, VIDEO, IMAGE, 13)) for prompt in prompts_of(folder_of(family))]
    require_equal_from_the_cache(family, folder_of(family), *columns_of(rows))


@pytest.mark.parametrize(
    ("family", "name"), [slow(f, name, when=name == "hf" and f not in FEW) for f in VIDEOS for name in ENGINES]
)
def test_greedy_tokens_equal_generate(family, name, folder_of):
    folder = folder_of(family)
    requests = [PromptRequest(n, ids, media=media) for n, (ids, media) in enumerate(prompts_of(folder))]
    require_greedy(family, engine_of(name, load_model(folder)), requests)


@pytest.mark.parametrize("family", ["llava_onevision", "mistral3"])
def test_prompts_of_one_and_two_images_equal_the_own_forward(family, folder_of):
    """Processors divide a single image into tiles (LLaVA-OneVision), or keep its shape (Mistral 3)."""
    pictures = [frames(n, (30 + 40 * n, 60), seed=n) for n in (1, 2)]
    prompts = [encoded(folder_of(family), f"{'<image>' * len(images)}?", {"images": images}) for images in pictures]
    rows = [(tuple(prompt.ids), prompt.media, (11, 12, 13)) for prompt in prompts]
    require_equal(family, folder_of(family), *columns_of(rows))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_part_of_a_video_has_its_two_frames(family, folder_of):
    """Patches [parts, height * width, colours, frames, pixels] of frames of one colour each."""
    folder = folder_of(family)
    clip = [Image.new("RGB", (56, 56), (level,) * 3) for level in LEVELS]
    tensors = encoded(folder, "<video>", {"videos": [clip]}).media.tensors
    images = load_tokenizer(folder).processor.processor.image_processor
    height, width = tensors["video_grid_thw"][0, 1:].tolist()
    patches = tensors["pixel_values_videos"].view(2, height * width, 3, 2, -1)
    for colour, (mean, std) in enumerate(zip(images.image_mean, images.image_std, strict=True)):
        expected = torch.tensor([(level / 255 - mean) / std for level in LEVELS]).view(2, 1, 2, 1)
        assert torch.allclose(patches[:, :, colour], expected.expand_as(patches[:, :, colour]), atol=1e-6)


def test_texts_of_frames_have_their_times_or_numbers(folder_of):
    row = {"videos": [{"video": frames(), "fps": 2}]}
    numbered, timed = (encoded(folder_of(f), "<video>", row).media.texts[0] for f in ("internvl", "qwen3_vl"))
    assert [line.split(":")[0] for line in numbered.splitlines()] == [f"Frame{n}" for n in range(1, 5)]
    # the middle of two frames, half a second apart
    assert [part.split(">")[0] for part in timed.split("<") if "seconds" in part] == ["0.2 seconds", "1.2 seconds"]


def test_limits_of_pixels_change_frames_and_their_digest(folder_of):
    row = [{"video": frames(size=(112, 112)), **limits} for limits in ({}, {"max_pixels": 28 * 28})]
    large, small = (encoded(folder_of("qwen2_5_vl"), "<video>", {"videos": [video]}) for video in row)
    assert small.ids.count(VIDEO) == 2 < large.ids.count(VIDEO)
    assert small.media != large.media
    assert large.media.tensors["second_per_grid_ts"].tolist() == [1.0]


@pytest.mark.parametrize("family", WITHOUT_VIDEOS)
def test_other_families_refuse_videos(family, folder_of):
    with pytest.raises(DataError, match="row: video 0 cannot be read"):
        encoded(folder_of(family), "<video>?", {"videos": [frames()]})
