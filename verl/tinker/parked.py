"""Models whose base model is not in memory: their adapters wait on the host, and their states are on the disk."""

import logging
from collections.abc import Mapping

from verl.errors import VerlError
from verl.tinker.adapters import Adapter
from verl.tinker.bases import BaseModel
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.journal import RequestJournal
from verl.tinker.records import RefusedRequest
from verl.tinker.served import ServedModel
from verl.tinker.worker import Bench

log = logging.getLogger(__name__)


class Parked:
    """Takes the adapters of `models` when their base model leaves, and gives them back. A model that a restart of the service
    has not loaded comes from its state on the disk."""

    def __init__(self, models: Mapping[str, ServedModel], checkpoints: Checkpoints, journal: RequestJournal):
        self._models, self._checkpoints, self._journal = models, checkpoints, journal
        self._adapters: dict[str, Adapter] = {}

    def take(self, base: BaseModel, bench: Bench) -> None:
        """Take the adapters of a base model that leaves, with their gradients."""
        for model in self._of(base):
            try:
                adapter = self._adapters[model.model_id] = bench.training.taken(model.model_id)
            except VerlError:  # it has ended meanwhile
                continue
            if model.is_between_steps and model.last_seq > model.state_seq:
                try:
                    self._checkpoints.save_state(model.model_id, model.last_seq, adapter)
                except Exception as error:  # noqa: BLE001  (a restart computes more again)
                    log.warning("The state of %s is not saved: %s", model.model_id, error)
                    continue
                model.state_seq, model.unsaved_s = model.last_seq, 0.0
                self._journal.cover(model.model_id, model.last_seq)

    def give(self, base: BaseModel, bench: Bench) -> None:
        """Give the adapters back to a base model that has come."""
        for model in self._of(base):
            adapter = self._adapters.pop(model.model_id, None)
            if adapter is None and model.state_seq >= 0:
                try:
                    adapter = self._checkpoints.load_state(model.model_id, model.state_seq)
                except (VerlError, RefusedRequest, OSError) as error:  # its own requests say so
                    log.warning("The state of %s is not read: %s", model.model_id, error)
            if adapter is not None:
                bench.training.put(model.model_id, adapter)

    def drop(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)

    def _of(self, base: BaseModel) -> list[ServedModel]:
        return [model for model in list(self._models.values()) if model.base is base and model.num_steps is not None]
