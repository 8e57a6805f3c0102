"""`verl data`: preparation commands."""

from __future__ import annotations


def run(argv: list[str]) -> int:
    from verl.data.prepare import main

    return main(argv) or 0
