"""Invalid and hostile input without end: counts of the outcomes, and an error for an outcome that must not occur.

    python benchmarks/fuzz.py                      every section, at full size
    python benchmarks/fuzz.py keys --count 100000  single-character edits at random instead of all of them
    python benchmarks/fuzz.py rows texts --count 100000 --seed 7

A section is a function `cases(rng, count, folder)` next to the tests that run a part of it. It yields (kind of input, outcome),
and raises AssertionError for an outcome that must not occur. Any exception that is not an error of verl ends the script with
its traceback, the number of the case and the seed.
"""

import argparse
import importlib
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))

from report import table


class Section(NamedTuple):
    cases: str  # module:function
    count: int | None  # cases of a full run; None: all that there are
    meaning: str


SECTIONS = {
    "keys": Section("tests.config.edits:cases", None, "typing errors in config keys"),
    "configs": Section("tests.config.inputs:cases", 5_000, "values of keys, and YAML files"),
    "commands": Section("tests.cli.commands:cases", 2_000, "command lines of every verb"),
    "rows": Section("tests.data.mutations:cases", 10_000, "mutated data rows"),
    "token-rows": Section("tests.data.token_rows:cases", 10_000, "mutated rows of token ids"),
    "media": Section("tests.data.media_rows:cases", None, "malformed rows with images, in runs of two programs"),
    "pictures": Section("tests.data.damaged_pictures:cases", 5_000, "pictures of every mode, whole and damaged"),
    "files": Section("tests.data.damage:cases", 2_000, "damaged data files"),
    "row-cache": Section("tests.data.cache_damage:cases", 1_000, "damaged entries of the cache of rows"),
    "texts": Section("tests.test_foreign_text:cases", 10_000, "foreign texts in rows, configs, templates, logs"),
    "templates": Section("tests.data.hostile_templates:cases", 2_000, "chat templates of strangers"),
    "rewards": Section("tests.rewards.returns:cases", 10_000, "returns of a reward function"),
    "tool-calls": Section("tests.agents.damaged_calls:cases", 20_000, "damaged tool calls, in each format"),
    "episode-rewards": Section("tests.agents.episode_rewards:cases", 5_000, "rewards of environments, runners, loops"),
    "process-states": Section("tests.api.process_states:cases", 100, "runs in processes with other settings of torch"),
    "steps": Section("tests.run.hostile_steps:cases", 200, "training steps beside one hostile sample, timed"),
    "checkpoints": Section("tests.checkpoint.damage:cases", 1_000, "damaged checkpoints"),
    "saved-folders": Section("tests.checkpoint.saved_folders:cases", 1_000, "damaged sessions, exports, services"),
    "service": Section("tests.tinker.requests:cases", 2_000, "requests of a hostile tenant beside another"),
    "models": Section("tests.models.damaged_folders:cases", 2_000, "damaged model folders"),
    "tokenizers": Section("tests.models.damaged_tokenizers:cases", 2_000, "damaged tokenizer.json"),
    "foreign-entries": Section("tests.models.foreign_entries:cases", 5_000, "entries of adapters"),
    "gguf": Section("tests.models.damaged_gguf:cases", 2_000, "damaged GGUF files"),
    "run-folders": Section("tests.tracking.run_folders:cases", 2_000, "damaged run folders"),
    "urls": Section("tests.page.hostile_urls:cases", 2_000, "odd URLs of pages, odd values of times and sizes"),
    "answers": Section("tests.rollout.damaged_answers:cases", 5_000, "damaged answers of rollout services and judges"),
}


def main(argv: list[str] | None = None) -> dict[str, Counter]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["sections:", *(f"  {name:<15} {section.meaning}" for name, section in SECTIONS.items())]),
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all")
    parser.add_argument("--count", type=int, help="cases of each section; default: its own number")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    logging.getLogger("verl").setLevel(logging.CRITICAL)  # each damaged checkpoint is a warning
    names = options.sections or SECTIONS
    return {name: run(name, options.count or SECTIONS[name].count, options.seed) for name in names}


def run(name: str, count: int | None, seed: int) -> Counter:
    """Count the outcomes of one section, and print their table."""
    module, _, function = SECTIONS[name].cases.partition(":")
    cases = getattr(importlib.import_module(module), function)
    outcomes: Counter = Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcomes.update(cases(random.Random(seed), count, Path(folder)))
        except Exception:
            print(f"{name} --seed {seed} --count {count}: case {sum(outcomes.values())} failed", file=sys.stderr)
            raise
    show(name, outcomes, time.perf_counter() - started, seed)
    return outcomes


def show(name: str, counts: Counter, seconds: float, seed: int) -> None:
    """A table of kinds against outcomes."""
    total = sum(counts.values())
    print(f"\n{name}: {total:,} cases, seed {seed}, {seconds:.1f} s ({1e3 * seconds / max(1, total):.2f} ms each)")
    outcomes, kinds = (sorted(set(names)) for names in zip(*((what, kind) for kind, what in counts), strict=True))
    rows = [[kind, *(f"{counts[kind, what]:,}" for what in outcomes)] for kind in kinds]
    sums = [f"{sum(n for (_, what), n in counts.items() if what == outcome):,}" for outcome in outcomes]
    print(table(["", *outcomes], [*rows, ["all", *sums]]))


if __name__ == "__main__":
    main()
