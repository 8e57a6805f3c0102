"""Import path of verl.compat.sections: configs from Python."""

from verl.compat.sections import omega_conf_to_dataclass, validate_config

__all__ = ["omega_conf_to_dataclass", "validate_config"]
