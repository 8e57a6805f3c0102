"""Configs as Python objects: sections of existing releases as dataclasses, and a whole tree as a config that we can run."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

from verl.config import (
    PPO,
    ActorConfig,
    CriticConfig,
    FSDPConfig,
    LoadedConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutConfig,
    VerlConfig,
    load_config,
)
from verl.errors import ConfigError
from verl.registry import load_object

__all__ = [
    "ActorConfig",
    "BaseConfig",
    "CriticConfig",
    "FSDPConfig",
    "HFModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RolloutConfig",
    "loaded_config",
    "omega_conf_to_dataclass",
    "validate_config",
]


@dataclass
class BaseConfig(Mapping[str, Any]):
    """Base of recipes' own config dataclasses: also read like a mapping, and frozen but for `_mutable_fields`."""

    _mutable_fields = set[str]()
    _target_: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises FrozenInstanceError for a field that is set already and not in `_mutable_fields`."""
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(f"The field {name!r} of {type(self).__name__} is frozen; make a new config.")
        super().__setattr__(name, value)

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str) or not hasattr(self, key):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))


@dataclass(frozen=True)
class HFModelConfig(ModelConfig):
    """The section `model`, with what its folder holds: read when it is first asked for."""

    @property
    def local_path(self) -> str:
        """The folder, or the hub name. Raises ModelError for a folder that is not there."""
        from verl.models.load import locate

        return locate(self.path)

    @functools.cached_property
    def hf_config(self) -> Any:
        """The transformers config with `override_config` put in."""
        from verl.models.load import load_model_config

        return load_model_config(self.path, self.trust_remote_code, self.override_config)

    @functools.cached_property
    def tokenizer(self) -> Any:
        from verl.models.load import load_tokenizer

        return load_tokenizer(self)

    @functools.cached_property
    def processor(self) -> Any:
        """None for a model of text alone."""
        from verl.compat.tokenizers import hf_processor

        return hf_processor(self.path, trust_remote_code=self.trust_remote_code)

    @functools.cached_property
    def generation_config(self) -> Any:
        from verl.compat.models import get_generation_config

        return get_generation_config(self.path, trust_remote_code=self.trust_remote_code)

    @property
    def architectures(self) -> list[str]:
        return list(self.hf_config.architectures or [])

    def get_processor(self) -> Any:
        """The processor, or the tokenizer of a model of text alone."""
        return self.processor if self.processor is not None else self.tokenizer


def omega_conf_to_dataclass(config: Any, dataclass_type: Any = None) -> Any:
    """A section (OmegaConf or dict) as `dataclass_type`, or as the class that its `_target_` names; nested sections become
    what the class declares. A dataclass comes back as it is, an empty section as the class's defaults. Raises ConfigError
    for a key that the class does not have, and ValueError without any class."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if config is None or (isinstance(config, Mapping) and not config):
        return dataclass_type if dataclass_type is None else dataclass_type()
    if not OmegaConf.is_config(config) and not isinstance(config, dict):
        return config
    tree = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    assert isinstance(tree, dict)
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


def loaded_config(config: Any) -> LoadedConfig:
    """A whole tree from Python (OmegaConf, dict, our dataclasses) resolved and checked as one from a command line is.

    Keys at their defaults count as not given: a tree that Hydra composed has all of them. Raises ConfigError.
    """
    from omegaconf import OmegaConf

    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, VerlConfig):
        config = dataclasses.asdict(config)
    tree: Any = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config_from_python.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(_asked_for(tree, ""))), encoding="utf-8")
        return load_config((), str(file))


def validate_config(config: Any, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """Check a whole tree. Raises ConfigError with one sentence per problem. Which roles a run needs is read from the tree."""
    loaded_config(config)


def _without_targets(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_targets(value) for key, value in tree.items() if key != "_target_"}
    return [_without_targets(value) for value in tree] if isinstance(tree, list) else tree


def _asked_for(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    """`tree` without what is at its default, but for keys that would follow others."""
    found = {}
    for name, value in tree.items():
        spelled = f"{prefix}{name}"
        path = PPO.resolve(spelled)[0]
        if isinstance(value, dict) and path not in PPO.leaves:
            below = _asked_for(value, f"{spelled}.")
            if below:
                found[name] = below
        elif path not in PPO.leaves or PPO.leaves[path].default != value or path in _FOLLOWING:
            found[name] = value
    return found


_FOLLOWING = {path for path, _ in PPO.follows}
