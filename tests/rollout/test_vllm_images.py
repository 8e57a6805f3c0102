"""Images in vLLM; slow: greedy tokens of tiny models, in the process and of a server.

    PYTHONPATH=tests/rollout/torchvision_on_cpu python -m pytest -m slow -p no:xdist tests/rollout/test_vllm_images.py

vLLM reads pictures with torchvision. The folder has a package in its place, since wheels of torchvision need PyTorch for CUDA.
SmolVLM's processor needs the package num2words.
"""

import importlib.util
import json
from contextlib import closing
from dataclasses import replace

import pytest

from tests import vision_families
from tests.models.test_videos import encoded, frames
from tests.rollout.simulated import send
from tests.rollout.test_http_images import request_of
from tests.rollout.test_http_real import make as make_client
from tests.rollout.test_http_real import serving
from tests.rollout.test_vllm_real import assert_equal, make
from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.models.load import load_model, load_tokenizer
from verl.rollout.api import ENGINES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "internvl",
    "mistral3",
    "idefics3",
    "smolvlm",
)
mrope = vision_families.mrope


@pytest.fixture
def task(family, tmp_path, monkeypatch):
    """Folder, tokenizer, model and requests: a prompt with two images, one without, a sample whose later turn has an image, and
    of families with images of any size a prompt with two that are resized, in Qwen3-VL with a video of 4 frames between."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # of a size that vLLM has a kernel for
    monkeypatch.setattr(vision_families, "TEXT", vision_families.TEXT | heads)
    monkeypatch.setattr(vision_families, "mrope", lambda section, **more: mrope([2 * n for n in section], **more))
    folder = vision_families.vision_folder(tmp_path / "model", family)
    if family in vision_families.PATCHES:  # vLLM resizes with torchvision
        file = folder / "preprocessor_config.json"
        file.write_text(file.read_text().replace('ImageProcessorPil"', 'ImageProcessor"'))
        size = {"shortest_edge": 28 * 28, "longest_edge": 1 << 24}
        settings = {"video_processor_type": "Qwen3VLVideoProcessor", "size": size}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    if family == "qwen3_vl_moe":
        vision_families.transpose_experts(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.processor.keeps_files = True
    resumed = request_of(tokenizer)
    first = replace(resumed, ordinal=1, token_ids=resumed.token_ids[: -resumed.num_drawn], num_drawn=0, spans=())
    requests = [resumed, first, PromptRequest(2, tuple(tokenizer.encode("None.")))]
    if family in vision_families.PATCHES:  # verl resizes their pictures for vLLM
        reads = family.startswith("qwen3")
        row = {"images": frames(2, (100, 75), seed=1), "videos": [frames(4, (100, 75))] * reads}
        prompt = encoded(folder, f"<image>A{'<video>' * reads}B<image>?", row, tokenizer)
        requests.append(PromptRequest(3, tuple(prompt.ids), media=prompt.media))
    return folder, tokenizer, load_model(folder), requests


def require_native(engine, tokenizer, module, requests):
    native = ENGINES.get("native")(module, tokenizer, RolloutConfig(max_num_seqs=8), eos_token_ids=[258])
    assert_equal(engine.generate(requests, GREEDY, step=1), native.generate(requests, GREEDY, step=1))


@pytest.mark.parametrize(
    ("family", "mode"), [*((f, "sync") for f in FAMILIES), ("qwen2_5_vl", "async"), ("qwen3_vl", "async")]
)
def test_greedy_tokens_in_the_process_are_the_native_ones_after_an_update(mode, family, task):
    folder, tokenizer, module, requests = task
    kwargs = "{vllm: {limit_mm_per_prompt: {video: 0}}}" if family == "glm4v" else "{}"  # its template lacks videos
    with closing(make(folder, mode, tokenizer, max_num_seqs=8, prompt_length=1500, engine_kwargs=kwargs)) as engine:
        for parameter in module.requires_grad_(False).parameters():
            parameter.mul_(1.05)  # as training changes it
        send(engine, module, 0)
        require_native(engine, tokenizer, module, requests)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_greedy_tokens_of_a_server_are_the_native_ones(family, task, tmp_path):
    folder, tokenizer, module, requests = task
    videos = json.dumps({"video": {"num_frames": -1, "fps": 2}})
    with serving(folder, tmp_path, "--media-io-kwargs", videos, length=2048) as (url, _):
        client = make_client(url, folder, tokenizer, length=2048, api="vllm")
        require_native(client, tokenizer, module, requests)
