"""The worked example of docs/format.md (section 14), from the golden vault of suite `aes`.

    python worked_example.py             the section, on standard output
    python worked_example.py --check     is that what the page says? Status 1 and a diff if not
    python worked_example.py --write     put it into the page

Every value is recomputed here step by step, and the steps are compared with what lies in the store.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers import algorithms
from cryptography.hazmat.primitives.cmac import CMAC

from lamassu_reader.crypto import SUITES, b64, hkdf, prf, siv_open, siv_seal, unb64, xaes_open
from lamassu_reader.pages import HEAD

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "format.md"
GOLDEN = ROOT / "testdata" / "vaults"
HEADING = "## 14. Worked example\n"
WIDTH = 128  # of code blocks
PROSE_WIDTH = 120

Lines = list[str]


def _hex(label: str, data: bytes, note: str = "") -> Lines:
    """A label and bytes in hex, a few lines if need be."""
    text = data.hex()
    rows = [text[i : i + WIDTH] for i in range(0, len(text), WIDTH)] or ["(empty)"]
    out = [f"{label:<17} {rows[0]}"] + [" " * 18 + row for row in rows[1:]]
    if note:
        out[-1] += f"  {note}"
    return out


def _block(*parts: Lines | str) -> str:
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def _header(header: dict[str, Any]) -> tuple[str, bytes, bytes]:
    """The text on the header and its keys; K_in and K_out."""
    secret = (GOLDEN / "key.raw").read_bytes()
    slot, vault_id = header["slots"][0], bytes.fromhex(header["id"])
    salt, wrapped = bytes.fromhex(slot["salt"]), bytes.fromhex(slot["wrapped"])
    wrapping = hkdf(secret, b"lamassu v1 slot", salt=salt)
    aad = b"lamassu v1 slot" + vault_id + slot["id"].to_bytes(4, "little")
    opened = xaes_open(wrapping, bytes.fromhex(slot["nonce"]), wrapped[:16], wrapped[16:], aad)
    file_key, seed = opened[:32], opened[32:]  # an administrator's slot

    header_key = hkdf(file_key, b"lamassu v1 header")
    body = {name: value for name, value in header.items() if name != "mac"}
    form = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    mac = prf(header_key, form)
    assert mac.hex() == header["mac"]

    chain_key = hkdf(file_key, b"lamassu v1 keychain")
    sealed = bytes.fromhex(header["keychain"]["sealed"])
    chain_aad = b"lamassu v1 keychain" + vault_id
    text = xaes_open(chain_key, bytes.fromhex(header["keychain"]["nonce"]), sealed[:16], sealed[16:], chain_aad)
    chain = json.loads(text)
    (inner,), (outer,) = chain["inner"], chain["outer"]
    assert text == json.dumps(chain, sort_keys=True, separators=(",", ":")).encode()

    shown = {name: value for name, value in header.items() if name not in ("slots", "keychain", "mac")}
    out = "The header, without its other slots, `keychain` and `mac`:\n\n```\n" + json.dumps(shown, ensure_ascii=False)[:-1]
    for member in ("suite", "small_files", "admin", "history"):
        out = out.replace(f', "{member}"', f',\n "{member}"')
    out = out.replace(', "signature"', ',\n  "signature"') + ",\n"
    out += ' "slots": [' + json.dumps(slot).replace(', "nonce"', ',\n   "nonce"').replace(', "salt"', ',\n   "salt"')
    out = out.replace(', "wrapped"', ',\n   "wrapped"') + ", …], …}\n```\n\nSlot 1 is opened by `key.raw` (section 4):\n\n"
    out += _block(
        _hex("secret", secret),
        _hex("wrapping key", wrapping),
        _hex("AAD", aad),
        _hex("file key", file_key),
        _hex("seed", seed, "= the administrator's"),
        _hex("header key", header_key),
        f"canonical form    {len(form)} bytes: {form[:44].decode()} …",
        _hex("its SHA-256", hashlib.sha256(form).digest()),
        _hex("mac", mac),
        _hex("keychain key", chain_key),
        f"keychain          {len(text)} bytes: {text[:44].decode()} …",
        _hex("K_in, epoch 1", bytes.fromhex(inner["key"])),
        _hex("K_out, epoch 1", bytes.fromhex(outer["key"])),
    )
    return out, bytes.fromhex(inner["key"]), bytes.fromhex(outer["key"])


def _record(keys: dict[str, bytes], record: bytes, kind: int) -> tuple[Lines, bytes]:
    """A sealed record without context, taken apart; its content."""
    nonce, tag, mark, cipher = record[:24], record[24:40], record[40:56], record[56:]
    aad = b"\x01\x00\x01" + bytes([kind])
    assert mark == prf(keys["record select"], nonce + aad)[:16]
    content = xaes_open(keys["record seal"], nonce, tag, cipher, aad)
    return _hex("nonce", nonce) + _hex("tag", tag) + _hex("AAD", aad) + _hex("epoch tag", mark), content


def _page(keys: dict[str, bytes], raw: bytes) -> tuple[Lines, bytes]:
    """Page 0, taken apart; its 4040 plaintext bytes."""
    nonce, tag, mark = raw[:24], raw[24:40], raw[40:56]
    aad = b"\x01\x00\x01\x0c\x08\x00\x00\x00" + bytes(8)
    assert mark == prf(keys["page select"], nonce + aad)[:16]
    plain = xaes_open(keys["page seal"], nonce, tag, raw[56:4096], aad)
    assert nonce == prf(keys["page convergent"], aad + plain)[:24]
    at = {name: (offset - HEAD, size) for name, offset, size in _FIELDS}
    value = {name: plain[a : a + n] for name, (a, n) in at.items()}
    number = {name: int.from_bytes(data, "little") for name, data in value.items()}
    fields = (
        f"size {number['size']}, file id {value['file id'].hex()}, session {number['session']}, sequence {number['sequence']},\n"
        f"                  flags {number['flags']:#06x} (tail, used = {number['flags'] >> 8}), "
        f"pending {number['pending']}, replaced {number['replaced']}"
    )
    lines = _hex("nonce", nonce, "= PRF(page convergent, AAD ‖ plaintext)[0..24]") + _hex("tag", tag) + _hex("AAD", aad)
    return lines + _hex("epoch tag", mark) + [f"fields            {fields}"], plain


_FIELDS = (
    ("size", 56, 8),
    ("file id", 64, 16),
    ("session", 80, 4),
    ("sequence", 84, 4),
    ("flags", 88, 8),
    ("pending", 96, 16),
    ("replaced", 112, 16),
)


def _data_block(keys: dict[str, bytes], raw: bytes, key: bytes) -> Lines:
    """The one data block of a file, from its plaintext back to the store."""
    suite = SUITES["aes"]
    plain = suite.decrypt_block(key, raw[4096:8192])
    h = hashlib.sha256(plain).digest()
    halves, first = [], b""
    for c in (1, 2):
        first = c.to_bytes(4, "big") + b"lamassu\0" + h + (256).to_bytes(4, "big")
        mac = CMAC(algorithms.AES(keys["block key"]))
        mac.update(first)
        halves.append(mac.finalize())
    derived = b"".join(halves)
    assert derived[:31] + bytes([derived[31] & 0xFE]) == key
    cipher = suite.encrypt_block(key, plain)
    assert cipher == raw[4096:8192]
    return (
        _hex("D begins", plain[:16])
        + _hex("h", h)
        + _hex("input of CMAC 2", first)
        + _hex("CMAC 1 ‖ CMAC 2", derived)
        + _hex("K", key, "(slot 0)")
        + _hex("at offset 4096", cipher[:16], "…")
        + _hex("SHA-256 of it all", hashlib.sha256(cipher).digest())
    )


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    found = archive.extractfile(f"vault/{name}")
    assert found
    return found.read()


def _section(archive: tarfile.TarFile) -> str:
    header = json.loads(_read(archive, "lamassu.vault"))
    text, k_in, k_out = _header(header)
    suite = SUITES["aes"]
    purposes = ("page seal", "page select", "page convergent", "record seal", "record select")
    keys = {purpose: suite.derive(k_out, purpose) for purpose in purposes} | {
        "xattr name": suite.derive(k_out, "xattr name", 64),
        "block key": suite.derive(k_in, "block key"),
    }
    out = [
        HEADING,
        "The vault is `testdata/vaults/aes.tar.gz`, and `testdata/vaults/key.raw` opens it. `tests/interop/worked_example.py` writes this\n"
        "section, and a test keeps it true. Bytes are in hex.",
        text,
        "Derived from K_out and, the last one, from K_in (section 3); e.g. `page seal` with info `lamassu v1 aes page seal`:",
        _block(*(_hex(purpose, key) for purpose, key in keys.items())),
    ]

    record = archive.getmember("vault/lamassu.dir").linkname
    lines, content = _record(keys, unb64(record.encode()), 1)
    directory_id, secret = content[4:20], content[20:52]
    name_key = hkdf(secret, b"lamassu v1 name", 64)
    out += [
        f"`lamassu.dir` of the root (sections 5 and 6) is a link to `{record[:24]}…`, {len(record)} characters:",
        _block(
            lines,
            _hex("content", content),
            _hex("directory id", directory_id),
            _hex("directory secret", secret),
            _hex("name key", name_key),
        ),
    ]

    sealed = siv_seal(name_key, directory_id, b"hello.txt")
    stored = b64(sealed).decode()
    assert siv_open(name_key, directory_id, sealed) == b"hello.txt"
    raw = _read(archive, stored)
    lines, plain = _page(keys, raw)
    assert len(raw) == 4096 and plain[-32:] == b"Hello, world!\n".ljust(32, b"\0")
    out += [
        f"`hello.txt` holds `Hello, world!` and a line end. Its sealed name is `{sealed.hex()}`, so it lies at\n"
        f"`{stored}`: a page and nothing else, the content in the last slot (section 9):",
        _block(lines, _hex("slot 123", plain[-32:])),
    ]

    stored = b64(siv_seal(name_key, directory_id, b"block and tail")).decode()
    raw = _read(archive, stored)
    lines, plain = _page(keys, raw)
    size = int.from_bytes(plain[:8], "little")
    slots = (size - 4096 + 31) // 32
    tail = plain[-32 * slots :][: size - 4096]
    out += [
        f"`block and tail`, {size} bytes, lies at `{stored}`: page 0, then block 0. The last {size - 4096} bytes are the tail, "
        f"in the last {slots} slots:",
        _block(lines, _hex("tail begins", tail[:16], "…")),
        "Its block 0 (section 10), D being the 4096 bytes of plaintext:",
        _block(_data_block(keys, raw, plain[72:104])),
    ]
    return "\n".join(part if part.endswith("\n") else _wrapped(part) + "\n" for part in out)


def _wrapped(text: str) -> str:
    """Prose in lines of PROSE_WIDTH columns at most, with code spans in one piece."""
    text = re.sub(r"`[^`]*`", lambda span: span.group().replace(" ", "\0"), text)
    return textwrap.fill(text, PROSE_WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def section() -> str:
    """The whole section."""
    with tarfile.open(GOLDEN / "aes.tar.gz") as archive:
        return _section(archive)


def page_with(text: str) -> tuple[str, str]:
    """The page as it is, and with this section."""
    page = PAGE.read_text(encoding="utf-8")
    before, heading, _ = page.partition("\n" + HEADING)
    assert heading, "docs/format.md has no section 14"
    return page, before + "\n" + text


def main() -> int:
    """The command line."""
    if sys.argv[1:] == []:
        sys.stdout.write(section())
        return 0
    page, wanted = page_with(section())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif sys.argv[1:] == ["--check"]:
        sys.stdout.writelines(difflib.unified_diff(page.splitlines(True), wanted.splitlines(True), "docs/format.md", "recomputed"))
        return page != wanted
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
