"""Vision-language models through packed batches, against transformers' own forward of each row."""

import pytest
import torch

from tests.slow import each_value
from tests.vision_families import (
    CONFIGS,
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    few,
    one_by_one,
    random_images,
    random_model,
    transpose_experts,
    vision_folder,
)
from verl.data_proto.extras import BatchExtras
from verl.data_proto.media import Media, MediaSpan
from verl.errors import ModelError
from verl.models.forward import hidden_states, packed_outputs
from verl.models.grad_buffers import GradientBuffers
from verl.models.load import load_model
from verl.models.packing import pack_rows
from verl.models.vision import freeze_towers, language_model_of, vision_states, vision_towers

pytestmark = pytest.mark.seed("B1")
TOLERANCE = 1e-5
# two prompts with images, one of them with a text of its own length in front, and one without
SIZES = (((2, 2),), ((2, 4), (4, 2)), ())
RESPONSES = ((11, 12, 13), (21, 22, 23, 24))
# a response may sample the token that stands for images in prompts
STRAY = ((11, IMAGE, 13), (IMAGE, 22, 23, 24))
CASES = ("checkpointing", "frozen towers", "frozen language model", "critic")


@pytest.fixture(params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture
def folder(family, folder_of):
    return folder_of(family)


def prompt_of(family, sizes, number):
    tensors, counts = random_images(family, sizes, seed=number) if sizes else ({}, [])
    ids = [5, 6 + number]
    for count in counts:
        ids += [VISION_START, *[IMAGE] * count, VISION_END, 7]
    return (*ids, 8), Media(str(number), tensors) if sizes else None


def batch_of(family, responses):
    """`columns_of` every prompt with each response."""
    return columns_of([(*prompt_of(family, sizes, n), r) for n, sizes in enumerate(SIZES) for r in responses])


def columns_of(rows):
    """Columns and media of rows (prompt, media, response), and (prompt, response, media) of each row."""
    widths = max(len(p) for p, _, _ in rows), max(len(r) for _, _, r in rows)
    columns = {
        "prompts": torch.tensor([[0] * (widths[0] - len(p)) + list(p) for p, _, _ in rows]),
        "prompt_mask": torch.tensor([[False] * (widths[0] - len(p)) + [True] * len(p) for p, _, _ in rows]),
        "responses": torch.tensor([list(r) + [0] * (widths[1] - len(r)) for _, _, r in rows]),
        "response_mask": torch.tensor([[True] * len(r) + [False] * (widths[1] - len(r)) for _, _, r in rows]),
    }
    return columns, [media for _, media, _ in rows], rows


def inputs_of(model, ids, media):
    ids = torch.tensor([ids])
    has_grids = "grid" in " ".join(media.tensors if media else ())
    kinds = {"mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO)} if has_grids else {}
    return {"input_ids": ids, **(media.tensors if media else {}), **kinds}


def own_log_probs(model, prompt, media, response):
    """Log-probs of a response by the model's own forward over the row."""
    logits = model(**inputs_of(model, prompt + response, media), use_cache=False).logits[0]
    chosen = torch.tensor(response)[:, None]
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, chosen)[:, 0]


def cached_log_probs(model, prompt, media, response):
    """The same as `generate` computes it: the prompt with its images, then the response from the cache."""
    model.model.rope_deltas = None  # of the images of an earlier prompt
    first = model(**inputs_of(model, prompt, media), use_cache=True)
    ids = torch.tensor([response])
    rest = model(input_ids=ids, past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits[0, -1:], rest.logits[0, :-1]])
    return logits.log_softmax(-1).gather(1, ids.T)[:, 0]


def packed_log_probs(model, columns, media):
    return packed_outputs(model, pack_rows(columns, extras=BatchExtras(media)), ("log_probs",))["log_probs"]


@pytest.mark.parametrize(("family", "share_prompts"), each_value(list(CONFIGS), [True, False]))
def test_log_probs_and_gradients_equal_the_own_forward(family, folder, share_prompts):
    require_equal(family, folder, *batch_of(family, RESPONSES), share_prompts=share_prompts)


def require_equal(family, folder, columns, media, rows, *, share_prompts=True):
    """Log-probs and gradients of the packed forward, and of the family's own forward of each row."""
    ours, theirs = load_model(folder), random_model(family)
    packed = pack_rows(columns, share_prompts=share_prompts, extras=BatchExtras(media))
    log_probs = packed_outputs(ours, packed, ("log_probs",))["log_probs"][columns["response_mask"]]
    expected = torch.cat([own_log_probs(theirs, p, m, r) for p, m, r in rows])
    assert torch.allclose(log_probs, expected, rtol=0, atol=TOLERANCE)
    weights = torch.linspace(-1, 1, len(expected))
    (log_probs * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    for name, parameter in ours.named_parameters():
        if name in gradients:
            assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=TOLERANCE * scale), name
    towers = [p for tower in vision_towers(ours) for p in tower.parameters()]
    assert towers
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in towers)


@pytest.mark.parametrize(("family", "case"), each_value(list(CONFIGS), CASES))
def test_gradients_equal_the_modules_ones(family, folder, case):
    """Summed in buffers, as by a training step, if our decoder computes the language model."""
    if family in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"):
        pytest.skip("its own modules compute it")
    columns, media, _ = batch_of(family, STRAY)
    packed, gradients = pack_rows(columns, extras=BatchExtras(media)), []
    for states in (hidden_states, lambda model, *_: vision_states(model, packed)[packed.hidden_index]):
        model = load_model(folder, "token_value" if case == "critic" else "lm")
        if case == "frozen towers":
            freeze_towers(model)
        if case == "frozen language model":
            language_model_of(model).requires_grad_(False)
        if case == "checkpointing":
            model.gradient_checkpointing_enable()
        hidden = states(model, packed, GradientBuffers({p: p for p in model.parameters() if p.requires_grad}))
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()})
    ours, theirs = gradients
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        scale = max(1.0, float(expected.abs().max()))
        assert torch.allclose(ours[name], expected, rtol=0, atol=TOLERANCE * scale), name


def episode_of(family, number, sizes=((2, 2), (2, 4), (4, 2))):
    """(prompt, response, mask of trained tokens, spans, all images) with an image in the prompt and one in each later turn."""
    tensors, counts = random_images(family, sizes, seed=number)
    images = [Media(f"{number}/{i}", one) for i, one in enumerate(one_by_one(family, tensors))]
    prompt = (5, 6 + number, VISION_START, *[IMAGE] * counts[0], VISION_END, 8)
    spans, response, mask = [MediaSpan(3 - len(prompt), counts[0], images[0])], [11, 12], [1, 1]
    for image, count in zip(images[1:], counts[1:], strict=True):
        response += [9, VISION_START]
        spans.append(MediaSpan(len(response), count, image))
        response += [*[IMAGE] * count, VISION_END, 21, 22, 23]
        mask += [0] * (len(response) - len(mask) - 3) + [1, 1, 1]
    return prompt, tuple(response), mask, tuple(spans), Media(str(number), tensors)


@pytest.mark.parametrize(("family", "share_prompts"), each_value(list(CONFIGS), [True, False]))
def test_images_of_later_turns_equal_the_own_forward(family, folder, share_prompts):
    """A whole episode, and one of the same prompt without trained tokens behind its first image."""
    prompt, response, mask, spans, media = episode_of(family, 0)
    columns = {
        "prompts": torch.tensor([prompt] * 2),
        "prompt_mask": torch.ones(2, len(prompt), dtype=torch.bool),
        "responses": torch.tensor([response] * 2),
        "response_mask": torch.tensor([mask, [1, 1] + [0] * (len(mask) - 2)]).bool(),
    }
    ours, theirs = load_model(folder), random_model(family)
    packed = pack_rows(columns, share_prompts=share_prompts, extras=BatchExtras([spans] * 2))
    assert len(packed.media) == (3 if share_prompts else 4)
    log_probs = packed_outputs(ours, packed, ("log_probs",))["log_probs"]
    expected = own_log_probs(theirs, prompt, media, response)
    for values, trains in zip(log_probs, columns["response_mask"], strict=True):
        assert torch.allclose(values[trains], expected[trains], rtol=0, atol=TOLERANCE)
    trains = columns["response_mask"][0]
    log_probs[0].sum().backward()
    expected[trains].sum().backward()
    scale = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, rtol=0, atol=TOLERANCE * scale), name


def test_a_sampled_placeholder_is_a_token_like_any_other(family, folder):
    require_equal_from_the_cache(family, folder, *batch_of(family, STRAY))


@torch.no_grad()
def require_equal_from_the_cache(family, folder, columns, media, rows):
    ours, theirs = load_model(folder), random_model(family)
    log_probs = packed_log_probs(ours, columns, media)[columns["response_mask"]]
    expected = torch.cat([cached_log_probs(theirs, p, m, r) for p, m, r in rows])
    assert torch.allclose(log_probs, expected, rtol=0, atol=TOLERANCE)


@few
@torch.no_grad()
def test_images_of_a_prompt_are_computed_once_for_its_samples(family, folder):
    prompt, media = prompt_of(family, SIZES[1], 1)
    columns = {
        "prompts": torch.tensor([prompt] * 8),
        "prompt_mask": torch.ones(8, len(prompt), dtype=torch.bool),
        "responses": torch.arange(8 * 3).view(8, 3),
        "response_mask": torch.ones(8, 3, dtype=torch.bool),
    }
    model, calls = load_model(folder), []
    hooks = [
        tower.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for tower in vision_towers(model)[:1]
    ]
    packed = pack_rows(columns, extras=BatchExtras([media] * 8))
    assert len(packed.media) == 1
    packed_outputs(model, packed, ("log_probs",))
    assert len(hooks) == len(calls) == 1
    sizes = [value.numel() for value in (*calls[0][0], *calls[0][1].values()) if isinstance(value, torch.Tensor)]
    assert max(sizes) == media.tensors["pixel_values"].numel()


@few
@torch.no_grad()
def test_equal_tokens_with_other_images_share_nothing(family, folder):
    prompt, media = prompt_of(family, SIZES[0], 0)
    other = Media("other", random_images(family, SIZES[0], seed=9)[0])
    columns = {
        "prompts": torch.tensor([prompt] * 2),
        "prompt_mask": torch.ones(2, len(prompt), dtype=torch.bool),
        "responses": torch.tensor([[11, 12]] * 2),
        "response_mask": torch.ones(2, 2, dtype=torch.bool),
    }
    log_probs = packed_log_probs(load_model(folder), columns, [media, other])
    expected = [own_log_probs(random_model(family), prompt, m, (11, 12)) for m in (media, other)]
    assert torch.allclose(log_probs, torch.stack(expected), rtol=0, atol=TOLERANCE)
    assert not torch.allclose(log_probs[0], log_probs[1], rtol=0, atol=1e-3)


def test_a_text_model_refuses_images(tmp_path):
    from verl.models.tiny import make_tiny_model
    from verl.models.vision import require_vision

    with pytest.raises(ModelError, match="LlamaForCausalLM cannot read them"):
        require_vision(load_model(make_tiny_model(tmp_path)))


def test_published_files_have_experts_transposed(tmp_path):
    folder = vision_folder(tmp_path, "qwen3_vl_moe")
    expected = dict(load_model(folder).named_parameters())
    transpose_experts(folder)
    for name, parameter in load_model(folder).named_parameters():
        assert torch.equal(parameter, expected[name]), name
