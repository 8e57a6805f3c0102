"""Stands for torchvision, whose wheels need PyTorch for CUDA: what vLLM and transformers call of it to read a picture.

A folder of PYTHONPATH has this package. torchvision too resizes tensors with torch's `interpolate`.
"""

import sys
from enum import Enum

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.nn.functional import pad as pad_of_torch

__version__ = "0.0"


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(picture):
    array = torch.from_numpy(np.array(picture, copy=True))
    return (array if array.dim() == 3 else array[..., None]).permute(2, 0, 1)


def resize(images, size, interpolation=InterpolationMode.BILINEAR, max_size=None, antialias=True):
    smooth = {"align_corners": False, "antialias": antialias} if interpolation.value.startswith("bi") else {}
    flat = images.reshape(-1, *images.shape[-3:])
    flat = interpolate(flat, list(size), mode=interpolation.value, **smooth)
    return flat.reshape(*images.shape[:-2], *flat.shape[-2:])


def normalize(images, mean, std, inplace=False):
    mean, std = (torch.as_tensor(values, dtype=images.dtype)[:, None, None] for values in (mean, std))
    return (images - mean) / std


def pad(images, padding, fill=0, padding_mode="constant"):
    x, y, x_after, y_after = padding
    return pad_of_torch(images, (x, x_after, y, y_after), mode=padding_mode, value=fill or 0)


def crop(images, y, x, height, width):
    return images[..., y : y + height, x : x + width]


def grayscale_to_rgb(images):
    return images.expand(*images.shape[:-3], 3, -1, -1)


def __getattr__(name):
    """A name that is imported but not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"The package in place of torchvision has no {name}")

    return absent


functional = transforms = v2 = io = sys.modules[__name__]
for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = transforms
