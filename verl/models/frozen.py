"""Models without training, with the weights that they had in their run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.models.load import adopt_model, load_model, load_model_config
from verl.models.rounding import Rounding


def load_frozen(
    path: str | Path,
    head: str = "lm",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounding: Rounding | None = None,
    build: Callable[[], nn.Module] | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> Any:
    """`load_model`, or `adopt_model` of what `build` returns, without gradients. Wider weights are rounded to `dtype` as
    masters are (default: dithered). To nearest, a checkpoint of float32 would lose most updates of a small rate, although
    its run has measured them."""
    rounding, wide = rounding or Rounding(), torch.promote_types(dtype, torch.float32)
    stored = getattr(load_model_config(path, trust_remote_code, settings.get("override_config")), "dtype", None)
    narrows = rounding.kind == "dithered" and stored != dtype != wide
    place, loaded = ("cpu", wide) if narrows else (device, dtype)  # if it is wide, it may not fit
    if build is not None:
        module = adopt_model(build(), head, device=place, dtype=loaded)
    else:
        module = load_model(path, head, device=place, dtype=loaded, trust_remote_code=trust_remote_code, **settings)
    module.requires_grad_(False)
    if narrows:
        for name, parameter in module.named_parameters():
            if not name.startswith("score."):  # a scalar head stays wide
                parameter.data = rounding.rounded(name, parameter.data, dtype)
        module.to(device)
    return module
