"""`verl show --tui`, driven by textual's pilot."""

import asyncio
import builtins
import sys

import pytest

from tests.page.folders import add_step, make_run, sample, write_samples
from verl.errors import ConfigError, MissingExtraError


@pytest.fixture
def tui():
    pytest.importorskip("textual", reason="the extra `tui` is not installed")
    from verl.page import tui

    return tui


@pytest.fixture
def run_folder(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [sample(8, k, step=3, score=float(k), response=f"so the answer is {7 + k}") for k in range(2)]
    rows[0].update(finish_reason="length")
    rows[1]["train_log_probs"] = [rows[1]["log_probs"][0] - 2.5, *rows[1]["log_probs"][1:]]
    rows += [sample(9, 0, step=3, score=0.5, response="\x1b[31mred\u202e [bold]x[/bold]")]
    write_samples(folder, "train", 3, rows)
    return folder


def drive(tui, folder, steps):
    """Run `steps(app, pilot)` on the app about `folder`."""

    async def all_of_it():
        app = tui.RunApp(folder, folder.parent)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await steps(app, pilot)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


async def opened(app, pilot, key, screen):
    """Press a key and wait for the screen that it opens."""
    await pilot.press(key)
    for _ in range(100):
        if isinstance(app.screen, screen) and app.screen.focused is not None:
            return
        await pilot.pause(0.05)
    raise AssertionError(f"{key} has opened {app.screen}")


def table_of(app):
    from textual.widgets import DataTable

    table = app.screen.query_one(DataTable)
    return [[str(cell) for cell in table.get_row_at(i)] for i in range(table.row_count)]


def text_of(app, where):
    from textual.widgets import Static

    return str(app.screen.query_one(where, Static).render())


def test_from_the_run_to_a_token(tui, run_folder):
    async def steps(app, pilot):
        assert [row[0] for row in table_of(app)] == ["3", "2", "1"]
        assert "stopped at step 3 of 10" in text_of(app, "#head")
        assert "reward 0.5" in text_of(app, "#head")
        await pilot.press("enter")
        assert table_of(app)[0][0] == "How much is 8 + 0?"
        assert table_of(app)[0][4:6] == ["1", "2.5"]
        await pilot.press("enter")
        assert [row[1] for row in table_of(app)] == ["0", "1"]
        assert table_of(app)[0][4] == "cut"
        await pilot.press("j", "enter")
        sample = text_of(app, "#sample")
        assert "score 1.0" in sample
        assert "How much is 8 + 1?" in sample
        assert "coloured by log-prob" in sample
        await pilot.press("m")
        assert "largest: -2.5 at token 1 of 6, 'The'" in text_of(app, "#sample")
        await pilot.press("u", "u", "u", "u")
        assert isinstance(app.screen, tui.RunScreen)

    drive(tui, run_folder, steps)


def test_the_order_of_groups_changes(tui, run_folder):
    async def steps(app, pilot):
        await pilot.press("enter")
        assert "spread of rewards" in text_of(app, "#head")
        await pilot.press("s")
        assert "mean reward, lowest first" in text_of(app, "#head")

    drive(tui, run_folder, steps)


def test_words_and_flags_are_searched(tui, run_folder):
    async def steps(app, pilot):
        await pilot.press("c")
        assert [row[0] for row in table_of(app)] == ["train 3"]
        await pilot.press("u")
        await opened(app, pilot, "slash", tui.SearchScreen)
        await pilot.press(*"ANSWER", "space", *"is", "space", "8", "enter")
        assert "so the answer is 8" in table_of(app)[0][5]
        await pilot.press("enter")
        assert "Step 3" in text_of(app, "#sample") or "step 3" in text_of(app, "#sample")

    drive(tui, run_folder, steps)


def test_foreign_text_stays_text(tui, run_folder):
    async def steps(app, pilot):
        await opened(app, pilot, "slash", tui.SearchScreen)
        await pilot.press(*"red", "enter")
        assert table_of(app)[0][5] == "\\x1b[31mred\\u202e [bold]x[/bold]"
        await pilot.press("enter")
        assert "\x1b" not in text_of(app, "#sample")
        assert "\u202e" not in text_of(app, "#sample")

    drive(tui, run_folder, steps)


def test_a_step_arrives_by_itself(tui, run_folder):
    async def steps(app, pilot):
        add_step(run_folder, 4)
        for _ in range(50):
            await pilot.pause(0.1)
            if table_of(app)[0][0] == "4":
                break
        assert table_of(app)[0][0] == "4"
        assert "at step 4" in text_of(app, "#head")

    drive(tui, run_folder, steps)


def test_an_empty_run_is_a_sentence(tui, tmp_path):
    (tmp_path / "run" / "samples").mkdir(parents=True)

    async def steps(app, pilot):
        assert "No step has been written" in text_of(app, "#head")
        await pilot.press("enter", "f")
        assert table_of(app) == []

    drive(tui, tmp_path / "run", steps)


def test_another_folder_is_refused(tui, tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        tui.browse(tmp_path)


def test_the_extra_is_named(monkeypatch, around, tmp_path):
    from verl.cli.show import run_show

    def without_textual(original, name, *rest):
        if name.partition(".")[0] == "textual":
            raise ImportError("no textual", name="textual")
        return original(name, *rest)

    around(builtins, "__import__", without_textual)
    monkeypatch.delitem(sys.modules, "verl.page.tui", raising=False)
    with pytest.raises(
        MissingExtraError, match=r"verl show --tui needs the package 'textual'.*pip install 'textual>=1.0'"
    ):
        run_show([str(tmp_path), "--tui"])
