"""An independent reader of the Lamassu on-disk format, version 1, written from docs/format.md alone."""

from .content import File
from .errors import Damage, Destroyed, LamassuError, NoKey, NotFound, Refused
from .header import Header, KeySource
from .sessions import Sessions
from .vault import Entry, Vault

__all__ = ["Damage", "Destroyed", "Entry", "File", "Header", "KeySource", "LamassuError", "NoKey", "NotFound", "Refused", "Sessions", "Vault"]
