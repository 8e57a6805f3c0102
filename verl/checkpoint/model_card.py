"""Model cards of checkpoints: base model, command, data, results and versions, from the files of the run folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.checkpoint.export import checkpoint_model
from verl.config.loaded import scalar
from verl.foreign_text import clean
from verl.tracking.files import read_json
from verl.tracking.run_folder import RunFolder

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_MODEL_KEYS = ("model.path", "actor_rollout_ref.model.path")
_DATA_KEYS = ("data.train_files", "data.val_files")
_METHOD_KEYS = ("algorithm.adv_estimator", "preference.loss", "rm.loss", "sft.loss")


def write_model_card(folder: Path, source: str | Path, step: int | None = None) -> None:
    """Write README.md into the exported `folder` for the checkpoint `source`, as `export` takes it; nothing where `source` is
    a Hugging Face folder, of whose training nothing is known."""
    checkpoint = checkpoint_model(source, None, step)[0]
    if (checkpoint / "trainer_state.json").is_file():
        (folder / "README.md").write_text(model_card(checkpoint), encoding="utf-8")


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
    """A JSON object of the run; empty where it cannot be read."""
    try:
        return read_json(file, lambda value: isinstance(value, dict))
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
    shown = [
        " | ".join("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row) for row in rows
    ]
    return "## Results\n\n" + "\n".join([*table, *(f"| {row} |" for row in shown)])


def _versions(versions: object) -> str:
    if not isinstance(versions, Mapping):
        return ""
    return "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
