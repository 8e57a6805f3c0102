"""`verl.utils.py_functional`, `ray_utils` and `net_utils`: dicts, coroutines and addresses."""

from __future__ import annotations

import asyncio
import functools
import inspect
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` to the list of that name in `data`, in place; names get `prefix` unless they have it.

    data = {"loss": [1.0]}; append_to_dict(data, {"loss": 2.0})   # {"loss": [1.0, 2.0]}
    """
    for key, value in new_data.items():
        data.setdefault(key if key.startswith(prefix) else f"{prefix}{key}", []).append(value)


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf containers, at any depth, as dicts and lists, with interpolations resolved; tuples become lists."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(obj):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the entries of the second to the first, in place, and return it. Raises ValueError when a key of both differs in
    value."""
    from verl.data_proto.merge import union_meta_info

    dict1.update(union_meta_info(dict1, dict2))
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns. Raises ValueError when the rows do not have the same keys."""
    rows = list(list_of_dict)
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("The dicts do not have the same keys.")
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread; a new one, set as current, where there is none or it is closed."""
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


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a coroutine function that can be called from plain code too, where the call waits for the result. Inside a
    running event loop it returns the coroutine, to be awaited."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        if not inspect.iscoroutine(found):
            return found
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(found)
        return found

    return call


def is_ipv4(address: str) -> bool:
    """Whether `address` is written as an IPv4 address."""
    return _version(address) == 4


def is_valid_ipv6_address(address: str) -> bool:
    """Whether `address` is written as an IPv6 address, without brackets."""
    return _version(address) == 6


def _version(address: str) -> int | None:
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return None
