"""Keeps secrets out of logs: a filter for every handler that the run attaches."""

from __future__ import annotations

import logging

from verl.config.secrets import hide

_PLAIN = logging.Formatter()


class HideSecrets(logging.Filter):
    """Puts a mask for every known secret into a record's message and its traceback; lets all records pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # arguments that do not fit: the handler reports them
            return True
        hidden = hide(message)
        if hidden != message:
            record.msg, record.args = hidden, None
        if record.exc_info and not record.exc_text:
            record.exc_text = _PLAIN.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = hide(record.exc_text)
        return True
