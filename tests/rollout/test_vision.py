"""Generation from prompts with images: both engines give the greedy tokens of transformers' `generate`."""

import pytest
import torch

from tests.models.test_vision import SIZES, cached_log_probs, inputs_of, prompt_of
from tests.vision_families import CONFIGS, IMAGE, random_model
from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest, SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.models.load import load_model
from verl.models.vision import vision_towers
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout

LENGTH = 6
ENGINES = {"native": NativeRollout, "hf": HFRollout}
GREEDY = SamplingParams(n=1, temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module", params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def module(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family)
    random_model(family).save_pretrained(folder)
    return load_model(folder)


def requests_of(family):
    prompts = [prompt_of(family, sizes, number) for number, sizes in enumerate(SIZES)]
    return [PromptRequest(number, ids, media=media) for number, (ids, media) in enumerate(prompts)]


def engine_of(name, module, **config):
    return ENGINES[name](module, None, RolloutConfig(**config), eos_token_ids=[258])


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_equal_generate(family, module, name):
    requests = requests_of(family)
    completions = engine_of(name, module).generate(requests, GREEDY, step=1)
    theirs = random_model(family)
    for request, done in zip(requests, completions, strict=True):
        inputs = inputs_of(theirs, request.token_ids, request.media)
        expected = theirs.generate(**inputs, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
        assert done.token_ids == expected[0, len(request.token_ids) :].tolist()


@pytest.mark.parametrize("name", ENGINES)
def test_log_probs_equal_the_model(family, module, name):
    requests = requests_of(family)
    params = SamplingParams(n=3, max_new_tokens=LENGTH, ignore_eos=True)
    # few tokens a step, and fewer rows than samples, so that prompts start while other samples decode
    engine = engine_of(name, module, max_num_seqs=4, max_num_batched_tokens=8)
    theirs = random_model(family)
    with torch.no_grad():
        for done in engine.generate(requests, params, step=1):
            request = requests[done.ordinal]
            expected = cached_log_probs(theirs, request.token_ids, request.media, tuple(done.token_ids))
            assert torch.allclose(torch.tensor(done.log_probs), expected, rtol=0, atol=1e-5)


def test_both_engines_sample_the_same_tokens(family, module):
    params = SamplingParams(n=3, max_new_tokens=LENGTH, ignore_eos=True)
    ours, theirs = (engine_of(name, module).generate(requests_of(family), params, step=1) for name in ENGINES)
    assert [done.token_ids for done in ours] == [done.token_ids for done in theirs]


@pytest.mark.parametrize("name", ENGINES)
def test_a_sample_resumes_behind_images(family, module, name):
    """Its response so far may have the token that stands for images."""
    engine = engine_of(name, module)
    response = (11, IMAGE, 13)
    for request in requests_of(family):
        resumed = PromptRequest(
            request.ordinal, (*request.token_ids, *response), num_drawn=len(response), media=request.media
        )
        (done,) = engine.generate([resumed], GREEDY, step=1)
        whole = cached_log_probs(random_model(family), request.token_ids, request.media, (*response, *done.token_ids))
        assert torch.allclose(torch.tensor(done.log_probs), whole[len(response) :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENGINES)
def test_a_turn_follows_images(family, module, name):
    """As of an agent: the tokens of an environment follow a kept response, and may have the token of images."""
    answer = (31, IMAGE, 33)
    params = SamplingParams(n=1, max_new_tokens=4, ignore_eos=True)
    generation = engine_of(name, module).open(params, step=1, keep=True)
    requests = requests_of(family)
    for request in requests:
        generation.add(request)
    turns = {}
    while done := generation.poll():
        for one in done:
            turns.setdefault(one.key, []).append(one)
            if len(turns[one.key]) == 1:
                generation.add(TurnRequest(*one.key, answer, 4))
    generation.close()
    for request in requests:
        first, second = turns[request.ordinal, 0]
        whole = (*first.token_ids, *answer, *second.token_ids)
        expected = cached_log_probs(random_model(family), request.token_ids, request.media, whole)
        assert torch.allclose(torch.tensor(second.log_probs), expected[-4:], rtol=0, atol=1e-5)


def test_images_of_a_prompt_are_computed_once_for_its_samples(family, module):
    calls = []
    tower = vision_towers(module)[0]
    hook = tower.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        request = requests_of(family)[0]
        params = SamplingParams(n=8, max_new_tokens=LENGTH, ignore_eos=True)
        assert len(engine_of("native", module).generate([request], params, step=1)) == 8
    finally:
        hook.remove()
    assert len(calls) == 1


def test_an_engine_without_images_refuses_them(family, module):
    class Other(NativeRollout):
        reads_images = False

    engine = Other(module, None, RolloutConfig(), eos_token_ids=[258])
    with pytest.raises(ConfigError, match="reads no images"):
        engine.generate(requests_of(family), GREEDY, step=1)
