"""Inputs of a run, by content: data, models, and the files of code and settings that its config names.

Each checkpoint keeps the digests of the run that has saved it. A run that resumes from it lists every difference. Weights, the
tokenizer and the training rows may not differ, unless trainer.resume_changed_inputs allows it: the trained weights belong to
them, and another model.path in the same folder is meant to begin another run.
"""

import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config import LoadedConfig, ModelConfig, RunConfig
from verl.config.loaded import CREATED_FILES
from verl.config.schema import value_at
from verl.config.sources import read_limited
from verl.data.files import files_behind
from verl.errors import CheckpointError, ConfigError, VerlError
from verl.families import engine_facts
from verl.models.content import digest_of_files, digest_of_text, digest_of_weights
from verl.models.folder import fetch, weight_files
from verl.models.lora import WEIGHTS_FILE
from verl.programs.api import Program
from verl.registry import is_in_process, load_object, user_file
from verl.regular_files import imported_files, read_text
from verl.user_objects import digest_of_object

log = logging.getLogger(__name__)

_TRAIN, _WEIGHTS, _TOKENIZER = "data.train_files", "weights of the ", "tokenizer of the "
_DATA = (_TRAIN, "data.val_files")
_MODULE_KEYS = ("external_lib", "path", "class_path", "class_name", "_target_")  # a dotted name there is a module
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_MAX_NAME = 1024  # longer texts are templates
_SETTINGS = (".yaml", ".yml", ".json")
_TOKENIZER_FILES = "tokenizer* *.model *.tiktoken vocab* merges.txt added_tokens.json special_tokens*".split()
_TEMPLATE = "chat_template"  # of tokenizer_config.json, and the beginning of the names of files


def inputs_of(loaded: LoadedConfig[RunConfig], program: type[Program[Any]]) -> dict[str, str]:
    """Everything that a run of `program` reads -> the digest of its content. A file that cannot be read has none: its reader
    says so."""
    config, digests = loaded.config, dict[str, str]()
    for key in _DATA:
        _add(digests, key, lambda key=key: digest_of_files(_data_files(value_at(config, key))))
    roles = program.roles(config)
    for spec in roles.models:
        if spec.build is not None:
            continue
        if spec is roles.main:
            _add_tokenizer(digests, spec.name, spec.model)
        if spec is roles.main or roles.main is None or spec.model.path != roles.main.model.path:
            _add_config(digests, spec.name, spec.model)
        _add_weights(digests, spec.name, spec.model, changes=spec.changes)
    judge = value_at(config, "reward.reward_model")
    if judge is not None and judge.enable and judge.model_path and not engine_facts(judge.rollout.name).asks_service:
        model = ModelConfig(path=judge.model_path)
        for add in (_add_tokenizer, _add_config, _add_weights):
            add(digests, "reward model", model)
    for path, leaf in loaded.schema.leaves.items():
        follows = loaded.origins[path].startswith("follows ")  # the key that it follows has the same file
        if leaf.inert or leaf.sizing or follows or path in _DATA or path.endswith(CREATED_FILES):
            continue
        value = value_at(config, path)
        files, objects = _named_files(path.rpartition(".")[2], value), list(_references(value))
        if files or objects:
            _add(digests, path, lambda files=files, objects=objects: _digest_of_code(list(files), objects))
    return digests


_FUNCTIONS = "reward.custom_reward_function.reward_kwargs"  # the key of functions that Python code passes


def changed_inputs(checkpoint: Path, saved: Mapping[str, str] | None, now: Mapping[str, str], action: str) -> str:
    """A sentence with the differences between the inputs `saved` in `checkpoint` (None: by a version without digests) and
    `now`; "" without any. Raises CheckpointError, unless `action` is "warn", if the trained weights depend on one."""
    changed = [name for name in now if (saved or {}).get(name, now[name]) != now[name]]
    essential = [name for name in changed if name.endswith(_TRAIN) or name.startswith((_WEIGHTS, _TOKENIZER))]
    if essential and action != "warn":
        raise CheckpointError(
            f"{checkpoint} was trained with another content of: {', '.join(essential)}. Bring it back, or set "
            "trainer.resume_changed_inputs=warn to resume with the new content. For a new run, set another "
            "trainer.default_local_dir."
        )
    names = ["the reward functions" if name == _FUNCTIONS else name for name in changed]
    return f"The run resumes with another content of: {', '.join(names)}." if changed else ""


def _add(digests: dict[str, str], name: str, digest: Any) -> None:
    try:
        digests[name] = digest()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, VerlError) as error:
        # a damaged file raises any of them
        log.debug("No digest of %s: %s", name, error)


# -- data ---------------------------------------------------------------------------------------------------------------


def _data_files(names: str | list[str] | None) -> list[Path]:
    """The local files of a list of data files, in order. Raises FileNotFoundError if all are of the hub."""
    files = [file for name in ([names] if isinstance(names, str) else names or []) for file in files_behind(name)]
    if names and not files:
        raise FileNotFoundError(names)
    return files


# -- models -------------------------------------------------------------------------------------------------------------


def _add_weights(digests: dict[str, str], role: str, model: ModelConfig, *, changes: bool = False) -> None:
    def files() -> list[Path]:
        adapter = model.lora_adapter_path  # merged into a model that does not train
        merged = [Path(adapter).expanduser() / WEIGHTS_FILE] if adapter and not changes else []
        return [*weight_files(fetch(model.path, weights=True)), *merged]

    _add(digests, f"{_WEIGHTS}{role}", lambda: digest_of_weights(files()))


def _add_config(digests: dict[str, str], role: str, model: ModelConfig) -> None:
    def files() -> list[Path]:
        folder = fetch(model.path, weights=False)
        return [folder / "config.json", *(sorted(folder.glob("*.py")) if model.trust_remote_code else [])]

    _add(digests, f"config of the {role}", lambda: digest_of_files(files()))


def _add_tokenizer(digests: dict[str, str], role: str, model: ModelConfig) -> None:
    def folder() -> Path:
        return fetch(model.tokenizer_path or model.path, weights=False)

    def settings() -> dict[str, Any]:
        file = folder() / "tokenizer_config.json"
        return json.loads(read_text(file)) if file.is_file() else {}

    def tokenizer() -> str:
        files = {file for pattern in _TOKENIZER_FILES for file in folder().glob(pattern) if file.is_file()}
        recorded = {key: value for key, value in settings().items() if key != _TEMPLATE}
        files.discard(folder() / "tokenizer_config.json")
        return digest_of_text(digest_of_files(sorted(files)), json.dumps(recorded, sort_keys=True))

    def template() -> str:
        files = sorted(file for file in folder().glob(f"{_TEMPLATE}*") if file.is_file())
        return digest_of_text(digest_of_files(files), json.dumps(settings().get(_TEMPLATE)))

    def generation() -> str:
        return digest_of_files(list(fetch(model.path, weights=False).glob("generation_config.json")))

    def processor() -> str:
        return digest_of_files(sorted(folder().glob("*processor_config.json")))

    _add(digests, f"{_TOKENIZER}{role}", tokenizer)
    _add(digests, f"image processor of the {role}", processor)
    if not model.custom_chat_template:
        _add(digests, f"chat template of the {role}", template)
    _add(digests, f"generation config of the {role}", generation)


# -- code and settings --------------------------------------------------------------------------------------------------


def _named_files(key: str, value: object) -> dict[Path, None]:
    """The files that the value of `key` names, in order. Lists and mappings are searched, and so are the files found."""
    files: dict[Path, None] = {}
    waiting = [(key, value)]
    while waiting:
        key, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(str(name), entry) for name, entry in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, entry) for entry in value]
        elif isinstance(value, Path):
            file = value.resolve()
            if file in files or not file.is_file():
                continue
            files[file] = None
            waiting += [("", imported) for imported in imported_files(file)] if file.suffix == ".py" else []
            waiting += [("", _settings(file))] if file.suffix in _SETTINGS else []
        elif isinstance(value, str) and value and len(value) < _MAX_NAME and "\n" not in value:
            waiting += [("", file) for file in [_file(key, value)] if file is not None]
    return files


def _digest_of_code(files: list[Path], references: list[str]) -> str:
    digest = digest_of_files(files)
    return digest_of_text(digest, *(digest_of_object(load_object(r)) for r in references)) if references else digest


def _references(value: object) -> Iterator[str]:
    """References to functions that exist only in this process."""
    if isinstance(value, str) and is_in_process(value):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _references(inner)


def _file(key: str, text: str) -> Path | None:
    """The file that a text names: a path, or path/to/file.py:name, or a module if the text or its key says so."""
    name = text.removeprefix("pkg://").removeprefix("file://")
    reference = name.rpartition(":")[0]
    for path in filter(None, (name, reference)):
        try:
            file = user_file(path)
            if file.suffix and file.is_file():
                return file
        except (OSError, ValueError, RuntimeError):  # no name of a file
            continue
    is_module = key in _MODULE_KEYS or text.startswith("pkg://") or bool(reference)
    return _module_file(reference or name) if is_module and _MODULE.fullmatch(reference or name) else None


def _module_file(name: str) -> Path | None:
    """The file of module, or module.object, `name`, without an import; None for one of verl, or without a file."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top) if top != "verl" else None
    except (ImportError, ValueError):
        return None
    if spec is None or (not spec.submodule_search_locations and not spec.has_location):
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin or "")
    place = Path(next(iter(spec.submodule_search_locations)))
    for part in inner:
        if (place / f"{part}.py").is_file():
            return place / f"{part}.py"
        if not (place / part).is_dir():
            break
        place /= part
    return place / "__init__.py"


def _settings(file: Path) -> object:
    """The values of a YAML or JSON file; None if it cannot be read."""
    try:
        return read_limited(file)
    except ConfigError:
        return None
