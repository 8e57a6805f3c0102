"""Vision-language models: their families, and the inputs of packed tokens and images.

Modules of transformers compute the images, unpatched, with sdpa in the vision tower. Their features take the places of tokens'
embeddings. A language model of a plain family is computed as one without images (verl.models.forward), every other by its own
modules with verl's attention. The images of a prompt are computed once, and each of its responses sees the tokens that they
became.

                  prompt, images within           responses of it
    token ids     5 6 [img] [img] [img] [img] 7   11 12 13   21 22
    positions     0 1  2    2     3     3     4   5  6  7    5  6     of a family with positions in a picture

Positions of tokens behind images follow the last position of the images. If a family counts tokens, that is their number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from verl.data_proto.media import Media
from verl.errors import ModelError
from verl.model_families import FAMILIES as ALL_FAMILIES
from verl.model_families import VISION
from verl.models.attention import ATTENTION_NAME
from verl.models.hf_module import HFModule

FAMILIES = VISION


@dataclass(frozen=True)
class PlacedMedia:
    """Images in the `length` tokens from `start` of a row of tokens. Tokens up to `end` continue them."""

    start: int
    length: int
    end: int
    media: Media


@dataclass(frozen=True)
class ImageFeatures:
    """Images in a row of tokens, as its language model reads them: `values` [image tokens, hidden_size] are the embeddings of
    the tokens `index` (int64, ascending), and `deep[i]`, of the same shape, is added to their hidden states behind layer i
    (Qwen3-VL)."""

    index: torch.Tensor
    values: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures | None:
        """The features of several images; None without any."""
        if not parts:
            return None
        deep = zip(*(part.deep for part in parts), strict=True)
        index, values = torch.cat([part.index for part in parts]), torch.cat([part.values for part in parts])
        return cls(index, values, tuple(torch.cat(layer) for layer in deep))

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, hidden_size] with `values` at their places, differentiable."""
        return x.index_copy(0, self.index, self.values.to(x.dtype))

    def deepened(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The output `x` [tokens, hidden_size] of a layer with the features that are added to it, differentiable."""
        return x.index_add(0, self.index, self.deep[layer].to(x.dtype))

    def among(self, keep: torch.Tensor) -> ImageFeatures:
        """The features of the tokens that `keep` (ascending) holds, in a row of only these."""
        is_kept = torch.isin(keep, self.index)
        place = torch.searchsorted(self.index, keep[is_kept])
        return ImageFeatures(is_kept.nonzero()[:, 0], self.values[place], tuple(layer[place] for layer in self.deep))


def is_vision_config(config: PreTrainedConfig) -> bool:
    """Whether a config describes a model of FAMILIES."""
    return config.model_type in FAMILIES and getattr(config, "vision_config", None) is not None


def is_vision_model(module: object) -> bool:
    """Whether a module is a model of FAMILIES, with any head."""
    config = getattr(module, "config", None)
    return isinstance(config, PreTrainedConfig) and is_vision_config(config)


def attention_of(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """The attention `name` as set_attn_implementation takes it. A vision tower never has verl's: that reads a layout."""
    if not is_vision_config(config) or name != ATTENTION_NAME:
        return name
    return {"": name, **{key: name if key == "text_config" else "sdpa" for key in config.sub_configs}}


def require_vision(module: nn.Module) -> None:
    """Raise ModelError if `module` is to compute images and reads none."""
    if not is_vision_model(module):
        kind = getattr(module.config, "model_type", type(module).__name__)
        row = ALL_FAMILIES.get(kind)
        refused = row.vision.refused if row is not None and row.vision is not None else ""
        why = refused or "it has no vision tower that is supported"
        raise ModelError(
            f"Rows have images, and {type(module).__name__} cannot read them: {why}. Families that can are "
            f"{', '.join(FAMILIES)}."
        )


def body_of(module: Any) -> Any:
    """The module that computes hidden states from token ids and images."""
    body = getattr(module, "base_model", None)
    return module.get_decoder() if body is None or body is module else body


def language_model_of(module: HFModule) -> Any:
    """The module that computes hidden states from embeddings: the decoder of a text model, or the part of a family's body."""
    decoder = module.get_decoder()
    return decoder.get_decoder() if is_vision_model(decoder) else decoder


def vision_towers(module: Any) -> list[nn.Module]:
    """The parts of `module` that its vision_config describes, from pixels to features of images."""
    config = module.config.vision_config
    return [part for part in module.modules() if getattr(part, "config", None) is config]


def freeze_towers(module: nn.Module) -> None:
    """Keep the weights of vision towers as they are. Raises ModelError for a model without one."""
    if not is_vision_model(module):
        raise ModelError(
            f"actor.freeze_vision_tower=True: {type(module).__name__} has no vision tower. Remove the key."
        )
    for tower in vision_towers(module):
        tower.requires_grad_(False)


def positions_within(module: nn.Module, ids: torch.Tensor, media: Media) -> tuple[torch.Tensor, int]:
    """Positions [axes, tokens] of tokens with images, counted from the first, and the number that separates positions of later
    tokens from their count: axes are time, height and width if the family has them, else one of counted tokens."""
    body = body_of(module)
    count = torch.arange(len(ids), device=ids.device)
    if not hasattr(body, "get_rope_index"):
        return count[None], 0
    grids = {name: value for name, value in media.tensors.items() if name.endswith(("_thw", "_ts"))}
    kinds = _kinds(module, ids)[None].int()
    placed, delta = body.get_rope_index(ids[None], **_accepted(body.get_rope_index, mm_token_type_ids=kinds, **grids))
    return placed[:, 0], int(delta.flatten()[0])


def image_features(module: Any, ids: torch.Tensor, placed: Sequence[PlacedMedia]) -> ImageFeatures | None:
    """The features of the images `placed` in the token ids [1, tokens], differentiable in the weights of the family's modules
    before its language model; None without images. Raises ModelError if images and tokens do not agree."""
    if not placed:
        return None
    require_vision(module)
    where = torch.cat([torch.arange(item.start, item.start + item.length, device=ids.device) for item in placed])
    spans = ids[:, where]
    kinds_of = _kinds(module, spans)
    marks, kinds = kinds_of > 0, _accepted(body_of(module).forward, mm_token_type_ids=kinds_of, token_type_ids=kinds_of)
    pixels = joined([item.media.tensors for item in placed], FAMILIES[module.config.model_type].axis, ids.device)
    with _front(module) as read:
        body_of(module)(input_ids=spans, position_ids=where[None], use_cache=False, **pixels, **kinds)
    return ImageFeatures(
        where[marks[0]], read["inputs_embeds"][0, marks[0]], tuple(read.get("deepstack_visual_embeds") or ())
    )


@contextmanager
def _front(module: HFModule) -> Iterator[dict[str, Any]]:
    """Within the block a forward ends before the language model, with the inputs of that in the result. Embeddings of tokens
    are constants: their gradient would be as large as the vocabulary, and no token of an image reads one."""
    read: dict[str, object] = {}

    def forward(**inputs: Any) -> MoeModelOutputWithPast:
        read.update(inputs)
        return MoeModelOutputWithPast(last_hidden_state=inputs["inputs_embeds"])

    decoder = language_model_of(module)
    decoder.forward = forward
    try:
        with module.get_input_embeddings().register_forward_hook(lambda _, __, output: output.detach()):
            yield read
    finally:
        del decoder.forward


def with_features(module: nn.Module, packed: Any) -> tuple[Any, ImageFeatures | None]:
    """A PackedBatch with the positions that the family gives its tokens, and the features of its images."""
    if not packed.media:
        return packed, None
    positions = placed_positions(module, packed.input_ids, packed.position_ids, packed.media)
    return replace(packed, position_ids=positions), image_features(module, packed.input_ids, packed.media)


def language_states(
    module: HFModule,
    ids: torch.Tensor,
    positions: torch.Tensor,
    layout: object,
    images: ImageFeatures | None,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, hidden_size]: last hidden states of token ids [1, tokens] by the language model's own modules. `noise`
    [tokens, hidden_size] is added to the embeddings of tokens. A token that stands for images is a sampled one like any other
    if `images` have no features."""
    x, deep = module.get_input_embeddings()(ids)[0], {}
    if noise is not None:
        x = x + noise.to(x)
    if images is not None:
        x = images.embedded(x)
    if images is not None and images.deep:
        marks = torch.zeros_like(ids, dtype=torch.bool).index_fill_(1, images.index, True)
        deep = {"visual_pos_masks": marks, "deepstack_visual_embeds": list(images.deep)}
    read = {"inputs_embeds": x[None], "position_ids": positions, "layout": layout, "use_cache": False}
    return cast("torch.Tensor", language_model_of(module)(**read, **deep).last_hidden_state[0])


@contextmanager
def padded_inputs(
    module: nn.Module, ids: torch.Tensor, in_images: torch.Tensor, media: Sequence[Media]
) -> Iterator[dict[str, object]]:
    """Arguments of `generate` for token ids [rows, tokens] of rows with the same images, in the tokens `in_images`."""
    if not media:
        yield {"inputs": ids}
        return
    require_vision(module)
    tokens, kinds = _tokens_of_images(module, ids, in_images)
    config: Any = module.config
    row_tensors = joined([item.tensors for item in media], FAMILIES[config.model_type].axis, ids.device)
    pixels = {name: torch.cat([value] * len(ids)) for name, value in row_tensors.items()}
    with _embedding(module, ids, tokens):
        yield {"inputs": tokens, **pixels, **kinds}


def _tokens_of_images(
    module: nn.Module, ids: torch.Tensor, in_images: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids with another token at each placeholder that stands for no image, and marks of the other placeholders, under
    the names that the family's forward reads."""
    kinds = _kinds(module, ids)
    marks = kinds * in_images
    accepted = _accepted(body_of(module).forward, mm_token_type_ids=marks, token_type_ids=marks)
    return ids.masked_fill((kinds > 0) & ~in_images, _other_token(module)), accepted


@contextmanager
def _embedding(module: Any, ids: torch.Tensor, read: torch.Tensor) -> Iterator[None]:
    """Embeddings of `ids` if the forward reads the token ids `read`, within the block."""

    def embedded(embedding: Any, _: object, output: torch.Tensor) -> torch.Tensor:
        is_prompt = output.shape[:-1] == ids.shape  # and no later step of `generate`
        return F.embedding(ids, embedding.weight) if is_prompt else output

    with module.get_input_embeddings().register_forward_hook(embedded):
        yield


def joined(media: Sequence[Mapping[str, torch.Tensor]], axis: int, device: Any) -> dict[str, torch.Tensor]:
    """The tensors of several Media along `axis`, or along the first if a tensor has no such axis."""
    names = dict.fromkeys(name for tensors in media for name in tensors)
    parts = {name: [tensors[name] for tensors in media if name in tensors] for name in names}
    return {
        name: torch.cat(_alike(values, dim), dim).to(device)
        for name, values in parts.items()
        for dim in [axis if values[0].dim() > 2 else 0]
    }


def _alike(values: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Tensors of equal sizes but along `dim`, with zeros behind those that are smaller."""
    sizes = [max(along) for along in zip(*(value.shape for value in values), strict=True)]

    def padded(value: torch.Tensor) -> torch.Tensor:
        lacks = [0 if a == dim else size - n for a, (size, n) in enumerate(zip(sizes, value.shape, strict=True))]
        return F.pad(value, [n for lack in reversed(lacks) for n in (0, lack)]) if any(lacks) else value

    return [padded(value) for value in values]


def vision_states(module: HFModule, packed: Any) -> torch.Tensor:
    """[tokens, hidden_size]: last hidden states of the tokens of a PackedBatch."""
    packed, images = with_features(module, packed)
    return language_states(module, packed.input_ids, packed.position_ids, packed.layout, images, packed.noise)


def placed_positions(
    module: nn.Module, ids: torch.Tensor, counted: torch.Tensor, placed: Sequence[PlacedMedia]
) -> torch.Tensor:
    """The positions of tokens `ids` [1, tokens], counted as `counted` but for their images: [1, tokens], or [axes, 1, tokens]
    if the family has positions in images."""
    if not placed or not hasattr(body_of(module), "get_rope_index"):
        return counted
    result = counted.expand(3, *counted.shape).clone()
    for item in placed:
        last = item.start + item.length
        positions, shift = positions_within(module, ids[0, item.start : last], item.media)
        result[:, 0, item.start : last] = positions + result[:, 0, item.start : item.start + 1]
        result[:, 0, last : item.end] += shift
    return result


def _kinds(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """1 at each of `ids` that stands for a part of an image, 2 for a part of a video, 0 elsewhere."""
    config = module.config
    image = getattr(config, "image_token_id", None)
    kinds: torch.Tensor = (ids == (config.image_token_index if image is None else image)).long()
    video = None if FAMILIES[config.model_type].no_videos else getattr(config, "video_token_id", None)
    return kinds if video is None else kinds + 2 * (ids == video)


def _other_token(module: nn.Module) -> int:
    """A token id that stands for no medium."""
    names = ("image_token_id", "image_token_index", "video_token_id")
    media = {getattr(module.config, name, None) for name in names}
    return next(token for token in range(len(media) + 1) if token not in media)


def _accepted(function: Any, **values: object) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}
