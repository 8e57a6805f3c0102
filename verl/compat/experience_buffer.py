"""Experience buffer between generation and training, for custom training loops.

    buffer = ExperienceBuffer(max_groups=512, max_age=2, place="process")
    buffer.put(batch, version=3)                                  # rows of one prompt (column uid) stay together
    batch = buffer.sample(16, version=4, order="oldest")          # 16 groups, none older than 2 versions

The runs of `verl train` have a separate queue (verl/programs/rollout_queue.py). The sample ledger resumes that queue, and no
sample in it trains twice; here a script decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.rollout.process import EngineProcess

Order = Literal["oldest", "newest", "uniform", "priority"]
ORDERS: tuple[Order, ...] = ("oldest", "newest", "uniform", "priority")


class ExperienceBuffer:
    """At most `max_groups` groups of rows (None: no limit), with the version of the weights that made each. The oldest groups
    leave first, and no sampled group is more than `max_age` versions old.

    `by` is an object column: rows with equal values make a group; without that column every row is a group. `place` is "driver"
    (this process) or "process" (a separate process that ends with this one); calls to it have `timeout_s` seconds. Random
    choices depend only on `seed` and on the calls. For one thread. Raises ConfigError for settings that make no sense.
    """

    def __init__(
        self,
        max_groups: int | None = None,
        max_age: int | None = None,
        *,
        by: str = "uid",
        seed: int = 0,
        place: Literal["driver", "process"] = "driver",
        timeout_s: float = 60.0,
    ):
        for name, value, least in (("max_groups", max_groups, 1), ("max_age", max_age, 0)):
            if value is not None and value < least:
                raise ConfigError(
                    f"ExperienceBuffer({name}={value}) would hold nothing; it is at least {least}, or None."
                )
        if place not in ("driver", "process"):
            raise ConfigError(
                f"ExperienceBuffer(place={place!r}): a buffer is in the 'driver' or in a separate 'process'."
            )
        setup = {"max_groups": max_groups, "max_age": max_age, "by": by, "seed": seed}
        groups = StoredGroups(setup)
        self._calls: dict[str, Callable[..., object]] = {
            "put": groups.put,
            "qsize": groups.qsize,
            "sample": groups.sample,
        }
        self._process: EngineProcess | None = None
        if place == "process":
            self._process = EngineProcess(
                "experience buffer", f"{__name__}:StoredGroups", setup, environment={}, start_timeout_s=timeout_s,
                call_timeout_s=timeout_s,
            )  # fmt: skip

    def put(self, batch: DataProto, *, version: int, priority: Sequence[float] | None = None) -> int:
        """Add the rows of `batch`, made by weights `version`. `priority` [rows] is above 0 (default: 1); a group has the
        largest of its rows. Returns the number of groups that left for it. Raises DataError for priorities that do not fit."""
        priorities = None if priority is None else [float(value) for value in priority]
        if priorities is not None and (
            len(priorities) != len(batch) or not all(0 < value < np.inf for value in priorities)
        ):
            raise DataError(
                f"put() got {len(priorities)} priorities for {len(batch)} rows; it needs one above 0 for each."
            )
        return int(self._call("put", batch, int(version), priorities))

    def qsize(self) -> int:
        """The number of groups that are there."""
        return int(self._call("qsize"))

    def sample(self, count: int, *, version: int, order: Order = "oldest", remove: bool = True) -> DataProto:
        """The rows of `count` groups, none older than `max_age` versions at weights `version`; older ones leave the buffer.

        `order`: the oldest or newest first, "uniform", or "priority", with chances in proportion to it (Schaul et al. 2016,
        arXiv:1511.05952, alpha=1), without repetition. `remove=False` keeps them for a replay. Raises DataError if there are
        fewer, ConfigError for another order.
        """
        if order not in ORDERS:
            raise ConfigError(f"sample(order={order!r}): the orders are {', '.join(ORDERS)}.")
        return cast("DataProto", self._call("sample", int(count), int(version), order, remove))

    def close(self) -> None:
        """End the process, if there is one. May be called again."""
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> ExperienceBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: str, *arguments: object) -> Any:
        if self._process is not None:
            return self._process.call(method, *arguments)
        return self._calls[method](*arguments)


class StoredGroups:
    """The groups of a buffer, in this process or in a separate process."""

    def __init__(self, setup: Mapping[str, Any]):
        self._max_groups, self._max_age, self._by = setup["max_groups"], setup["max_age"], setup["by"]
        self._seed, self._num_draws = setup["seed"], 0
        self._groups: list[tuple[int, float, DataProto]] = []  # version, priority, rows; oldest first

    def put(self, batch: DataProto, version: int, priority: list[float] | None) -> int:
        """See ExperienceBuffer."""
        weights = np.ones(len(batch)) if priority is None else np.asarray(priority)
        for rows in _groups_of(batch, self._by):
            self._groups.append((version, float(weights[rows].max()), batch.select_idxs(rows)))
        self._groups.sort(key=lambda group: group[0])  # stable: of one version, as they came
        num_over = max(0, len(self._groups) - self._max_groups) if self._max_groups else 0
        del self._groups[:num_over]
        return num_over

    def qsize(self) -> int:
        """See ExperienceBuffer."""
        return len(self._groups)

    def sample(self, count: int, version: int, order: Order, remove: bool) -> DataProto:
        """See ExperienceBuffer."""
        if self._max_age is not None:
            self._groups = [group for group in self._groups if version - group[0] <= self._max_age]
        if not 1 <= count <= len(self._groups):
            aged = f" of at most {self._max_age} versions before {version}" if self._max_age is not None else ""
            raise DataError(f"sample({count}) was asked of a buffer that holds {len(self._groups)} groups{aged}.")
        chosen = self._chosen(count, order)
        batch = DataProto.concat([self._groups[i][2] for i in chosen])
        if remove:
            removed = set(chosen)
            self._groups = [group for i, group in enumerate(self._groups) if i not in removed]
        return batch

    def _chosen(self, count: int, order: Order) -> list[int]:
        if order in ("oldest", "newest"):
            indices = list(range(len(self._groups)))
            return indices[:count] if order == "oldest" else indices[::-1][:count]
        # Gumbel noise on log-weights: the largest are a sample without replacement (Efraimidis and Spirakis 2006)
        generator = np.random.Generator(np.random.Philox(key=[self._seed, self._num_draws]))
        self._num_draws += 1
        weights = np.array([group[1] if order == "priority" else 1.0 for group in self._groups])
        keys = np.log(weights) + generator.gumbel(size=len(weights))
        return [int(i) for i in np.argsort(-keys, kind="stable")[:count]]


def _groups_of(batch: DataProto, by: str) -> list[np.ndarray]:
    """Row indices of each group, in order of their first rows."""
    if by not in batch.non_tensor_batch:
        return [np.array([row]) for row in range(len(batch))]
    rows: dict[object, list[int]] = {}
    for row, name in enumerate(batch.non_tensor_batch[by]):
        rows.setdefault(name, []).append(row)
    return [np.array(members) for members in rows.values()]
