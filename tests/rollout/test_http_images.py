"""Services and prompts with images: simulated services that have the model's image processor."""

import base64
import io
import math

import pytest
from PIL import Image

from tests.agents.pictures import picture
from tests.rollout.service import MODELS, choice, running
from tests.rollout.simulated import weight_transfer
from tests.vision_families import IMAGE
from verl.config import DataConfig, RolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data.images import image_messages
from verl.data.prompts import PromptEncoder
from verl.data_proto.media import MediaSpan
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ModelError
from verl.models.load import load_model, load_tokenizer
from verl.rollout.api import ENGINES

ROUTES = {"http": "/inference/v1/generate", "sglang": "/generate"}
PARAMS = SamplingParams(n=2, temperature=0.8, max_new_tokens=4, stop=("x",))
VOCABULARY = 272


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("internvl")


def services(folder):
    """Answers as of vLLM, which puts the tokens of each image in the place of its one token, and of SGLang: two tokens."""
    tokenizer = load_tokenizer(folder)

    def vllm(body):
        pictures = [opened(part["url"]) for part in body["content_parts"] if part["type"] == "image_url"]
        texts = iter(tokenizer.processor.read(pictures, {})[1])
        parts = [tokenizer.encode(next(texts)) if token == IMAGE else [token] for token in body["token_ids"]]
        rows = [{"token_id": 11, "logprob": -0.5}, {"token_id": 12, "logprob": 0}]
        choice = {"token_ids": [11, 12], "logprobs": {"content": rows}, "finish_reason": "length"}
        return {"prompt_token_ids": sum(parts, []), "choices": [choice]}

    def sglang(body):
        rows = [[-0.5, 11, None], [0.0, 12, None]]
        if "image_data" not in body:  # a look at its log-probs
            rows = [[-math.log(VOCABULARY), 11, None]]
        return {"text": "", "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": rows}}

    return {
        "/v1/models": MODELS,
        "/v1/completions": choice([5], [-math.log(VOCABULARY)]),
        ROUTES["http"]: vllm,
        "/model_info": {"model_path": "a/model"},
        "/generate": sglang,
    }


def opened(url):
    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))


def engine_of(name, folder, url):
    tokenizer = load_tokenizer(folder)
    tokenizer.processor.keeps_files = True
    config = RolloutConfig(name=name, max_num_seqs=4, service=ServiceConfig(url=url, timeout_s=5.0))
    return ENGINES.get(name)(
        load_model(folder), tokenizer, config, eos_token_ids=[258], transfer=weight_transfer("a/model")
    )


def request_of(tokenizer):
    """Two pictures in a prompt, a sampled token, and a picture of a later turn."""
    config, pictures = DataConfig(), [picture(seed) for seed in range(3)]
    encoder, question = PromptEncoder(tokenizer, config), [{"role": "user", "content": "<image>A<image>?"}]
    prompt = encoder.encode_row(image_messages(question, {"images": pictures[:2]}, config)[0], "row", pictures[:2])
    media = encoder.images.read(pictures[2:], "row").media
    turn = tokenizer.encode(f"B{media.texts[0]}?", add_special_tokens=False)
    ids = (*prompt.ids, 11, *turn)
    places = [place for place, token in enumerate(ids) if token == IMAGE and place > len(prompt.ids)]
    span = MediaSpan(places[0], places[-1] + 1 - places[0], media)
    return PromptRequest(0, ids, num_drawn=1 + len(turn), media=prompt.media, spans=(span,))


@pytest.mark.parametrize("name", ROUTES)
def test_services_get_a_token_and_a_data_url_for_each_image(name, folder):
    with running(services(folder)) as service:
        engine = engine_of(name, folder, service.url)
        done = engine.generate([request_of(engine.tokenizer)], PARAMS, step=1)
    assert [(d.token_ids, d.log_probs) for d in done] == [([11, 12] * 2, [-0.5, 0.0] * 2)] * 2, "each gives two tokens"
    bodies = [body for body in service.bodies(ROUTES[name]) if "image_data" in body or "content_parts" in body]
    assert len(bodies) == 4
    for body in bodies:
        assert (body.get("token_ids") or body["input_ids"]).count(IMAGE) == 3
        urls = body.get("image_data") or [part["url"] for part in body["content_parts"]]
        assert [opened(url).tobytes() for url in urls] == [picture(seed).tobytes() for seed in range(3)]


def test_a_service_with_other_tokens_for_an_image_is_refused(folder):
    with running(services(folder)) as service:
        engine = engine_of("http", folder, service.url)
        engine.tokenizer.processor.processor.image_seq_length = 8  # of the run, not of the service
        with pytest.raises(
            ModelError, match=r"other tokens .* for the prompt and images of sample \d.*mm-processor-kwargs"
        ):
            engine.generate([request_of(engine.tokenizer)], PARAMS, step=1)
