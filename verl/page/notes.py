"""The user's notes.md of a run folder: read and replaced by the page, and by any editor."""

import contextlib
import hashlib
import re
import threading
from pathlib import Path

from verl.regular_files import read_text
from verl.tracking.files import write_atomically

MAX_BYTES = 64 << 10
_TAG = re.compile(r"(?<![\w#&/])#(\w[\w-]{0,39})")
_WRITES = threading.Lock()


class Notes:
    """notes.md of a run `folder`."""

    def __init__(self, folder: Path):
        self._file = folder / "notes.md"

    @property
    def text(self) -> str:
        """The text; "" without one that can be read."""
        with contextlib.suppress(OSError, ValueError):
            return self._read()
        return ""

    def _read(self) -> str:
        """The text, "" without a file. Raises OSError, and ValueError for a file that is no text or too large."""
        try:
            text = read_text(self._file, MAX_BYTES).strip("\ufeff\n\r\t ")
        except FileNotFoundError:
            return ""
        if "\0" in text:  # no form can send it
            raise ValueError("it has a NUL")
        return text

    @property
    def tags(self) -> list[str]:
        """Its words like #baseline, in their order."""
        return list(dict.fromkeys(_TAG.findall(self.text)))

    @property
    def digest(self) -> str:
        """A digest of the text: a form that has it replaces no newer one."""
        return _digest(self.text)

    def replace(self, text: str, digest: str) -> str:
        """Replace the text with the digest `digest`; "" or a sentence if it was not replaced."""
        text = text.replace("\r\n", "\n").strip()
        if len(text.encode()) >= MAX_BYTES:
            return "Notes have at most 64 KiB. They were not saved."
        with _WRITES:  # between the look at the text and its replacement no other form replaces it
            try:
                if digest != _digest(self._read()):
                    return "notes.md has changed since this page was opened. Go back, copy your text, and load the page again."
                write_atomically(self._file, text and text + "\n")
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                return f"notes.md could not be replaced: {reason}. Change it in an editor."
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
