"""Rows examined in batches, by several processes and from the cache: the same lengths, rows and errors as row by row."""

import json
import mmap
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import hostile_templates
from tests.data.mutations import mutated
from tests.data.rows import config, row, write
from tests.slow import slow
from verl.config import DataConfig
from verl.config.roots.reward_model import RMDataConfig
from verl.config.sections.data import PreferenceDataConfig, SFTDataConfig
from verl.data import row_cache, scan, tables
from verl.data.conversations.dataset import ConversationDataset, read_into
from verl.data.dataset import PromptRows, RLHFDataset, load_dataset
from verl.data.files import read_rows, write_parquet
from verl.data.loader import PromptLoader
from verl.data.messages import prompt_messages
from verl.data.order import PromptOrder
from verl.data.preferences.dataset import PreferenceDataset
from verl.data.preferences.scored import StepDataset
from verl.data.prompts import PromptEncoder
from verl.data.scan import ScanPart, scan_rows
from verl.data.schema import at
from verl.data.template_checks import TemplateChecks
from verl.errors import DataError, UnavailableRowError
from verl.models.tiny import make_tokenizer
from verl.page.index import index_folder

SIZE = 4  # of a batch
NOTHING_LEFT = "All prompts are too long."
pytestmark = pytest.mark.usefixtures("small_batches")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("VERL_DATA_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def small_batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BATCH", SIZE)
        patch.setattr(scan, "NUM_AT_ONCE", 2 * SIZE)
        yield


def some_rows(rng, count=7, share=0.4):
    """Rows that a JSON file can hold, a share of them mutated."""
    rows = []
    while len(rows) < count:
        changed = mutated(rng)[1] if rng.random() < share else row(len(rows), prompt="word " * rng.randrange(1, 30))
        try:
            rows.append(json.loads(json.dumps(changed).encode()))
        except (TypeError, ValueError):
            continue
    return rows


def written(rng, folder, rows):
    if rng.random() < 0.4:
        try:
            write_parquet(folder / "a.parquet", rows)
            return str(folder / "a.parquet")
        except (DataError, TypeError, ValueError):
            pass  # parquet cannot hold these rows
    return write(folder / "a.jsonl", rows)


def prompts_of(rows):
    for number in range(len(rows)):
        with at(rows.place(number)):
            messages = prompt_messages(rows[number], DataConfig())
        yield (text if isinstance(text := rows[number]["prompt"], str) else messages), rows.place(number)


def row_by_row(path, tokenizer, settings):
    """The rows that train, or the error of a run that reads them one by one, first all fields and then all prompts."""
    try:
        dataset = RLHFDataset(path, tokenizer, replace(settings, filter_overlong_prompts=False))
        encoder, checks = PromptEncoder(tokenizer, settings), TemplateChecks(tokenizer)
        if settings.filter_overlong_prompts:
            lengths = [len(encoder.encode_whole(*prompt).ids) for prompt in prompts_of(dataset.dataframe)]
            short = [number for number, length in enumerate(lengths) if length <= settings.max_prompt_length]
            if not short:
                return NOTHING_LEFT
            dataset.dataframe = dataset.dataframe.select(short)
        rows, missing = PromptRows(dataset, settings), {}
        for number in range(len(rows)):
            try:
                rows[number]
            except UnavailableRowError as error:
                missing.setdefault(error.feature, []).append(rows.place(number))
        if missing:
            parts = [f"{len(x)} of {len(rows)} rows, the first {x[0]}: {feature}" for feature, x in missing.items()]
            raise DataError(" ".join(parts))
        for number in range(len(rows)):
            prompt, place = rows.prompt(rows[number]), rows.place(number)
            if settings.truncation == "error" and not settings.filter_overlong_prompts:
                encoder.encode(prompt, place)
            checks.check_prompt(prompt, place, encoder.template_kwargs)
        return [encoder.encode(rows.prompt(rows[number]), "") for number in range(len(rows))]
    except DataError as error:
        return str(error)


def loaded(path, tokenizer, settings):
    try:
        rows = load_dataset(path, tokenizer, settings)
    except DataError as error:
        return NOTHING_LEFT if str(error).startswith("All 7 prompts of") else str(error)
    encoder = PromptEncoder(tokenizer, settings)
    return [encoder.encode(rows.prompt(rows[number]), "") for number in range(len(rows))]


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_batches_have_the_rows_lengths_and_errors_of_single_rows(tmp_path_factory, seed):
    rng, folder, tokenizer = random.Random(seed), tmp_path_factory.mktemp("rows"), make_tokenizer()
    if rng.random() < 0.4:
        text = hostile_templates.template(rng)[1]
        if not any(word in text for word in ("random", "lipsum", "10**9")):  # others each time, or without an end
            tokenizer.chat_template = text
    path = written(rng, folder, some_rows(rng))
    modes = [{}, {"truncation": "left"}, {"filter_overlong_prompts": True}]
    settings = config(max_prompt_length=rng.choice([100, 400]), check="all", **rng.choice(modes))
    expected = row_by_row(path, tokenizer, settings)
    assert loaded(path, tokenizer, settings) == expected


def test_one_row_at_a_time_and_batches_agree_in_detail(tmp_path):
    rng, tokenizer = random.Random(3), make_tokenizer()
    outcomes = {"row": 0, "error": 0}
    for _ in range(40):
        path = written(rng, tmp_path, some_rows(rng, 9, share=0.2))
        try:
            rows = PromptRows(RLHFDataset(path, tokenizer, config()), config())
        except DataError:
            continue
        for number, outcome in enumerate(rows.batch(range(len(rows)))):
            try:
                single = rows[number]
            except DataError as error:
                single = error
            assert repr(outcome) == repr(single)
            outcomes["error" if isinstance(single, DataError) else "row"] += 1
    assert min(outcomes.values()) > 20, outcomes


def take_for_a_minute(loader):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        loader.take(0, 1)
        time.sleep(0.01)


class TestProcesses:
    def path(self, folder, count=40, **changes):
        bad = {int(name[1:]): change for name, change in changes.items()}
        return write(folder / "a.jsonl", [row(i, **bad.get(i, {})) for i in range(count)])

    def test_forked_processes_find_what_one_process_finds(self, tmp_path, monkeypatch):
        tokenizer, all_rows = make_tokenizer(), config(check="all")
        long, wrong, media = {"prompt": "x" * 100}, {"reward_model": ...}, {"images": ["a.png"]}
        for bad in (
            {"r30": long, "r35": long},
            {"r9": long, "r30": wrong, "r37": wrong},
            {"r9": long, "r12": media, "r39": media},
            {},
        ):
            path = self.path(tmp_path, **bad)
            several = loaded(path, tokenizer, all_rows)
            with monkeypatch.context() as patch:
                patch.setattr(scan, "NUM_AT_ONCE", 1000)
                assert loaded(path, tokenizer, all_rows) == several
            assert isinstance(several, str) == bool(bad)

    def test_a_filter_has_all_lengths_before_the_run(self, tmp_path):
        path = self.path(tmp_path, r3={"prompt": "x" * 100}, r38={"prompt": "x" * 100})
        rows = load_dataset(path, make_tokenizer(), config(filter_overlong_prompts=True))
        assert len(rows) == 38
        assert [rows[i]["extra_info"]["index"] for i in (3, 36, 37)] == [4, 37, 39]

    def test_a_bad_row_behind_the_first_stops_the_run_while_it_trains(self, tmp_path):
        tokenizer = make_tokenizer()
        path = self.path(tmp_path, r33={"reward_model": ...})
        rows = load_dataset(path, tokenizer, config())
        loader = PromptLoader(rows, PromptEncoder(tokenizer, rows.config), PromptOrder(40, 1, False), 1)
        with pytest.raises(DataError, match=r"row 33 .*field 'reward_model' is missing"):
            take_for_a_minute(loader)
        with pytest.raises(DataError, match="row 33 "):
            load_dataset(path, tokenizer, config(check="all"))
        with pytest.raises(DataError, match="row 2 "):
            load_dataset(self.path(tmp_path, r2={"reward_model": ...}), tokenizer, config())

    def test_what_an_ended_process_leaves_is_examined_here(self):
        parent = os.getpid()

        def examine(rows):
            if os.getpid() != parent and rows.start == 2 * SIZE:
                os.kill(os.getpid(), signal.SIGKILL)
            return ScanPart({"numbers": np.array(rows)})

        result = scan_rows("rows", 50, examine, key=lambda: None)
        assert result.results()[0]["numbers"].tolist() == list(range(50))

    def test_a_batch_without_an_end(self, monkeypatch):
        monkeypatch.setattr(scan, "_STILL_S", 0.5)
        parent = os.getpid()

        def examine(rows):
            time.sleep(60 if os.getpid() != parent and rows.start == 2 * SIZE else 0)
            return ScanPart({"numbers": np.array(rows)})

        with pytest.raises(DataError, match=r"^letters: the check of rows 8 to 11 takes longer than 0\.5 s"):
            scan_rows("letters", 50, examine, key=lambda: None)


class TestCache:
    def scanned(self, key, count=20, **settings):
        """(numbers, whether rows were examined)."""
        touched = mmap.mmap(-1, 1)

        def examine(rows):
            touched[0] |= bool(rows)
            return ScanPart({"numbers": np.array(rows, np.int64) * 3}, len(rows))

        result = scan_rows("rows", count, examine, key=lambda: key, **settings)
        arrays, facts = result.results()
        assert sum(facts) == count
        return arrays["numbers"].tolist(), bool(touched[0])

    def test_a_second_scan_reads_what_the_first_has_written(self, cache):
        expected = [number * 3 for number in range(20)]
        assert self.scanned("one") == (expected, True)
        assert self.scanned("one") == (expected, False)
        assert self.scanned("one", wait=False) == (expected, False)
        assert self.scanned(None) == (expected, True)
        (cache / "one.arrays").write_bytes(b"short")
        assert self.scanned("one") == (expected, True)

    def test_a_start_after_a_run_that_ended_early_does_not_examine_its_first_rows_again(self):
        examined = []

        def examine(rows):
            examined.extend([rows] if rows else [])
            return ScanPart({"numbers": np.array(rows, np.int64)})

        for _ in range(2):
            unfinished = scan_rows("rows", 20, examine, key=lambda: "early", wait=False)
        assert examined == [range(4), range(4, 8)]
        unfinished.finish()
        assert unfinished.results()[0]["numbers"].tolist() == list(range(20))

    def test_a_folder_that_cannot_be_written_costs_only_the_cache(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("VERL_DATA_CACHE", str(tmp_path / "file" / "cache"))
        assert self.scanned("two") == self.scanned("two")

    def test_whatever_a_verdict_depends_on_is_in_the_key(self, tmp_path, cache):
        tokenizer, path = make_tokenizer(), write(tmp_path / "a.jsonl", [row(i) for i in range(20)])

        def entries():
            load_dataset(path, tokenizer, config(check="all", **changes))
            return len(list(cache.glob("*.arrays")))

        changes = {}
        first = entries()
        assert entries() == first
        changes = {"max_prompt_length": 63}
        assert entries() == first + 1
        changes = {}
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "model")
        assert entries() == first + 2
        write(tmp_path / "a.jsonl", [row(i + 1) for i in range(20)])
        assert entries() == first + 3
        type(tokenizer).__module__, module = "mine", type(tokenizer).__module__
        try:
            assert entries() == first + 3  # a class of one's own has no key
        finally:
            type(tokenizer).__module__ = module

    def test_every_bit_of_an_entry_counts(self, cache):
        """An entry with another bit is no entry; it is removed, and named once."""
        arrays, entry = {"lengths": np.arange(3, dtype=np.int32)}, cache / "bits.arrays"

        def load():
            return row_cache.load_arrays("bits", {"lengths": np.dtype(np.int32)}, 1)

        row_cache.save_arrays("bits", {"lengths": [arrays["lengths"]]}, ["a"])
        assert load()[0]["lengths"].tolist() == [0, 1, 2]
        content = entry.read_bytes()
        for bit in range(8 * len(content)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            entry.write_bytes(damaged)
            assert load() is None, bit
            assert not entry.exists()

    @pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
    def test_an_entry_is_a_regular_file(self, put, cache, caplog):
        key = f"odd{put.__name__[:6]}"
        put(cache / f"{key}.arrays")
        os.mkfifo(cache / f"{key}.lock")
        assert self.scanned(key) == ([number * 3 for number in range(20)], True)
        assert self.scanned(key)[1] == (put is os.mkdir)  # a folder stays in the place of the entry
        assert caplog.text.count("in the cache of rows is damaged") == 1, caplog.text

    def test_old_entries_are_removed_and_files_of_others_stay(self, cache):
        entry = "ab" * 16
        old = [cache / name for name in (f"{entry}.arrays", f"{entry}.first.arrays", f".{entry}.arrow.{entry[:8]}.tmp")]
        foreign = [cache / name for name in ("thesis.tex", "mine.arrow", f"{entry}.parquet", "notes.lock")]
        for path in (*old, *foreign):
            path.write_bytes(b"")
            os.utime(path, (0, 0))
        partial_entry = cache / f".{entry}.arrow.{entry[8:16]}.tmp"  # of a start that was killed two hours ago
        partial_entry.write_bytes(b"")
        os.utime(partial_entry, (time.time() - 7200,) * 2)
        self.scanned("three")
        assert not partial_entry.exists()
        assert [path.name for path in (*old, *foreign) if path.exists()] == [path.name for path in foreign]
        for path in foreign:
            path.unlink()

    def test_an_entry_that_cannot_be_touched_is_read(self, cache, monkeypatch, caplog):
        """Of a read-only folder, or of another user, since only its owner may set its time."""
        self.scanned("theirs")

        def forbidden(path):
            raise PermissionError(1, "Operation not permitted", str(path))

        monkeypatch.setattr(row_cache.os, "utime", forbidden)
        assert not self.scanned("theirs")[1]
        assert "damaged" not in caplog.text
        assert (cache / "theirs.arrays").exists()

    def test_a_user_without_a_home_has_no_cache(self, monkeypatch):
        for name in ("VERL_DATA_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
        assert self.scanned("homeless") == self.scanned("homeless")
        assert index_folder().name.startswith("verl-page-")

    def test_a_start_that_waits_for_another_says_so(self, monkeypatch, caplog):
        monkeypatch.setattr(row_cache, "_WAIT_SAID_S", 0.0)
        monkeypatch.setattr(row_cache, "_CLAIM_S", 0.3)
        descriptor = row_cache.claim("busy", wait=False)
        assert self.scanned("busy")[1]
        os.close(descriptor)
        assert caplog.text.count("Another start checks the same rows") == 1


class TestLargeParquet:
    def test_rows_of_a_memory_map_are_the_rows_of_the_file(self, tmp_path, monkeypatch, cache):
        path = tmp_path / "a.parquet"
        write_parquet(path, [row(i, note=None if i % 3 else "n" * i) for i in range(50)])
        rows_of_file = list(read_rows(path))
        monkeypatch.setattr(tables, "_MAPPED_BYTES", 0)
        monkeypatch.setattr(tables, "ROWS_READ", 8)
        for _ in range(2):
            rows = read_rows([path, path])
            assert list(rows) == [*rows_of_file, *rows_of_file]
            assert rows.batch(range(45, 55)) == [*rows_of_file[45:], *rows_of_file[:5]]
            assert rows.select([7, 3, 99]).batch(range(3)) == [rows_of_file[7], rows_of_file[3], rows_of_file[49]]
            assert rows.texts("data_source") == {"task/a"}
        assert len(list(cache.glob("*.arrow"))) == 1

    def test_a_damaged_copy_is_not_touched(self, tmp_path, monkeypatch):
        monkeypatch.setenv("VERL_DATA_CACHE", str(tmp_path / "cache"))
        path = tmp_path / "a.parquet"
        write_parquet(path, [row(i) for i in range(20)])
        monkeypatch.setattr(tables, "_MAPPED_BYTES", 0)
        rows_of_file = list(read_rows(path))
        (copy,) = (tmp_path / "cache").rglob("*.arrow")
        copy.write_bytes(copy.read_bytes()[:-100])
        assert list(read_rows(path)) == rows_of_file


def chats(count, **bad):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"count to {i}"},
                {"role": "assistant", "content": "one " * (i % 17 + 1)},
            ]
            * (1 + i % 2)
        }
        for i in range(count)
    ]
    for name, wrong in bad.items():
        rows[int(name[1:])] = wrong
    return rows


def pairs(count):
    return [
        {"prompt": f"count to {i} ", "chosen": "one " * (i % 5 + 1), "rejected": "two " * (i % 3 + 1), "margin": i / 3}
        for i in range(count)
    ]


def solutions(count):
    return [
        {"prompt": f"count to {i}", "completions": ["one", "two"][: 1 + i % 2], "labels": [True, False][: 1 + i % 2]}
        for i in range(count)
    ]


KINDS = {
    "chats": (ConversationDataset, chats, SFTDataConfig),
    "pairs": (PreferenceDataset, pairs, PreferenceDataConfig),
    "trained prompts": (partial(PreferenceDataset, trains_prompts=True), pairs, PreferenceDataConfig),
    "single completions": (partial(PreferenceDataset, paired=False), pairs, PreferenceDataConfig),
    "solutions": (partial(StepDataset, "\n"), solutions, RMDataConfig),
}


class TestGivenRows:
    """Rows that become training sequences."""

    def loaded(self, make, paths, settings, **selects):
        """(sequences and place of each row, summaries), or the error."""
        try:
            dataset = read_into(make(), paths, make_tokenizer(), settings, **selects)
        except DataError as error:
            return str(error)
        rows = [(repr(dataset[number]), dataset.place(number)) for number in range(len(dataset))]
        return rows, dataset.summaries

    @pytest.mark.parametrize(
        "kind", ["chats", "pairs", slow("trained prompts"), slow("single completions"), "solutions"]
    )
    def test_processes_and_the_cache_give_the_same_sequences(self, kind, tmp_path, monkeypatch):
        make, rows_of, settings = KINDS[kind]
        paths = [write(tmp_path / "a.jsonl", rows_of(41)), write(tmp_path / "b.jsonl", rows_of(3))]
        for changes in ({}, {"max_length": 40, "truncation": "right"}, {"max_length": 20}):
            with monkeypatch.context() as patch:
                patch.setattr(scan, "NUM_AT_ONCE", 1000)
                patch.setattr(scan, "BATCH", 1000)
                expected = self.loaded(make, paths, settings(**changes))
            assert self.loaded(make, paths, settings(**changes)) == expected
            assert self.loaded(make, paths, settings(**changes)) == expected
        assert self.loaded(make, paths, settings(), max_samples=3)[1][1].num_rows in (0, 3)

    def test_bad_rows(self, tmp_path, monkeypatch):
        bad = {f"r{i}": {"messages": [{"role": "usre", "content": str(i)}]} for i in (17, 30)}
        path = write(tmp_path / "a.jsonl", chats(41, **bad))
        assert f"{path}, row 17 " in self.loaded(ConversationDataset, path, SFTDataConfig())
        with monkeypatch.context() as patch:
            patch.setattr(scan, "NUM_AT_ONCE", 1000)
            expected = self.loaded(ConversationDataset, path, SFTDataConfig(), keep_going=True)
        assert self.loaded(ConversationDataset, path, SFTDataConfig(), keep_going=True) == expected
        assert len(expected[1][0].problems) == 2
