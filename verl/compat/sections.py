"""Configs from Python: sections as dataclasses, and complete trees as a config to run (`verl.utils.config`,
`verl.workers.config`, `verl.base_config`, `verl.experimental.reward_loop`)."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verl.config import PPO, LoadedConfig, ModelConfig, PPOConfig
from verl.config.load import load_composed
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, NameConfigError, nearest
from verl.registry import load_object
from verl.regular_files import syntax_tree

if TYPE_CHECKING:
    from omegaconf import DictConfig


class _KeyKindError(KeyError, TypeError):
    """A key that is no text; membership tests catch the first type, scripts the second."""


@dataclass
class BaseConfig(Mapping[str, Any]):
    """Base of scripts' config dataclasses: also a mapping, and frozen except for `_mutable_fields`."""

    _mutable_fields = set[str]()
    _target_: str = ""

    def __setattr__(self, name: str, value: object) -> None:
        """Raises FrozenInstanceError for a field that has a value and is not in `_mutable_fields`."""
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(f"The field {name!r} of {type(self).__name__} is frozen; make a new config.")
        super().__setattr__(name, value)

    def __getitem__(self, key: str) -> Any:
        """Raises NameConfigError, a KeyError and an AttributeError, for a name that is not there."""
        if not isinstance(key, str):
            raise _KeyKindError(f"A key of {type(self).__name__} is a text, not {key!r}.")
        if not hasattr(self, key):
            raise NameConfigError(f"{type(self).__name__} has no field {key!r}{nearest(key, self) or '.'}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))


@dataclass(frozen=True)
class HFModelConfig(ModelConfig):
    """The section `model`, with config, tokenizer and processor of its folder, loaded on first use."""

    @property
    def local_path(self) -> str:
        """The folder, or the hub name. Raises ModelError for a missing folder."""
        from verl.models.folder import locate

        return locate(self.path)

    @functools.cached_property
    def hf_config(self) -> Any:
        """The transformers config with `override_config` applied."""
        from verl.models.load import load_model_config

        return load_model_config(self.path, self.trust_remote_code, self.override_config)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        from verl.models.load import load_tokenizer

        return load_tokenizer(self)

    @functools.cached_property
    def processor(self) -> Any:
        """The processor; None for a text-only model."""
        from verl.compat.models import hf_processor

        return hf_processor(self.path, trust_remote_code=self.trust_remote_code)

    @functools.cached_property
    def generation_config(self) -> Any:
        from verl.compat.models import get_generation_config

        return get_generation_config(self.path, trust_remote_code=self.trust_remote_code)

    @property
    def architectures(self) -> list[str]:
        return list(self.hf_config.architectures or [])

    def get_processor(self) -> Any:
        """The processor, or the tokenizer of a text-only model."""
        return self.processor if self.processor is not None else self.tokenizer


def omega_conf_to_dataclass(config: object, dataclass_type: Any = None) -> Any:
    """A section (OmegaConf or dict) as `dataclass_type`, or as the class that its `_target_` or its place in a tree names; a
    dataclass is returned unchanged. Raises ConfigError for a key that the class lacks, and ValueError without a class."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if config is None or (isinstance(config, Mapping) and not config):
        return dataclass_type if dataclass_type is None else dataclass_type()
    if not OmegaConf.is_config(config) and not isinstance(config, dict):
        return config
    tree = OmegaConf.to_container(OmegaConf.create(cast("dict[str, Any]", config)), resolve=True)
    assert isinstance(tree, dict)
    place = "" if "_target_" in tree else getattr(config, "_get_full_key", lambda _: "")(None)
    if dataclass_type is None and dataclasses.is_dataclass(_at(PPOConfig(), place)):
        root = cast("DictConfig", config)._get_root()
        return _at(loaded_config(root, reads=names_of_caller(sys._getframe(1).f_globals)).config, place)
    if dataclass_type is None:
        target = str(tree.get("_target_") or "")
        if "." not in target:
            raise ValueError("Give dataclass_type, or a config with _target_: package.module.Class.")
        module, _, name = target.rpartition(".")
        dataclass_type = load_object(f"{module}:{name}")
    if not dataclasses.is_dataclass(dataclass_type):
        raise ValueError(f"{dataclass_type} is not a dataclass.")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass_type), _without_targets(tree)))
    except OmegaConfBaseException as error:
        name = getattr(dataclass_type, "__name__", str(dataclass_type))
        raise ConfigError(f"The section does not fit {name}: {str(error).splitlines()[0]}") from error


def _at(tree: object, place: str) -> Any:
    """The section or value of a tree at a place as "actor_rollout_ref.actor"; None without one."""
    return (
        functools.reduce(lambda section, name: getattr(section, name, None), place.split("."), tree) if place else None
    )


def loaded_config(
    config: object, program: type | None = None, reads: set[str] | None = None, *, chooses: bool = False
) -> LoadedConfig[Any]:
    """A complete tree from Python (OmegaConf, dict, dataclasses), checked as by `load_composed`. `program`: a class of the user
    that may read further keys, by names that its file has (or `reads`). If it `chooses` among data.gen_batch_size prompts, the
    run has batches of so many. Raises ConfigError."""
    from omegaconf import OmegaConf

    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, PPOConfig):
        config = dataclasses.asdict(config)
    tree: Any = OmegaConf.to_container(OmegaConf.create(cast("dict[str, Any]", config)), resolve=True)
    data, filters = tree.get("data") or {}, (tree.get("algorithm") or {}).get("filter_groups") or {}
    generated = data.get("gen_batch_size") if chooses and not filters.get("enable") else None
    if generated:
        data["train_batch_size"] = data.pop("gen_batch_size")
    names = _names_in_file(program) if reads is None else reads
    try:
        return load_composed(tree, program_reads=names | _handed_on(tree) if names else names)
    except ConfigError as error:
        if not generated:
            raise
        raise ConfigError(str(error).replace("data.train_batch_size=", "data.gen_batch_size=")) from error


def _handed_on(tree: dict[str, object]) -> set[str]:
    """Keys at the root with the value of a key below whose name ends so: a config hands them on by ${...}."""
    below = [leaf for name, part in tree.items() if isinstance(part, dict) for leaf in _leaves(part, name)]
    values = {name: value for name, value in tree.items() if not isinstance(value, dict)}
    return {name for name, value in values.items() if any(path.endswith(name) and v == value for path, v in below)}


def completed(tree: PPOConfig, config: object) -> object:
    """All keys of the tree as OmegaConf, and the ones of `config`; it may have some that only the script reads."""
    from omegaconf import OmegaConf

    values = dataclasses.asdict(cast("Any", config)) if dataclasses.is_dataclass(config) else cast("Any", config)
    return OmegaConf.merge(OmegaConf.create(dataclasses.asdict(tree)), values)


def _names_in_file(program: type | None) -> set[str]:
    """Attributes and texts in the files around a class that is not of verl."""
    try:
        return (
            names_of_caller({"__name__": program.__module__, "__file__": inspect.getfile(program)})
            if program
            else set()
        )
    except (OSError, TypeError):  # a class without a file, as in a notebook
        return set()


def names_of_caller(values: Mapping[str, Any]) -> set[str]:
    """The same for a function of the user; `values` are the globals of its module. The files are in its folder, in the folders
    of its packages, and in the folder that has the outermost package: scripts are there."""
    module, file = str(values.get("__name__")), values.get("__file__")
    if module.partition(".")[0] == "verl" or not file:
        return set()
    folders = [folder for folder in Path(file).parents[: module.count(".") + 1] if folder.name != "site-packages"]
    return {name for folder in folders for beside in folder.glob("*.py") for name in _names_in(beside)}


def _names_in(file: Path) -> set[str]:
    try:
        module = syntax_tree(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # its import says so
        return set()
    nodes = list(ast.walk(module)) if module else []
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def validate_config(config: object, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """Check a complete tree; it determines the roles. Unknown keys that a file beside the caller's names are for its trainer.
    Raises ConfigError with one sentence per problem."""
    loaded_config(config, reads=names_of_caller(sys._getframe(1).f_globals))


def _without_targets(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: _without_targets(value) for key, value in tree.items() if key != "_target_"}
    return [_without_targets(value) for value in tree] if isinstance(tree, list) else tree


_LEGACY_REWARD = ("custom_reward_function", "reward_model", "sandbox_fusion")


def migrate_legacy_reward_impl(config: DictConfig) -> DictConfig:
    """Move the keys of the three older sections of an OmegaConf tree below `reward`, in place, except null values. Returns
    the tree."""
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        for section in _LEGACY_REWARD:
            older = config.pop(section, None)
            tree: Any = OmegaConf.to_container(older, resolve=True) if OmegaConf.is_config(older) else older
            for spelled, value in _leaves(tree or {}, section):
                path, _ = PPO.resolve(spelled)
                if value is not None:
                    OmegaConf.update(config, path, value, force_add=True)
    return config


def _leaves(tree: dict[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}.{name}")
        elif value != {}:
            yield f"{prefix}.{name}", value
