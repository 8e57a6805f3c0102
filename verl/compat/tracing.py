"""Timers of named phases, and the decorators of rollout tracing, which trace nothing here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`. The other arguments colour a mark for NVIDIA's profilers; no mark
    is made, since `trainer.*` spans are in the timeline of the run folder."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


simple_timer = marked_timer


class RolloutTraceConfig:
    """Accepted without a backend. Samples with their tokens, scores and versions are in the run folder's ledger."""

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None, *_: Any, **__: Any) -> None:
        """Raises ConfigError when a backend is asked for."""
        if backend is not None:
            raise ConfigError(
                f"Tracing rollouts to {backend!r} is not available in this version. Set rollout.trace.backend=null; "
                "`verl show RUN` reads the samples of a run from its ledger."
            )

    @classmethod
    def get_backend(cls) -> None:
        """None: there is no tracing backend."""


def rollout_trace_op(func: F) -> F:
    """`func` as it is. Existing releases report its calls to Weave or MLflow; no call is traced here."""
    return func


@contextmanager
def rollout_trace_attr(**_: Any) -> Iterator[None]:
    """A block whose attributes existing releases attach to its traced calls; nothing is traced here."""
    yield
