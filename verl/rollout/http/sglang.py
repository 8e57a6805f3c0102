"""The rollout engine on SGLang: on a server of its own, or on a service; weights in buckets, or adapters by name."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from verl.config import RolloutConfig, full_key
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError, MissingExtraError, ModelError, UnreachableError, WorkerLostError
from verl.families import ROLLOUT_ENGINES
from verl.models.hf_module import HFModule
from verl.rollout.api import Weights
from verl.rollout.http.dialects import SGLang
from verl.rollout.http.engine import HTTPGeneration, HTTPRollout
from verl.rollout.http.server import NamedAdapters, SGLangServer, require_blocks

_MEMORY = ("kv_cache", "weights")  # of SGLang, by its names
_IDLE_S = 30  # for its server to end what was dropped

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SGLangRollout(HTTPRollout):
    """A service of SGLang (`rollout.name=sglang`), or without `service.url` a server that is started only for this engine.
    Raises the errors of SGLangServer and HTTPRollout, and WorkerLostError when that server dies."""

    facts = ROLLOUT_ENGINES.facts["sglang"]
    api = "sglang"

    @classmethod
    def require_package(cls, config: RolloutConfig, key: str = "rollout.name") -> None:
        """See RolloutEngine."""
        if config.service.url is None and importlib.util.find_spec("sglang") is None:
            fix = f"set {full_key('rollout.service.url')} to a server of SGLang that is running"
            raise MissingExtraError(f"{full_key(key)}=sglang", "sglang", "sglang", fix)
        if config.service.url is not None:
            super().require_package(config, key)

    @classmethod
    def require_model(cls, module: HFModule, config: RolloutConfig, device: torch.device) -> None:
        """See RolloutEngine."""
        if config.quantization is not None:
            require_blocks(module, config)

    def __post_init__(self) -> None:
        self.require_model(self.module, self.config, self.transfer.device)
        self.server: SGLangServer | None = None
        if self.config.service.url is None:
            self.server = SGLangServer(self.config, self.transfer, self.module)
            service = replace(self.config.service, url=self.server.url, weights_dir=self.server.weights_dir)
            self.config = replace(self.config, service=service)
        by_name = self.config.adapters_by_name
        self._adapters = NamedAdapters(self.transfer.model, self.module) if by_name else None
        try:
            super().__post_init__()
            if self.config.quantization is not None:
                self._require_buckets()
        except BaseException:
            self.close()
            raise
        self._asleep: set[str] = set()  # parts of the server's memory that are freed

    def _require_buckets(self) -> None:
        """For weights in fp8: the server has none yet, and only its receiver of buckets makes their scales."""
        self.discard()
        if self._buckets_problem:
            raise ModelError(
                f"SGLang's server cannot read the memory of this run, which {full_key('rollout.quantization')}=fp8 needs: "
                f"{self._buckets_problem}"
            )

    def open(self, params: SamplingParams, *, step: int, keep: bool = False) -> HTTPGeneration:
        self.require_whole()
        self._wake(*_MEMORY)
        return super().open(params, step=step, keep=keep)

    def load(self, weights: Weights) -> None:
        self._wake("weights")  # the KV cache would lie in memory that the update may need
        if self._adapters is None:
            return super().load(weights)
        root = self.config.service.weights_dir
        if root is None:
            raise ConfigError(
                f"Adapters for the service at {self.client.url} are files: set {full_key('rollout.service.weights_dir')} to a "
                "folder that this run can write and the service can read."
            )
        assert isinstance(self.dialect, SGLang)
        self._num_updates += 1
        folder = Path(root).expanduser() / f"adapter-{os.urandom(4).hex()}-{self._num_updates}"
        with self.updating(), self.watched():
            try:
                self._adapters.write(folder, weights)
                self.dialect.load_adapter(self.client, folder.name, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def weights_way(self) -> str | None:
        """See RolloutEngine."""
        return super().weights_way() if self._adapters is None else "adapters as files"

    def release(self) -> None:
        """See RolloutEngine. A server that was started here frees its memory of the GPU, unless it is still busy with
        samples that were dropped. Weights that no update replaces stay on the GPU."""
        if self.server is None or not self.server.frees_memory or self._asleep:
            return
        discards = self.syncs and self._adapters is None
        parts = _MEMORY if discards else ("kv_cache",)
        with self.watched():
            self.client.post("/abort_request", {"abort_all": True})
            try:
                self.client.command(f"/flush_cache?timeout={_IDLE_S}", {})  # refused until nothing runs
            except ModelError as error:
                log.warning("SGLang's server keeps its GPU memory during this training step: %s", error)
                return
            if discards:
                self.discard()
            self.client.post("/release_memory_occupation", {"tags": parts})
        self._asleep = set(parts)

    def _wake(self, *parts: str) -> None:
        if tags := sorted(self._asleep.intersection(parts)):
            with self.watched():
                self.client.post("/resume_memory_occupation", {"tags": tags})
            self._asleep.difference_update(tags)

    def close(self) -> None:
        """End the server, if it was started here."""
        super().close()
        if self.server is not None:
            self.server.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises WorkerLostError instead of UnreachableError when the server has ended."""
        try:
            yield
        except UnreachableError as error:
            ending = self.server.ending() if self.server is not None else ""
            if not ending or self.server is None:
                raise
            raise WorkerLostError(
                f"SGLang's server (pid {self.server.pid}) {ending}. Start the run again, which resumes from the last "
                "checkpoint."
            ) from error
