"""`verl.utils.model`: small functions over Hugging Face models and their inputs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.models.load import locate, num_parameters

log = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Position of each token among those that the mask keeps, [batch, sequence]; padding on the left has position 0."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


def get_model_size(model: torch.nn.Module, scale: str = "auto") -> tuple[float, str]:
    """(number, unit) of the parameters: `scale` B, M, K, or "" for the plain count; "auto" chooses. Raises ValueError."""
    count, units = num_parameters(model), {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale == "auto":
        scale = next(unit for unit, size in units.items() if count >= size or not unit)
    if scale not in units:
        raise ValueError(f"scale={scale!r} is not one of auto, B, M, K and the empty text.")
    return count / units[scale], scale


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    """Log how many parameters a model has; tied ones count once."""
    count, unit = get_model_size(model)
    log.info("%s has %.2f%s parameters.", name or type(model).__name__, count, unit)


def get_generation_config(model: str, trust_remote_code: bool = False) -> Any:
    """The GenerationConfig of a folder or hub name, or the one that its config.json implies; None without either."""
    import transformers

    try:
        return transformers.GenerationConfig.from_pretrained(locate(model))
    except OSError:
        pass
    try:
        config = transformers.AutoConfig.from_pretrained(locate(model), trust_remote_code=trust_remote_code)
        return transformers.GenerationConfig.from_model_config(config)
    except OSError:
        return None


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set fields of a transformers config, in place; a mapping changes the fields of the sub-config of that name."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping) and not isinstance(getattr(module_config, key, None), (dict, type(None))):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def convert_weight_keys(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """`state_dict` under the names that the model's checkpoint files use, by `model._checkpoint_conversion_mapping` read
    backwards; unchanged for a model without one."""
    renames = getattr(model, "_checkpoint_conversion_mapping", None)
    if not renames:
        return state_dict
    # the mapping holds patterns with anchors and look-aheads, which are no part of a name
    backwards = [(new, re.sub(r"\(.*\)", "", old.lstrip("^"))) for old, new in renames.items()]
    found = {}
    for key, value in state_dict.items():
        for pattern, replacement in backwards:
            key, count = re.subn(pattern, replacement, key)
            if count:
                break
        found[key] = value
    return found


def extract_multi_modal_inputs(
    batch_data: Sequence[Mapping[str, Any]], indices: Sequence[int] | None = None
) -> dict[str, Any]:
    """The model inputs (pixel values, grids) of several rows joined along their first axis; rows with `image_bound` keep
    lists, one entry a row. `indices` choose rows; those beyond the end are left out."""
    rows = list(batch_data) if indices is None else [batch_data[i] for i in indices if i < len(batch_data)]
    rows = [getattr(row, "data", row) for row in rows]  # rows of a TensorDict come wrapped
    found: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None:
                found.setdefault(key, []).append(value)
    if any("image_bound" in row for row in rows):
        return dict(found)
    return {key: torch.cat(values, dim=0) for key, values in found.items()}
