"""`verl show RUN --tui`: a run in a terminal, from its steps to groups, samples and tokens; for work over SSH."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from verl.errors import MissingExtraError
from verl.foreign_text import clean, printable
from verl.page import search, steps, tables
from verl.page.index import IndexedSample, SampleIndex
from verl.page.reader import RunReader
from verl.page.text import Tokens, tokens_of
from verl.tracking.files import Json
from verl.tracking.run_folder import require_run_folder
from verl.tracking.timeline import duration

try:
    from textual.app import App, ComposeResult
    from textual.binding import Binding
    from textual.containers import VerticalScroll
    from textual.screen import Screen
    from textual.widgets import DataTable, Footer, Input, Static
except ImportError as error:
    raise MissingExtraError("verl show --tui", "tui", error.name or "textual", "leave out --tui") from error

_REFRESH_S = 1.0
_INDEX_S = 10.0  # at most, before the samples of a step are shown as far as they are indexed
_LIMIT = 200  # rows of a search
_MODES = {  # mode of the tokens -> column, and the value at which marks begin, weak and strong
    "log-prob": ("log_prob", (1.0, 3.0)),
    "trainer − sampler": ("gap", (0.05, 0.1)),
    "entropy": ("entropy", (1.0, 3.0)),
    "plain": ("", (0.0, 0.0)),
}
_SHADES = ("", "yellow", "bold red")
FILTERS = {"c": ("cut", "cut"), "a": ("same answer, different score", "conflict"), "f": ("scorer failed", "failed")}

Rows = list[tuple[str, Sequence[str | Text]]]  # (key, cells)


def browse(folder: Path) -> int:
    """Show the run in `folder` until the user leaves: the exit code. Raises ConfigError when it is no run folder."""
    require_run_folder(folder)
    RunApp(folder).run()
    return 0


class TableScreen(Screen[None]):
    """A head, a table, and what opens when a row is chosen."""

    BINDINGS = [
        Binding("escape,u", "up", "Up"),
        Binding("j", "move(1)", "Down", show=False),
        Binding("k", "move(-1)", "Up", show=False),
        Binding("q", "app.quit", "Quit"),
    ]
    AUTO_FOCUS = ""  # each screen gives the keys to one of its parts
    app: RunApp
    columns: tuple[str, ...] = ()
    first_focus: type[object] = DataTable

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self.prepare()
        self.query_one(DataTable).add_columns(*self.columns)
        self.fill()
        self.set_focus(self.query_one(self.first_focus))

    def prepare(self) -> None:
        """Work before the first `fill`; not `on_mount`: textual calls it of each class by itself."""

    def fill(self) -> None:
        """Write head and table again; the cursor stays in its row."""
        table = self.query_one(DataTable)
        at = table.cursor_row
        table.clear()
        for key, cells in self.rows():
            table.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell, 300)) for cell in cells), key=key)
        if table.row_count:
            table.move_cursor(row=min(at, table.row_count - 1))
        self.query_one("#head", Static).update(self.head())

    def head(self) -> Text:
        raise NotImplementedError

    def rows(self) -> Rows:
        raise NotImplementedError

    def chosen(self, key: str) -> Screen[None] | None:
        """The screen that a row opens."""
        raise NotImplementedError

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        screen = self.chosen(event.row_key.value or "")
        if screen is not None:
            self.app.push_screen(screen)

    def action_up(self) -> None:
        if len(self.app.screen_stack) > 2:  # the first is textual's own
            self.app.pop_screen()

    def action_move(self, by: int) -> None:
        table = self.query_one(DataTable)
        table.move_cursor(row=table.cursor_row + by)


class RunScreen(TableScreen):
    """State, newest values and the steps of a run, as it goes."""

    BINDINGS = [
        Binding("slash", "search('')", "Search", key_display="/"),
        *(Binding(key, f"search('{name}')", label.capitalize()) for key, (label, name) in FILTERS.items()),
    ]
    columns = ("step", "at", "samples", "reward", "spread in a group", "groups without signal")

    def prepare(self) -> None:
        self._seen = self.app.reader.version
        self.set_interval(_REFRESH_S, self._look)

    def _look(self) -> None:
        version = self.app.reader.refresh()
        if version != self._seen and self.is_current:
            self._seen = version
            self.fill()

    def head(self) -> Text:
        run = self.app.reader
        of = f" of {run.total_steps}" if run.total_steps else ""
        lines = [f"{run.key}  {run.status} at step {run.step}{of}"]
        if run.seconds_left:
            lines[0] += f", about {duration(run.seconds_left)} to go"
        context = tables.run_context(run, self.app.index)
        lines.append("  ".join(f"{stat['label']} {tables.number(stat['value'], 3)}" for stat in context["headline"]))
        if bound := context["bottleneck"]:
            lines.append(f"{bound.name}: a step takes {duration(bound.step_s)}. {''.join(bound.advice[:1])}")
        return Text(printable("\n".join([*lines, *run.problems])))

    def rows(self) -> Rows:
        indexed = {row["step"]: row for row in self.app.index.statistics().get("train", [])}
        times = self.app.reader.times
        rows: Rows = []
        for step in sorted({*indexed, *times} - {0}, reverse=True):
            row = indexed.get(step)
            figures = ["", "", "", ""]
            if row is not None:
                silent = row["without_signal"]
                figures = [
                    tables.number(row["rows"]), tables.number(row["mean"], 3), tables.number(row["group_spread"], 2),
                    "–" if silent is None else f"{silent:.0%}",
                ]  # fmt: skip
            rows.append((str(step), [str(step), tables.clock(times.get(step)), *figures]))
        return rows

    def chosen(self, key: str) -> Screen[None]:
        return StepScreen(int(key))

    def action_search(self, flag: str) -> None:
        self.app.push_screen(SearchScreen(flag))


class StepScreen(TableScreen):
    """The groups of a step."""

    BINDINGS = [Binding("s", "sort", "Order")]
    columns = ("prompt", "mean", "spread", "tokens", "cut", "largest Δ", "scores")

    def __init__(self, step: int):
        super().__init__()
        self.at = steps.Place(self.app.reader, self.app.index, "train", step)
        self.sort = "spread"

    def prepare(self) -> None:
        self.at.ensure(_INDEX_S)

    def head(self) -> Text:
        return Text(f"Step {self.at.step}, {self.labels.get(self.sort, '')}. Enter opens a group, s changes the order.")

    def rows(self) -> Rows:
        context = steps.step_context(self.at, {"sort": self.sort}) or {"groups": [], "sorts": {}}
        self.labels: Mapping[str, str] = context["sorts"]
        rows: Rows = []
        for group in context["groups"]:
            cells = [tables.number(group[name], 3) for name in ("mean", "spread", "length", "cut", "gap")]
            scores = " ".join(tables.number(score, 2) for score in group["scores"][:16])
            rows.append((group["unit"], [clean(group["prompt"] or group["response"], 60), *cells, scores]))
        return rows

    def chosen(self, key: str) -> Screen[None]:
        return GroupScreen(self.at, key)

    def action_sort(self) -> None:
        if names := list(self.labels):
            self.sort = names[(names.index(self.sort) + 1) % len(names) if self.sort in names else 0]
            self.fill()


def _cells(row: IndexedSample, response: str) -> list[str | Text]:
    """Score, advantage, length, flags and the beginning of the response of a sample."""
    flags = [name for name, is_set in (("cut", row["finish"] == "length"), ("scorer failed", row["error"])) if is_set]
    if row["gap"] is not None and row["gap"] > 0.1:
        flags.append(f"Δp {row['gap']:.2g}")
    return [
        tables.number(row["score"], 3), tables.number(row["advantage"], 3), str(row["length"]),
        Text(", ".join(flags), style="red"), clean(response, 120),
    ]  # fmt: skip


class GroupScreen(TableScreen):
    """The samples of a group."""

    columns = ("sample", "score", "advantage", "tokens", "", "response")

    def __init__(self, at: steps.Place, unit: str):
        super().__init__()
        self.at, self.unit = at, unit

    def head(self) -> Text:
        context = steps.group_context(self.at, self.unit, {})
        if context is None:
            return Text("This group is not in the samples any more.")
        warning = "\nSamples with the same final answer have different scores: look at the reward function."
        return Text(
            f"Step {self.at.step}, group {self.unit}\n{printable(context['prompt'][-1000:])}\n"
            f"ground truth: {clean(context['truth'])}{warning if context['group']['conflict'] else ''}"
        )

    def rows(self) -> Rows:
        rows: Rows = []
        for i, row in enumerate(self.at.samples(self.unit)):
            number = row["sample"] if row["sample"] is not None else i
            rows.append((str(row["line"]), [str(number), *_cells(row, self.at.texts(row)[1])]))
        return rows

    def chosen(self, key: str) -> Screen[None]:
        return SampleScreen(self.at, int(key))


class SearchScreen(TableScreen):
    """Samples of all steps with some words, or with a flag."""

    columns = ("step", "score", "advantage", "tokens", "", "response")

    def __init__(self, flag: str):
        super().__init__()
        self.flag, self.words = flag, ""
        self.first_focus = DataTable if flag else Input

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Words of a prompt or response; Enter searches")
        yield from super().compose()

    def prepare(self) -> None:
        self.app.index.update(deadline=_deadline(_INDEX_S))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.words = event.value
        self.fill()
        self.set_focus(self.query_one(DataTable))

    def head(self) -> Text:
        label = next((label for label, name in FILTERS.values() if name == self.flag), "")
        unread = self.app.index.num_unread()
        rest = f"; {unread} files are not read yet" if unread else ""
        return Text(f"Samples{f': {label}' if label else ''}, the newest first{rest}")

    def rows(self) -> Rows:
        query = {"q": self.words, **({self.flag: "1"} if self.flag else {})}
        samples = search.find_samples(self.app.index, query, limit=_LIMIT)
        return [
            (
                f"{row['split']} {row['step']} {row['line']}",
                [f"{row['split']} {row['step']}", *_cells(row, row["response"])],
            )
            for row in samples
        ]

    def chosen(self, key: str) -> Screen[None]:
        split, step, line = key.rsplit(" ", 2)
        return SampleScreen(steps.Place(self.app.reader, self.app.index, split, int(step)), int(line))


def _deadline(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


class SampleScreen(Screen[None]):
    """One sample: reward, conversation, tokens coloured by a value, history."""

    BINDINGS = [
        Binding("escape,u", "app.pop_screen", "Up"),
        Binding("m", "mode", "Colour"),
        Binding("q", "app.quit", "Quit"),
    ]
    app: RunApp

    def __init__(self, at: steps.Place, line: int):
        super().__init__()
        self.at, self.line, self.mode = at, line, next(iter(_MODES))

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield Static(id="sample")
        yield Footer()

    def on_mount(self) -> None:
        self._show()
        self.query_one(VerticalScroll).focus()

    def _show(self) -> None:
        context = steps.sample_context(self.at, self.line)
        text = Text("This sample is not in the run folder any more.") if context is None else self._text(context)
        self.query_one("#sample", Static).update(text)

    def _text(self, sample: Json) -> Text:
        row, text = sample["row"], Text()
        facts = {"score": row.get("score"), **sample["parts"], "ground truth": row.get("ground_truth"),
                 "ended by": row.get("finish_reason"), **sample["facts"]}  # fmt: skip
        text.append(f"{self.at.title}, line {self.line}\n", style="bold")
        text.append("  ".join(f"{clean(name, 40)} {clean(v, 100)}" for name, v in facts.items() if v is not None))
        if row.get("reward_error"):
            text.append(f"\nThe scorer failed: {printable(str(row['reward_error']))}", style="red")
        for message in sample["messages"] or [{"role": "prompt", "content": row.get("prompt")}]:
            text.append(f"\n\n{clean(message.get('role'), 40)}\n", style="bold")
            text.append(printable(str(message.get("content") or ""))[:20_000])
        text.append(f"\n\nresponse, coloured by {self.mode} (m changes it)\n", style="bold")
        tokens = tokens_of(row, self.app.reader.tokens)
        text.append_text(
            Text(printable(str(row.get("response") or ""))) if tokens is None else _colored(tokens, self.mode)
        )
        if sample["life"]:
            text.append("\n\nhistory\n", style="bold")
            text.append("\n".join(f"step {step}: {clean(event)}" for step, event in sample["life"]["events"]))
        return text

    def action_mode(self) -> None:
        names = list(_MODES)
        self.mode = names[(names.index(self.mode) + 1) % len(names)]
        self._show()


def _colored(tokens: Tokens, mode: str) -> Text:
    """The tokens in the colours of a mode, and the one with the largest value."""
    column, (weak, strong) = _MODES[mode]
    values, text = tokens.columns.get(column, []), Text()
    sizes = [0.0 if v is None else abs(v) for v in values]
    for i, part in enumerate(tokens.texts):
        size = sizes[i] if sizes else 0.0
        text.append(printable(part), style=_SHADES[(size >= weak) + (size >= strong)] if sizes else "")
    if any(sizes):
        peak = max(range(len(sizes)), key=sizes.__getitem__)
        text.append(
            f"\nlargest: {values[peak]:+.3g} at token {peak + 1} of {tokens.num_all}, {tokens.texts[peak]!r}", "dim"
        )
    return text


class RunApp(App[None]):
    """The run in `folder`."""

    CSS = "#head { padding: 0 1; max-height: 40%; } DataTable { height: 1fr; } #sample { padding: 0 1; }"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, folder: Path, cache: Path | None = None):
        super().__init__()
        self.reader = RunReader(folder, folder.resolve().name)
        self.index = SampleIndex(folder, cache)

    def on_mount(self) -> None:
        self.title = self.reader.key
        self.reader.refresh(0)
        self.index.update(deadline=_deadline(_REFRESH_S))
        self.push_screen(RunScreen())
        self.run_worker(self._index_all, thread=True)

    def _index_all(self) -> None:
        """Index all in a separate thread; the screens show the samples indexed so far."""
        if self.index.update(deadline=lambda: not self.is_running):
            self.reader.version += 1
