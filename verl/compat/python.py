"""Functions over dicts, coroutines, addresses and imports: `verl.utils.py_functional`, `ray_utils`, `net_utils`,
`import_utils`."""

import asyncio
import functools
import importlib.util
import inspect
import ipaddress
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.errors import ConfigError, NameConfigError
from verl.parallel.framing import listening_socket
from verl.registry import load_module, load_object

T = TypeVar("T")


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, object], prefix: str = "") -> None:
    """Append each value of `new_data` to the list of that name in `data`; names get `prefix` unless they have it."""
    for key, value in new_data.items():
        data.setdefault(key if key.startswith(prefix) else f"{prefix}{key}", []).append(value)


def convert_to_regular_types(obj: object) -> Any:
    """OmegaConf containers, at any depth, as dicts and lists, with interpolations resolved; tuples become lists."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(obj):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def union_two_dict(dict1: dict[str, object], dict2: Mapping[str, object]) -> dict[str, object]:
    """Add the entries of `dict2` to `dict1`, in place, and return it. Raises ValueError for a key with two values."""
    from verl.data_proto.merge import union_meta_info

    dict1.update(union_meta_info(dict1, dict2))
    return dict1


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread; a new one, set as current, if there is none or it is closed."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = None
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    return loop


def parallel_put(data_list: Sequence[object], max_workers: int | None = None) -> list[object]:
    """References of objects in Ray's store, in their order, put there by several threads. Raises AssertionError for none."""
    assert data_list, "There is nothing to put into Ray's store."
    from verl.runtime.ray_cluster import ray

    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as pool:
        return list(pool.map(ray.put, data_list))


def auto_await(func: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: plain code may call the coroutine function `func` and waits for its result. Inside a running event loop
    the call returns the coroutine, to be awaited."""

    @functools.wraps(func)
    def call(*args: object, **kwargs: object) -> Any:
        returned = func(*args, **kwargs)
        if not inspect.iscoroutine(returned):
            return returned
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(returned)
        return returned

    return call


def get_free_port(address: str = "127.0.0.1", with_alive_sock: bool = False) -> tuple[int, socket.socket | None]:
    """(a free TCP port of an address of this machine, the socket that holds it). Without `with_alive_sock` the socket is closed
    and None, and the port may be taken again by another process."""
    held = listening_socket(address, 0, 1)
    port = int(held.getsockname()[1])
    if with_alive_sock:
        return port, held
    held.close()
    return port, None


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """An environment variable for the block; afterwards it has its value again."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def is_valid_ipv6_address(address: str) -> bool:
    """Whether `address` is an IPv6 address, without brackets."""
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of a dotted name is missing
        return False


is_nvtx_available = functools.cache(functools.partial(_is_installed, "nvtx"))
is_trl_available = functools.cache(functools.partial(_is_installed, "trl"))


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import modules that register objects: one dotted name, or several. Raises ConfigError."""
    names = [external_libs] if isinstance(external_libs, str) else external_libs or []
    for name in names:
        load_module(name)


class _FileConfigError(ConfigError, FileNotFoundError):
    """The file is not there, or is none."""


class _ImportConfigError(ConfigError, RuntimeError):
    """The import failed."""


def load_extern_object(module_path: str, object_name: str) -> Any:
    """`object_name` of a `.py` file, a dotted module or `pkg://module`. Raises ConfigError; it is also a FileNotFoundError,
    an AttributeError for the name, or a RuntimeError for a file that cannot be imported."""
    try:
        return load_object(f"{module_path}:{object_name}")
    except NameConfigError:
        raise
    except ConfigError as error:
        kind = _FileConfigError if error.__cause__ is None else _ImportConfigError
        raise kind(str(error)) from error


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """The class `type_name` of a file, as `load_extern_object`; None without a path."""
    return load_extern_object(file_path, type_name or "") if file_path else None


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """The class with the full dotted name "package.module.Class". Raises ConfigError."""
    module, _, name = fqn.rpartition(".")
    return load_object(f"{module}:{name}")


def deprecated(replacement: str = "") -> Callable[[T], T]:
    """Decorator of a function or class: each call or construction warns (FutureWarning) and names the `replacement`."""

    def mark(obj: T) -> T:
        name = getattr(obj, "__qualname__", str(obj))
        advice = f" Use {replacement} instead." if replacement else ""
        text = f"{name} is deprecated and will be removed.{advice}"
        called: Any = obj.__init__ if isinstance(obj, type) else obj  # type: ignore[misc]

        @functools.wraps(called)
        def warning(*args: object, **kwargs: object) -> Any:
            warnings.warn(text, FutureWarning, stacklevel=2)
            return called(*args, **kwargs)

        if isinstance(obj, type):
            obj.__init__ = warning  # type: ignore[misc]
            return obj
        return warning  # type: ignore[return-value]

    return mark
