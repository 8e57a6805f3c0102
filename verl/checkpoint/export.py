"""Export of a checkpoint's model as a Hugging Face folder or a GGUF file in the dtype of serving."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.files import find_damage, read_document
from verl.checkpoint.retention import candidates, missing_newest
from verl.checkpoint.tensor_files import num_bytes, read_model, set_config_dtype, write_model
from verl.engines.api import whole
from verl.errors import CheckpointError
from verl.models.gguf_file import rounded_dtype, write_gguf
from verl.models.rounding import Rounding
from verl.parallel.device import parse_dtype
from verl.tracking.run_folder import RunFolder

log = logging.getLogger(__name__)

_SECTIONS = {"actor": ("actor_rollout_ref", "actor", "fsdp_config"), "critic": ("critic", "fsdp"), "model": ("engine",)}


def export(
    source: str | Path,
    out: str | Path,
    dtype: str = "bfloat16",
    role: str | None = None,
    step: int | None = None,
    *,
    gguf: bool = False,
) -> Path:
    """Write the model of `role` as a self-contained Hugging Face folder, or as a GGUF file; returns `out`.

    Weights are rounded to bfloat16 as in the run (master_rounding of its config.yaml), and tensors that no engine trains are
    copied, so the result is the model that was evaluated. `source` is a folder global_step_N, a run folder with the checkpoint
    of `step` (None: its newest), or a Hugging Face folder. `out` must be missing or empty, and appears atomically. Raises
    CheckpointError, also where the newest checkpoint is damaged, and the errors of `write_gguf`.
    """
    target_dtype = parse_dtype(rounded_dtype(dtype) if gguf else dtype)
    checkpoint, role, model_folder = checkpoint_model(source, role, step)
    out = Path(out).expanduser()
    if out.exists() and (gguf or not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists{'' if gguf else ' and is not empty'}; remove it or choose another name.")
    rounding, extra = _rounding(checkpoint, role), checkpoint / role / "extra.json"
    untrained = read_document(extra).get("untrained", ()) if extra.is_file() else ()
    tensors = {
        name: rounding.rounded(name, whole(t), target_dtype)
        if t.dtype.is_floating_point and name not in untrained
        else whole(t)
        for name, t in read_model(model_folder).items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes(tensors):
        raise CheckpointError(
            f"{out} needs {num_bytes(tensors) / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free."
        )
    if gguf:
        write_gguf(model_folder, tensors, out, dtype)
    else:
        _write_folder(model_folder, tensors, out, target_dtype)
    log.info("Exported the %s of %s to %s (%s).", role, checkpoint, out, dtype)
    return out


def _write_folder(model_folder: Path, tensors: dict[str, torch.Tensor], out: Path, dtype: torch.dtype) -> None:
    """The folder `out` with the files of `model_folder`, and `tensors` for its weights."""
    temporary = out.parent / f".{out.name}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(model_folder, temporary, ignore=shutil.ignore_patterns("model*.safetensors*"))
        set_config_dtype(temporary / "config.json", dtype)
        write_model(temporary, tensors)
        os.replace(temporary, out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rounding(checkpoint: Path, role: str) -> Rounding:
    """The rounding of the run; the default without its config, and to nearest for a Hugging Face folder."""
    if _is_model(checkpoint):
        return Rounding("nearest")
    section: Any = RunFolder(checkpoint.parent).read_config()
    try:
        for key in _SECTIONS.get(role, ()):
            section = section[key]
    except (KeyError, TypeError):
        return Rounding()
    # versions without the key rounded to nearest
    return Rounding(str(section.get("master_rounding", "nearest")) if isinstance(section, dict) else "dithered")


def compare(source: str | Path, folder: str | Path, role: str | None = None, step: int | None = None) -> int:
    """Check that the Hugging Face `folder` holds the tensors of `role`, rounded to its dtype as in the run; returns their
    number. Raises CheckpointError naming a tensor that differs."""
    checkpoint, role, model_folder = checkpoint_model(source, role, step)
    folder = Path(folder).expanduser()
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} holds no model (*.safetensors); give the folder that was written.")
    ours, theirs = read_model(model_folder), read_model(folder)
    if different := sorted(ours.keys() ^ theirs.keys()):
        place = model_folder if different[0] in ours else folder
        raise CheckpointError(f"{len(different)} tensors are on one side only, the first {different[0]!r} in {place}.")
    rounding = _rounding(checkpoint, role)
    changed = [
        name
        for name, tensor in ours.items()
        if not torch.equal(rounding.rounded(name, whole(tensor), theirs[name].dtype), whole(theirs[name]))
    ]
    if changed:
        raise CheckpointError(
            f"{len(changed)} of {len(ours)} tensors of {folder} differ from {model_folder}, the first {changed[0]!r}."
        )
    return len(ours)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def checkpoint_model(source: str | Path, role: str | None, step: int | None) -> tuple[Path, str, Path]:
    """(the checkpoint, the role, its Hugging Face folder). Without a `role` the actor, or the single model of fine-tuning."""
    folder = Path(source).expanduser()
    if _is_model(folder) and role is None and step is None:
        return folder, "model", folder
    checkpoint = _checkpoint(folder, step)
    there = sorted(p.parent.name for p in checkpoint.glob("*/huggingface"))
    role = role or (there[0] if len(there) == 1 else "actor")
    if role not in there:
        raise CheckpointError(f"{checkpoint} has no role {role!r}; it has: {', '.join(there) or 'none'}.")
    return checkpoint, role, checkpoint / role / "huggingface"


def _checkpoint(source: Path, step: int | None) -> Path:
    if source.name.startswith("global_step_") and step is None:
        damage = find_damage(source) if source.is_dir() else "it does not exist"
        if damage is not None:
            raise CheckpointError(f"{source} is not a complete checkpoint: {damage}.")
        return source
    if step is not None:
        if step not in candidates(source):
            there = ", ".join(map(str, candidates(source)[:8])) or "none"
            raise CheckpointError(f"{source} has no checkpoint of step {step}; there are: {there}.")
        return _checkpoint(source / f"global_step_{step}", None)
    steps = candidates(source)
    faults = missing_newest(source, steps)
    if not steps and not faults:
        raise CheckpointError(
            f"{source} holds no checkpoint (no folder global_step_N); give the folder of a run with trainer.save_freq above 0."
        )
    older = steps
    if not faults:
        newest, *older = steps
        damage = find_damage(source / f"global_step_{newest}")
        if damage is None:
            return source / f"global_step_{newest}"
        faults = [f"global_step_{newest}: {damage}"]
    others = f"Export an older one with --step={older[0]}." if older else "There is no older one."
    raise CheckpointError(f"The newest checkpoint in {source} is damaged ({faults[0]}). {others}")
