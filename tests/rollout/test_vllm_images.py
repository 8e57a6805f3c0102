"""Images in vLLM, which must be importable; slow: greedy tokens of a tiny model, in the process and of a server.

python -m pytest -m slow -p no:xdist tests/rollout/test_vllm_images.py
"""

import importlib.util
from dataclasses import replace

import pytest

from tests import vision_families
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


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Folder, tokenizer, model and requests: a prompt with two images, one without, a sample whose later turn has an image."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of a size that vLLM has a kernel for
    monkeypatch.setattr(vision_families, "TEXT", vision_families.TEXT | heads)
    folder = vision_families.vision_folder(tmp_path / "model", "idefics3")  # most others import torchvision in vLLM
    tokenizer = load_tokenizer(folder)
    tokenizer.processor.keeps_files = True
    resumed = request_of(tokenizer)
    first = replace(resumed, ordinal=1, token_ids=resumed.token_ids[: -resumed.num_drawn], num_drawn=0, spans=())
    return folder, tokenizer, load_model(folder), [resumed, first, PromptRequest(2, tuple(tokenizer.encode("None.")))]


def require_native(engine, tokenizer, module, requests):
    native = ENGINES.get("native")(module, tokenizer, RolloutConfig(max_num_seqs=8), eos_token_ids=[258])
    assert_equal(engine.generate(requests, GREEDY, step=1), native.generate(requests, GREEDY, step=1))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_greedy_tokens_in_the_process_are_the_native_ones(mode, task):
    folder, tokenizer, module, requests = task
    engine = make(folder, mode, tokenizer, max_num_seqs=8, prompt_length=1500)
    try:
        engine.load(module.named_parameters())
        engine.publish(0)
        require_native(engine, tokenizer, module, requests)
    finally:
        engine.close()


def test_greedy_tokens_of_a_server_are_the_native_ones(task, tmp_path):
    folder, tokenizer, module, requests = task
    with serving(folder, tmp_path, length=2048) as (url, _):
        require_native(make_client(url, folder, tokenizer, api="vllm"), tokenizer, module, requests)
