"""Process-wide settings of DataProto."""

import os


class _AutoPadding(type):
    """Makes `DataProtoConfig.auto_padding` a property of the class, as scripts use it."""

    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = bool(enabled)


class DataProtoConfig(metaclass=_AutoPadding):
    """Process-wide switch: with `auto_padding` (or VERL_AUTO_PADDING=1) a batch that does not divide may be chunked."""

    auto_padding_key = "_verl_auto_padding"  # the same switch for one batch, in its meta_info
