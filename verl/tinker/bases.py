"""The base models of a service: their names and facts, and which of them are in memory.

A base model is loaded when a request computes with it. If it does not fit with the others, those that were used least recently
leave, unless they have requests, or another tenant used them in the last IDLE_S seconds. The adapters that train on them stay
in memory (`Parked`), and their states are saved.

    - {model: Qwen/Qwen3-0.6B}                                   a line of bases=FILE
    - {model: models/teacher, name: Qwen/Qwen3-4B, train: false, settings: {actor_rollout_ref.actor.fsdp_config.dtype: float32}}
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.config import PPOConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.models.folder import fetch, read_headers
from verl.models.load import eos_token_ids_of, load_model_config, load_tokenizer
from verl.models.rope import row_limits
from verl.parallel.device import compute_dtype, resolve_device
from verl.tinker.records import RefusedRequest
from verl.tinker.worker import Bench, BenchFacts, check_service, open_bench

log = logging.getLogger(__name__)

IDLE_S = 30.0  # without a request of its tenant: it may leave for another tenant
RETRY_S = 5
GB = 10**9


@dataclass(eq=False)
class BaseModel:
    """A base model: its path and the names that clients may use, what a request is checked against, and how it is loaded.
    One that does not `train` only samples. `num_bytes` is what it takes in memory."""

    path: str
    names: list[str]
    facts: BenchFacts
    tokenizer: Tokenizer
    load: Callable[[], contextlib.AbstractContextManager[Bench]]
    num_bytes: int = 0
    trains: bool = True

    @property
    def tokenizer_place(self) -> str:
        """The place from which a client loads the tokenizer: the model's folder, or its name on a hub."""
        return os.path.abspath(self.path) if os.path.isdir(self.path) else self.path


@dataclass(frozen=True)
class BaseEntry:
    """A base model as the operator names it."""

    config: PPOConfig
    names: list[str] = field(default_factory=list)
    trains: bool = True


class Bases:
    """The base models; a folder belongs to the first. At most `most_bytes` are in memory.

    Requests are admitted on the event loop; `bench` loads on a thread that computes. `tenants_of` has the tenants whose
    requests wait for a base model, `on_leave` and `on_return` get one whose workers go, or have come. `num_samplers`
    processes only sample.
    """

    def __init__(self, bases: Sequence[BaseModel], most_bytes: float = math.inf, *, num_samplers: int = 0):
        self.bases, self.most_bytes, self.num_samplers = list(bases), most_bytes, num_samplers
        self.tenants_of: Callable[[BaseModel], set[str]] = lambda base: set()
        self.on_leave: Callable[[BaseModel, Bench], None] = lambda base, bench: None
        self.on_return: Callable[[BaseModel, Bench], None] = lambda base, bench: None
        self._lock, self._loading = threading.Lock(), threading.RLock()
        # with the last request of each tenant; the base model that was used least recently first
        self._promised: OrderedDict[BaseModel, dict[str, float]] = OrderedDict()
        self._open: dict[BaseModel, tuple[Bench, contextlib.ExitStack]] = {}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, entries: Sequence[BaseEntry], most_bytes: float = math.inf) -> Iterator[Bases]:
        """The base models of `entries`; a single one is loaded at once. Their processes end on leaving. Raises ConfigError if
        one does not fit."""
        bases = [described_base(entry) for entry in entries]
        for base in bases:
            if base.num_bytes > most_bytes:
                raise ConfigError(
                    f"{base.path} takes {_size(base.num_bytes)}, more than the {_size(most_bytes)} of memory=."
                )
        if len(entries) > 1 and any(entry.config.trainer.placement for entry in entries):
            raise ConfigError("Several base models share one process. Leave out trainer.placement.")
        opened = cls(bases, most_bytes)
        try:
            if len(bases) == 1:
                bench = opened.bench()
                opened.num_samplers = len(bench.samplers) if bench.is_apart else 0
            yield opened
        finally:
            opened.close()

    @property
    def names(self) -> list[str]:
        return [name for base in self.bases for name in base.names]

    def named(self, name: str | None) -> BaseModel:
        """The base model of a name. Raises RefusedRequest if it is not served."""
        for base in self.bases:
            if name in base.names:
                return base
        raise RefusedRequest(f"There is no base model {str(name)[:200]!r} here; there is {', '.join(self.names)}.")

    def loaded(self, base: BaseModel) -> Bench | None:
        """The workers of a base model that is in memory."""
        opened = self._open.get(base)
        return None if opened is None else opened[0]

    def require_fit(self, base: BaseModel, tenant: str) -> None:
        """Raise RefusedRequest (400) for a base model that does not fit with those that other tenants use."""
        with self._lock:
            self._leaving(base, tenant, self._used_by_others(tenant), 400)

    def admit(self, base: BaseModel, tenant: str, *, is_stored: bool = False) -> None:
        """Promise memory to a base model that a request of a tenant computes with. Raises RefusedRequest (429) while it does
        not fit with those in use, unless the request `is_stored` in the journal: it was admitted before a kill."""
        with self._lock:
            used = self._used_by_others(tenant) | {held for held in self._promised if self.tenants_of(held)}
            for held in [] if is_stored else self._leaving(base, tenant, used, 429):
                del self._promised[held]
            self._promised.setdefault(base, {})[tenant] = time.monotonic()
            self._promised.move_to_end(base)

    def _used_by_others(self, tenant: str) -> set[BaseModel]:
        """Base models that other tenants wait for, or used in the last IDLE_S seconds."""
        now = time.monotonic()
        return {
            held
            for held, times in self._promised.items()
            if self.tenants_of(held) - {tenant}
            or any(now - at <= IDLE_S for name, at in times.items() if name != tenant)
        }

    def _leaving(self, base: BaseModel, tenant: str, used: set[BaseModel], status: int) -> list[BaseModel]:
        """Base models that leave for `base`, none of them `used`. Raises RefusedRequest if it does not fit with those."""
        free = self.most_bytes - sum(held.num_bytes for held in self._promised)
        leaving, candidates = (
            list[BaseModel](),
            [held for held in self._promised if held not in used and held is not base],
        )
        while base not in self._promised and base.num_bytes > free and candidates:
            leaving.append(candidates.pop(0))
            free += leaving[-1].num_bytes
        if base not in self._promised and base.num_bytes > free:
            names = ", ".join(held.names[0] for held in self._promised if held not in leaving)
            raise RefusedRequest(
                f"The base model {base.names[0]} ({_size(base.num_bytes)}) does not fit with {names}, in use now: the "
                f"server has {_size(self.most_bytes)} for base models. Try again later.",
                status, RETRY_S if status == 429 else None,
            )  # fmt: skip
        return leaving

    def bench(self, base: BaseModel | None = None) -> Bench:
        """The workers of a base model (None: of the first), which is loaded. Call it on a thread that computes."""
        base = base or self.bases[0]
        if (loaded := self.loaded(base)) is not None:
            return loaded
        with self._loading:
            if base not in self._open:
                with self._lock:
                    self._promised.setdefault(base, {})
                    leaving = [other for other in self._open if other not in self._promised]
                for other in leaving:
                    self._leave(other)
                if len(self.bases) > 1:
                    log.info("Loading the base model %s.", base.names[0])
                stack = contextlib.ExitStack()
                bench = stack.enter_context(base.load())
                self._open[base] = (bench, stack)
                base.facts = bench.facts
                self.on_return(base, bench)
            return self._open[base][0]

    def _leave(self, base: BaseModel) -> None:
        log.info("The base model %s leaves memory for another one.", base.names[0])
        bench, stack = self._open[base]
        self.on_leave(base, bench)
        del self._open[base], bench
        stack.close()
        del stack
        gc.collect()

    def close(self) -> None:
        for _, stack in self._open.values():
            stack.close()
        self._open.clear()


def described_base(entry: BaseEntry) -> BaseModel:
    """The base model of an entry, from its files; no weights are read. Raises ModelError, and ConfigError for what a service
    cannot have."""
    config, sections = entry.config, entry.config.actor_rollout_ref
    check_service(config)
    path = sections.model.path
    names = list(dict.fromkeys([path, Path(path).name, *entry.names]))
    model = load_model_config(path, sections.model.trust_remote_code, sections.model.override_config).get_text_config()
    tokenizer = load_tokenizer(sections.model)
    longest = min([sections.rollout.max_model_len or 1 << 20, *(limit for limit, _ in row_limits(model))])
    facts = BenchFacts(
        int(model.vocab_size), longest, str(model.model_type), sections.model.lora_rank, sections.rollout.max_num_seqs,
        eos_token_ids_of(sections.model, tokenizer),
    )  # fmt: skip
    return BaseModel(path, names, facts, tokenizer, lambda: open_bench(config), _num_bytes(config, path), entry.trains)


def _size(num_bytes: float) -> str:
    """The bytes in the largest unit that gives a number from 1 on: "270 kB"."""
    units = (("GB", GB), ("MB", 10**6), ("kB", 1000), ("bytes", 1))
    return next(f"{num_bytes / size:.3g} {unit}" for unit, size in units if num_bytes >= size or size == 1)


def _num_bytes(config: PPOConfig, path: str) -> int:
    """Bytes of the weights in the dtype of computation; on a CPU twice, with the copy that the decoder reads."""
    device = resolve_device(config.trainer.device)
    sections = config.actor_rollout_ref
    copies = 2 if device.type == "cpu" and sections.rollout.prepack_weights else 1
    headers = read_headers(fetch(path, weights=True)).values()
    size = compute_dtype(sections.actor.fsdp_config.dtype, device).itemsize
    return copies * size * sum(math.prod(header.shape) for header in headers)
