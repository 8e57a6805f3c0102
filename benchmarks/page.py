"""The page about runs: its speed with 100,000 samples, and the effect of a load on a run on the same machine.

    python benchmarks/page.py samples                      # a run folder of 400 steps x 250 samples of 200 tokens, and its page
    python benchmarks/page.py samples --steps 1            # all of them in one file
    python benchmarks/page.py load --model FOLDER          # whole runs of verl train, 30 s with and 30 s without load in turn

`samples` writes the folder (about 2 GB, removed at the end), starts `python -m verl.page` for it with an empty cache, and
takes times over HTTP as a browser would see them: the first row of the newest step, and of the list of samples, while nothing
is indexed; until the index is complete; and searches, three times each, the slowest counts. Exit code 1: a first row above
1 s, or a search above 0.3 s.

`load` asks for pages of every kind one after the other, as fast as they are answered, and holds a live connection. Responses
have a fixed length, so steps are equal work. Steps that lie within a window count; ratio: median with load over median
without, with twice its standard error. The quiet windows among themselves (odd against even) give the noise. Exit code 1: the
ratio is above 1 by more than its error and by more than the noise.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Report, number
from runs import REWARD, write_prompts

ROW_LIMIT_S, SEARCH_LIMIT_S = 1.0, 0.3
_DEADLINE_S = 900.0
_END_LIMIT_S = 60.0
_DOCS = Path(__file__).resolve().parents[1] / "docs"
_ERROR_OF_A_MEDIAN = math.sqrt(math.pi / 2)  # times the error of the mean
SEARCHES = {
    "a frequent word": "q=memory",
    "a frequent word, lowest score first": "q=memory&sort=score",
    "a phrase": "q=rollout+engine",
    "a rare word": "q=zyzzyva",
    "a word that is nowhere": "q=qwertyuiop",
    "two letters": "q=zq",
    "one letter": "q=e&sort=gap",
    "same answer, different score": "conflict=1",
    "largest difference": "sort=gap",
    "a word among those cut": "q=gradient&cut=1",
    "score and length": "min=0.5&longer=150&sort=longest",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="verl-page-") as scratch:
        found = {"samples": measure_samples, "load": measure_load}[arguments.what](arguments, Path(scratch))
    found.finish(arguments.json)
    return int(found.results["failed"])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("samples", "load"))
    parser.add_argument("--num", type=int, default=100_000, help="samples")
    parser.add_argument("--steps", type=int, default=400, help="samples: files they are in")
    parser.add_argument(
        "--tokens", type=int, default=200, help="samples: mean tokens of a response; load: of each response"
    )
    parser.add_argument("--model", help="load: model folder (default: a tiny random one)")
    parser.add_argument("--window-s", type=float, default=30.0, help="load: seconds of a window")
    parser.add_argument("--windows", type=int, default=6, help="load: windows with load, and as many without")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="load: a further key")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


# -- 100,000 samples -----------------------------------------------------------------------------------------------------


def write_run(folder: Path, num: int, steps: int, tokens: int, group: int = 10) -> int:
    """A run folder with `num` samples, `group` of each prompt, in `steps` files; its bytes.

    Words come from the documentation, so texts have its frequencies; a row has the columns of a GRPO run.
    """
    words = re.findall(r"[\w'`.,-]+", " ".join(p.read_text(encoding="utf-8") for p in sorted(_DOCS.glob("*.md"))))
    draw, size = random.Random(0), 0
    arrays = [_arrays(draw, draw.randrange(tokens // 2, tokens * 3 // 2)) for _ in range(200)]
    (folder / "samples" / "train").mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm:\n  adv_estimator: grpo\n")
    metrics, number_of = [], itertools.count()
    for step in range(1, steps + 1):
        lines = []
        while len(lines) < num // steps:
            ordinal = next(number_of)
            prompt = f"<|im_start|>user\n{' '.join(draw.choices(words, k=60))}<|im_end|>\n<|im_start|>assistant\n"
            lines += [_line(draw, words, step, ordinal, i, prompt, draw.choice(arrays)) for i in range(group)]
        if step == 1:
            lines[0] = lines[0].replace('"response": "', '"response": "zyzzyva ')
        path = folder / "samples" / "train" / f"step_{step:06d}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        size += path.stat().st_size
        metrics.append(json.dumps({"step": step, "time": 1.7e9 + 10 * step, "critic/score/mean": draw.random()}))
    (folder / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    return size


def _arrays(draw: random.Random, count: int) -> tuple[int, str]:
    log_probs = [-draw.expovariate(2.0) for _ in range(count)]
    advantage = draw.gauss(0, 1)
    columns = {
        "response_ids": [draw.randrange(49_000) for _ in range(count)],
        "log_probs": log_probs,
        "old_log_probs": log_probs,
        "train_log_probs": [value + draw.gauss(0, 0.01) for value in log_probs],
        "entropy": [draw.random() for _ in range(count)],
        "advantages": [advantage] * count,
    }
    return count, json.dumps(columns)[1:-1]


def _line(
    draw: random.Random, words: list[str], step: int, ordinal: int, i: int, prompt: str, made: tuple[int, str]
) -> str:
    count, arrays = made
    answer, score = draw.randrange(20), float(draw.random() > 0.5)
    row = {
        "step": step, "uid": str(ordinal), "data_source": "docs", "finish_reason": draw.choice(["stop"] * 9 + ["length"]),
        "reward_parts": {"acc": score}, "reward_error": None, "ordinal": ordinal, "sample_index": i, "prompt": prompt,
        "response": f"{' '.join(draw.choices(words, k=count * 3 // 4))} The answer is {answer}.", "score": score,
        "ground_truth": str(answer), "prompt_ids": list(range(90)),
    }  # fmt: skip
    return f"{json.dumps(row)[:-1]}, {arrays}}}"


class Client:
    """Requests to a page over one connection."""

    def __init__(self, host: str, port: int, token: str):
        self._connection = http.client.HTTPConnection(host, port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str) -> str:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise SystemExit(f"{path} was answered with {answer.status}:\n{text[:500]}")
        return text

    def seconds_until(self, path: str, is_there: Callable[[str], bool], every_s: float = 0.02) -> float:
        """From the first request of `path` to an answer that `is_there` accepts."""
        began = time.perf_counter()
        while not is_there(self.get(path)):
            if time.perf_counter() - began > _DEADLINE_S:
                raise SystemExit(f"{path} did not show its rows within {_DEADLINE_S:g} s.")
            time.sleep(every_s)
        return time.perf_counter() - began


def measure_samples(arguments: argparse.Namespace, scratch: Path) -> Report:
    """First rows, the time of indexing, and searches."""
    from verl.page.launch import start_page

    folder = scratch / "run"
    num_bytes = write_run(folder, arguments.num, arguments.steps, arguments.tokens)
    os.environ["VERL_PAGE_CACHE"] = str(scratch / "cache")
    page = start_page(folder, "127.0.0.1", 0)
    try:
        client = Client(page.host, page.port, page.token)
        client.get("/")  # the process has started
        newest = f"/run/run/train/{arguments.steps}"
        rows = {"first row of a step, nothing indexed": client.seconds_until(newest, _has_rows)}
        began = time.perf_counter()
        rows["first row of the samples, nothing indexed"] = client.seconds_until("/run/run/samples", _has_rows)
        while "Still reading samples" in (listed := client.get("/run/run/samples")):
            if time.perf_counter() - began > _DEADLINE_S:
                raise SystemExit(f"The samples were not indexed within {_DEADLINE_S:g} s.")
            time.sleep(0.25)
        indexing_s = time.perf_counter() - began
        found = re.search(r"([\d,]+) samples", listed)
        rows["first row of a step, indexed"] = client.seconds_until(newest, _has_rows)
        rows["first row of the samples, indexed"] = client.seconds_until("/run/run/samples", _has_rows)
        searches = {name: _slowest(client, f"/run/run/samples?{query}") for name, query in SEARCHES.items()}
    finally:
        page.close()
    size = sum(path.stat().st_size for path in (scratch / "cache").iterdir())
    facts = {"samples": found.group(1) if found else "none", "files": arguments.steps,
             "GB": number(num_bytes / 1e9), "index, GB": number(size / 1e9)}  # fmt: skip
    report = Report("A page about many samples", facts=facts)
    report.add_table(
        ["until", "s"], [*([n, number(s)] for n, s in rows.items()), ["the index is complete", number(indexing_s)]]
    )
    report.add_table(
        ["search", "s", "hits on the page"], [[n, number(s), str(hits)] for n, (s, hits) in searches.items()]
    )
    failed = max(rows.values()) > ROW_LIMIT_S or max(s for s, _ in searches.values()) > SEARCH_LIMIT_S
    report.results = {"first_rows_s": rows, "indexing_s": indexing_s, "searches": searches, "failed": failed}
    return report


def _has_rows(html: str) -> bool:
    return 'class="item prompt"' in html


def _slowest(client: Client, path: str) -> tuple[float, int]:
    times, hits = [], 0
    for _ in range(3):
        began = time.perf_counter()
        hits = client.get(path).count('class="item prompt"')
        times.append(time.perf_counter() - began)
    return max(times), hits


# -- a load during a run -------------------------------------------------------------------------------------------------


def measure_load(arguments: argparse.Namespace, scratch: Path) -> Report:
    """Step times of a run with and without load on its page, in windows that take turns."""
    from verl.tracking.timeline import read_timeline

    folder = scratch / "run"
    with (scratch / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl", "train", *load_overrides(arguments, scratch)], stderr=log, stdout=log,
            env={**os.environ, "VERL_PAGE_CACHE": str(scratch / "cache")},
        )  # fmt: skip
        try:
            wait_for_steps(folder, 3, process, scratch / "log")
            address = re.search(r"page: http://([^:/]+):(\d+)/\?token=(\S+)", (scratch / "log").read_text())
            assert address is not None, "the run has printed no address of its page"
            windows = list(take_turns(arguments, (address[1], int(address[2]), address[3])))
        finally:
            process.terminate()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    rows = list(read_timeline(folder / "timeline.jsonl"))
    steps = [[row["seconds"] for row in rows if inside(row, window)] for window in windows]
    return load_report(arguments, windows, steps)


def load_overrides(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """The keys of the run; writes the files that they name."""
    from verl.models.tiny import make_tiny_model

    model = arguments.model or make_tiny_model(scratch / "model")
    (scratch / "reward.py").write_text(REWARD)
    write_prompts(scratch / "train.jsonl", [f"Say something about {i}." for i in range(512)])
    return [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", f"data.train_files={scratch}/train.jsonl",
        "data.val_files=[]", "data.train_batch_size=4", "data.max_prompt_length=64",
        f"data.max_response_length={min(arguments.tokens, 32)}", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.ignore_eos=True", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"reward.custom_reward_function.path={scratch}/reward.py", "reward.custom_reward_function.reward_kwargs.seconds=0",
        "trainer.logger=[file]", "trainer.save_freq=-1", "trainer.total_training_steps=100000", "trainer.page.enable=True",
        f"trainer.default_local_dir={scratch / 'run'}", *arguments.set,
    ]  # fmt: skip


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the run has written `count` steps."""
    began = time.monotonic()
    timeline = folder / "timeline.jsonl"
    while not timeline.is_file() or timeline.read_text().count("\n") < count:
        if process.poll() is not None or time.monotonic() - began > _DEADLINE_S:
            raise SystemExit(f"The run did not come to step {count}:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


Window = tuple[float, float, int]  # start and end in seconds since 1970, and the number of requests in it


def take_turns(arguments: argparse.Namespace, place: tuple[str, int, str]) -> Iterator[Window]:
    """Windows without and with load in turn."""
    for _ in range(arguments.windows):
        for loaded in (False, True):
            began, stop, counts = time.time(), threading.Event(), [0]
            client = threading.Thread(target=_browse, args=(place, stop, counts), daemon=True)
            if loaded:
                client.start()
            time.sleep(arguments.window_s)
            stop.set()
            yield began, time.time(), counts[0]
            if loaded:
                client.join(60)


def _browse(place: tuple[str, int, str], stop: threading.Event, counts: list[int]) -> None:
    """Ask for pages of every kind until `stop`."""
    client = Client(*place)
    live = http.client.HTTPConnection(place[0], place[1], timeout=60)
    live.request("GET", "/live", headers={"Authorization": f"Bearer {place[2]}"})
    while not stop.is_set():
        home = client.get("/run/run")
        step = max(map(int, re.findall(r"/run/run/train/(\d+)", home)), default=1)
        group = re.search(rf"/run/run/train/{step}/u/[\w-]+", client.get(f"/run/run/train/{step}"))
        for path in (
            group and group[0],
            f"/run/run/train/{step}/s/0",
            "/run/run/samples?q=a",
            "/charts/run",
            "/metrics",
        ):
            if path and not stop.is_set():
                client.get(path)
                counts[0] += 1
        counts[0] += 2
    live.close()


def inside(row: dict[str, Any], window: Window) -> bool:
    """Whether a step lies within a window."""
    return window[0] <= row["start"] and row["start"] + row["seconds"] <= window[1]


def load_report(arguments: argparse.Namespace, windows: Sequence[Window], steps: Sequence[Sequence[float]]) -> Report:
    """The ratio of the loaded windows to the quiet ones, and of the quiet ones among themselves."""
    quiet, loaded = joined(steps[::2]), joined(steps[1::2])
    found, error = ratio_of(loaded, quiet)
    noise, noise_error = ratio_of(joined(steps[2::4]), joined(steps[::4]))
    requests = sum(w[2] for w in windows) / (arguments.windows * arguments.window_s)
    facts = {
        "windows": f"{arguments.windows} of {arguments.window_s:g} s on each side",
        "requests a second": number(requests),
    }
    report = Report("A load on the page of a run", facts=facts)
    report.add_table(
        ["", "steps", "median s"],
        [
            [name, str(len(side)), number(statistics.median(side))]
            for name, side in (("without load", quiet), ("with load", loaded))
        ],
    )
    report.notes += [
        f"with load / without: {found:.4f} ± {error:.4f}",
        f"without / without: {noise:.4f} ± {noise_error:.4f}",
    ]
    failed = found - 1 > error and found - 1 > abs(noise - 1) + noise_error
    report.results = {"ratio": found, "error": error, "noise": noise, "noise_error": noise_error, "failed": failed}
    return report


def ratio_of(ours: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Ratio of the medians, and twice its standard error (for medians of normally distributed values)."""
    ratio = statistics.median(ours) / statistics.median(base)
    spreads = [statistics.stdev(side) / statistics.median(side) / math.sqrt(len(side)) for side in (ours, base)]
    return ratio, 2 * ratio * _ERROR_OF_A_MEDIAN * math.hypot(*spreads)


def joined(parts: Sequence[Sequence[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(parts))


if __name__ == "__main__":
    sys.exit(main())
