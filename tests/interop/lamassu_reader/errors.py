"""What can go wrong. Every error says where it happened and what is wrong there."""

from __future__ import annotations

import os

Where = str | bytes | os.PathLike[str]


def show(where: Where) -> str:
    """A path or a description as printable text."""
    return os.fsdecode(where).encode("utf-8", "backslashreplace").decode("utf-8")


class LamassuError(Exception):
    """Base class. `where` is a path or a place in a file, `what` the finding."""

    def __init__(self, where: Where, what: str) -> None:
        super().__init__(f"{show(where)}: {what}")
        self.where = where
        self.what = what


class Refused(LamassuError):
    """The input is not what this version of the format allows."""


class NoKey(LamassuError):
    """No key slot is opened by the given source."""


class Destroyed(LamassuError):
    """The vault's keys were destroyed: nothing opens its header."""


class Damage(LamassuError):
    """Something sealed does not open, does not verify, or contradicts the rest."""


class NotFound(LamassuError):
    """A path that names nothing."""
