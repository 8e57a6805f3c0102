"""Models whose weights do not train, with the weights that they had in their run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl.models.load import adopt_model, load_model, load_model_config
from verl.models.rounding import Rounding


def load_frozen(
    path: str | Path,
    head: str = "lm",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounding: Rounding | None = None,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    build: Callable[[], Any] | None = None,
) -> Any:
    """`load_model`, or `adopt_model` of what `build` returns, without gradients. Wider weights are rounded to `dtype` as
    masters are (default: dithered). To nearest, a checkpoint of float32 would lose most updates of a small rate, although
    its run has measured them."""
    rounding, wide = rounding or Rounding(), torch.promote_types(dtype, torch.float32)
    stored = getattr(load_model_config(path, trust_remote_code, override_config), "dtype", None)
    narrows = rounding.kind == "dithered" and stored != dtype != wide
    where: dict[str, Any] = {
        "device": "cpu" if narrows else device,  # where it is wide, it may not fit
        "dtype": wide if narrows else dtype,
    }
    own: dict[str, Any] = {"trust_remote_code": trust_remote_code, "override_config": override_config}
    module = load_model(path, head, **where, **own) if build is None else adopt_model(build(), head, **where)
    module.requires_grad_(False)
    if narrows:
        for name, parameter in module.named_parameters():
            if not name.startswith("score."):  # a scalar head stays wide
                parameter.data = rounding.rounded(name, parameter.data, dtype)
        module.to(device)
    return module
