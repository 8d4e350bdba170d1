"""Errors that are a user's to mend: one message with what is wrong, where, and what to do."""

from __future__ import annotations


class SartorError(Exception):
    """A mistake in the input. The command line prints the message alone and exits with status 2."""


class SettingError(SartorError):
    """A wrong key, type or value in an experiment or a hyper-parameter."""


class DataError(SartorError):
    """Data that is missing, damaged or cannot be partitioned as asked."""

    def __init__(self, message: str) -> None:
        # Names that come from the data may hold anything; the message stays one line.
        super().__init__("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message))


class NotStackable(SartorError):
    """A model or client function that cannot be trained in one batch; the loop engine can run it."""
