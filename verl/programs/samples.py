"""The samples of a run: the tracker in every process, the ledger file on rank 0, and their part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl.checkpoint.files import FileRecord, record_of
from verl.parallel.serialize import record
from verl.programs.api import RunContext
from verl.tracking.files import sync_file
from verl.tracking.ledger.file import NAME, write_open
from verl.tracking.ledger.records import Offset, OpenSample, SegmentRecord, Snapshot
from verl.tracking.ledger.tracker import IN_CHECKPOINT, SampleTracker, start_ledger
from verl.tracking.ledger.writer import LedgerWriter

_TOKEN_BYTES = 16  # of an open sample in a checkpoint, with its log-prob

for _cls in (Offset, SegmentRecord, OpenSample, Snapshot):
    record(_cls)  # rank 0 broadcasts its snapshot


def start_samples(
    samples: SampleTracker, run: RunContext, checkpoint: Path | None, saved: Mapping[str, object] | None
) -> list[OpenSample]:
    """Samples and ledger of the run folder continue from what `checkpoint` recorded (`saved`), or start empty; may be called
    again to go back. Returns the samples that were open there. Raises CheckpointError as `start_ledger` does."""
    samples.close()
    path = run.folder / NAME
    snapshot = run.broadcast(start_ledger(path, checkpoint, saved) if run.is_rank_zero else None)
    assert snapshot is not None
    samples.start(snapshot, LedgerWriter(path) if run.is_rank_zero else None)
    return snapshot.waiting


def open_samples(samples: SampleTracker) -> dict[str, OpenSamplesWriter]:
    """The part of a checkpoint that holds the open samples: folder name -> its writer. Nothing on ranks other than 0, or when
    none are open."""
    return (
        {IN_CHECKPOINT.parent.name: OpenSamplesWriter(samples)}
        if samples.path is not None and samples.num_open()
        else {}
    )


class OpenSamplesWriter:
    """Writes the samples that are open at the end of the last step into a checkpoint, which can then be used without the run
    folder that it was saved in. The ledger must have been committed."""

    def __init__(self, samples: SampleTracker):
        self.samples = samples

    def num_bytes(self) -> int:
        """About the size of the file."""
        return _TOKEN_BYTES * self.samples.num_open_tokens()

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """See verl.checkpoint.store.CheckpointWriter."""
        folder.mkdir()
        target = folder / NAME
        assert self.samples.path is not None
        write_open(self.samples.path, target, self.samples.offset)
        sync_file(target)
        return {NAME: record_of(target)}
