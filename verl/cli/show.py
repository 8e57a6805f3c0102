"""`verl show RUN`: progress, bottleneck, advice, learning curves and last errors of a run."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verl.cli.parser import Parser
from verl.distributions import is_installed, load_part
from verl.foreign_text import clean, printable
from verl.tracking.timeline import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from verl.tracking.bottleneck import Bottleneck
    from verl.tracking.ledger.reader import Counts
    from verl.tracking.progress import Curve, Progress

_ABOUT = (
    "Show a run, running or ended: progress, where the time goes and the keys that change that, learning, warnings."
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32


def run_show(argv: list[str]) -> int:
    """Print the report: the exit code."""
    parser = Parser(prog="verl show", description=_ABOUT)
    parser.add_argument("run", help="the run folder (trainer.default_local_dir)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--episodes", type=int, default=0, metavar="N", help="print the last N conversations of agents too"
    )
    parser.add_argument("--tui", action="store_true", help="browse steps, groups, samples and tokens (extra 'tui')")
    arguments = parser.parse_args(argv)
    if arguments.tui:
        return cast("int", load_part("verl.page.tui").browse(Path(arguments.run).expanduser()))
    from verl.tracking.progress import read_progress, to_json

    progress = read_progress(Path(arguments.run).expanduser())
    if arguments.json:
        print(to_json(progress))
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    show(progress, console)
    _show_episodes(Path(progress.folder), arguments.episodes, console)
    return 0


def show(progress: Progress, console: Console) -> None:
    """Print `progress` as text."""
    from rich.text import Text

    console.print(Text.assemble((clean(progress.folder), "bold"), f"  {_state(progress)}"), soft_wrap=True)
    if progress.crashes:
        console.print(_crashes(progress.crashes), markup=False, soft_wrap=True)
    if progress.samples is not None:
        console.print(_samples(progress.samples), soft_wrap=True)
    if progress.bottleneck is not None:
        show_time(progress.bottleneck, console)
    if progress.planned is not None:
        console.print(f"  {clean(progress.planned)}", markup=False, soft_wrap=True)
    if progress.curves:
        _show_curves(list(progress.curves.values()), console)
    if progress.complaints:
        console.print("\n[bold]last warnings and errors[/bold]")
        for line in progress.complaints:
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _show_episodes(folder: Path, count: int, console: Console) -> None:
    if not count and not is_installed("verl-agents"):
        return
    journal = load_part("verl.agents.journal")
    episodes = journal.records(folder)
    for line in (*journal.summary(episodes), *(journal.transcripts(episodes, count) if count > 0 else ())):
        console.print(line, markup=False, soft_wrap=True)


def _state(progress: Progress) -> str:
    of = f" of {progress.total_steps}" if progress.total_steps else ""
    status = "served" if (progress.folder / "model.json").is_file() else progress.status  # by verl serve
    parts = [f"{status} at step {progress.step}{of}"]
    if progress.process:
        parts.append(progress.process)
    if progress.doing_s is not None:
        parts.append(f"in {progress.doing} for {duration(progress.doing_s)}")
    if progress.seconds_left is not None:
        parts.append(f"about {duration(progress.seconds_left)} to go")
    if status == "stopped":
        parts.append("run the same command again to resume")
    if progress.last_written_s is not None and progress.status == "running":
        parts.append(f"last step written {duration(progress.last_written_s)} ago")
    return ", ".join(parts)


def _samples(outcomes: Counts) -> str:
    """Counts of samples by outcome; the later ones only if they are not 0."""
    counts = [f"{outcomes.trained} trained", f"{outcomes.pending} pending", f"{outcomes.defaulted} whose scorer failed"]
    counts.append(f"{outcomes.twice} trained twice")
    rare = {
        "removed by a filter": outcomes.dropped,
        "sampled again": outcomes.evicted,
        "trained before this ledger begins": outcomes.before,
    }
    return f"samples: {', '.join([*counts, *(f'{count} {name}' for name, count in rare.items() if count)])}"


def _crashes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Number of restarts after a crash, and the last crash."""
    last, times = rows[-1], sum(row.get("event") == "restarted" for row in rows)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.get("time", 0)))
    end = "; then it gave up" if last.get("event") == "gave up" else ""
    return (
        f"restarted {times} time{'' if times == 1 else 's'} after a crash{end}; the last was at {when}, in step "
        f"{last.get('step')} ({last.get('phase')}): {last.get('cause')}"
    )


def show_time(bottleneck: Bottleneck, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(
        Text.assemble(
            "\n",
            (clean(bottleneck.name), "bold"),
            f": a step takes {duration(bottleneck.step_s)} (median, without validation and saving)",
        )
    )
    table = Table.grid(padding=(0, 2))
    for phase, share in bottleneck.shares.items():
        table.add_row(Text(f"  {clean(phase)}"), f"{share:6.1%}", "█" * min(max(round(share * 40), 0), 40))
    console.print(table)
    roles = ", ".join(f"{clean(role)} {share:.0%}" for role, share in bottleneck.utilisation.items())
    if roles:
        console.print(f"  busy: {roles}", soft_wrap=True, markup=False)
    if bottleneck.communication_bytes:
        speed = bottleneck.communication_bytes / max(bottleneck.communication_s, 1e-9) / 1e6
        console.print(
            f"  exchanged per step: {bottleneck.communication_bytes / 1e6:.1f} MB in {duration(bottleneck.communication_s)} "
            f"({speed:.0f} MB/s)"
        )
    if bottleneck.measured:
        from verl.tracking.bottleneck import MEASURED

        console.print(f"  {', '.join(MEASURED[name].format(value) for name, value in bottleneck.measured.items())}")
    for wait in bottleneck.waits:
        console.print(f"  {wait}", soft_wrap=True)
    if bottleneck.advice:
        console.print("[bold]what to change[/bold]")
    for sentence in bottleneck.advice:
        console.print(f"  - {printable(sentence)}", markup=False, soft_wrap=True)


def _show_curves(curves: Sequence[Curve], console: Console) -> None:
    console.print("\n[bold]learning[/bold]")
    rows = [
        (
            curve.meaning,
            f"{curve.first:.4g} → {curve.last:.4g}",
            "" if curve.best is None else f"best {curve.best:.4g} at step {curve.best_step}",
            sparkline(curve.points),
        )
        for curve in curves
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # whole lines, also in a narrow terminal and a pipe
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(f"  {line}".rstrip(), markup=False, highlight=False, soft_wrap=True)


def sparkline(points: Sequence[float]) -> str:
    """At most `_CURVE_WIDTH` characters, each the mean of its share of the points, from the lowest block to the highest."""
    finite = [p for p in points if p == p and abs(p) != float("inf")]
    if not finite:
        return ""
    count = min(_CURVE_WIDTH, len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    # of halves: neither a sum nor the difference of two means overflows
    means = [sum(p / 2 / (b - a) for p in finite[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[0] * count
    return "".join(_BLOCKS[round((m - low) / (high - low) * (len(_BLOCKS) - 1))] for m in means)
