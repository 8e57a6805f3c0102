"""Slips, mutations and damage without end: counts of what becomes of them, and an error for what must not be.

    python benchmarks/fuzz.py                      all three, at full size
    python benchmarks/fuzz.py keys --letters 2     deletions and swaps, and 2 drawn characters a place instead of all
    python benchmarks/fuzz.py rows --rows 100000 --seed 7
    python benchmarks/fuzz.py checkpoints --checkpoints 5000

What counts as right is defined beside the tests that run a part of this: tests/config/edits.py, tests/data/mutations.py,
tests/checkpoint/damage.py. Whatever raises something else than an error of verl ends the script with its traceback and seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Outcome = tuple[str, str]


def keys(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """(first part of the key, outcome) of every edit of every key."""
    from tests.config import edits

    rng = random.Random(options.seed)
    for key in edits.keys():
        for edited in edits.edits(key, rng, options.letters):
            found = edits.outcome(key, edited)
            if found not in edits.EXPECTED:
                raise AssertionError(found)
            yield key.partition(".")[0], found


def rows(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """(kind of mutation, outcome) of data rows."""
    from tests.data import mutations
    from verl.models.tiny import make_tokenizer

    tokenizer, rng = make_tokenizer(), random.Random(options.seed)
    for _ in range(options.rows):
        yield mutations.outcome(rng, folder, tokenizer)


def checkpoints(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """(kind of damage, outcome) of checkpoints, those of another model (with digests that are right) among them."""
    from tests.checkpoint import attack, damage

    rng = random.Random(options.seed)
    wanted = damage.two_checkpoints(folder / "saved")
    content = attack.state_of(folder / "saved")
    for number in range(options.checkpoints):
        if number % 10:
            yield damage.outcome(rng, folder / "run", content, wanted)
        else:
            yield damage.forged(rng, folder / "forged")


PARTS: dict[str, Callable[[argparse.Namespace, Path], Iterator[Outcome]]] = {
    "keys": keys,
    "rows": rows,
    "checkpoints": checkpoints,
}


def main(argv: list[str] | None = None) -> dict[str, Counter]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--letters", type=int, help="drawn characters per place of a key; default: all")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the counts there too")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    logging.getLogger("verl").setLevel(logging.CRITICAL)  # each damaged checkpoint is a warning
    counts: dict[str, Counter] = {}
    for part in options.parts or PARTS:
        counts[part] = Counter()
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for found in PARTS[part](options, Path(folder)):
                counts[part][found] += 1
        show(part, counts[part], time.perf_counter() - started, options.seed)
    if options.json:
        text = {part: {" / ".join(found): n for found, n in sorted(c.items())} for part, c in counts.items()}
        options.json.write_text(json.dumps({"seed": options.seed, **text}, indent=1))
    return counts


def show(part: str, counts: Counter, seconds: float, seed: int) -> None:
    """A table of kinds against outcomes."""
    total = sum(counts.values())
    print(f"\n{part}: {total:,} cases, seed {seed}, {seconds:.1f} s ({1e3 * seconds / max(1, total):.2f} ms each)")
    outcomes = sorted({what for _, what in counts})
    kinds = sorted({kind for kind, _ in counts})
    width = max(map(len, [*kinds, "all"]))
    print(" " * width, *(f"{what:>{max(9, len(what))}}" for what in outcomes), sep="  ")
    for kind in [*kinds, "all"]:
        cells = [sum(n for (k, w), n in counts.items() if w == what and kind in (k, "all")) for what in outcomes]
        print(f"{kind:<{width}}", *(f"{n:>{max(9, len(w))},}" for n, w in zip(cells, outcomes, strict=True)), sep="  ")


if __name__ == "__main__":
    main()
