"""The image processor of a model folder, next to its tokenizer: pixels as the vision tower reads them, and the text that stands
for an image in a prompt.

transformers' processors need torchvision for videos. Here they are made without their video part, with image processors of PIL
and numpy, so that images need no further package.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ModelError
from verl.models.folder import read_json_object, reason
from verl.models.vision import FAMILIES

# transformers makes a processor of the first two; the others belong to it, and an exported model keeps them
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor")
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")


class ImageProcessor:
    """`processor` of transformers, whose files lie in `folder`. `token` stands for an image in rendered messages.
    `reads_only_parts`: the chat template passes over contents that are texts, and reads lists of parts. `keeps_files`: Media
    have the images as files, for a rollout engine that reads them."""

    def __init__(self, processor: Any, folder: Path):
        self.processor, self.folder = processor, folder
        self.keeps_files = False
        self.reads_only_parts = not _reads_texts(processor.tokenizer)
        self.token: str = processor.image_token
        self.token_id: int = processor.image_token_id

    @property
    def settings(self) -> str:
        """All that decides which tensors an image becomes, as JSON."""
        return str(self.processor.image_processor.to_json_string())

    @property
    def arguments(self) -> set[str]:
        """Names of the arguments that the processor of images takes."""
        return set(self.processor.image_processor.valid_kwargs.__annotations__)

    def read(self, images: Sequence[Any], settings: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Inputs of the model for PIL images, by name, and the text that takes the place of the token of each image. `settings`
        are arguments of the processor (data.mm_processor_kwargs). Raises what a processor raises."""
        output = self.processor(
            images=list(images),
            text=[self.token * len(images)],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            **settings,
        )
        tensors = {name: value for name, value in output.items() if name not in _OF_TEXT}
        return tensors, [entry["replacement"] for entry in output["text_replacement_offsets"][0]]

    def save_pretrained(self, folder: Path) -> None:
        """Copy the processor's files, as the model folder has them."""
        for name in FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)


def load_processor(folder: Path, model_type: str, tokenizer: Any, trust_remote_code: bool) -> ImageProcessor | None:
    """The processor in `folder` of a family in verl.models.vision.FAMILIES; None for other families, and where there is none.
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
    return ImageProcessor(processor, folder)


def _reads_texts(tokenizer: Tokenizer) -> bool:
    text = "question"
    try:
        return text in tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    except Exception:  # noqa: BLE001 - a template is a program of the model's authors
        return False


def _build(folder: Path, model_type: str, tokenizer: Tokenizer, trust_remote_code: bool) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    images_only = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(_PARTS[:2]))})
    image_processor = transformers.AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", trust_remote_code=trust_remote_code
    )
    parameters = inspect.signature(kind.__init__).parameters
    entries, _ = kind.get_processor_dict(str(folder))
    known = {name: value for name, value in entries.items() if name in parameters and name not in _PARTS}
    without_video = {"video_processor": None} if "video_processor" in parameters else {}
    return images_only(image_processor=image_processor, tokenizer=tokenizer, **without_video, **known)
