"""Whatever is interrupted whenever: no sample is lost and none trains twice."""

import random
import tempfile
from collections import Counter
from concurrent.futures import wait
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tracking.sample_lives import LateWriter, issue, open_tracker, scored, segment
from verl.tracking.ledger.file import NAME, write_open
from verl.tracking.ledger.reader import Ledger
from verl.tracking.ledger.tracker import IN_CHECKPOINT

STEPS, PROMPTS, SAMPLES = 5, 2, 2
PARTS = 2  # of a response, where rollouts are partial


class Crash(Exception):
    pass


class Program:
    """The trainer's handling of its samples, over a folder: `ahead` batches are made before their turn, in parts."""

    def __init__(self, folder, ahead, save_every, order, crashes):
        self.path, self.ahead, self.save_every = folder / NAME, ahead, save_every
        self.order = order  # in which things of one step arrive
        self.crashes = list(crashes)  # after so many events each
        self.share = 1.0  # of the rows since the last flush that the next crash leaves
        self.tracker = None
        self.newest = (None, None)  # checkpoint and record: what survives a crash

    def event(self):
        if self.crashes:
            after, self.share = self.crashes[0]
            if after == 0:
                self.crashes.pop(0)
                raise Crash
            self.crashes[0] = (after - 1, self.share)

    def run(self):
        """Start, crash and start again, to the end."""
        while True:
            self.tracker, waiting = open_tracker(self.path, *self.newest, LateWriter)
            try:
                self.train(waiting)
            except Crash:
                self.die()
            else:
                self.tracker.close()
                return

    def die(self):
        """A killed process: what its thread has not written is gone."""
        writer = self.tracker._writer
        wait([self.tracker._digested])  # which passes its rows on in order
        writer.send(int(self.share * len(writer.calls)))
        self.tracker.close()

    def train(self, waiting):
        begun = {s.ordinal for s in waiting}
        for step in range(self.tracker.offset.step + 1, STEPS + 1):
            first = self.tracker.cursor
            batches = [range(o, o + PROMPTS) for o in range(first, first + PROMPTS * (self.ahead + 1), PROMPTS)]
            for batch in batches:
                if batch[0] not in begun:
                    self.event()
                    issue(self.tracker, step, batch, SAMPLES)
                    begun |= set(batch)
                self.generate(step, batch, 1)
            self.generate(step, batches[0], PARTS)
            self.score(step, batches[0])
            self.event()
            self.tracker.train(step, [key for key in keys(batches[0]) if sum(key) % 3])
            self.event()
            if step % self.save_every == 0:
                self.save(step)

    def generate(self, step, batch, num_parts):
        """Another part for what has fewer than `num_parts`, or fewer than its steps in the queue."""
        wait([self.tracker._digested])
        arriving = [key for key in keys(batch) if self.tracker.num_tokens(key) < 3 * num_parts]
        self.order.shuffle(arriving)
        for ordinal, sample in arriving:
            self.event()
            done = self.tracker.num_tokens((ordinal, sample))
            self.tracker.generate(step, [segment(ordinal, sample, version=step - 1, first=done, reason="length")])

    def score(self, step, batch):
        arriving = keys(batch)
        self.order.shuffle(arriving)
        for key in arriving:
            self.event()
            self.tracker.score(step, [scored(*key)])

    def save(self, step):
        record = self.tracker.commit()
        self.event()
        checkpoint = self.path.parent / f"global_step_{step}"
        (checkpoint / IN_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / IN_CHECKPOINT).unlink(missing_ok=True)
        write_open(self.path, checkpoint / IN_CHECKPOINT, self.tracker.offset)
        self.event()
        self.newest = (checkpoint, record)


def keys(batch):
    return [(ordinal, sample) for ordinal in batch for sample in range(SAMPLES)]


def what_became(folder):
    """(multiset of trained samples, steps with what trained in them)."""
    with Ledger.open(folder) as ledger:
        counts = ledger.counts()
        assert counts.twice == counts.evicted == 0
        assert ledger.offset().cursor == STEPS * PROMPTS
        ended = ledger._rows("SELECT ordinal, sample FROM samples WHERE fate IS NOT NULL")
        assert Counter(ended) == Counter(keys(range(STEPS * PROMPTS)))
        trained = [(s.step, s.ordinal, s.sample, s.token_versions.tolist(), s.digest) for s in ledger.trained()]
        return ledger.multiset_of_trained(), trained, ledger.offset()


@cache
def unbroken(ahead):
    with tempfile.TemporaryDirectory() as folder:
        Program(Path(folder), ahead, 1, random.Random(0), []).run()
        return what_became(folder)


@settings(max_examples=30, deadline=None)
@given(
    ahead=st.integers(0, 2),
    save_every=st.integers(1, 3),
    seed=st.integers(0, 99),
    crashes=st.lists(st.tuples(st.integers(0, 70), st.floats(0, 1)), max_size=4),
)
def test_any_crashes_anywhere_change_nothing(ahead, save_every, seed, crashes):
    with tempfile.TemporaryDirectory() as folder:
        Program(Path(folder), ahead, save_every, random.Random(seed), crashes).run()
        assert what_became(folder) == unbroken(ahead)
