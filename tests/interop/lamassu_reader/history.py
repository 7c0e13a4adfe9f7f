"""The history of a vault's keys: section 4a."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .crypto import NONCE, TAG, OpenFailed, xaes_open
from .errors import Damage, Where, show

if TYPE_CHECKING:
    from .header import Header

UNIT, CONTENT_MAX = 256, 64 << 10
HEAD = 4 + NONCE + TAG


@dataclass(frozen=True)
class History:
    """Entries that verify. `torn`: bytes of an append that was interrupted."""

    entries: tuple[dict[str, Any], ...]
    torn: int

    @staticmethod
    def read(data: bytes, header: Header, where: Where) -> History:
        """Open every entry and compare with the mark in the header."""
        w = show(where)
        entries: list[dict[str, Any]] = []
        heads = [bytes(32)]
        at = 0
        torn = 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            plausible = 0 < length <= CONTENT_MAX and length % UNIT == 0
            end = at + HEAD + (length if plausible else CONTENT_MAX)
            entry = data[at:end]
            aad = b"lamassu v1 history" + header.id + len(heads).to_bytes(8, "little") + heads[-1]
            nonce, tag, ciphertext = entry[4:28], entry[28:HEAD], entry[HEAD:]
            try:
                if not plausible or len(entry) < HEAD:
                    raise OpenFailed
                content = xaes_open(header.history_key, nonce, tag, ciphertext, aad)
            except (OpenFailed, ValueError):
                if end >= len(data) and (plausible or len(entry) < 4 or not any(entry[:4])):
                    torn = len(data) - at
                    break
                raise Damage(w, f"entry {len(heads)} does not verify") from None
            entries.append(json.loads(content))
            heads.append(hashlib.sha256(entry).digest())
            at = end
        if header.history is not None:
            count, head = header.history
            if count >= len(heads) and torn:  # what was counted was durable, so this is no interrupted append
                raise Damage(w, f"entry {len(heads)} does not verify")
            if count >= len(heads):
                raise Damage(w, f"cut off: the header has seen {count} entries, {len(entries)} verify")
            if heads[count] != head:
                raise Damage(w, f"entry {count} is not the one that the header has seen")
        return History(tuple(entries), torn)
