"""Generation from prompts with images: both engines give the greedy tokens of transformers' `generate`."""

import copy
import functools

import pytest
import torch

from tests.models.plain_attention import PLAIN
from tests.models.test_vision import SIZES, cached_log_probs, episode_of, inputs_of, own_log_probs, prompt_of
from tests.slow import slow
from tests.vision_families import CONFIGS, FEW, IMAGE, few, random_model
from verl.config import RolloutConfig
from verl.config.sections.rollout import KVCacheConfig
from verl.data_proto.media import MediaSpan
from verl.data_proto.samples import PromptRequest, SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.families import EngineFacts
from verl.models.load import load_model
from verl.models.lora import LoRASpec, add_adapters
from verl.models.vision import vision_towers
from verl.rollout.hf import HFRollout
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.cuda.forward import StraightForward
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.torch.forward import DenseForward

LENGTH = 6
loaded = functools.cache(load_model)
ENGINES = {"native": NativeRollout, "hf": HFRollout}
# language models with experts, with linear attention, and with norms behind attention
BY_MODULES = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
GREEDY = SamplingParams(n=1, temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture
def module(family, folder_of):
    return loaded(folder_of(family))


# "hf" computes by the modules of a family, and its tokens are compared with the tokens of "native" below
by_engine = pytest.mark.parametrize(
    ("family", "name"), [slow(f, name, when=name == "hf" and f not in FEW) for f in CONFIGS for name in ENGINES]
)


def requests_of(family):
    prompts = [prompt_of(family, sizes, number) for number, sizes in enumerate(SIZES)]
    return [PromptRequest(number, ids, media=media) for number, (ids, media) in enumerate(prompts)]


def engine_of(name, module, **config):
    return ENGINES[name](module, None, RolloutConfig(**config), eos_token_ids=[258])


@by_engine
def test_greedy_tokens_equal_generate(family, module, name):
    require_greedy(family, engine_of(name, module), requests_of(family))


def require_greedy(family, engine, requests):
    completions, theirs = engine.generate(requests, GREEDY, step=1), random_model(family)
    theirs.generation_config.eos_token_id = None  # `generate` would not sample it before LENGTH tokens
    for request, done in zip(requests, completions, strict=True):
        inputs = inputs_of(theirs, request.token_ids, request.media)
        expected = theirs.generate(**inputs, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
        assert done.token_ids == expected[0, len(request.token_ids) :].tolist()


@by_engine
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


@by_engine
def test_a_sample_resumes_behind_images(family, module, name):
    """Its response so far may have the token that stands for images."""
    engine = engine_of(name, module)
    response = (11, IMAGE, 13)
    for request in requests_of(family):
        resumed = PromptRequest(
            request.ordinal, (*request.token_ids, *response), num_drawn=len(response), media=request.media
        )
        (done,) = engine.generate([resumed], GREEDY, step=1)
        full = cached_log_probs(random_model(family), request.token_ids, request.media, (*response, *done.token_ids))
        assert torch.allclose(torch.tensor(done.log_probs), full[len(response) :], rtol=0, atol=1e-5)


@by_engine
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
        tokens = (*first.token_ids, *answer, *second.token_ids)
        expected = cached_log_probs(random_model(family), request.token_ids, request.media, tokens)
        assert torch.allclose(torch.tensor(second.log_probs), expected[-4:], rtol=0, atol=1e-5)


@by_engine
@pytest.mark.parametrize("continues", [True, False])
def test_a_turn_has_images(family, module, name, continues):
    """Of a kept sample as a turn, and of a resumed one within its history."""
    prompt, response, _, spans, media = episode_of(family, 0)
    spans = tuple(span.moved(len(prompt)) for span in spans)
    generation = engine_of(name, module).open(SamplingParams(n=1, max_new_tokens=4, ignore_eos=True), step=1, keep=True)
    if continues:
        generation.add(PromptRequest(0, prompt, spans=spans[:1]))
        ids = [*prompt]
        for number, span in enumerate(spans[1:]):
            (done,) = generation.poll()
            ids += done.token_ids
            turn = (9, *prompt[2:3], *[IMAGE] * span.length, 7 + number)
            generation.add(TurnRequest(0, 0, turn, 4, (MediaSpan(2, span.length, span.media),)))
            ids += turn
    else:
        ids = [*prompt, *response, 11]
        generation.add(PromptRequest(0, tuple(ids), num_drawn=len(response) + 1, spans=spans))
    (done,) = generation.poll()
    generation.close()
    theirs = random_model(family)
    expected = own_log_probs(theirs, tuple(ids), media, tuple(done.token_ids))
    assert torch.allclose(torch.tensor(done.log_probs), expected, rtol=0, atol=1e-5)


def bits_of(done):
    return [(d.key, d.token_ids, d.log_probs) for d in done]


def test_the_decoder_computes_plain_language_models(family, module):
    assert (DenseForward.of(module, prepack=True) is None) == (family in BY_MODULES)
    engine = engine_of("native", module)
    assert engine.invariance().holds == isinstance(engine.dense(), CpuForward)


def test_engines_and_the_backend_of_a_gpu_sample_the_same_tokens(family, module):
    gpu = NativeRollout(module, None, RolloutConfig(enforce_eager=True), eos_token_ids=[258], device_kernel=PLAIN)
    gpu.device.fits = StraightForward.reads
    params = SamplingParams(n=3, max_new_tokens=LENGTH, ignore_eos=True)
    engines = (engine_of("native", module), engine_of("hf", module), gpu)
    native, hf, device = (
        [done.token_ids for done in engine.generate(requests_of(family), params, step=1)] for engine in engines
    )
    assert native == hf == device
    assert (gpu.device.stores is None) == (family in BY_MODULES)


@few
def test_a_sample_depends_neither_on_its_batch_nor_on_the_time_of_its_images(family, module):
    """Of prompts, samples that give up their place in memory for a while, and turns with a history that is computed again."""
    if not isinstance(engine_of("native", module).dense(), CpuForward):
        pytest.skip("only the compiled kernels promise it")
    params = SamplingParams(n=4, max_new_tokens=24, ignore_eos=True)
    together = bits_of(engine_of("native", module).generate(requests_of(family), params, step=1))
    apart = [bits_of(engine_of("native", module).generate([r], params, step=1)) for r in requests_of(family)]
    assert together == sum(apart, [])
    cache = KVCacheConfig(enable_paged_attention=True, max_tokens=160)
    narrow = engine_of("native", module, kv_cache_config=cache)
    assert bits_of(narrow.generate(requests_of(family), params, step=1)) == together
    assert narrow.stats()["num_preempted"] > 0
    prompt, _, _, spans, _ = episode_of(family, 0)
    spans = tuple(span.moved(len(prompt)) for span in spans)
    turns = SamplingParams(n=1, max_new_tokens=4, ignore_eos=True)
    generation = engine_of("native", module).open(turns, step=1, keep=True)
    generation.add(PromptRequest(0, prompt, spans=spans[:1]))
    (first,) = generation.poll()
    span = spans[1]
    turn = (9, *[IMAGE] * span.length, 7)
    generation.add(TurnRequest(0, 0, turn, 4, (MediaSpan(1, span.length, span.media),)))
    (turned,) = generation.poll()
    generation.close()
    ids = (*prompt, *first.token_ids, *turn)
    moved = MediaSpan(len(ids) - len(turn) + 1, span.length, span.media)
    resumed = PromptRequest(0, ids, num_drawn=4 + len(turn), spans=(spans[0], moved))
    (again,) = engine_of("native", module).generate([resumed], turns, step=1)
    assert bits_of([turned]) == bits_of([again])


@few
def test_adapters_act_behind_images(family, module):
    adapted = copy.deepcopy(module)
    add_adapters(adapted, LoRASpec(4, 8.0, "all-linear"), torch.float32)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    params = SamplingParams(n=2, max_new_tokens=LENGTH, ignore_eos=True)
    ours, theirs, plain = (
        engine_of(name, m).generate(requests_of(family), params, step=1)
        for name, m in (("native", adapted), ("hf", adapted), ("hf", module))
    )
    assert [done.token_ids for done in ours] == [done.token_ids for done in theirs]
    assert [done.token_ids for done in ours] != [done.token_ids for done in plain]


@few
def test_bfloat16_is_as_near_to_float32_as_the_modules(family, module):
    narrow, params = copy.deepcopy(module).bfloat16(), SamplingParams(n=4, max_new_tokens=LENGTH, ignore_eos=True)
    errors, theirs = {}, random_model(family)
    with torch.no_grad():
        for name in ENGINES:
            done = engine_of(name, narrow).generate(requests_of(family), params, step=1)
            prompts = [requests_of(family)[d.ordinal] for d in done]
            exact = [
                cached_log_probs(theirs, r.token_ids, r.media, tuple(d.token_ids))
                for r, d in zip(prompts, done, strict=True)
            ]
            errors[name] = float((torch.tensor([d.log_probs for d in done]) - torch.stack(exact)).norm())
    assert 0 < errors["native"] < 1.5 * errors["hf"]


@few
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


@few
def test_an_engine_without_images_refuses_them(family, module):
    class Other(NativeRollout):
        facts = EngineFacts()

    engine = Other(module, None, RolloutConfig(), eos_token_ids=[258])
    with pytest.raises(ConfigError, match="reads no images"):
        engine.generate(requests_of(family), GREEDY, step=1)
