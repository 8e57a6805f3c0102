"""The sample ledger: its content, its refusals, its rewind, and faults of its file."""

import logging
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tracking.sample_lives import issue, open_tracker, record_of_a_step, scored, segment, take_step
from verl.cli.show import _samples
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion
from verl.data_proto.trajectory import Trajectory, to_columns
from verl.errors import CheckpointError, DeadlineError
from verl.foreign_text import valid_utf8
from verl.tracking.ledger import file as ledger_file
from verl.tracking.ledger import records
from verl.tracking.ledger import writer as ledger_writer
from verl.tracking.ledger.file import NAME, holds, write_open
from verl.tracking.ledger.reader import Ledger, read_counts
from verl.tracking.ledger.records import ENVIRONMENT, SampleDigest, Scored, SegmentRecord, content_digest, segments_of
from verl.tracking.ledger.tracker import IN_CHECKPOINT, SampleTracker
from verl.tracking.ledger.writer import LedgerWriter


def resume(path, record):
    return open_tracker(path, path.parent / "global_step_1", record)


def path_in(folder):
    folder.mkdir(exist_ok=True)
    return folder / NAME


@pytest.fixture
def path(tmp_path):
    return path_in(tmp_path / "run")


@pytest.fixture
def tracker(path):
    return open_tracker(path)[0]


def test_a_sample_reads_back_as_it_was(path, tracker):
    take_step(tracker, 1, [0, 1], left_out=[(1, 1)])
    take_step(tracker, 2, [2, 3], error="the scorer died")
    assert tracker.cursor == 4
    with Ledger.open(path.parent) as ledger:  # while the run continues
        assert ledger.path == path
    tracker.close()
    with Ledger.open(path) as ledger:
        assert [(s.ordinal, s.sample, s.step, s.uses) for s in ledger.trained(1)] == [
            (0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1),
        ]  # fmt: skip
        last = ledger.trained()[-1]
        record = segment(3, 1, version=1)
        assert (last.ordinal, last.sample, last.row, last.epoch, last.step) == (3, 1, 3, 0, 2)
        assert last.tokens.tolist() == record.tokens.tolist()
        assert np.array_equal(last.log_probs, record.log_probs)
        assert last.token_versions.tolist() == [1, 1, 1]
        assert (last.reward, last.parts, last.error) == (3.1, {"score": 1, "nan": None}, "the scorer died")
        counts = ledger.counts()
        assert (counts.steps, counts.trained, counts.dropped, counts.defaulted, counts.twice) == (2, 7, 1, 4, 0)
        assert ledger.multiset_of_trained()[3, 1, last.digest] == 1
        assert ledger.offset() == tracker.offset
    assert _samples(counts) == (
        "samples: 7 trained, 0 pending, 4 whose scorer failed, 0 trained twice, 1 removed by a filter"
    )


def test_rows_that_are_drawn_several_times_count_so_often(path, tracker):
    issue(tracker, 1, [0])
    tracker.generate(1, [segment(0, 0), segment(0, 1)])
    tracker.score(1, [scored(0, 0), scored(0, 1)])
    tracker.train(1, [(0, 1), (0, 1)])
    tracker.close()
    with Ledger.open(path) as ledger:
        assert list(ledger.multiset_of_trained().values()) == [2]
        assert ledger.counts().twice == 0


def test_pieces_of_a_response_keep_their_versions(path, tracker):
    issue(tracker, 1, [0], n=1)
    tracker.generate(1, [segment(0, 0, version=0, count=2, reason="length")])
    assert tracker.num_open_tokens() == 2
    tracker.generate(2, [segment(0, 0, version=1, first=2, count=1)])
    tracker.score(2, [scored(0, 0)])
    tracker.train(2, [(0, 0)])
    tracker.close()
    with Ledger.open(path) as ledger:
        (sample,) = ledger.trained(2)
    assert sample.tokens.tolist() == [0, 1, 2]
    assert sample.token_versions.tolist() == [0, 0, 1]
    assert sample.finish_reason == "stop"


def test_segments_that_refuse_writes_are_made_again_for_the_file(path, tracker):
    """As in Ray's store. Nothing of them waits in memory for the file."""
    calls = []

    def stored(num_tokens, piece):
        calls.append(num_tokens((0, 0)))
        piece.tokens.flags.writeable = piece.log_probs.flags.writeable = False
        return [piece]

    for _ in range(2):  # attempts
        issue(tracker, 1, [0], n=1)
    tracker.generate(1, partial(stored, piece=segment(0, 0, count=2, reason="length")))
    tracker.generate(2, partial(stored, piece=segment(0, 0, version=1, first=2, count=1)))
    tracker.score(2, [scored(0, 0)])
    tracker.train(2, [(0, 0)])
    tracker.close()
    assert sorted(calls) == [0, 0, 2, 2]
    with Ledger.open(path) as ledger:
        (sample,) = ledger.trained(2)
    assert (sample.tokens.tolist(), sample.token_versions.tolist()) == ([0, 1, 2], [0, 0, 1])


def test_the_digest_is_of_the_content_and_not_of_the_pieces():
    joined, parts, other = SampleDigest(), SampleDigest(), SampleDigest()
    joined.add(segment(1, 0, count=3))
    parts.add(segment(1, 0, count=1))
    parts.add(segment(1, 0, first=1, count=2))
    other.add(segment(1, 0, count=3, version=1))
    assert joined.content() == parts.content()
    contents = ((joined.content(), 0.5), (joined.content(), 0.25), (other.content(), 0.5))
    assert len({records.digest_with_reward(*content) for content in contents}) == 3


def test_samples_end_in_the_order_of_their_prompts():
    tracker = SampleTracker()  # writes nothing, as on ranks other than 0
    for ordinals in ([1], [0]):  # whatever arrives first
        issue(tracker, 1, ordinals)
        tracker.generate(1, [segment(ordinals[0], s) for s in (1, 0)])
    tracker.score(1, [scored(o, s) for o in (1, 0) for s in (0, 1)])
    tracker.train(1, [(1, 0), (0, 1)])
    same = SampleTracker()
    take_step(same, 1, [0, 1], left_out=[(0, 0), (1, 1)])
    # versions of the segments are alike, so the digests of what trained are
    assert tracker.offset == same.offset
    assert tracker.commit() == {"run": "", "step": 1, "cursor": 2, "num_trained": 2, "digest": same.offset.digest}


def test_nothing_is_lost_or_trains_twice_unseen():
    tracker = SampleTracker()
    take_step(tracker, 1, [0, 1])
    with pytest.raises(CheckpointError, match="Prompt 1 would train a second time in step 2"):
        issue(tracker, 2, [1])
    issue(tracker, 2, [2, 3])
    tracker.generate(2, [segment(3, s) for s in (0, 1)])
    tracker.score(2, [scored(3, s) for s in (0, 1)])
    with pytest.raises(CheckpointError, match="Step 2 skipped prompt 2, which would be lost"):
        tracker.train(2, [(3, 0)])
    with pytest.raises(CheckpointError, match="Sample 0 of prompt 0 was scored, and it is not open"):
        tracker.score(2, [scored(0, 0)])
    tracker.generate(2, [segment(2, s) for s in (0, 1)])
    tracker.score(2, [scored(2, s) for s in (0, 1)])
    with pytest.raises(CheckpointError, match="Sample 5 of prompt 2 trained in step 2"):
        tracker.train(2, [(2, 5)])
    tracker.generate(2, [segment(2, 0)])  # it had ended
    with pytest.raises(CheckpointError, match="Sample 0 of prompt 2 was generated, and it is not open"):
        tracker.num_open_tokens()


def test_what_is_sampled_anew_is_another_attempt(path, tracker):
    issue(tracker, 1, [0], n=3)
    tracker.generate(1, [segment(0, s) for s in range(3)])
    take_step(tracker, 2, [0], n=2)
    tracker.close()
    with Ledger.open(path) as ledger:
        counts = ledger.counts()
        assert (counts.trained, counts.evicted, counts.pending) == (2, 3, 0)
        assert {s.token_versions[0] for s in ledger.trained()} == {1}


def test_after_a_crash_what_came_later_has_not_happened(path, tracker):
    """The queue's samples of steps before the checkpoint are there again, without the segments that were added later."""
    issue(tracker, 1, [2], n=1)
    tracker.generate(1, [segment(2, 0, count=2, reason="length")])
    take_step(tracker, 1, [0])
    record = tracker.commit()
    tracker.generate(2, [segment(2, 0, first=2, version=1)])
    take_step(tracker, 2, [1])
    issue(tracker, 3, [3])
    tracker.close()
    again, waiting = resume(path, record)
    rows = np.array([0, 1, 2, 70])
    assert (again.lengths.of(rows).tolist(), tracker.lengths.of(rows).tolist()) == ([3, 0, 0, 0], [3, 3, 0, 0])
    assert (again.cursor, again.num_open()) == (1, 1)
    assert [(s.ordinal, s.step, s.split, s.limit) for s in waiting] == [(2, 1, "train", 8)]
    assert [p.tokens.tolist() for p in waiting[0].segments] == [[200, 201]]
    again.generate(2, [segment(2, 0, first=2, version=1)])
    take_step(again, 2, [1])
    assert again.offset == tracker.offset
    assert (again.lengths.of(rows) == tracker.lengths.of(rows)).all()
    again.close()
    with Ledger.open(path) as ledger:
        assert len(ledger.trained()) == 4
        assert ledger.pending() == [(2, 0)]
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE lengths")  # as in earlier files
    older, _ = resume(path, record)
    take_step(older, 2, [1])
    assert older.lengths.of(rows).tolist() == [0, 3, 0, 0]
    older.close()


def test_a_record_that_the_ledger_contradicts_is_refused(path):
    record = record_of_a_step(path)
    checkpoint = path.parent / "global_step_1"
    with pytest.raises(CheckpointError, match=r"does not agree with the checkpoint .*global_step_1.*Move it"):
        open_tracker(path, checkpoint, {**record, "digest": "0" * 32})
    with pytest.raises(CheckpointError, match="does not agree"):
        open_tracker(path, checkpoint, {**record, "step": 4})
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM samples WHERE sample = 1")
    with pytest.raises(CheckpointError, match="does not agree"):
        open_tracker(path, checkpoint, record)
    with pytest.raises(CheckpointError, match="saved by an earlier version"):
        open_tracker(path, checkpoint, None)


def test_a_lost_ledger_costs_only_the_history(path, tracker, caplog):
    issue(tracker, 1, [1], n=1)
    tracker.generate(1, [segment(1, 0)])
    take_step(tracker, 1, [0])
    record, checkpoint = tracker.commit(), path.parent / "global_step_1"
    (checkpoint / IN_CHECKPOINT).parent.mkdir(parents=True)
    write_open(path, checkpoint / IN_CHECKPOINT, tracker.offset)
    content = (checkpoint / IN_CHECKPOINT).read_bytes()
    tracker.close()
    path.unlink()
    again, waiting = open_tracker(path, checkpoint, record)
    assert "history of the samples up to step 1 is lost" in caplog.text
    assert (again.cursor, [s.ordinal for s in waiting]) == (1, [1])
    again.score(2, [scored(1, 0)])
    again.train(2, [(1, 0)])
    again.close()
    with Ledger.open(path) as ledger:
        assert (ledger.counts().trained, ledger.counts().before) == (1, 2)
    assert (checkpoint / IN_CHECKPOINT).read_bytes() == content  # a checkpoint is never changed
    path.unlink()
    (checkpoint / IN_CHECKPOINT).unlink()
    bare, waiting = open_tracker(path, checkpoint, record)
    assert (bare.cursor, waiting) == (1, [])
    bare.close()


def test_a_checkpoint_of_another_folder_brings_its_history(path, tracker, tmp_path, caplog):
    take_step(tracker, 1, [0])
    record = tracker.commit()
    take_step(tracker, 2, [1])
    tracker.close()
    other = path_in(tmp_path / "other")
    theirs, _ = open_tracker(other)
    take_step(theirs, 1, [0], n=1)
    theirs.close()
    again, _ = open_tracker(other, path.parent / "global_step_1", record)
    assert "lost" not in caplog.text
    assert again.cursor == 1
    again.close()
    with Ledger.open(other) as ledger:
        assert len(ledger.trained()) == 2
    with Ledger.open(path) as ledger:
        assert ledger.counts().trained == 4  # as it was
    (aside,) = other.parent.glob(f"superseded_*_{NAME}")
    with Ledger.open(aside) as ledger:
        assert ledger.counts().trained == 1


@pytest.mark.parametrize("content", [b"", b"not a database" * 500])
def test_a_damaged_ledger_is_said_with_what_to_do(path, content):
    record = record_of_a_step(path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ledger\.sqlite is damaged \(.*Move it to another place"):
        resume(path, record)
    assert read_counts(path.parent) is None


def test_a_changed_byte_is_an_error(path, tracker):
    issue(tracker, 1, [1], n=1)
    tracker.generate(1, [segment(1, 0, count=7)])
    take_step(tracker, 1, [0])
    record = tracker.commit()
    tracker.close()
    content = path.read_bytes()
    tokens = segment(1, 0, count=7).tokens.tobytes()
    assert content.count(tokens) == 1
    path.write_bytes(content.replace(tokens, tokens[:5] + b"\1" + tokens[6:]))
    with pytest.raises(CheckpointError, match="sample 0 of prompt 1 does not have the content that was written"):
        resume(path, record)


def test_a_full_disk_reaches_the_run(path, monkeypatch):
    def small(where, connect=ledger_file.connect):
        db = connect(where)
        if threading.current_thread().name == "ledger":
            db.execute("PRAGMA max_page_count=1")
        return db

    monkeypatch.setattr(ledger_writer, "connect", small)
    tracker, _ = open_tracker(path)

    def many_steps():
        for step in range(1, 100):
            take_step(tracker, step, [step - 1], n=8)
            tracker.commit()

    with pytest.raises(CheckpointError, match=r"cannot be used: database or disk is full\. Free some space"):
        many_steps()
    tracker.close()  # one warning


def test_a_disk_that_hangs_ends_with_the_deadline(path, monkeypatch):
    tracker, _ = open_tracker(path)
    tracker.close()
    held = threading.Event()

    def hanging(where, connect=ledger_file.connect):
        held.wait(120)
        return connect(where)

    monkeypatch.setattr(ledger_writer, "connect", hanging)
    monkeypatch.setattr(ledger_writer, "_POLL_S", 0.02)
    writer = LedgerWriter(path, max_queued=1, deadline_s=0.1)
    with pytest.raises(DeadlineError, match=r"ledger\.sqlite was not synced within 0\.1 s"):
        writer.flush()
    with pytest.raises(DeadlineError, match=r"accepted no rows within 0\.1 s"):
        writer.write("skip", [(1, 0, 0)])
    held.set()
    writer._deadline_s = 30.0  # a busy machine needs more than a disk that answers
    writer.close()


@pytest.mark.parametrize("locks", [True, False])
def test_folders_without_shared_memory_or_locks_have_another_journal(path, monkeypatch, around, locks, caplog):
    def connect(original, where, journal, options=""):
        if not locks and not options:
            raise sqlite3.OperationalError("locking protocol")
        return original(where, journal, options)

    monkeypatch.setattr(ledger_file, "is_network_folder", lambda folder: locks)
    around(ledger_file, "_connect", connect)
    with caplog.at_level(logging.INFO, "verl"):
        tracker, _ = open_tracker(path)
    take_step(tracker, 1, [0])
    record = tracker.commit()
    assert not list(path.parent.glob("*-wal"))
    assert "no shared memory" in caplog.text
    tracker.close()
    again, _ = resume(path, record)
    assert again.cursor == 1
    again.close()


def test_skipped_prompts_stay_skipped(path, tracker):
    issue(tracker, 1, [1, 2, 3])
    take_step(tracker, 1, [0])
    record = tracker.commit()
    tracker.close()
    again, _ = resume(path, record)
    again.skip_prompts(2, 3)
    assert (again.cursor, again.num_open()) == (3, 2)
    take_step(again, 2, [3])
    record = again.commit()
    assert record["cursor"] == again.cursor == 4
    again.close()
    more, _ = open_tracker(path, path.parent / "global_step_2", record)
    assert more.cursor == 4
    more.close()


def test_there_is_nothing_to_read_where_no_run_was(tmp_path):
    with pytest.raises(CheckpointError, match="There is no sample ledger"):
        Ledger.open(tmp_path)
    assert read_counts(tmp_path) is None


def test_counts_continue_and_a_newer_format_is_refused(path, tracker):
    issue(tracker, 1, [1], n=1)
    take_step(tracker, 1, [0], left_out=[(0, 1)], error="the scorer died")
    take_step(tracker, 2, [1], n=3)
    record = tracker.commit()
    tracker.close()
    with Ledger.open(path) as ledger:
        counts = ledger.counts()
        assert (counts.trained, counts.dropped, counts.evicted, counts.defaulted) == (4, 1, 1, 2)
    again, _ = resume(path, record)
    take_step(again, 3, [2], left_out=[(2, 0)])
    again.close()
    with Ledger.open(path) as ledger:
        assert ledger.counts() == replace(counts, steps=3, trained=5, dropped=2)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE about SET value = '4' WHERE name = 'format'")
        db.commit()
    with pytest.raises(CheckpointError, match="has format 4; this version reads formats up to 3"):
        resume(path, record)


def test_a_resume_compares_the_newest_samples(path, tracker):
    for step in range(1, 6):
        take_step(tracker, step, [step - 1])
    offset = tracker.offset
    tracker.close()
    for changed, num_verified, agrees in ((1, 10, False), (1, 4, True), (4, 4, False), (5, 1, False)):
        with closing(sqlite3.connect(path)) as db:
            (digest,) = db.execute("SELECT digest FROM samples WHERE ended_step = ?", (changed,)).fetchone()
            db.execute("UPDATE samples SET digest = 'other' WHERE ended_step = ? AND sample = 0", (changed,))
            db.commit()
            assert holds(path, offset, num_verified) == agrees
            db.execute("UPDATE samples SET digest = ? WHERE ended_step = ? AND sample = 0", (digest, changed))
            db.commit()
    assert holds(path, offset)


def test_the_cost_of_a_resume_does_not_grow_with_the_history(path, monkeypatch, around):
    """Counts, rewind and checkpoint reach all rows of samples and segments by an index."""
    tracker, _ = open_tracker(path)
    take_step(tracker, 1, [0, 1])
    issue(tracker, 1, [2])
    record, statements = tracker.commit(), []
    tracker.close()

    def traced(connect, *args):
        db = connect(*args)
        db.set_trace_callback(statements.append)
        return db

    around(ledger_file, "_open", traced)
    again, _ = resume(path, record)
    take_step(again, 2, [2])
    again.close()
    write_open(path, path.with_name("saved"), again.offset)
    with Ledger.open(path) as ledger:
        ledger.counts()
    monkeypatch.undo()
    with closing(sqlite3.connect(path)) as db:
        db.execute("ATTACH ? AS whole", (str(path),))
        db.create_function("content_digest", 2, content_digest)
        queries = {s for s in statements if s.startswith(("SELECT", "DELETE", "UPDATE", "INSERT"))}
        plans = {query: [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")] for query in queries}
    del plans[next(query for query in plans if query.startswith("INSERT INTO segments SELECT"))]  # of the new file
    scans = {
        q: p for q, p in plans.items() if any(re.match(r"SCAN (p|s|samples|segments|again)\b", step) for step in p)
    }
    assert len(plans) > 20
    assert not scans


def test_tokens_of_the_environment_have_no_log_probs(path, tracker):
    take_step(tracker, 1, [0])
    record = tracker.commit()
    issue(tracker, 1, [1], n=1)
    reply = SegmentRecord(1, 0, np.array([7, 8], dtype="<i4"), None, 0, "", 0, ENVIRONMENT)
    tracker.generate(1, [segment(1, 0, count=1), reply])
    tracker.close()
    again, waiting = resume(path, record)
    assert [(s.source, s.log_probs is None) for s in waiting[0].segments] == [("policy", False), ("environment", True)]
    again.score(2, [scored(1, 0)])
    again.train(2, [(1, 0)])
    again.close()
    with Ledger.open(path) as ledger:
        (sample,) = ledger.trained(2)
    assert sample.tokens.tolist() == [100, 7, 8]
    assert np.isnan(sample.log_probs).tolist() == [False, True, True]


def test_segments_keep_their_source_and_skip_known_tokens():
    """A response with a tool's answer in it, and its first turn in the ledger."""
    first = Completion(4, 1, [10, 11], [-0.5, -1.0], "stop", 2)
    trajectory = Trajectory(4, 1, (1, 2)).extended(first).answered((20, 21), 2)
    trajectory = trajectory.extended(Completion(4, 1, [12], [-2.0], "stop", 3))
    columns = to_columns([trajectory], pad_token_id=0, prompt_width=3, response_width=8)
    columns["rollout_rank"] = torch.tensor([6])
    rows = DataProto.from_dict(columns, {"finish_reason": np.array(["stop"], dtype=object)})
    answer, last = segments_of(np.array([4]), rows, lambda key: {(4, 1): 2}[key])
    assert (answer.tokens.tolist(), answer.log_probs, answer.source) == ([20, 21], None, ENVIRONMENT)
    assert (last.tokens.tolist(), last.log_probs.tolist(), last.version, last.rank) == ([12], [-2.0], 3, 6)


@settings(max_examples=15, deadline=None)
@given(text=st.text(st.characters(categories=None, exclude_categories=()), max_size=20))
@example(text="\ud800")
@example(text="\x1b[31m\0\n")
def test_any_text_of_a_reward_can_be_recorded(text):
    with tempfile.TemporaryDirectory() as folder:
        tracker, _ = open_tracker(Path(folder) / NAME)
        issue(tracker, 1, [0], n=1)
        tracker.generate(1, [segment(0, 0, reason=text)])
        tracker.score(1, [Scored(0, 0, 1.0, {text: text, "nested": {"deep": [text]}}, text)])
        tracker.train(1, [(0, 0)])
        record = tracker.commit()
        tracker.close()
        again, _ = open_tracker(Path(folder) / NAME, Path(folder) / "global_step_1", record)
        again.close()
        with Ledger.open(folder) as ledger:
            (sample,) = ledger.trained()
        assert sample.error == valid_utf8(text)
        assert sample.finish_reason == valid_utf8(text)
        assert "nested" in sample.parts


def test_a_history_with_text_that_is_not_utf8_stays(path, tracker):
    take_step(tracker, 1, [0, 1], error="the scorer died")
    record = tracker.commit()
    tracker.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE samples SET error = CAST(X'61EDA080' AS TEXT) WHERE ordinal = 0")
        db.commit()
    again, _ = resume(path, record)
    take_step(again, 2, [2])
    again.close()
    with Ledger.open(path) as ledger:
        assert ledger.counts().trained == 6
        assert ledger.trained(1)[0].error.startswith("a\ufffd")


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER t AFTER INSERT ON steps BEGIN DELETE FROM samples; END",
        "CREATE VIEW v AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "DROP TABLE skipped; CREATE VIEW skipped AS SELECT 1 AS step, 1 AS first_ordinal, 1 AS next_ordinal",
        "CREATE INDEX i ON segments (length(printf('%.*c', 4000, tokens)))",
        "CREATE TABLE more (x)",
        "ALTER TABLE samples ADD COLUMN more",
        "DROP TABLE segments",
        "UPDATE about SET value = '[' WHERE name = 'base'",
        "UPDATE about SET value = 'two' WHERE name = 'format'",
    ],
)
def test_a_ledger_with_other_tables_is_refused(path, change):
    record = record_of_a_step(path)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    with pytest.raises(CheckpointError, match=r"ledger\.sqlite is damaged \("):
        resume(path, record)


@pytest.mark.parametrize("part", ["", "-wal", "-journal"])
def test_a_pipe_in_the_place_of_a_ledger_is_said(path, part):
    record = record_of_a_step(path)
    file = path.with_name(path.name + part)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=f"{file.name} is not a regular file"):
        resume(path, record)


def change(path, statement):
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()


def test_a_changed_history_is_an_error(path):
    """A reward changes the digest of its sample; a digest, uses, order or a later step the digest of the run."""
    record = record_of_a_step(path, [0, 1])
    change(path, "UPDATE samples SET reward = 0.25 WHERE ordinal = 1 AND sample = 1")
    with Ledger.open(path) as ledger, pytest.raises(CheckpointError, match="sample 1 of prompt 1 does not have"):
        ledger.trained()
    for column, value in (("issued_step", 9), ("scored_step", 9), ("scored_step", "NULL")):
        changed = f"UPDATE samples SET {column} = {value} WHERE ordinal = 1 AND sample = 1"
        change(path, changed)
        with pytest.raises(CheckpointError, match="does not agree"):
            resume(path, record)
        change(path, changed.replace(f"= {value} ", "= 1 "))
    change(path, "UPDATE samples SET uses = 2 WHERE ordinal = 1")
    with pytest.raises(CheckpointError, match="does not agree"):
        resume(path, record)


@pytest.mark.parametrize("ended", ["NULL", "-1", "0.5"])
def test_samples_that_trained_in_no_step_are_listed(path, tracker, ended):
    """Samples of a step after the checkpoint, which rewinding would not find."""
    take_step(tracker, 1, [0, 1])
    record = tracker.commit()
    take_step(tracker, 2, [2, 3])
    tracker.close()
    change(path, f"UPDATE samples SET ended_step = {ended} WHERE ordinal = 2")
    with pytest.raises(CheckpointError, match="does not agree"):
        resume(path, record)


def test_a_link_in_the_place_of_a_ledger_is_refused(path):
    record = record_of_a_step(path, [0, 1])
    path.symlink_to(path.rename(path.with_name("other")))
    with pytest.raises(CheckpointError, match="is a link to .*other, which the run would change"):
        resume(path, record)


def test_open_samples_must_match_the_checkpoint(path, tracker):
    issue(tracker, 1, [1], n=1)
    tracker.generate(1, [segment(1, 0)])
    take_step(tracker, 1, [0])
    record, saved = tracker.commit(), path.parent / "global_step_1" / IN_CHECKPOINT
    saved.parent.mkdir(parents=True)
    write_open(path, saved, tracker.offset)
    tracker.close()
    again, waiting = open_tracker(path, saved.parents[1], record)
    assert len(waiting) == 1
    again.close()
    change(path, "UPDATE samples SET token_limit = 9 WHERE ended_step IS NULL")
    with pytest.raises(CheckpointError, match="does not agree"):
        open_tracker(path, saved.parents[1], record)


def test_a_ledger_is_copied_after_its_folder_is_gone(path, tracker, tmp_path):
    take_step(tracker, 1, [0])
    tracker.commit()
    shutil.rmtree(path.parent)
    take_step(tracker, 2, [1])
    rescued = path_in(tmp_path / "rescued")
    tracker.move_to(rescued)
    record = tracker.commit()
    tracker.close()
    again, _ = open_tracker(rescued, rescued.parent / "global_step_2", record)
    assert again.cursor == 2
    again.close()
    with Ledger.open(rescued) as ledger:
        assert ledger.counts().trained == 4
