"""Errors that are a user's to mend: one message with what is wrong, where, and what to do."""

from __future__ import annotations


class SartorError(Exception):
    """A mistake in the input. The command line prints the message alone and exits with status 2.

    Names and reasons in it may come from anywhere; the message stays one line.

    >>> str(SartorError("mine.csv: cannot be read\\n  as a table"))
    'mine.csv: cannot be read as a table'
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(part.strip() for part in str(message).splitlines())
        super().__init__("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line))


class SettingError(SartorError):
    """A wrong key, type or value in an experiment or a hyper-parameter."""


class DataError(SartorError):
    """Data that is missing, damaged or cannot be partitioned as asked."""


class Diverged(SartorError):
    """Numbers of a run that grew beyond all bounds; the same experiment comes to the same end again."""


class NotStackable(SartorError):
    """A model or client function that cannot be trained in one batch; the loop engine can run it."""
