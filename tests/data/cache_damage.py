"""Entries of the cache of rows on bad disks, of other writers, and things that are no files: the rows stay the same."""

import json
import shutil

import numpy as np
import pytest

from tests import damage
from tests.damage import of_files, put_no_file
from tests.data.rows import config, row, write
from verl.config.sections.data import SFTDataConfig
from verl.data import row_cache, scan, tables
from verl.data.conversations.dataset import ConversationDataset, read_into
from verl.data.dataset import load_dataset
from verl.data.files import read_rows, write_parquet
from verl.models.tiny import make_tokenizer

NUM_ROWS = 20


def prompts(folder, tokenizer, **changes):
    rows = [row(i, prompt="word " * (i % 7 + 1)) for i in range(NUM_ROWS)]
    settings = config(max_prompt_length=40, **changes)
    dataset = load_dataset(write(folder / "prompts.jsonl", rows), tokenizer, settings)
    return [dataset[number]["extra_info"]["index"] for number in range(len(dataset))]


def conversations(folder, tokenizer):
    rows = [{"prompt": f"count to {i}", "completion": "one " * (i % 5 + 1)} for i in range(NUM_ROWS)]
    settings = SFTDataConfig(max_length=20, truncation="right")
    dataset = read_into(ConversationDataset(), write(folder / "chats.jsonl", rows), tokenizer, settings)
    return repr([dataset[number] for number in range(len(dataset))]), dataset.summaries


def parquet(folder, tokenizer):
    file = folder / "rows.parquet"
    if not file.exists():
        write_parquet(file, [row(i) for i in range(NUM_ROWS)])
    return list(read_rows(file))


READERS = {
    "filter": lambda *place: prompts(*place, filter_overlong_prompts=True, check="all"),
    "first": lambda *place: prompts(*place, truncation="left", check="first"),
    "checks": lambda *place: prompts(*place, truncation="left", check="all"),
    "conversations": conversations,
    "parquet": parquet,
}


def of_another_writer(rng, entry):
    """Entries with a valid digest that no scan of these rows has written."""
    numbers = np.arange(rng.randrange(30))
    arrays = rng.choice([{}, {"lengths": [numbers]}, {"lengths": [numbers.astype(np.int32)]}, {"x": [numbers]}])
    facts = rng.choice([None, 3, [], [None], {}, "x" * 5, [[None]] * 9])
    with row_cache.new_entry(entry) as temporary, open(temporary, "wb") as file:
        if rng.random() < 0.5:
            row_cache.write_arrays(file, arrays, facts)
        else:
            header = rng.choice(
                ["[" * 5000, '{"arrays": []}', "1", json.dumps({"arrays": {"lengths": ["|O", 2]}, "facts": []})]
            ).encode()
            file.write(len(header).to_bytes(8, "little") + header)


def of_other_rows(rng, entry):
    """The sealed content of an entry of another name."""
    with row_cache.new_entry(entry.with_name(f"other{entry.suffix}")) as temporary:
        shutil.copyfile(entry, temporary)
        temporary.write_bytes(temporary.read_bytes()[: -row_cache._SEAL])
    entry.with_name(f"other{entry.suffix}").replace(entry)


def no_file(rng, entry):
    entry.unlink()
    put_no_file(rng, entry, ("folder", "pipe", "socket", "device", "nowhere", "loop"))


BYTES = [of_files(change) for change in (damage.flip, damage.cut, damage.append, damage.zero_block)]


def cases(rng, count, folder):
    """(reader, kind of damage) and "the same rows" for `count` damaged entries."""
    tokenizer = make_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BATCH", 4)
        patch.setattr(scan, "NUM_AT_ONCE", 8)
        patch.setattr(tables, "_MAPPED_BYTES", 0)
        entries, expected = {}, {}
        for name, read in READERS.items():
            patch.setenv("VERL_DATA_CACHE", str(folder / name))
            expected[name] = read(folder, tokenizer)
            entries[name] = {entry.name: entry.read_bytes() for entry in sorted((folder / name).glob("*.ar*"))}
        for _ in range(count):
            name = rng.choice(list(READERS))
            change = rng.choice([*BYTES, BYTES[0], no_file, of_other_rows, *[of_another_writer] * (name != "parquet")])
            shutil.rmtree(folder / name)
            (folder / name).mkdir()
            for entry, content in entries[name].items():
                (folder / name / entry).write_bytes(content)
            patch.setenv("VERL_DATA_CACHE", str(folder / name))
            change(rng, folder / name / rng.choice(list(entries[name])))
            assert READERS[name](folder, tokenizer) == expected[name], (name, change.__name__)
            yield f"{name}: {change.__name__.replace('_', ' ')}", "the same rows"
