"""Training steps with one hostile sample each, timed against the steps without one in the same run.

`cases` is the section `steps` of benchmarks/fuzz.py. A step goes from one row of metrics to the next, so that it has in it
whatever a sample costs: its worker, its sentence in the log, its records on disk. Left out is the processor time of the call
itself, which `reward.timeout_s` and `reward.cpu_s` allow it.
"""

from statistics import median

from tests.json_lines import read_lines, write_lines
from tests.letters_task import overrides
from tests.rewards.returns import FUNCTION
from verl.config import load_config
from verl.models.tiny import make_tiny_model
from verl.run.host import train

ROWS, SAMPLES = 4, 4  # of a step
MAX_RATIO = 2.0  # times the median of the steps without a hostile sample
MAX_MB = 2.0  # in the run folder for one hostile sample: reward.max_result_kb and max_output_kb, and what says so
_TRIES = 3  # a busy machine is no fault of a sample
_STEPS = 12  # hostile steps of one run, each followed by an ordinary step
_TEXT = 10**6  # characters in a large row; each sample of its prompt gets them

KINDS = (
    "large number", "large part", "many parts", "long part", "deep part", "no number", "no JSON", "raises", "prints",
    "huge dict", "huge list", "part of 100 MB", "name of 100 MB", "error of 100 MB", "print of 100 MB", "flood of the log",
    "kept memory", "kept threads", "kept files", "allocation", "segfault", "exit", "forged answer", "fork bomb", "large row",
)  # fmt: skip
HOSTILE = r"""
import os, signal, struct, threading, time

def keep(what):
    globals().setdefault("kept", []).append(what)
    return 0.5

def fork_bomb(rng):
    while True:
        os.fork()

def raise_text(rng):
    raise ValueError("x\n" * (50 << 20))

def flood(rng):
    for _ in range(20_000):
        print("2026-01-01 ERROR verl: " + "y" * 200)
    return 0.5

def forge(rng):
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack(">I", 24) + bytes(16) + b'{"id":1}')
        except OSError:
            pass
    return 1e9

def start_threads(rng):
    return keep([threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(50)])

KINDS |= {
    "huge dict": lambda rng: {"score": 0.5, **{f"part {i}": i for i in range(10**6)}},
    "huge list": lambda rng: {"score": 0.5, "x": [0.5] * 10**7},
    "part of 100 MB": lambda rng: {"score": 0.5, "x": "x" * (100 << 20)},
    "name of 100 MB": lambda rng: {"score": 0.5, "\x1b" * (100 << 20): 1},
    "error of 100 MB": raise_text,
    "print of 100 MB": lambda rng: print("z" * (100 << 20)),
    "flood of the log": flood,
    "kept memory": lambda rng: keep(bytearray(500 << 20)),
    "kept threads": start_threads,
    "kept files": lambda rng: keep([open("/dev/null") for _ in range(900)]),
    "allocation": lambda rng: len(bytearray(100 << 30)),
    "segfault": lambda rng: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda rng: os._exit(0),
    "forged answer": forge,
    "fork bomb": fork_bomb,
    "large row": lambda rng: 0.5,
}

def of_row(data_source, solution_str, ground_truth, extra_info=None):
    kind, _, seed = ground_truth.partition("|")
    if kind:
        try:
            os.close(os.open(extra_info["once"], os.O_CREAT | os.O_EXCL))  # the first sample of the group alone
        except FileExistsError:
            pass
        else:
            began = time.process_time()
            try:
                return KINDS[kind](random.Random(seed))
            finally:
                open(extra_info["once"], "w").write(str(time.process_time() - began))
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""


def cases(rng, count, folder):
    """(kind of sample, "in time"). Raises AssertionError for a kind that makes a step slower than MAX_RATIO allows."""
    model = make_tiny_model(folder / "model")
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    rng.shuffle(kinds)
    slowest = dict.fromkeys(kinds, 0.0)
    for number in range(_TRIES):
        slow = []
        for first in range(0, len(kinds), _STEPS):
            where = folder / f"{number}_{first}"
            for kind, ratio in steps_of(where, model, kinds[first : first + _STEPS], rng):
                if ratio > MAX_RATIO:
                    slow.append((kind, ratio))
                else:
                    slowest[kind] = max(slowest[kind], ratio)
                    yield kind, "in time"
        kinds = [kind for kind, _ in slow]
    print("slowest step over the median:", ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in sorted(slowest.items())))
    assert not slow, f"steps that one sample made slower than {MAX_RATIO} times the median, {_TRIES} times: {slow}"


def steps_of(folder, model, kinds, rng):
    """(kind, seconds over the median of the ordinary steps) for each hostile sample. Seconds are of its step less the
    processor time of the call itself, or of the step after it if that took longer."""
    folder.mkdir()
    (folder / "reward.py").write_text(FUNCTION + HOSTILE)
    order = ["", "", *(kind for each in kinds for kind in (each, ""))]  # the first step is slower, for other reasons
    rows = [row(folder, step, place, kind, rng) for step, kind in enumerate(order) for place in range(ROWS)]
    write_lines(folder / "train.jsonl", rows)
    assert train(load_config(keys(folder, model, len(order)))) == 0
    metrics = read_lines(folder / "run" / "metrics.jsonl")
    seconds = [after["time"] - before["time"] for before, after in zip(metrics, metrics[1:], strict=False)]
    assert len(seconds) == len(order) - 1
    written_mb = (
        sum(file.stat().st_size for file in (folder / "run").rglob("*") if "global_step" not in str(file)) / 2**20
    )
    assert written_mb < MAX_MB * (1 + len(kinds)), f"the run wrote {written_mb:.1f} MB beside {kinds}"
    usual = median(seconds[0::2])
    reward_s = [float((folder / f"once_{step}").read_text() or 0) for step, kind in enumerate(order) if kind]
    times = zip(kinds, reward_s, seconds[1::2], seconds[2::2], strict=True)
    return [(kind, max(took - own_s, after) / usual) for kind, own_s, took, after in times]


def row(folder, step, place, kind, rng):
    is_hostile = kind and place == 0
    more = {"text": "\u4e2d" * _TEXT} if is_hostile and kind == "large row" else {}
    return {
        "data_source": "letters",
        "prompt": [{"role": "user", "content": f"{step} {place}"}],
        "reward_model": {"style": "rule", "ground_truth": f"{kind}|{rng.random()}" if is_hostile else "|"},
        "extra_info": {"index": step * ROWS + place, "once": str(folder / f"once_{step}"), **more},
    }


def keys(folder, model, steps):
    return overrides(
        model,
        folder,
        "data.val_files=[]",
        "data.shuffle=False",
        f"data.train_batch_size={ROWS}",
        "data.max_response_length=896",  # a step of a second, or of a third on a fast processor
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
        "reward.custom_reward_function.name=of_row",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder}/run",
    )
