"""Services and prompts with images: vLLM's route for token ids, simulated by a service that has the model's image processor."""

import base64
import io

import pytest
from PIL import Image

from tests.agents.pictures import picture
from tests.rollout.service import running
from tests.rollout.simulated import weight_transfer
from tests.vision_families import IMAGE, vision_folder
from verl.config import DataConfig, RolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data.images import image_messages
from verl.data.prompts import PromptEncoder
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ModelError
from verl.models.load import load_model, load_tokenizer
from verl.rollout.http.engine import HTTPRollout

MODELS = {"data": [{"id": "served", "root": "somewhere/model"}]}
ROUTE = "/inference/v1/generate"
PARAMS = SamplingParams(n=2, temperature=0.8, top_k=5, max_new_tokens=4, stop=("x",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_folder(tmp_path_factory.mktemp("qwen2_vl"), "qwen2_vl")


def prompt_of(tokenizer, settings=None):
    """Tokens and media of a question about two pictures."""
    config, pictures = DataConfig(mm_processor_kwargs=settings or {}), [picture(0), picture(1)]
    question = [{"role": "user", "content": "<image>A<image>?"}]
    messages, sources = image_messages(question, {"images": pictures}, config)
    return PromptEncoder(tokenizer, config).encode_row(messages, "row", sources)


def vllm_of(folder):
    """Answers as of vLLM: the tokens of each image take the place of its one token; then two tokens follow."""
    tokenizer = load_tokenizer(folder)
    rows = [{"token_id": 11, "logprob": -0.5}, {"token_id": 12, "logprob": 0}]

    def generate(body):
        urls = [part["url"] for part in body["content_parts"] if part["type"] == "image_url"]
        files = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
        texts = iter(tokenizer.processor.read([Image.open(io.BytesIO(file)) for file in files], {})[1])
        parts = [tokenizer.encode(next(texts)) if token == IMAGE else [token] for token in body["token_ids"]]
        return {
            "prompt_token_ids": [token for part in parts for token in part],
            "choices": [{"token_ids": [11, 12], "logprobs": {"content": rows}, "finish_reason": "length"}],
        }

    return {"/v1/models": MODELS, ROUTE: generate}


def engine_of(folder, url):
    tokenizer = load_tokenizer(folder)
    tokenizer.processor.keeps_files = True
    service = ServiceConfig(url=url, timeout_s=5.0)
    config = RolloutConfig(name="http", max_num_seqs=4, service=service)
    return HTTPRollout(load_model(folder), tokenizer, config, eos_token_ids=[258], transfer=weight_transfer("a/model"))


def test_a_prompt_with_images_has_a_token_and_a_data_url_for_each(folder):
    with running(vllm_of(folder)) as service:
        engine = engine_of(folder, service.url)
        prompt = prompt_of(engine.tokenizer)
        done = engine.generate([PromptRequest(0, tuple(prompt.ids), media=prompt.media)], PARAMS, step=1)
    assert [(d.token_ids, d.log_probs) for d in done] == [([11, 12], [-0.5, 0.0])] * 2
    bodies = service.bodies(ROUTE)
    assert [body["token_ids"].count(IMAGE) for body in bodies] == [2, 2] != prompt.ids.count(IMAGE)
    assert len({body["sampling_params"]["seed"] for body in bodies}) == 2
    files = [base64.b64decode(part["url"].partition(",")[2]) for part in bodies[0]["content_parts"]]
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    assert [shown.tobytes() for shown in pictures] == [picture(seed).tobytes() for seed in range(2)]


def test_a_service_with_other_tokens_for_an_image_is_refused(folder):
    with running(vllm_of(folder)) as service:
        engine = engine_of(folder, service.url)
        prompt = prompt_of(engine.tokenizer, {"max_pixels": 28 * 28})
        request = PromptRequest(0, tuple(prompt.ids), media=prompt.media)
        with pytest.raises(ModelError, match=r"tokens for the prompt and images of sample 0.*mm-processor-kwargs"):
            engine.generate([request], PARAMS, step=1)
