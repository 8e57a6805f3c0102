"""Log-probabilities of completions under the reference policy: computed in each step, or once and kept in the run folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from verl.checkpoint.files import record_of, remove_tree
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.data.preferences.dataset import PreferenceSequence
from verl.data_proto.media import media_of
from verl.data_proto.proto import DataProto
from verl.errors import DataError
from verl.roles.api import Broadcast, ModelHandle
from verl.roles.objectives.preference import row_sums

log = logging.getLogger(__name__)

FILE = "reference_log_probs.safetensors"


class ReferenceLogProbs:
    """log pi_ref(y) of sequences by the role `model`. After `keep` or `read` they are looked up by the sequences' digests, and
    the model may change."""

    def __init__(self, model: ModelHandle, ld_alpha: float | None):
        self.model, self.ld_alpha = model, ld_alpha
        self._kept: dict[bytes, float] | None = None
        self.digest: str | None = None  # of the kept file, on rank 0

    def of(self, batch: DataProto, sequences: Sequence[PreferenceSequence]) -> torch.Tensor:
        """Log-probs [batch] of the `sequences`, the rows of `batch`. Raises DataError for a sequence that was not kept."""
        if self._kept is None:
            return completion_log_probs(self.model, batch, self.ld_alpha)
        try:
            return torch.tensor([self._kept[name] for name in self._names(batch, sequences)], dtype=torch.float64)
        except KeyError:
            raise DataError(
                f"The data has rows that it did not have when the run began, so that their reference log-probabilities are not "
                f"in {FILE}. Train on the data of before, set ref.precompute=False, or start a new run."
            ) from None

    def keep(self, parts: Iterable[tuple[DataProto, Sequence[PreferenceSequence]]]) -> None:
        """Compute and keep the log-probs of all batches."""
        log_probs: dict[bytes, float] = {}
        for batch, sequences in parts:
            values = completion_log_probs(self.model, batch, self.ld_alpha)
            log_probs.update(zip(self._names(batch, sequences), values.tolist(), strict=True))
        self._kept = log_probs

    def write(self, folder: Path) -> None:
        """Write the kept log-probs into `folder`."""
        assert self._kept is not None
        names = np.frombuffer(b"".join(self._kept), dtype=np.uint8).reshape(len(self._kept), -1)
        tensors = {
            "digests": torch.from_numpy(names.copy()),
            "log_probs": torch.tensor(list(self._kept.values()), dtype=torch.float64),
        }
        temporary = folder / f"{FILE}.new"
        remove_tree(temporary)  # of a start that was killed
        self.digest = write_tensors(temporary, tensors).blake2b
        os.replace(temporary, folder / FILE)

    def read(self, folder: Path, expected_digest: str | None, is_rank_zero: bool, broadcast: Broadcast) -> None:
        """Read what `write` has written, with `expected_digest` (None: any); on rank 0, for all ranks. Raises DataError when
        it is not there or has changed."""
        arrays, file, state = None, folder / FILE, "gone"
        if is_rank_zero and file.is_file():
            self.digest, state = record_of(file).blake2b, "not the file that this run has written"
            if expected_digest in (None, self.digest):
                tensors = read_tensors(file)
                arrays = [tensors["digests"].numpy(), tensors["log_probs"].numpy()]
        arrays, state = broadcast((arrays, state))
        if arrays is None:
            raise DataError(
                f"{file} is {state}, and the policy has changed since then. Bring it back, set "
                "ref.precompute=False, or start a new run."
            )
        self._kept = {name.tobytes(): value for name, value in zip(arrays[0], arrays[1].tolist(), strict=True)}

    def _names(self, batch: DataProto, sequences: Sequence[PreferenceSequence]) -> list[bytes]:
        """A name for each sequence, a row of `batch`; with `ld_alpha` the value depends on the pair's other sequence too."""
        media = media_of(batch) or [None] * len(sequences)
        names = [sequence.digest(images) for sequence, images in zip(sequences, media, strict=True)]
        if self.ld_alpha is None:
            return names
        lengths = [int(sequence.completion.sum()) for sequence in sequences]
        shared = [min(lengths[i - i % 2 : i - i % 2 + 2]) for i in range(len(sequences))]
        return [name + length.to_bytes(4, "little") for name, length in zip(names, shared, strict=True)]


def completion_log_probs(model: ModelHandle, batch: DataProto, ld_alpha: float | None) -> torch.Tensor:
    """log pi(y) [batch] by `model` as it is now."""
    log_probs = model.forward(batch, {"log_probs": "log_probs"}).get().batch["log_probs"]
    return row_sums(log_probs, batch.batch, ld_alpha)
