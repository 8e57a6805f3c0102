"""Rows in files of JSON lines."""

import json


def write_lines(path, rows):
    """Writes the rows to `path`, and returns it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]
