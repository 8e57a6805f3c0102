"""The image processor of a model folder, next to its tokenizer: pixels as the vision tower reads them, and the text that stands
for an image or a video in a prompt.

transformers' processors need torchvision for videos. Here they are made without their video part, with image processors of PIL
and numpy. Frames of a video go through the image processor (ClipProcessor), so that no further package is needed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from verl.data_proto.media import SAMPLING, Clip
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ModelError
from verl.models.folder import read_json_object, reason
from verl.models.vision import FAMILIES, joined

if TYPE_CHECKING:
    from PIL import Image

# transformers makes a processor of the first two; the other files belong to it, and an exported model keeps them
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_TILINGS = {"crop_to_patches", "do_image_splitting"}  # arguments that divide an image into several
_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor")
_TOTALS = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)  # families whose limits of pixels, in the folder's file, are of a complete video
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")


class ImageProcessor:
    """`processor` of transformers, with files in `folder`. `token` stands for an image in rendered messages.
    `reads_only_parts`: the chat template passes over contents that are texts, and reads lists of parts. `keeps_files`: Media
    have the images as files, for a rollout engine that reads them."""

    def __init__(self, processor: Any, folder: Path, family: str):
        self.processor, self.folder, self.family = processor, folder, family
        self.keeps_files = False
        self.no_videos = FAMILIES[family].no_videos  # why it reads none
        self.not_sent = FAMILIES[family].not_sent  # why an engine that needs files gets none
        self.reads_only_parts = not _reads_texts(processor.tokenizer)
        self.token: str = processor.image_token
        self.token_id: int = processor.image_token_id
        # frames that are one part of a video; above 1 if videos have their tokens and limits of pixels
        self.frames_at_once = 1 if self.no_videos else getattr(processor.image_processor, "temporal_patch_size", 1)
        self.tokens = (self.token, *([] if self.no_videos else [processor.video_token]))  # of rendered messages
        self.video_token_id: int = getattr(processor, "video_token_id", -1)
        self.marks = {self.token: self.token_id}  # text -> id of tokens that stand for parts of images and videos
        if self.frames_at_once > 1:
            self.marks[processor.video_token] = processor.video_token_id
        self.video_settings = _video_settings(folder)

    @property
    def settings(self) -> str:
        """All that decides the tensors of an image or a video, as JSON."""
        return str(self.processor.image_processor.to_json_string()) + (
            json.dumps(self.video_settings, sort_keys=True) if self.video_settings else ""
        )

    @property
    def arguments(self) -> set[str]:
        """Names of the arguments that the processor of images takes, and of those that choose frames of a video."""
        return {*self.processor.image_processor.valid_kwargs.__annotations__, *(() if self.no_videos else SAMPLING)}

    def read(
        self, media: Sequence[object], settings: Mapping[str, object]
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Inputs of the model for PIL images and Clips, by name, and the text that takes the place of the token of each.
        `settings` are arguments of the processor (data.mm_processor_kwargs). Raises what a processor raises."""
        settings = {name: value for name, value in settings.items() if name not in SAMPLING}
        if not any(isinstance(item, Clip) for item in media):
            return _called(self.processor, self.token * len(media), images=[list(media)], **settings)
        parts = [
            self._read_clip(item, settings) if isinstance(item, Clip) else self.read([item], settings) for item in media
        ]
        return joined([tensors for tensors, _ in parts], FAMILIES[self.family].axis, "cpu"), [
            t for _, texts in parts for t in texts
        ]

    def _read_clip(self, clip: Clip, settings: Mapping[str, object]) -> tuple[dict[str, torch.Tensor], list[str]]:
        processor = copy.copy(self.processor)
        images, arguments = self.processor.image_processor, self._frame_arguments(clip, settings)
        processor.video_processor = ClipProcessor(images, clip, self.frames_at_once, arguments)
        unread = np.zeros((len(clip.frames), 1, 1, 3), np.uint8)  # the clip processor has the frames
        return _called(processor, processor.video_token, videos=[[unread]])

    def _frame_arguments(self, clip: Clip, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the image processor for frames, by the folder's file, data.mm_processor_kwargs and the row."""
        base = {name: v for name, v in self.video_settings.items() if name in self.arguments and name not in SAMPLING}
        arguments = {**base, **settings}
        if self.frames_at_once > 1:
            size = {**dict(self.processor.image_processor.size), **arguments.get("size", {})}
            size = {edge: size[edge] for edge in _EDGES.values()}
            if "size" in base and "size" not in settings and self.family in _TOTALS:
                size = {edge: pixels // len(clip.frames) for edge, pixels in size.items()}
            for limits in (arguments, clip.limits):
                size |= {edge: int(limits[name]) for name, edge in _EDGES.items() if limits.get(name)}
            arguments = {name: value for name, value in arguments.items() if name not in _EDGES} | {"size": size}
        return {**arguments, **dict.fromkeys(self.arguments & _TILINGS, False)}

    def as_read(
        self, media: Sequence[Image.Image | Clip], tensors: Mapping[str, torch.Tensor]
    ) -> list[Image.Image | Clip]:
        """PIL images and Clips in the sizes of their pixels in `tensors`, if the family reads images in their own sizes:
        torchvision, as services resize, differs from PIL by some levels of brightness."""
        images = self.processor.image_processor
        image_grids, video_grids = (iter(tensors.get(f"{kind}_grid_thw", ())) for kind in ("image", "video"))

        def sized(frames: Sequence[Image.Image], grids: Iterator[torch.Tensor]) -> tuple[Image.Image, ...]:
            if (grid := next(grids, None)) is None:
                return tuple(frames)
            height, width = (grid[1:] * images.patch_size).tolist()
            return tuple(frame.resize((width, height), images.resample) for frame in frames)

        return [
            replace(item, frames=sized(item.frames, video_grids))
            if isinstance(item, Clip)
            else sized([item], image_grids)[0]
            for item in media
        ]

    def save_pretrained(self, folder: Path) -> None:
        """Copy the processor's files, as the model folder has them."""
        for name in FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)


@dataclass(frozen=True)
class ClipProcessor:
    """The video processor of transformers for one clip. Its frames go through an image processor with `arguments`.
    `temporal_patch_size` frames are one part of the video: their pixels lie behind one another in each patch."""

    image_processor: Any
    clip: Clip
    temporal_patch_size: int
    arguments: Mapping[str, Any]

    @property
    def merge_size(self) -> int:
        return int(self.image_processor.merge_size)

    def __call__(self, videos: object, **_: object) -> dict[str, object]:
        clip, step = self.clip, self.temporal_patch_size
        frames = [*clip.frames, *[clip.frames[-1]] * (-len(clip.frames) % step)]
        output = self.image_processor(frames, return_tensors="pt", **self.arguments)
        metadata = VideoMetadata(clip.num_frames, clip.fps, frames_indices=list(clip.indices))
        metadata.duration = clip.num_frames / clip.fps
        pixels = output["pixel_values"]
        if "image_grid_thw" in output:
            # an image processor repeats the pixels of an image for each of `step` frames
            patches = pixels.view(len(frames) // step, step, -1, 3, step, pixels.shape[1] // (3 * step))
            parts = patches[..., 0, :].permute(0, 2, 3, 1, 4).reshape(-1, pixels.shape[1])
            grid = torch.tensor([[len(frames) // step, *output["image_grid_thw"][0, 1:].tolist()]])
            return {"pixel_values_videos": parts, "video_grid_thw": grid, "video_metadata": [metadata]}
        if pixels.dim() == 4:  # a family that renames pixels
            return {"pixel_values_videos": pixels[None], "video_metadata": [metadata]}
        names = ("pixel_values", "pixel_attention_mask")
        return {**{name: output[name] for name in names if name in output}, "video_metadata": [metadata]}


def _called(processor: Any, text: str, **inputs: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    output = processor(text=[text], return_tensors="pt", return_text_replacement_offsets=True, **inputs)
    tensors = {name: value for name, value in output.items() if name not in _OF_TEXT}
    return tensors, [entry["replacement"] for entry in output["text_replacement_offsets"][0]]


def _video_settings(folder: Path) -> dict[str, object]:
    """The settings of a folder's video processor, from the place that transformers reads, with our name of nframes."""
    files = [read_json_object(folder / name) if (folder / name).is_file() else {} for name in FILES[1:3]]
    entries = dict(files[0].get("video_processor") or files[1])
    sampling = entries.pop("video_sampling", None) or {}  # of SmolVLM
    entries |= {**sampling, "size": sampling["video_size"]} if sampling else {}
    entries["nframes"] = entries.pop("num_frames", None)
    return {name: value for name, value in entries.items() if value is not None}


def load_processor(
    folder: Path, model_type: str, tokenizer: Tokenizer, trust_remote_code: bool
) -> ImageProcessor | None:
    """The processor in `folder` of a family in verl.models.vision.FAMILIES; None for other families, and if there is none.
    Raises ModelError."""
    if model_type not in FAMILIES or not any((folder / name).is_file() for name in FILES[:2]):
        return None
    for name in FILES:
        if (folder / name).exists():
            read_json_object(folder / name)
    try:
        processor = _build(folder, model_type, tokenizer, trust_remote_code)
    except Exception as error:  # of a family's code, or a package that it needs
        raise ModelError(f"No image processor could be loaded from {folder}: {reason(error)}.") from error
    if not hasattr(processor, "get_text_with_replacements"):
        raise ModelError(
            f"Images need a newer transformers than {transformers.__version__}: pip install 'transformers>=5.19'."
        )
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    return ImageProcessor(processor, folder, model_type)


def _reads_texts(tokenizer: Tokenizer) -> bool:
    text = "question"
    try:
        return text in tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    except Exception:  # noqa: BLE001 - a template is a program of the model's authors
        return False


def _processor_class(model_type: str) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    if model_type != "mistral3" or is_torchvision_available():
        return getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    # Pixtral's module takes one function, also of `pil`, from a module that needs torchvision
    needs_torchvision = pil.__name__.replace("_pil", "")
    sys.modules[needs_torchvision] = pil
    try:
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    finally:
        del sys.modules[needs_torchvision]


def _build(folder: Path, model_type: str, tokenizer: Tokenizer, trust_remote_code: bool) -> Any:
    kind = _processor_class(model_type)
    images_only = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(_PARTS[:2]))})
    image_processor = transformers.AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", trust_remote_code=trust_remote_code
    )
    parameters = inspect.signature(kind.__init__).parameters
    entries, _ = kind.get_processor_dict(str(folder))
    read = {name: value for name, value in entries.items() if name in parameters and name not in _PARTS}
    without_video = {"video_processor": None} if "video_processor" in parameters else {}
    return images_only(image_processor=image_processor, tokenizer=tokenizer, **without_video, **read)
