"""Samples with made-up tokens, recorded by a tracker as in a run."""

import numpy as np

from verl.tracking.ledger.records import Prompt, Scored, SegmentRecord
from verl.tracking.ledger.tracker import SampleTracker, start_ledger
from verl.tracking.ledger.writer import LedgerWriter

LIMIT = 8


def prompts(ordinals):
    return [Prompt(ordinal, 0, ordinal, f"{ordinal:016x}") for ordinal in ordinals]


def segment(ordinal, sample, version=0, first=0, count=3, reason="stop"):
    """Tokens that follow from their place and from the version that made them."""
    tokens = np.array([100 * ordinal + 10 * sample + first + i for i in range(count)], dtype="<i4")
    return SegmentRecord(ordinal, sample, tokens, (-tokens / 1000 - version).astype("<f4"), version, reason, 0)


def scored(ordinal, sample, error=None):
    return Scored(ordinal, sample, ordinal + sample / 10, {"score": sample, "nan": float("nan")}, error)


def issue(tracker, step, ordinals, n=2):
    tracker.issue(step, prompts(ordinals), num_samples=n, split="train", limit=LIMIT)


def take_step(tracker, step, ordinals, n=2, left_out=(), error=None):
    """Issue, generate, score and train `n` samples of each prompt."""
    keys = [(ordinal, sample) for ordinal in ordinals for sample in range(n)]
    issue(tracker, step, ordinals, n)
    tracker.generate(step, [segment(*key, version=step - 1) for key in keys])
    tracker.score(step, [scored(*key, error) for key in keys])
    tracker.train(step, [key for key in keys if key not in left_out])


def open_tracker(path, checkpoint=None, record=None, writer=LedgerWriter):
    """(tracker that writes the ledger `path`, samples that wait)."""
    snapshot = start_ledger(path, checkpoint, record)
    tracker = SampleTracker()
    tracker.start(snapshot, writer(path))
    return tracker, snapshot.waiting


class LateWriter(LedgerWriter):
    """Writes nothing before it must, so that a crash loses as much as it may."""

    def __init__(self, path):
        super().__init__(path)
        self.calls = []

    def write(self, statement, rows):
        self.calls.append((statement, list(rows)))

    def send(self, count=None):
        """The first `count` calls; the others are lost."""
        for call in self.calls[:count]:
            super().write(*call)
        self.calls.clear()

    def flush(self):
        self.send()
        super().flush()

    def close(self):
        self.send()
        super().close()


def record_of_a_step(path, ordinals=(0,)):
    """The record of the checkpoint after a step of these prompts; the ledger is closed."""
    tracker, _ = open_tracker(path)
    take_step(tracker, 1, list(ordinals))
    record = tracker.commit()
    tracker.close()
    return record
