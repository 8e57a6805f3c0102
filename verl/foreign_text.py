"""Cleaning of foreign text: what models, reward functions, services, data and other programs give a run to show or to store."""

LIMIT = 300  # characters of foreign text in one sentence


def clean(text: object, limit: int = LIMIT) -> str:
    r"""One line of at most `limit` characters for a sentence, a log or the console.

    Spaces and line ends become single spaces, and characters that do not print (control characters, escape sequences, marks
    of direction, half characters) their escapes. An object without a text is named by its type.

    >>> clean("a\n\x1b[31mb")
    'a \\x1b[31mb'
    """
    try:
        full = str(text)
    except Exception as error:  # noqa: BLE001 - the __str__ of foreign code
        full = f"<{type(text).__name__} without a text: {type(error).__name__}>"
    start = " ".join(full[: 4 * limit].split())
    escaped = "".join(c if c.isprintable() else _escape(c) for c in start)
    return escaped if len(escaped) <= limit and len(full) <= 4 * limit else escaped[: limit - 3] + "..."


def quoted(value: object, limit: int = LIMIT) -> str:
    """A foreign value as Python writes it, on one line of at most `limit` characters; a text has quotation marks."""
    try:
        return clean(repr(value), limit)
    except Exception as error:  # noqa: BLE001 - the __repr__ of foreign code, or lists in lists without end
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def printable(text: str) -> str:
    """The text with its lines, for logs and the console: other control characters become their escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def valid_utf8(text: str) -> str:
    r"""The text as it can be stored: half characters (surrogates such as '\ud800') become their escapes."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
