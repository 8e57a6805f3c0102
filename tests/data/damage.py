"""Data files on disks, in copies and by hand: bytes changed, cut or added, and names that are no files."""

import gzip
import json
import random

from tests import damage
from tests.damage import of_files, put_no_file
from tests.data import mutations
from tests.data.mutations import base_rows, is_valid, read
from verl.data.files import write_parquet

SUFFIXES = ("jsonl", "json", "jsonl.gz", "json.gz", "parquet")
PLAIN = [
    row for row in base_rows() if isinstance(row["prompt"], list) and isinstance(row["prompt"][0]["content"], str)
][:1]


def content(suffix: str, folder) -> bytes:
    """A file of one valid row."""
    if suffix == "parquet":
        write_parquet(folder / "good.parquet", PLAIN)
        return (folder / "good.parquet").read_bytes()
    text = json.dumps(PLAIN if suffix.startswith("json.") or suffix == "json" else PLAIN[0]).encode()
    return gzip.compress(text, mtime=0) if suffix.endswith("gz") else text


def not_a_file(rng, path):
    put_no_file(rng, path, ("folder", "pipe", "nowhere", "loop"))


flip, cut, append = map(of_files, (damage.flip, damage.cut, damage.append))


def twice(rng, path):
    """A key that an object has twice."""
    text = path.read_text()
    at = rng.choice([i for i, c in enumerate(text) if c == "{"])
    path.write_text(text[: at + 1] + '"twice": 1, "twice": ' + rng.choice(["1", "{}", "[1]"]) + ", " + text[at + 1 :])


def change(rng, path):
    damaged = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(damaged))
        damaged[at : at + rng.randrange(3)] = rng.choice([b"", b"\0", b"\n", b'"', b"[", b"\xff", rng.randbytes(2)])
    path.write_bytes(damaged)


def outcome(rng: random.Random, folder, tokenizer) -> tuple[str, str]:
    """(kind of damage, outcome): "refused" with a sentence that names the file, or "accepted", and then the row is valid."""
    suffix = rng.choice(SUFFIXES)
    path = folder / f"rows.{suffix}"
    kinds = [not_a_file, change, flip, cut, append] + [twice] * (suffix in ("json", "jsonl"))
    kind = rng.choice(kinds)
    if kind is not not_a_file:
        path.write_bytes(content(suffix, folder))
    kind(rng, path)
    answer = read(path, tokenizer)  # asserts that a refusal names the file, and that verl check agrees
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    if isinstance(answer, str):
        return kind.__name__, "refused"
    assert kind not in (not_a_file, twice), (kind.__name__, suffix)
    assert is_valid(answer[0])
    return kind.__name__, "accepted, valid"


def cases(rng, count, folder):
    """Outcomes of `count` mutated rows in damaged files."""
    return mutations.outcomes(outcome, rng, count, folder)
