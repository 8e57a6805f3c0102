"""`verl.utils.import_utils`: optional packages, and code of the user's by path."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from verl.registry import load_module, load_object

T = TypeVar("T")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of a dotted name is missing
        return False


@functools.cache
def is_nvtx_available() -> bool:
    """Whether the package `nvtx` (marks for NVIDIA's profilers) is installed."""
    return _is_installed("nvtx")


@functools.cache
def is_megatron_core_available() -> bool:
    """Whether megatron-core is installed."""
    return _is_installed("megatron.core")


@functools.cache
def is_vllm_available() -> bool:
    """Whether vLLM is installed."""
    return _is_installed("vllm")


@functools.cache
def is_sglang_available() -> bool:
    """Whether SGLang is installed."""
    return _is_installed("sglang")


@functools.cache
def is_trl_available() -> bool:
    """Whether TRL is installed."""
    return _is_installed("trl")


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import modules for what they register: one dotted name, or several. Raises ConfigError."""
    names = [external_libs] if isinstance(external_libs, str) else external_libs or []
    for name in names:
        load_module(name)


def load_extern_object(module_path: str, object_name: str) -> Any:
    """`object_name` of a `.py` file, a dotted module or `pkg://module`. Raises ConfigError when either is missing."""
    return load_object(f"{module_path}:{object_name}")


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """The class `type_name` of a file, as `load_extern_object`; None without a path."""
    return load_extern_object(file_path, type_name or "") if file_path else None


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """The class with the full dotted name "package.module.Class". Raises ConfigError."""
    module, _, name = fqn.rpartition(".")
    return load_object(f"{module}:{name}")


def deprecated(replacement: str = "") -> Callable[[T], T]:
    """Decorator: a call of the function, or the making of an object of the class, warns (FutureWarning) and names the
    `replacement`."""

    def mark(obj: T) -> T:
        name = getattr(obj, "__qualname__", str(obj))
        advice = f" Use {replacement} instead." if replacement else ""
        text = f"{name} is deprecated and will be removed.{advice}"
        called: Any = obj.__init__ if isinstance(obj, type) else obj  # type: ignore[misc]

        @functools.wraps(called)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, FutureWarning, stacklevel=2)
            return called(*args, **kwargs)

        if isinstance(obj, type):
            obj.__init__ = warning  # type: ignore[misc]
            return obj
        return warning  # type: ignore[return-value]

    return mark
