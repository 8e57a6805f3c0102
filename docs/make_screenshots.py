"""The pictures of docs/page.md: `python docs/make_screenshots.py RUN` with a GRPO run; needs playwright and chromium.

It shows the step whose groups differ most, its first group, and of that the sample with the best score.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from verl.page.launch import start_page

OUT = Path(__file__).resolve().parent / "images"


def main(folder: Path) -> None:
    """Write the pictures of the run in `folder`."""
    OUT.mkdir(exist_ok=True)
    page = start_page(folder, "127.0.0.1", 0)
    base = page.address.partition("/?")[0]
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium") or "/usr/bin/chromium", args=["--no-sandbox"]
            )
            tab = browser.new_page(viewport={"width": 1280, "height": 860})
            tab.goto(page.address)
            tab.wait_for_timeout(3000)  # the index of samples is built
            run = f"{base}/run/{folder.resolve().name}"
            tab.goto(run)
            step = _best_step(tab.inner_text(".steps tbody"))
            for name, address, keys in (
                ("run", run, ""),
                ("step", f"{run}/train/{step}", ""),
                ("group", "", "j\n"),
                ("sample", "", "j\nt"),
            ):
                if address:
                    tab.goto(address)
                for key in keys:
                    tab.keyboard.press("Enter" if key == "\n" else key)
                    tab.wait_for_timeout(700)
                tab.wait_for_timeout(700)
                tab.screenshot(path=OUT / f"page-{name}.png")
    finally:
        page.close()


def _best_step(table: str) -> str:
    rows = [re.split(r"\t", row) for row in table.splitlines() if row.strip()]
    return max((row for row in rows if len(row) > 4), key=lambda row: float(row[3].replace("–", "0")))[0].strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
