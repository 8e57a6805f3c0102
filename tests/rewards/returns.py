"""Random returns of a reward function, ordinary and hostile ones, and what must become of each.

`cases` is the section `rewards` of benchmarks/fuzz.py. A return is made twice from the same seed: by the scorer in its
sandbox, and here, where `is_usable` says whether it must be scored.
"""

import dataclasses
import gc
import itertools
import json
import logging
import math
import sqlite3
import time

from verl.config import CustomRewardFunctionConfig, RewardConfig
from verl.data_proto.samples import ScoreRequest
from verl.rewards.managers import build_reward_manager
from verl.rewards.sandbox.limits import Limits
from verl.tracking.files import json_text

DEFAULT = -3.5
LIMITS = Limits()
MAX_COST_S = 0.1  # of the run's time for one sample, in addition to the scorer's: a fraction of the shortest step

FUNCTION = r'''
import math, random, sys


def text(rng, limit=40):
    """Text as a model writes it, with escapes of terminals, forged lines of a log and half characters."""
    odd = ("\x1b[2J", "\n2026-01-01 ERROR verl: ", "\r", "\0", "\ud800", "\udfff", "\u202e", "\x9b31m", "\t", "é", "中", "a b")
    length = rng.randrange(limit)
    return "".join(rng.choice(odd) if rng.random() < 0.5 else chr(rng.randrange(32, 0x3000)) for _ in range(length))


def number(rng):
    return rng.choice([rng.uniform(-2, 2), rng.randrange(-9, 9), True, 1e12, -1e12, 0.0, 5e-324])


def large_number(rng):
    return rng.choice([1e39, 3e38, -3e38, 1.0000001e12, 1e300, 10**400, -(10**30), math.nan, math.inf, -math.inf])


def parts(rng, value=number):
    return {text(rng): value(rng) for _ in range(rng.randrange(1, 9))}


def nested(rng, depth):
    value = rng.choice([number(rng), text(rng), None, True])
    for _ in range(depth):
        value = {text(rng): value} if rng.random() < 0.5 else [value, number(rng)]
    return value


def raises(rng):
    raise rng.choice([ValueError, SystemExit, KeyError, type("X\x1b[1m", (Exception,), {})])(text(rng))


def prints(rng):
    line = text(rng, 300).encode(errors="backslashreplace").decode()
    for _ in range(rng.choice([1, 1, 50, 2000])):
        print(line, file=rng.choice([sys.stdout, sys.stderr]))
    sys.stdout.buffer.write(rng.randbytes(100))
    return number(rng)


KINDS = {
    "number": number,
    "parts": lambda rng: {"score": number(rng), **parts(rng)},
    "texts": lambda rng: {"score": number(rng), **parts(rng, text)},
    "nested": lambda rng: {"score": number(rng), "x": nested(rng, rng.randrange(7))},
    "odd keys": lambda rng: {"score": number(rng), None: 1, 3.5: 2, (1, "\ud800"): text(rng)},
    "prints": prints,
    "large number": large_number,
    "large part": lambda rng: {"score": number(rng), "x": rng.choice([large_number(rng), [large_number(rng)]])},
    "many parts": lambda rng: {"score": 1, **{str(i): i for i in range(rng.choice([257, 1000, 100_000]))}},
    "long part": lambda rng: {"score": 1, "x": rng.choice(["a", "\ud800", "\n", [0]]) * rng.choice([300_000, 5_000_000])},
    "deep part": lambda rng: {"score": 1, "x": nested(rng, rng.choice([12, 500, 100_000]))},
    "no number": lambda rng: rng.choice([None, "1.0", [1.0], {}, {"acc": 1}, {"score": None}, {"score": "1"}, b"1", object()]),
    "no JSON": lambda rng: {"score": 1, "x": rng.choice([b"1", object(), KINDS, 1j, Exception, [b"1"], {"a": object()}])},
    "raises": raises,
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return KINDS[ground_truth](random.Random(solution_str))
'''
USABLE = ("number", "parts", "texts", "nested", "odd keys", "prints")


def build(folder):
    """A manager of FUNCTION, a function that returns by seed and kind."""
    (folder / "returns.py").write_text(FUNCTION)
    function = dataclasses.replace(CustomRewardFunctionConfig(), path=str(folder / "returns.py"))
    config = dataclasses.replace(RewardConfig(), num_workers=1, default_score=DEFAULT, custom_reward_function=function)
    return build_reward_manager(config, max_response_length=8, log_dir=folder / "logs")


def cases(rng, count, folder):
    """(kind of return, what became of it). Raises AssertionError for a return that costs more than its own sample."""
    kinds = [*USABLE, *"large number,large part,many parts,long part,deep part,no number,no JSON,raises".split(",")]
    ledger = sqlite3.connect(folder / "ledger.sqlite")
    ledger.execute("CREATE TABLE samples (parts TEXT, error TEXT)")
    manager, lines = build(folder), _Lines()
    logger = logging.getLogger("verl.rewards")
    logger.addHandler(lines)
    level, logger.level = logger.level, logging.WARNING
    try:
        manager.start()
        for number in range(count):
            kind, seed = rng.choice(kinds), str(rng.random())
            request = ScoreRequest(f"{number}/0", f"fuzz\x1b[31m\n{seed}", seed, kind)
            score, cost_s = _score(manager, request)
            assert cost_s < MAX_COST_S, f"{kind} {seed}: the run needed {cost_s:.3f} s for this sample"
            yield kind, verdict(kind, seed, score, ledger)
        assert [s.score for s in manager.score([ScoreRequest("last", "fuzz", "1", "number")])] != [DEFAULT]
    finally:
        logger.removeHandler(lines)
        logger.level = level
        manager.close()
    assert lines.wrong == [], "lines of the log that are not one printable line"
    for file in (folder / "logs").iterdir():
        assert is_printable(file.read_text(encoding="utf-8"), also="\n\t"), f"control characters in {file.name}"


def _score(manager, request):
    """The score of a request, and the seconds of this process's processor time for it."""
    gc.disable()  # a search for garbage reads all objects of the process
    began = time.process_time()
    (score,) = manager.score([request])
    gc.enable()
    return score, time.process_time() - began


def verdict(kind, seed, score, ledger):
    ledger.execute("INSERT INTO samples VALUES (?, ?)", (json_text(score.parts), score.error))
    ledger.commit()
    json_text(score.parts).encode()
    if score.error is None:
        assert kind in USABLE, f"{kind} {seed}: scored as {score.score}, {score.parts}"
        check(score.score, score.parts, LIMITS)
        return "scored"
    assert kind not in USABLE, f"{kind} {seed}: {score.error}"
    assert score.score == DEFAULT
    assert score.parts == {}, "a defaulted sample has no parts of others"
    assert is_printable(score.error), f"{kind} {seed}: {score.error!r}"
    assert len(score.error) < 2000
    return "default score"


def check(score, parts, limits):
    """Assert that later steps can use a score: every number, every name and every text."""
    assert isinstance(score, float)
    assert len(parts) <= limits.max_parts
    assert len(json.dumps(parts)) <= limits.max_result_kb * 1024
    json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()
    for value in (score, *_numbers(parts)):
        assert math.isfinite(value)
        assert abs(value) <= limits.max_abs_score
    assert all(is_printable(name) and len(name) <= 100 for name in parts)


def is_printable(text, also=""):
    return all(c.isprintable() or c in also for c in text)


def _numbers(value):
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(map(_numbers, value.values())))
    if isinstance(value, list):
        return list(itertools.chain.from_iterable(map(_numbers, value)))
    return [value] if isinstance(value, (int, float)) else []


class _Lines(logging.Handler):
    """Lines of the log with characters that a terminal or a reader of logs would take for something else."""

    def __init__(self):
        super().__init__()
        self.wrong = []

    def emit(self, record):
        if not is_printable(record.getMessage()):
            self.wrong.append(record.getMessage())
