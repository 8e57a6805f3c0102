"""Export of a checkpoint's model as a Hugging Face folder or a GGUF file, with its model card, and uploads to the Hub."""

import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from verl.checkpoint.files import read_document
from verl.checkpoint.retention import candidates, missing_newest
from verl.checkpoint.tensor_files import num_bytes, read_model, set_config_dtype, write_model
from verl.config.loaded import scalar
from verl.distributions import load_part
from verl.engines.api import whole
from verl.errors import CheckpointError, ConfigError, UnreachableError, VerlError
from verl.foreign_text import clean
from verl.manifest import MANIFEST, find_damage, new_folder
from verl.models.intact import require_intact
from verl.models.rounding import Rounding
from verl.parallel.device import parse_dtype
from verl.regular_files import make_folder
from verl.tracking.files import read_json, write_atomically
from verl.tracking.run_folder import RunFolder

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_MODEL_KEYS = ("model.path", "actor_rollout_ref.model.path")
_DATA_KEYS = ("data.train_files", "data.val_files")
_METHOD_KEYS = ("algorithm.adv_estimator", "preference.loss", "rm.loss", "sft.loss")


def write_model_card(folder: Path, source: str | Path, step: int | None = None) -> None:
    """Write README.md into the exported `folder` for the checkpoint `source`, as `export` takes it; nothing if `source` is
    a Hugging Face folder: nothing is known of its training."""
    checkpoint = checkpoint_model(source, None, step)[0]
    if (checkpoint / "trainer_state.json").is_file():
        write_atomically(folder / "README.md", model_card(checkpoint))


def model_card(checkpoint: Path) -> str:
    """The card of the model in the folder `checkpoint` of a run. Files of the machine are named without their folders."""
    from huggingface_hub import ModelCardData  # not above: no run needs it before its end

    run = RunFolder(checkpoint.parent)
    config = _leaves(run.read_config())
    command = str(_read(checkpoint / "trainer_state.json").get("command") or "verl train")
    base = next((str(config[key]) for key in _MODEL_KEYS if config.get(key)), "")
    method = next((_short(config[key]).strip("[]") for key in _METHOD_KEYS if config.get(key)), command.split()[-1])
    data = ModelCardData(
        base_model=_hub_name(base), library_name="transformers", tags=["verl", command.split()[-1], method]
    )
    summary = _read(checkpoint.parent / "summary.json")
    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {checkpoint.parent.name}",
        f"{_hub_name(base) or _short(base) or 'A model'} trained with verl "
        f"({method}), step {checkpoint.name.removeprefix('global_step_')}.",
        "\n".join(["## Data\n", *(f"- `{key}`: {_short(config[key])}" for key in _DATA_KEYS if config.get(key))]),
        _results(summary),
        f"## Command\n\n```sh\n{command} {' '.join(_settings(run, config))}\n```",
        _versions(summary.get("versions")),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _read(file: Path) -> Mapping[str, object]:
    """A JSON object of the run; empty if it cannot be read."""
    try:
        return cast("Mapping[str, object]", read_json(file, lambda value: isinstance(value, dict)))
    except (OSError, ValueError):
        return {}


def _leaves(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for name, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def _hub_name(path: str) -> str | None:
    """owner/name of a model on the Hub or in its cache; None for another folder."""
    if cached := _HUB_CACHE.search(path):
        return "/".join(cached.groups())
    return path if _HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def _short(value: object) -> str:
    """A value without the folders of this machine."""
    if isinstance(value, list):
        return "[" + ",".join(map(_short, value)) + "]"
    text = value if isinstance(value, str) else scalar(value)
    return clean(Path(text).name if text.startswith(("/", "~", ".")) else text, 400)


def _settings(run: RunFolder, values: Mapping[str, object]) -> Iterator[str]:
    """key=value of each key of `run` that differs from its default by the user's choice; `values` are all values by key."""
    for key, written, origin in run.read_keys():
        if origin and not origin.startswith("follows ") and not key.startswith("trainer.default_local_dir"):
            text = _short(values.get(key, written))
            yield f"{key}={text}" if re.fullmatch(r"[\w./:,@+=-]*", text) else f"'{key}={text}'"


def _results(summary: Mapping[str, object]) -> str:
    """A table of the results on held-out rows; "" for a run without validation."""
    names = [name.removesuffix("_after") for name in summary if name.endswith("_after")]
    rows = [(name, summary.get(f"{name}_before"), summary.get(f"{name}_after")) for name in names]
    rows = [row for row in rows if row[1] is not None or row[2] is not None]
    if not rows:
        return ""
    table = ["| held-out rows | before | after |", "|---|---|---|"]
    cells = [
        " | ".join("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row) for row in rows
    ]
    return "## Results\n\n" + "\n".join([*table, *(f"| {row} |" for row in cells)])


def _versions(versions: object) -> str:
    if not isinstance(versions, Mapping):
        return ""
    return "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in versions.items() if version)


log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # of a server that does not answer; huggingface_hub sets none


def create_repository(repo_id: str, private: bool) -> None:
    """Create the model repository `repo_id` unless it exists; fails if an upload would. Raises ConfigError for a name
    that is none, UnreachableError otherwise."""
    with _explained(repo_id):
        huggingface_hub.create_repo(repo_id, private=private, exist_ok=True)


def push(folder: Path, repo_id: str, private: bool, message: str = "Upload model") -> str:
    """Upload the files of `folder` as one commit; returns the address of the repository. Raises as `create_repository`."""
    create_repository(repo_id, private)
    with _explained(repo_id):
        commit = huggingface_hub.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, ignore_patterns=MANIFEST
        )
        return str(commit.repo_url)


def push_result(checkpoint: Path, role: str, repo_id: str, private: bool) -> None:
    """Upload the model of a run that has ended. A failure is logged with the command that uploads again."""
    try:
        with tempfile.TemporaryDirectory(prefix=".pushed-", dir=checkpoint.parent) as temporary:
            folder = export(checkpoint, Path(temporary) / "model", role=role)
            write_model_card(folder, checkpoint)
            log.info("The trained model is at %s.", push(folder, repo_id, private))
    except VerlError as error:
        log.error(
            "%s The run is complete, and its model is in %s. To upload again: verl export %s FOLDER --push %s",
            error, checkpoint, checkpoint, repo_id,
        )  # fmt: skip


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into sentences."""
    huggingface_hub.utils.get_session().timeout = _TIMEOUT_S
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{clean(repo_id)} is no name of a repository on the Hub: give owner/name.") from error
    except OfflineModeIsEnabled as error:
        raise UnreachableError("HF_HUB_OFFLINE is set, so nothing can be uploaded to the Hub. Unset it.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "Upload again later"
        if status in (401, 403):
            advice = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
        why = clean(error.server_message or "no reason").rstrip(".")
        raise UnreachableError(
            f"The Hub refused the upload to {repo_id} with status {status}: {why}. {advice}."
        ) from error
    except Exception as error:
        raise UnreachableError(
            f"The upload to {repo_id} failed: {type(error).__name__}: {clean(error, 200)}. Check the network and HF_ENDPOINT."
        ) from error


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
    CheckpointError, also if the newest checkpoint is damaged, and the errors of `write_gguf`.
    """
    writer = load_part("verl.models.gguf_file") if gguf else None
    target_dtype = parse_dtype(dtype if writer is None else writer.rounded_dtype(dtype))
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
    make_folder(out.parent)
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes(tensors):
        raise CheckpointError(
            f"{out} needs {num_bytes(tensors) / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free."
        )
    if writer is not None:
        writer.write_gguf(model_folder, tensors, out, dtype)
    else:
        _write_folder(model_folder, tensors, out, target_dtype)
    log.info("Exported the %s of %s to %s (%s).", role, checkpoint, out, dtype)
    return out


def _write_folder(model_folder: Path, tensors: dict[str, torch.Tensor], out: Path, dtype: torch.dtype) -> None:
    """The folder `out` with the files of `model_folder`, and `tensors` for its weights."""
    ignored = shutil.ignore_patterns("model*.safetensors*", MANIFEST)
    try:
        with new_folder(out) as (temporary, records):
            shutil.copytree(model_folder, temporary, ignore=ignored, dirs_exist_ok=True)
            set_config_dtype(temporary / "config.json", dtype)
            records |= write_model(temporary, tensors)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}.") from error


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
    saved, exported = read_model(model_folder), read_model(folder)
    if different := sorted(saved.keys() ^ exported.keys()):
        place = model_folder if different[0] in saved else folder
        raise CheckpointError(f"{len(different)} tensors are on one side only, the first {different[0]!r} in {place}.")
    rounding = _rounding(checkpoint, role)
    changed = [
        name
        for name, tensor in saved.items()
        if not torch.equal(rounding.rounded(name, whole(tensor), exported[name].dtype), whole(exported[name]))
    ]
    if changed:
        raise CheckpointError(
            f"{len(changed)} of {len(saved)} tensors of {folder} differ from {model_folder}, the first {changed[0]!r}."
        )
    return len(saved)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def checkpoint_model(source: str | Path, role: str | None, step: int | None) -> tuple[Path, str, Path]:
    """(the checkpoint, the role, its Hugging Face folder). Without a `role` the actor, or the single model of fine-tuning."""
    folder = Path(source).expanduser()
    if _is_model(folder) and role is None and step is None:
        require_intact(folder, weights=True)
        return folder, "model", folder
    checkpoint = _checkpoint(folder, step)
    roles = sorted(p.parent.name for p in checkpoint.glob("*/huggingface"))
    role = role or (roles[0] if len(roles) == 1 else "actor")
    if role not in roles:
        raise CheckpointError(f"{checkpoint} has no role {role!r}; it has: {', '.join(roles) or 'none'}.")
    return checkpoint, role, checkpoint / role / "huggingface"


def _checkpoint(source: Path, step: int | None) -> Path:
    if source.name.startswith("global_step_") and step is None:
        damage = find_damage(source) if source.is_dir() else "it does not exist"
        if damage is not None:
            raise CheckpointError(f"{source} is not a complete checkpoint: {damage}.")
        return source
    if step is not None:
        if step not in candidates(source):
            steps_text = ", ".join(map(str, candidates(source)[:8])) or "none"
            raise CheckpointError(f"{source} has no checkpoint of step {step}; there are: {steps_text}.")
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
    advice = f"Export an older one with --step={older[0]}." if older else "There is no older one."
    raise CheckpointError(f"The newest checkpoint in {source} is damaged ({faults[0]}). {advice}")
