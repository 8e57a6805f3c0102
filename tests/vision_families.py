"""Tiny random vision-language models of transformers' families, and folders of them with tokenizer and image processor."""

import functools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from tests.slow import slow
from verl.model_families import FAMILIES as FAMILIES_OF_TEXT
from verl.models.tiny import make_tokenizer
from verl.models.vision import FAMILIES

pytest.importorskip("transformers", minversion="5.19")  # its processors give the text of an image
VOCABULARY = 272
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "pad_token_id": 256,
    "eos_token_id": 258,
    "bos_token_id": 257,
}
IMAGE, VIDEO, VISION_START, VISION_END = 259, 260, 261, 262  # the first tokens behind the tokens of make_tokenizer
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
_DEEP_TOWER = _TOWER | {"depth": 3, "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_GRIDS = [[16, 16], [16, 32], [32, 16]]  # sizes of images of LLaVA-OneVision, in tiles of 16 x 16 pixels


def mrope(section, **more):
    return {"rope_parameters": {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0, **more}}


def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    return transformers.Qwen2VLConfig(text_config=TEXT | mrope([2, 3, 3]), vision_config=vision, **_QWEN_TOKENS)


def qwen2_5_vl():
    vision = _TOWER | {"window_size": 56, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(text_config=TEXT | mrope([2, 3, 3]), vision_config=vision, **_QWEN_TOKENS)


def qwen3_vl():
    text = TEXT | {"num_hidden_layers": 3} | mrope([4, 2, 2], mrope_interleaved=True)
    return transformers.Qwen3VLConfig(text_config=text, vision_config=dict(_DEEP_TOWER), **_QWEN_TOKENS)


def qwen3_vl_moe():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    experts |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
    text = TEXT | experts | mrope([4, 2, 2], mrope_interleaved=True)
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=dict(_DEEP_TOWER), **_QWEN_TOKENS)


def qwen3_5(kind="Qwen3_5", experts=()):
    vision = {name: size for name, size in _DEEP_TOWER.items() if name != "deepstack_visual_indexes"}
    text = TEXT | FAMILIES_OF_TEXT["qwen3_5_text"].tiny | dict(experts)
    return getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **_QWEN_TOKENS)


def qwen3_5_moe():
    return qwen3_5("Qwen3_5Moe", FAMILIES_OF_TEXT["qwen3_5_moe_text"].tiny)


def glm4v():
    text = TEXT | {"partial_rotary_factor": 1.0} | mrope([2, 3, 3])
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens |= {"image_start_token_id": VISION_START, "image_end_token_id": VISION_END}
    return transformers.Glm4vConfig(text_config=text, vision_config=_TOWER | {"image_size": 56}, **tokens)


def llava():
    vision = transformers.CLIPVisionConfig(**_SIGLIP, image_size=32, patch_size=8, projection_dim=32)
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=vision, image_token_index=IMAGE
    )


def llava_onevision():
    vision = transformers.SiglipVisionConfig(**_SIGLIP, image_size=16, patch_size=8, vision_use_head=False)
    return transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**TEXT),
        vision_config=vision,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=_GRIDS,
    )


def mistral3():
    vision = transformers.PixtralVisionConfig(**_SIGLIP, image_size=64, patch_size=8)
    text = transformers.MistralConfig(**TEXT, sliding_window=None)
    return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=IMAGE)


def internvl():
    vision = _SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]}
    return transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT), vision_config=vision, image_token_id=IMAGE, downsample_ratio=0.5
    )


def idefics3(kind="Idefics3"):
    return getattr(transformers, f"{kind}Config")(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=_SIGLIP | {"image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=IMAGE,
        pad_token_id=256,
    )


def smolvlm():
    return idefics3("SmolVLM")


_QWENS = (qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe)
CONFIGS = {f.__name__: f for f in (*_QWENS, glm4v, llava, llava_onevision, internvl, mistral3, idefics3, smolvlm)}
assert set(CONFIGS) == set(FAMILIES)
FEW = ("qwen2_vl", "qwen3_vl", "smolvlm")  # with positions in images, features for later layers, and neither
few = pytest.mark.parametrize("family", [slow(f, when=f not in FEW) for f in CONFIGS])  # a path that a kind shares
PATCHES = (*(f.__name__ for f in _QWENS), "glm4v")  # families with sizes of each image


def random_model(family, seed=0):
    """A model of `family` as transformers builds it, in float32 and eager attention."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.tie_word_embeddings = False
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def random_images(family, sizes=((2, 2),), seed=0):
    """Inputs of images with `sizes` tokens in height and width (of families with one size: 2 x 2), and the tokens of each."""
    generator = torch.Generator().manual_seed(seed)
    if family in PATCHES:
        patch = 16 if family.startswith("qwen3") else 14
        grids = torch.tensor([[1, 2 * h, 2 * w] for h, w in sizes])
        pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * patch * patch, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grids}, [h * w for h, w in sizes]
    if family == "mistral3":
        height, width = (16 * max(size[axis] for size in sizes) for axis in (0, 1))
        pixels = torch.randn(len(sizes), 3, height, width, generator=generator)
        return {"pixel_values": pixels, "image_sizes": 16 * torch.tensor(sizes)}, [h * w for h, w in sizes]
    if family == "llava_onevision":  # the whole image and each of its tiles, and a token behind each line
        pixels = torch.randn(len(sizes), 3 if max(map(max, sizes)) > 2 else 2, 3, 16, 16, generator=generator)
        shapes = {"image_sizes": 8 * torch.tensor(sizes), "batch_num_images": torch.ones(len(sizes), dtype=torch.long)}
        return {"pixel_values": pixels, **shapes}, [4 + h * w + h for h, w in sizes]
    pixels = torch.randn(len(sizes), 3, 32, 32, generator=generator)
    counts = [16 if family == "llava" else 4] * len(sizes)
    return {"pixel_values": pixels[None] if FAMILIES[family].axis else pixels}, counts


def one_by_one(family, tensors):
    """The inputs of `random_images` for each image."""
    if family in PATCHES:
        grids = tensors["image_grid_thw"]
        parts = tensors["pixel_values"].split(grids.prod(1).tolist())
        return [{"pixel_values": part, "image_grid_thw": grid[None]} for part, grid in zip(parts, grids, strict=True)]
    parts = (value.split(1, dim=FAMILIES[family].axis if value.dim() > 2 else 0) for value in tensors.values())
    return [dict(zip(tensors, part, strict=True)) for part in zip(*parts, strict=True)]


# tokens IMAGE, VIDEO, VISION_START and VISION_END of each family
_QWEN_NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_LLAVA_NAMES = ("<image>", "<video>", "<vision>", "</vision>")
_IDEFICS_NAMES = ("<image>", "<video>", "<fake_token_around_image>", "<end_of_utterance>")
NAMES = dict.fromkeys(PATCHES, _QWEN_NAMES) | {
    "glm4v": ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    "llava": _LLAVA_NAMES,
    "llava_onevision": _LLAVA_NAMES,
    "mistral3": ("[IMG]", "[VIDEO]", "[IMG_BREAK]", "[IMG_END]"),
    "internvl": ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    "idefics3": _IDEFICS_NAMES,
    "smolvlm": _IDEFICS_NAMES,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'video' %}VIDEO{% else %}"
    "{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CROP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
PIXELS = {
    **dict.fromkeys(PATCHES, {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56 * 2}}),
    "llava": _CROP,
    "llava_onevision": {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": _GRIDS},
    "mistral3": {"size": {"longest_edge": 64}},
    "internvl": {"size": {"height": 32, "width": 32}},
    "idefics3": _TILES,
    "smolvlm": _TILES,
}
PROCESSORS = {
    "llava": {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_onevision": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    "mistral3": {"patch_size": 8, "spatial_merge_size": 2},
    "internvl": {"image_seq_length": 4},
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
}


def vision_tokenizer(family, template=TEMPLATE):
    """make_tokenizer with the family's tokens of images, and a chat template that writes them."""
    names = NAMES[family]
    tokenizer = make_tokenizer()
    more = ["<|begin_of_video|>", "<|end_of_video|>"] if family == "glm4v" else []
    tokenizer.add_special_tokens({"additional_special_tokens": [*names, *more]})
    image, video = (names[2] + name + names[3] if family in PATCHES else name for name in names[:2])
    tokenizer.chat_template = template.replace("IMAGE", image).replace("VIDEO", video)
    return tokenizer


def vision_folders(tmp_path_factory):
    """family -> its `vision_folder`, made when it is first asked for."""
    return functools.cache(lambda family: vision_folder(tmp_path_factory.mktemp(family), family))


def transpose_experts(folder):
    """Write the experts of Qwen3-VL as published files have them."""
    file = folder / "model.safetensors"
    weights = {name: t.mT.contiguous() if ".experts." in name else t for name, t in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def vision_folder(folder, family, seed=0):
    """A folder with a random model of `family`, its tokenizer and its image processor."""
    folder = Path(folder)
    random_model(family, seed).save_pretrained(folder)
    vision_tokenizer(family).save_pretrained(folder)
    if family == "internvl":  # its processor reads tokens from attributes of the tokenizer
        attributes = ("context_image_token", "video_token", "start_image_token", "end_image_token")
        file = folder / "tokenizer_config.json"
        named = {"model_specific_special_tokens": dict(zip(attributes, NAMES[family], strict=True))}
        file.write_text(json.dumps(json.loads(file.read_text()) | named))
    pixels = {"patch_size": 16} if family.startswith("qwen3") else {}
    kind = IMAGE_PROCESSOR_MAPPING_NAMES[family.removesuffix("_moe")]["pil"]
    getattr(transformers, kind)(**PIXELS[family], **pixels).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSORS.get(family, {})))
    return folder
