"""Unit tests of the reader, against tiny vaults made by the minimal writer.

Run in this folder: python -m unittest test_reader
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import algorithms
from cryptography.hazmat.primitives.kdf.kbkdf import KBKDFCMAC, CounterLocation, Mode

import lamassu_reader as lr
import lamassu_samples
import worked_example
from lamassu_reader import crypto, payload, root, sessions, treehash
from lamassu_reader.header import KeySource, load, parse
from lamassu_reader.pages import is_profile, is_profile_of, method_of
from lamassu_writer_min import CLOSED, HOLE, OPEN, PageSpec, Writer, le

HERE = Path(__file__).resolve().parent
SUITES = ("aes", "paper", "blake3", "chacha")
RAW = bytes(range(32))
KEY = KeySource(RAW, "raw")


def noise(n: int, seed: int = 1) -> bytes:
    """Bytes without runs of zeros, the same in every run."""
    return random.Random(seed).randbytes(n)


class Temp(unittest.TestCase):
    """A fresh folder for every test."""

    def setUp(self) -> None:
        """Make the folder."""
        temp = tempfile.TemporaryDirectory()
        self.addCleanup(temp.cleanup)
        self.tmp = Path(temp.name)
        self.count = 0

    def writer(self, suite: str = "aes", **options: Any) -> Writer:
        """A vault opened by RAW."""
        self.count += 1
        w = Writer(self.tmp / f"vault{self.count}", suite, **options)
        w.slot("raw", RAW, "test")
        w.finish()
        return w

    def read(self, w: Writer, path: Path) -> bytes:
        """The content of one encrypted file; the vault's record says which sessions are open."""
        return self.read_and_notices(w, path)[0]

    def read_and_notices(self, w: Writer, path: Path) -> tuple[bytes, list[str]]:
        """The content of one encrypted file, and what must be said of it."""
        with self.file(w, path) as f:
            data = b"".join(f.chunks())
            self.assertEqual(len(data), f.size)
            return data, f.notices

    def file(self, w: Writer, path: Path) -> lr.File:
        """One encrypted file, opened with the vault's record of sessions."""
        header = load(w.dir / "lamassu.vault", KEY)
        return lr.File(header, path, sessions.load(header, os.fsencode(w.dir)))

    def damaged(self, w: Writer, path: Path, words: str) -> None:
        """Reading the file fails with these words."""
        with self.assertRaisesRegex(lr.Damage, words):
            self.read(w, path)

    def last_damaged(self, w: Writer, path: Path, words: str) -> None:
        """The last page is damaged, with these words; and what is empty from the floor on, in page 0 too, is not taken for a hole."""
        with self.file(w, path) as f:
            self.assertTrue(any(re.search(words, str(damage)) for damage in f.damages()), path)
            self.assertEqual(f.block(0), bytes(4096))
            with self.assertRaisesRegex(lr.Damage, "lost the end"):
                f.block(1)


class Primitives(unittest.TestCase):
    """Known answers."""

    def test_xaes_256_gcm(self) -> None:
        """The two vectors of the C2SP specification."""
        nonce, plain = b"ABCDEFGHIJKLMNOPQRSTUVWX", b"XAES-256-GCM"
        for key, aad, want in (
            (1, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
            (3, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
        ):
            tag, cipher = crypto.xaes_seal(bytes([key]) * 32, nonce, plain, aad)
            self.assertEqual((cipher + tag).hex(), want)
            self.assertEqual(crypto.xaes_open(bytes([key]) * 32, nonce, tag, cipher, aad), plain)
            with self.assertRaises(crypto.OpenFailed):
                crypto.xaes_open(bytes([key]) * 32, nonce, tag, cipher, aad + b"x")

    def test_xchacha20_poly1305(self) -> None:
        """draft-irtf-cfrg-xchacha-03, A.3.1."""
        plain = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be "
        plain += b"it."
        aad = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
        tag, cipher = crypto.xchacha_seal(bytes(range(0x80, 0xA0)), bytes(range(0x40, 0x58)), plain, aad)
        self.assertEqual(tag.hex(), "c0875924c1c7987947deafd8780acf49")
        self.assertTrue(cipher.hex().startswith("bd6d179d3e83d43b9576579493c0e939"))

    def test_chacha20(self) -> None:
        """RFC 8439 A.1, test vector 1: key, nonce and counter zero."""
        stream = crypto.SUITES["chacha"].encrypt_block(bytes(32), bytes(64))
        self.assertTrue(stream.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28"))

    def test_counter_kdf(self) -> None:
        """The block key of `aes` is what another implementation of SP 800-108 derives."""
        inner, plain = crypto.SUITES["aes"].inner(bytes(32)), noise(4096)
        for salt in (b"", noise(16), noise(24)):
            kdf = KBKDFCMAC(
                algorithms.AES,
                Mode.CounterMode,
                32,
                4,
                4,
                CounterLocation.BeforeFixed,
                b"lamassu",
                hashlib.sha256(plain).digest() + salt,
                None,
            )
            want = bytearray(kdf.derive(inner.keys[crypto.OF_SUITE]))
            want[31] &= 0xFE
            self.assertEqual(inner.block_key(plain, salt), want)

    def test_keyed_blake3(self) -> None:
        """The official vector for no input."""
        h = blake3.blake3(b"", key=b"whats the Elvish word for friend").hexdigest()
        self.assertEqual(h, "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26")

    def test_kept_vectors(self) -> None:
        """vectors.json is what the code says."""
        self.assertEqual((HERE / "vectors.json").read_text(), lamassu_samples.vectors())

    def test_worked_example(self) -> None:
        """Section 14 of the page is what the golden vault says; `python worked_example.py --write` mends it."""
        page, wanted = worked_example.page_with(worked_example.section())
        self.assertEqual(page, wanted)

    def test_aes_siv_key_order(self) -> None:
        """RFC 5297 A.1 is AES-128; the order of the key halves and of the output is the same here."""
        key = bytes.fromhex("fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
        aad = bytes.fromhex("101112131415161718191a1b1c1d1e1f2021222324252627")
        sealed = crypto.siv_seal(key, aad, bytes.fromhex("112233445566778899aabbccddee"))
        self.assertEqual(sealed.hex(), "85632d07c6e8f37f950acd320a2ecc9340c02b9690c4dc04daef7f6afe5c")

    def test_hkdf(self) -> None:
        """RFC 5869 A.3: no salt."""
        okm = crypto.hkdf(b"\x0b" * 22, b"", 42)
        self.assertTrue(okm.hex().startswith("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"))

    def test_base64(self) -> None:
        """Strictness."""
        self.assertEqual(crypto.unb64(b"AAE"), b"\x00\x01")
        for bad in (b"AAF", b"AAE=", b"A", b"AA+/", b"AAE\n", b"AA E"):
            with self.assertRaises(ValueError):
                crypto.unb64(bad)

    def test_last_bit(self) -> None:
        """Cleared in every suite but `paper`."""
        for name in SUITES:
            keys = crypto.SUITES[name].inner(bytes(range(32)))
            bits = {keys.block_key(noise(4096, n))[31] & 1 for n in range(32)}
            self.assertEqual(bits, {0, 1} if name == "paper" else {0})


class HeaderTest(Temp):
    """Section 4."""

    def build(self, change: Callable[[Writer], None] | None = None, chain: bytes | None = None) -> bytes:
        """A header, changed before it is authenticated."""
        w = self.writer()
        if change:
            change(w)
        return w.header_bytes(chain)

    def refuse(self, data: bytes, words: str) -> None:
        """Refused with these words."""
        with self.assertRaisesRegex(lr.Refused, words):
            parse(data, KEY, "h")

    def test_sources(self) -> None:
        """Every kind of slot."""
        w = Writer(self.tmp / "v")
        w.slot("raw", b"r" * 32)
        w.slot("hex", b"h" * 32)
        w.slot("passphrase", "pässword ".encode(), 'a "label" \\ ü 🜲')
        w.slot("raw", b"s" * 32)
        data = w.header_bytes()
        for source, slot in (
            (KeySource(b"r" * 32), 1),
            (KeySource(b"s" * 32, "raw"), 4),
            (KeySource((b"h" * 32).hex().encode()), 2),
            (KeySource((b"h" * 32).hex().upper().encode() + b"\r\n", "hex"), 2),
            (KeySource(b"h" * 32, "raw"), 2),
            (KeySource((b"r" * 32).hex().encode(), "hex"), 1),
            (KeySource("pässword \n".encode()), 3),
            (KeySource("pässword ".encode(), "passphrase"), 3),
        ):
            self.assertEqual(parse(data, source, "h").opened_slot, slot)
        for wrong in (
            KeySource(b"r" * 32, "hex"),
            KeySource(b"r" * 33, "raw"),
            KeySource((b"h" * 32).hex().encode() + b"\n\n", "hex"),
            KeySource("pässword \n\n".encode()),
            KeySource(b"", "passphrase"),
            KeySource(b"\n", "passphrase"),
            KeySource(b"\xff", "passphrase"),
            KeySource(b"x" * 4097, "passphrase"),
        ):
            with self.assertRaises(lr.NoKey):
                parse(data, wrong, "h")

    def test_json_layout_is_free(self) -> None:
        """The MAC is over the canonical form, not over the bytes."""
        obj = json.loads(self.build())
        parse(json.dumps(dict(reversed(obj.items())), indent=None).encode(), KEY, "h")

    def test_mac(self) -> None:
        """Any change is seen."""
        obj = json.loads(self.build())
        for name, value in (("created", 5), ("reserved_slots", 9), ("zone", "00" * 16), ("small_files", "random")):
            self.refuse(json.dumps(obj | {name: value}).encode(), "MAC")

    def test_snapshot(self) -> None:
        """A reader reads a snapshot like any vault; the mark is under the MAC."""
        data = self.build(lambda w: w.header.__setitem__("read_only", True))
        parse(data, KEY, "h")
        obj = json.loads(data)
        del obj["read_only"]
        self.refuse(json.dumps(obj).encode(), "MAC")

    def test_domain(self) -> None:
        """A deduplication domain fits suite and small files, and is under the MAC."""
        self.assertEqual(parse(self.build(), KEY, "h").domain, "zone")
        for suite in SUITES:
            for small_files in ("convergent", "random"):
                for domain in ("family", "file", "none"):
                    members = {"suite": suite, "small_files": small_files, "domain": domain}
                    data = self.build(lambda w, members=members: w.header.update(members))
                    if domain == "family" or (suite != "paper" and small_files == "random"):
                        self.assertEqual(parse(data, KEY, "h").domain, domain)
                    else:
                        self.refuse(data, "domain")
        for bad in ("zone", "", "File"):
            self.refuse(self.build(lambda w, bad=bad: w.header.update(domain=bad)), "unknown value")
        obj = json.loads(data)
        self.refuse(json.dumps(obj | {"domain": "file"}).encode(), "MAC")

    def test_strictness(self) -> None:
        """What is refused although the MAC is right."""

        def put(name: str, value: object) -> Callable[[Writer], None]:
            return lambda w: w.header.__setitem__(name, value)

        def slot(name: str, value: object) -> Callable[[Writer], None]:
            return lambda w: w.header["slots"][0].__setitem__(name, value)

        for change, words in (
            (put("extra", 1), "unknown member 'extra'"),
            (lambda w: w.header.pop("zone"), "missing member 'zone'"),
            (put("version", 2), "version 2"),
            (put("version", True), "not an integer"),
            (put("version", "1"), "not an integer"),
            (put("format", "x"), "neither"),
            (put("features", ["compression"]), "unknown feature"),
            (put("suite", "des"), "unknown suite"),
            (put("block_size", 2048), "not within"),
            (put("block_size", 5000), "power of two"),
            (put("reserved_slots", 0), "not within"),
            (put("reserved_slots", 63), "not within"),
            (put("name_max", 63), "not within"),
            (put("name_max", 256), "not within"),
            (put("names", "none"), "unknown value"),
            (put("small_files", ""), "unknown value"),
            (put("created", 1.0), "not an integer"),
            (put("created", -1), "out of range"),
            (put("read_only", False), "read_only"),
            (put("read_only", 1), "read_only"),
            (put("zone", "AB" * 16), "lower-case"),
            (put("zone", "ab" * 15), "15 bytes"),
            (put("slots", []), "1 to 64"),
            (slot("id", 0), "not within"),
            (slot("id", (1 << 32) - 1), "not within"),
            (slot("id", 2), "not above"),
            (put("next_slot", 1), "not above"),
            (put("next_slot", 1 << 32), "not within"),
            (lambda w: w.header.pop("next_slot"), "missing member 'next_slot'"),
            (slot("extra", 0), "unknown member"),
            (slot("kind", "tpm"), "unknown kind"),
            (slot("label", "a\nb"), "control"),
            (slot("label", "ü" * 128), "255 bytes"),
            (slot("argon2", {}), "unknown member 'argon2'"),
            (slot("kind", "passphrase"), "missing member 'argon2'"),
        ):
            self.refuse(self.build(change), words)

    def test_argon2_bounds(self) -> None:
        """Refused before it runs."""
        for change, words in (
            ({"memory_kib": 8, "lanes": 2}, "memory_kib"),
            ({"memory_kib": 4194305}, "memory_kib"),
            ({"passes": 0}, "passes"),
            ({"passes": 65}, "passes"),
            ({"lanes": 17, "memory_kib": 1024}, "lanes"),
        ):
            w = Writer(self.tmp / f"v{words}{change}")
            w.slot("passphrase", b"x")
            w.header["slots"][0]["argon2"] |= change
            self.refuse(w.header_bytes(), words)

    def test_argon2_work(self) -> None:
        """What all slots together ask for is bounded: nothing runs."""
        for slots, passes in ((1, 64), (5, 4), (64, 64)):
            w = Writer(self.tmp / f"work{slots}")
            w.slot("passphrase", b"x")
            slot = w.header["slots"][0]
            cost = {"memory_kib": 4194304, "passes": passes, "lanes": 4}
            w.header["slots"] = [slot | {"id": i + 1, "argon2": cost} for i in range(slots)]
            w.header["next_slot"] = slots + 1
            self.refuse(w.header_bytes(), "64 GiB")

    def test_distinct_slots(self) -> None:
        """Slot ids are distinct, and at most 64."""
        self.refuse(self.build(lambda w: w.header["slots"].append(w.header["slots"][0])), "distinct")

    def test_json_traps(self) -> None:
        """What two JSON parsers could read differently."""
        good = self.build().decode()
        parse(good.encode(), KEY, "h")
        for bad, words in (
            (good.replace('"version": 1,', '"version": 1, "version": 1,'), "twice"),
            (good.replace('"version": 1,', '"version": 1.0,'), "not an integer"),
            (good.replace('"version": 1,', '"version": NaN,'), "not an integer"),
            (good.replace('"created": 1700000000', '"created": -0'), "out of range"),
            (good.replace('"created": 1700000000', '"created": 18446744073709551616'), "out of range"),
            (good.replace('"label": "test"', '"label": "\\ud800"'), "not JSON"),
            (good.replace('"label": "test"', '"label": "\t"'), "not JSON"),
            ("\ufeff" + good, "not JSON"),
            (good + "{}", "not JSON"),
            ("[" * 100000, "not JSON"),
            ("[]", "not a JSON object"),
            (good.replace('"label": "test"', '"label": 7'), "not a string"),
            (good.replace('"features": []', '"features": {}'), "not an array"),
            (good.replace('"slots": [', '"slots": [[],'), "not an object"),
            (good + " " * (1 << 20), "1 MiB"),
        ):
            self.refuse(bad.encode(), words)
        self.refuse(good.encode("utf-16"), "not JSON")

    def test_keychain(self) -> None:
        """Strictness inside."""
        e = {"created": 0, "epoch": 1, "key": "00" * 32}
        for chain, words in (
            ({"inner": [], "outer": [e]}, "inner: no epoch"),
            ({"inner": [e], "outer": []}, "outer: no epoch"),
            ({"inner": [e]}, "missing"),
            ({"inner": [e, e], "outer": [e]}, r"inner\[1\].epoch"),
            ({"inner": [e | {"epoch": 0}], "outer": [e]}, "epoch"),
            ({"inner": [e | {"key": "00"}], "outer": [e]}, "1 bytes"),
            ({"inner": [e | {"x": 1}], "outer": [e]}, "unknown"),
            ({"inner": [e | {"zone": False}], "outer": [e]}, r"inner\[0\].zone: not true"),
        ):
            self.refuse(self.build(chain=json.dumps(chain).encode()), words)
        of_zone = {"inner": [e | {"zone": True}], "outer": [e]}
        parse(self.build(chain=json.dumps(of_zone).encode()), KEY, "v")

    def test_zone(self) -> None:
        """A zone file, without outer epochs."""
        w = Writer(self.tmp / "v")
        w.slot("raw", RAW)
        for name in ("zone", "reserved_slots", "names", "name_max", "small_files"):
            del w.header[name]
        w.header["format"] = "lamassu-zone"
        w.outer_raw = []
        header = parse(w.header_bytes(), KEY, "z")
        self.assertTrue(header.is_zone)
        self.assertEqual(header.inner, tuple(w.inner_raw))
        self.assertEqual(header.pins, {})
        pin = {"vault": "0a" * 16, "admin": "0b" * 32}
        w.header["pins"] = [pin]
        self.assertEqual(parse(w.header_bytes(), KEY, "z").pins, {b"\n" * 16: b"\x0b" * 32})
        for bad in ([], [pin, pin], [{"vault": "0a" * 16}]):
            w.header["pins"] = bad
            self.refuse(w.header_bytes(), "pins")
        del w.header["pins"]
        w.header["names"] = "plain"
        self.refuse(w.header_bytes(), "unknown member 'names'")

    def test_zone_is_no_vault(self) -> None:
        """A zone file in the place of a header."""
        w = Writer(self.tmp / "v")
        w.slot("raw", RAW)
        for name in ("zone", "reserved_slots", "names", "name_max", "small_files"):
            del w.header[name]
        w.header["format"] = "lamassu-zone"
        w.finish()
        with self.assertRaisesRegex(lr.Refused, "zone file"):
            lr.Vault(str(w.dir), KEY)


class Files(Temp):
    """Sections 8 to 12."""

    def test_shapes(self) -> None:
        """Every suite, block size and reserve; sizes on and around every border."""
        for suite in SUITES:
            for block, reserved in ((4096, 62), (4096, 1), (8192, 62), (65536, 8)):
                w = self.writer(suite, block_size=block, reserved=reserved)
                page = w.N * block
                sizes = {0, 1, 31, 32, 33, block - 1, block, block + 1, 3 * block + 500}
                if block < 65536:
                    sizes |= {page - 1, page, page + 1, page + block + 7, w.P * page, w.P * page + 1, 2 * w.P * page + 77}
                for size in sorted(sizes):
                    data = noise(size)
                    path = w.dir / f"f{size}"
                    w.write_file(path, data)
                    with self.subTest(suite=suite, block=block, reserved=reserved, size=size):
                        self.assertEqual(self.read(w, path), data)

    def test_convergent(self) -> None:
        """Equal small files are equal ciphertext."""
        w = self.writer()
        w.write_file(w.dir / "a", b"same")
        w.write_file(w.dir / "b", b"same")
        self.assertEqual((w.dir / "a").read_bytes(), (w.dir / "b").read_bytes())

    def test_holes(self) -> None:
        """Holes in a page, pages of holes, blocks of zeros that are data."""
        for block in (4096, 16384):
            w = self.writer("chacha", block_size=block, reserved=62)
            total = 5 * w.N + 3
            data = bytearray(total * block)
            for b in (0, 5, w.N, 4 * w.N + 1, total - 1):
                data[b * block : (b + 1) * block] = noise(block, b)
            holes = frozenset(b for b in range(total) if not any(data[b * block : (b + 1) * block]) and b != 7)
            for sparse in (False, True):
                path = w.dir / f"f{sparse}"
                w.write_file(path, bytes(data), holes, sparse)
                if sparse:  # page 0's size says that pages 2 and 3 were there
                    self.assertEqual(self.read(w, path), data)
                else:
                    self.damaged(w, path, "page 2 .*absent below the size")

    def test_absent_above_the_floor(self) -> None:
        """A page above the floor may be absent without `sparse`, where the last page is of an open session; and that is said."""
        w = self.writer(reserved=62)
        path, fid = w.dir / "f", bytes([9]) * 16
        size = 6 * w.N * w.B + 10
        for first, session in ((OPEN, OPEN), (CLOSED, CLOSED), (CLOSED, OPEN)):
            w.put_page(path, 0, PageSpec(w.B, fid, first, used=w.N, keys=[w.put_block(path, 0, b"A" * w.B)]))
            w.put_page(path, 6, PageSpec(size, fid, session, tail=b"0123456789"))
            if first == OPEN:
                data, notices = self.read_and_notices(w, path)
                self.assertEqual(data, b"A" * w.B + bytes(size - w.B - 10) + b"0123456789")
                said = [re.search(r": pages? (\d+)(?: to (\d+))?(?: \(offset \d+\))?: absent", text) for text in notices]
                found = [g for match in said if match for g in range(int(match[1]), int(match[2] or match[1]) + 1)]
                self.assertEqual(found, [1, 2, 3, 4, 5])
            else:  # an open session that has not written page 0 has written no page past the one that was the last
                with self.file(w, path) as f:
                    self.assertEqual([str(d).split(": ")[1].split(" (")[0] for d in f.damages()], [f"page {g}" for g in range(1, 6)])
                    self.assertEqual(f.notices, [])
        w.put_page(path, 0, PageSpec(w.B, fid, CLOSED, sparse=True, used=w.N, keys=[w.block(b"A" * w.B)[0]]))
        self.assertEqual(self.read_and_notices(w, path), (b"A" * w.B + bytes(size - w.B - 10) + b"0123456789", []))

    def test_older_pages(self) -> None:
        """A page that others follow, and that tells less than all its blocks, is from when the file ended in it."""
        w = self.writer(reserved=62)
        path, fid = w.dir / "f", bytes([9]) * 16
        block, size = b"A" * w.B, 2 * w.N * w.B + 10
        key = w.block(block)[0]
        for g in (0, 1):
            for session, floor, tail, stale in (
                (CLOSED, size, None, True),
                (OPEN, w.B, None, False),
                (OPEN, w.N * w.B + w.B + 1, None, True),
                (OPEN, w.N * w.B + w.B, None, g == 0),
                (CLOSED, g * w.N * w.B + w.B + 5, b"12345", True),
            ):
                with self.subTest(g=g, session=session, floor=floor):
                    for page in (0, 1):
                        w.put_block(path, page * w.N, block)
                        used, own = (1, tail) if page == g else (w.N, None)
                        of = page * w.N * w.B + w.B + len(own or b"") if own or page else floor
                        w.put_page(path, page, PageSpec(of, fid, session, used=used, keys=[key], tail=own))
                    w.put_page(path, 2, PageSpec(size, fid, session, tail=b"0123456789"))
                    if stale:
                        self.damaged(w, path, f"page {g} .*older page")
                        continue
                    data, notices = self.read_and_notices(w, path)
                    self.assertEqual(data, 2 * block.ljust(w.N * w.B, b"\0") + b"0123456789")
                    self.assertEqual([f"page {g} " in text and "not written since" in text for text in notices], [True])

    def test_trailing_zeros_in_the_store(self) -> None:
        """Space set aside at the end of the backing file changes nothing."""
        w = self.writer(block_size=8192)
        path = w.dir / "f"
        w.write_file(path, noise(20000))
        with path.open("ab") as f:
            f.write(bytes(5 << 20))
        os.truncate(path, 1 << 40)
        self.assertEqual(self.read(w, path), noise(20000))

    def test_unwritten(self) -> None:
        """Files whose page was never written."""
        w = self.writer()
        for size in (0, 1, 4096):
            path = w.dir / f"f{size}"
            path.write_bytes(bytes(size))
            self.assertEqual(self.read(w, path), b"")
        path = w.dir / "more"
        path.write_bytes(bytes(4097))
        self.damaged(w, path, "something behind it")

    def test_floor(self) -> None:
        """A floor above what is there: the size is the floor, the rest is lost."""
        w = self.writer(reserved=62)
        path, fid, page = w.dir / "f", bytes([9]) * 16, w.N * w.B
        keys = [w.put_block(path, b, noise(w.B, b)) for b in range(w.N)]
        w.put_page(path, 0, PageSpec(page + 100, fid, 3, keys=keys, sparse=True))
        with self.file(w, path) as f:
            self.assertEqual((f.size, f.summary.lost_from), (page + 100, page))
            self.assertEqual(f.block(w.N - 1), noise(w.B, w.N - 1))
            self.assertEqual(len(list(f.damages())), 1)
            with self.assertRaises(lr.Damage):
                f.block(w.N)

    def test_floor_and_keys(self) -> None:
        """Past the size of the last page, a block with a key is read, one without is lost."""
        w = self.writer(reserved=62)
        path, fid, page = w.dir / "f", b"i" * 16, w.N * w.B
        w.put_page(path, 0, PageSpec(page + 3 * w.B, fid, 1, keys=[w.put_block(path, b, noise(w.B, b)) for b in range(w.N)]))
        keys = [w.put_block(path, w.N + i, noise(w.B, i)) for i in range(2)]
        w.put_page(path, 1, PageSpec(page + w.B, fid, 1, keys=keys))
        with self.file(w, path) as f:
            self.assertEqual((f.size, f.summary.lost_from), (page + 3 * w.B, page + w.B))
            self.assertEqual(f.block(w.N + 1), noise(w.B, 1))
            self.assertEqual([str(d).rpartition(": ")[0].rpartition(": ")[2][:9] for d in f.damages()], ["block 64 "])

    def test_damaged_pages(self) -> None:
        """A damaged page costs its own blocks and nothing else."""
        w = self.writer(reserved=62)
        span = w.N * w.B
        data = noise(2 * span + 5 * w.B)
        for bad in range(3):
            for junk in (b"!!!!", bytes(4096)):
                path = w.dir / f"f{bad}{len(junk)}"
                w.write_file(path, data)
                w.put(path, w.page_at(bad), junk)
                with self.file(w, path) as f, self.subTest(bad=bad, junk=len(junk)):
                    self.assertGreaterEqual(f.size, len(data))
                    found = list(f.damages())
                    self.assertEqual(len(found), 1, found)
                    for b in range(0, 2 * w.N + 5, 7):
                        if b // w.N == bad:
                            with self.assertRaises(lr.Damage):
                                f.block(b)
                        else:
                            self.assertEqual(f.block(b), data[b * w.B : (b + 1) * w.B])

    def test_damaged_last_page(self) -> None:
        """The size is then an estimate: not below the floor, else what the backing length allows."""
        w = self.writer(reserved=62)
        span = w.N * w.B
        path = w.dir / "f"
        w.write_file(path, noise(span + 3 * w.B))
        w.put(path, w.page_at(1), b"!!!!")
        with self.file(w, path) as f:
            self.assertEqual((f.size, f.summary.exact), (span + 3 * w.B, False))
        only = w.dir / "only"
        for size, want in ((100, w.B), (w.B + 4000, 2 * w.B)):
            w.write_file(only, noise(size))
            w.put(only, 0, b"!!!!")
            with self.file(w, only) as f:
                self.assertEqual((f.size, f.summary.exact), (want, False))

    def test_huge_hole(self) -> None:
        """A hole of an exbibyte is passed at once; the largest size is the largest."""
        w = self.writer(reserved=62)
        path, fid = w.dir / "f", b"i" * 16
        g = (1 << 42) // (w.N * w.B)
        size = g * w.N * w.B + 1
        w.put_page(path, 0, PageSpec(1, fid, 1, sparse=True, used=w.N, keys=[w.put_block(path, 0, b"A")]))
        w.put_page(path, g, PageSpec(size, fid, 1, tail=b"z"))
        with self.file(w, path) as f:
            self.assertEqual((f.size, list(f.damages())), (size, []))
            self.assertEqual((f.block(0)[:2], f.block(1 << 20), f.block(g * w.N)), (b"A\0", bytes(4096), b"z"))
        largest = (((1 << 63) - 1) // ((1 + w.N) * w.B) - 1) * w.N * w.B
        for size, words in ((largest, "lost the end"), (largest + 1, f"a size of {largest + 1}")):
            w.put_page(w.dir / "g", 0, PageSpec(size, fid, 1, sparse=True))
            self.damaged(w, w.dir / "g", words)

    def test_last_page_out_of_reach(self) -> None:
        """The size of the last page lies in the last page."""
        w = self.writer(reserved=62)
        for size in (w.N * w.B, 2 * w.N * w.B + 1):
            path = w.dir / f"f{size}"
            w.put_page(path, 0, PageSpec(10, b"i" * 16, 1))
            w.put_page(path, 1, PageSpec(size, b"i" * 16, 1))
            self.last_damaged(w, path, "not in its reach")

    def test_cut(self) -> None:
        """An interrupted shrink: page 0 has the size."""
        w = self.writer(reserved=62)
        path, data = w.dir / "f", noise(3 * 62 * 4096)
        w.write_file(path, data)
        keys = [w.block(data[b * w.B : (b + 1) * w.B])[0] for b in range(w.N)]
        fid = bytes([5]) * 16
        for size in (5000, 62 * 4096 + 1):
            w.put_page(path, 0, PageSpec(size, fid, OPEN, cut=True, keys=keys))
            w.put_page(path, 1, PageSpec(2 * w.N * w.B, fid, OPEN, keys=[w.block(data[(62 + i) * 4096 :][:4096])[0] for i in range(62)]))
            read, notices = self.read_and_notices(w, path)
            self.assertEqual(read, data[:size])
            self.assertEqual([f"a shrink to {size} bytes was interrupted" in text for text in notices], [True])
        w.put_page(path, 2, PageSpec(3 * w.N * w.B, fid, OPEN, sequence=2, keys=[w.block(data[(124 + i) * 4096 :][:4096])[0] for i in range(62)]))
        with self.file(w, path) as f:  # written after page 0: the shrink was complete by then
            self.assertEqual(f.size, 3 * w.N * w.B)
            (found,) = f.damages()
            self.assertRegex(str(found), "page 0 .*pages past its end were written later")
        for session in (CLOSED, OPEN + 1):  # put back later, it would cut the file again
            w.put_page(path, 0, PageSpec(5000, fid, session, cut=True, keys=keys))
            w.put_page(path, 2, PageSpec(3 * w.N * w.B, fid, OPEN, keys=[w.block(data[(124 + i) * 4096 :][:4096])[0] for i in range(62)]))
            with self.file(w, path) as f:
                self.assertEqual((f.size, f.summary.exact), (3 * w.N * w.B, True))
                self.assertEqual(f.block(62), data[62 * 4096 :][:4096])
                (found,) = f.damages()
                self.assertRegex(str(found), "page 0 .*interrupted shrink in a page of session [13], which is not open")

    def test_epochs(self) -> None:
        """Pages and blocks of different epochs in one file."""
        for suite in SUITES:
            w = self.writer(suite, reserved=62, inner_epochs=3, outer_epochs=3)
            path, data, fid = w.dir / "f", noise(63 * 4096), b"i" * 16
            keys = []
            for b in range(63):
                key, cipher = w.block(data[b * 4096 :][:4096], w.suite.inner(w.inner_raw[b % 3]))
                w.put(path, w.block_at(b), cipher)
                keys.append(key)
            w.epoch = 0
            w.put_page(path, 0, PageSpec(62 * 4096, fid, 1, keys=keys[:62]))
            w.epoch = 2
            w.put_page(path, 1, PageSpec(63 * 4096, fid, 1, keys=keys[62:]))
            self.assertEqual(self.read(w, path), data)

    def test_oblivious_epoch(self) -> None:
        """Half of a key is a server's, and the other half says whether it is that of the block."""
        for suite in ("aes", "blake3", "chacha"):
            w = self.writer(suite, inner_epochs=2)
            w.oblivious = {"key": "office", "public": "11" * 32, "server": "keeper.example:7433"}
            w.header["features"] = ["oblivious"]
            w.finish()
            old, data = w.suite.inner(w.inner_raw[0]), noise(3 * 4096)
            blocks = [w.block(data[b * 4096 :][:4096], old if b == 1 else None) for b in range(3)]
            for b, (_, cipher) in enumerate(blocks):
                w.put(w.dir / "f", w.block_at(b), cipher)
            keys = [key for key, _ in blocks]
            w.put_page(w.dir / "f", 0, PageSpec(3 * 4096, b"i" * 16, 1, keys=keys))
            self.assertEqual(self.read(w, w.dir / "f"), data)
            for at in (0, 15, 16, 31):
                key = bytearray(keys[0])
                key[at] ^= 2
                w.put_page(w.dir / "f", 0, PageSpec(3 * 4096, b"i" * 16, 1, keys=[bytes(key), *keys[1:]]))
                self.assertNotEqual(self.file(w, w.dir / "f").damages(), [])
        for chain, features, words in (
            (w.chain(), [], "not what the keychain has"),
            (w.chain(), ["oblivious", "oblivious"], "named twice"),
            (w.chain() | {"inner": w.chain()["outer"]}, ["oblivious"], "not what the keychain has"),
            (w.chain() | {"outer": w.chain()["inner"]}, ["oblivious"], "never oblivious"),
        ):
            w.header["features"] = features
            with self.assertRaisesRegex(lr.Refused, words):
                parse(w.header_bytes(json.dumps(chain).encode()), KEY, "v")

    def test_salted_blocks(self) -> None:
        """Keys that depend on the file, or on the file and the block's number: read in their place alone."""
        fid, data = b"i" * 16, noise(4096) * 65
        for suite in ("aes", "blake3", "chacha"):
            for domain in ("file", "none"):
                w = self.writer(suite, reserved=62)
                w.header |= {"domain": domain, "small_files": "random"}
                w.finish()

                def put(name: str, file_id: bytes, first: int = 0, w: Writer = w, domain: str = domain) -> Path:
                    path, keys = w.dir / name, []
                    for b in range(65):
                        number = (first + b).to_bytes(8, "little") if domain == "none" else b""
                        key, cipher = w.block(data[:4096], salt=file_id + number)
                        w.put(path, w.block_at(b), cipher)
                        keys.append(key)
                    self.assertEqual(len(set(keys)), 65 if domain == "none" else 1)
                    w.put_page(path, 0, PageSpec(65 * 4096, fid, 1, keys=keys[:62]))
                    w.put_page(path, 1, PageSpec(65 * 4096, fid, 1, keys=keys[62:]))
                    return path

                self.assertEqual(self.read(w, put("f", fid)), data)
                self.damaged(w, put("of another file", b"j" * 16), "does not match its key")
                if domain == "none":
                    self.damaged(w, put("elsewhere in it", fid, 1), "does not match its key")
                w.put_page(w.dir / "without", 0, PageSpec(4, bytes(16), 0, tail=b"tail"))
                self.damaged(w, w.dir / "without", "without the file's id")

    def test_compressed_blocks(self) -> None:
        """Keys and ciphertext that another program wrote, and payloads by both codecs."""
        rows = json.loads((HERE / "../../testdata/vectors/compressed_blocks.json").read_text())
        self.assertEqual(len(rows), 24)
        for row in rows:
            suite, size = crypto.SUITES[row["suite"]], row["block_size"]
            key, stored = bytes.fromhex(row["k"]), bytes.fromhex(row["ciphertext"]).ljust(size, b"\0")
            self.assertTrue(suite.is_compressed(key))
            self.assertEqual(payload.stored_len(stored), row["payload_len"])
            content = suite.decrypt_block(key, stored[: row["payload_len"]])
            inner = suite.inner(bytes.fromhex(row["k_in"]))
            self.assertEqual(inner.payload_key(content, bytes.fromhex(row.get("file_id", ""))), key)
            word = row["block_word"].encode()
            self.assertEqual(payload.unpack(content, size), word * (size // len(word)))
            for bad in (content[:3], b"\3" + content[1:], content[:1] + b"\xff\xff\xff" + content[4:], content[:14]):
                self.assertIsNone(payload.unpack(bad, size))
            self.assertIsNone(payload.unpack(content, size // 2), "more than a block")
            self.assertIsNone(payload.unpack(content, size * 2), "less than a block")

    def test_a_compressed_file(self) -> None:
        """A block that is compressed beside one that is not; and one whose key does not say so."""
        w = self.writer("aes")
        w.header["compression"] = {"codec": "zstd", "level": 3, "version": "1.5.7", "round": 512}
        w.finish()
        # "ab" twice by literals, then the rest by one match: an LZ4 block of 4096 bytes.
        made = b"\x2fab\x02\x00" + b"\xff" * 15 + bytes([4096 - 2 - 8 - 19 - 15 * 255]) + b"\x80abababab"
        content = (b"\1" + len(made).to_bytes(3, "little") + made).ljust(512, b"\0")
        plain, suite = b"ab" * 2048, crypto.SUITES["aes"]
        key = w.inner.payload_key(content)
        stored = suite.encrypt_block(key, content).ljust(4096, b"\0")
        for mark, damage in ((0, None), (1, "does not match its key")):
            path = w.dir / f"f{mark}"
            keys = [key[:31] + bytes((key[31] ^ mark,)), w.put_block(path, 1, noise(4096))]
            w.put(path, w.block_at(0), stored)
            w.put_page(path, 0, PageSpec(8192, bytes(16), 0, keys=keys))
            if damage:
                self.damaged(w, path, damage)
            else:
                self.assertEqual(self.read(w, path), plain + noise(4096))
        for wrong in ({"round": 256}, {"round": 4096}, {"level": 20}, {"codec": "lz4"}, {"version": "1.5"}):
            w.header["compression"] = {"codec": "zstd", "level": 3, "version": "1.5.7", "round": 512} | wrong
            with self.assertRaises(lr.Refused):
                parse(w.header_bytes(), KEY, "v")

    def pending(self, w: Writer, stored: bytes | None, new: bytes, previous: bytes | None, session: int = OPEN) -> Path:
        """Block 1 of 3 is pending with these candidates, and `stored` is what the store holds."""
        self.count += 1
        path = w.dir / f"p{self.count}"
        keys = [w.put_block(path, 0, b"zero" * 1024), new, w.put_block(path, 2, b"two." * 1024)]
        if stored is not None:
            w.put(path, w.block_at(1), stored)
        before = {} if previous is None else {1: previous}
        w.put_page(path, 0, PageSpec(3 * w.B, b"i" * 16, session, pending={1}, previous=before, keys=keys))
        return path

    def test_pending(self) -> None:
        """Every combination of candidates and of what the store holds."""
        for suite in SUITES:
            w = self.writer(suite)
            new, old, other = noise(4096, 2), noise(4096, 3), noise(4096, 4)
            (kn, cn), (ko, co), (_, cx) = w.block(new), w.block(old), w.block(other)
            hole = bytes(4096)
            for stored, key, previous, want in (
                (cn, kn, None, new),
                (None, kn, None, hole),
                (hole, kn, None, hole),
                (cx, kn, None, None),
                (cn, kn, ko, new),
                (co, kn, ko, old),
                (None, kn, ko, None),
                (cx, kn, ko, None),
                (cn, kn, HOLE, new),
                (None, kn, HOLE, hole),
                (cx, kn, HOLE, None),
                (None, HOLE, ko, hole),
                (co, HOLE, ko, old),
                (cx, HOLE, ko, None),
                (None, HOLE, None, hole),
                (cx, HOLE, None, None),
                (cn[:2048] + co[2048:], kn, ko, None),
            ):
                path = self.pending(w, stored, key, previous)
                with self.subTest(suite=suite, stored=stored and stored[:4], key=key[:4], previous=previous and previous[:4]):
                    if want is None:
                        self.damaged(w, path, "block 1 .*no candidate")
                    else:
                        data, notices = self.read_and_notices(w, path)
                        self.assertEqual(data, b"zero" * 1024 + want + b"two." * 1024)
                        first = want == new if key == kn else want == hole  # what was written last is there
                        words = "what was there before" if previous is not None else "nothing is: a hole"
                        self.assertEqual([words in notice and "block 1 " in notice for notice in notices], [] if first else [True])

    def test_pending_in_a_session_not_open(self) -> None:
        """Ignored, with all previous keys: the new keys count, and nothing else."""
        for suite in SUITES:
            w = self.writer(suite)
            new, old = noise(4096, 2), noise(4096, 3)
            (kn, cn), (ko, co) = w.block(new), w.block(old)
            hole = bytes(4096)
            for stored, key, previous, want in (
                (cn, kn, None, new),
                (None, kn, None, None),
                (hole, kn, None, None),
                (cn, kn, ko, new),
                (co, kn, ko, None),
                (cn, kn, HOLE, new),
                (None, kn, HOLE, None),
                (None, HOLE, ko, hole),
                (co, HOLE, ko, hole),
                (co, HOLE, None, hole),
            ):
                for session in (CLOSED, OPEN + 1):  # closed, and unknown
                    path = self.pending(w, stored, key, previous, session)
                    with self.subTest(suite=suite, stored=stored and stored[:4], key=key[:4], previous=previous and previous[:4]):
                        if want is None:
                            self.damaged(w, path, "block 1 .*does not match its key")
                        else:
                            data, notices = self.read_and_notices(w, path)
                            self.assertEqual(data, b"zero" * 1024 + want + b"two." * 1024)
                            self.assertEqual(["does not know" in text for text in notices], [] if session == CLOSED else [True])

    def test_without_a_record(self) -> None:
        """A single file without a vault: every session counts as open, and what is missing is said."""
        w = self.writer()
        (kn, _), (ko, co) = w.block(noise(4096, 2)), w.block(noise(4096, 3))
        path = self.pending(w, co, kn, ko, CLOSED)
        self.damaged(w, path, "does not match its key")
        with lr.File(load(w.dir / "lamassu.vault", KEY), path) as f:
            self.assertEqual(f.block(1), noise(4096, 3))
            self.assertEqual(f.block(1), noise(4096, 3))
            self.assertEqual(len(f.notices), 1)  # said once

    def test_pending_past_the_end(self) -> None:
        """Bytes past the end of the store count as zero, also within a block."""
        w = self.writer("chacha")
        path = w.dir / "f"
        key, cipher = w.block(b"x" * 4096)
        w.put_page(path, 0, PageSpec(4096, b"i" * 16, OPEN, pending={0}, keys=[key]))
        self.assertEqual(self.read(w, path), bytes(4096))
        w.put(path, 4096, bytes(100))
        self.assertEqual(self.read(w, path), bytes(4096))
        w.put(path, 4096, cipher[:100])
        self.damaged(w, path, "no candidate")

    def test_many_previous(self) -> None:
        """Previous keys are ascending by block, after the keys."""
        w = self.writer(reserved=62)
        path = w.dir / "f"
        marks = list(range(0, 62, 2))
        keys = [w.put_block(path, b, noise(4096, 100 + b)) for b in range(62)]
        previous = {i: keys[i] for i in marks}
        new = [w.block(b"new")[0] if i in previous else keys[i] for i in range(62)]
        page = PageSpec(62 * 4096, b"i" * 16, OPEN, pending=set(range(62)), previous=previous, keys=new)
        w.put_page(path, 0, page)
        self.assertEqual(self.read(w, path), b"".join(noise(4096, 100 + b) for b in range(62)))

    def test_page_strictness(self) -> None:
        """Pages that open but break a rule."""
        w = self.writer(reserved=8)
        path = w.dir / "f"
        key = w.put_block(path, 0, b"x" * 4096)
        size = 4096 + 40
        tail = b"t" * 40
        junk_slot, after_tail = 128 - 56 + 50 * 32, 4039
        fid = b"i" * 16
        for page, words, *content in (
            (PageSpec(4096, keys=[key], more_flags=5 << 3), "keys or a cipher of plain"),
            (PageSpec(4096, keys=[key], more_flags=9 << 3), "keys or a cipher of plain"),
            (PageSpec(4096, keys=[key], more_flags=4 << 3), "without a file id has"),
            (PageSpec(4096, keys=[key], more_flags=1 << 15), "without a file id has"),
            (PageSpec(4096, keys=[key], more_flags=1 << 16), "a session tag"),  # of a page without a file id
            (PageSpec(4096, keys=[key], more_flags=1 << 63), "a session tag"),
            (PageSpec(4096, used=117), "117 slots"),
            (PageSpec(4096, keys=[key], pending={1}), "at or above"),
            (PageSpec(4096, keys=[key], pending={127}), "at or above"),
            (PageSpec(4096, keys=[key], previous={0: key}), "not within"),
            (PageSpec(9 * 4096, keys=[key] * 9, pending=set(range(9)), previous=dict.fromkeys(range(9), key)), "9 previous"),
            (PageSpec(4096, keys=[key], junk={junk_slot: 1}), "unused slot"),
            (PageSpec(size, keys=[key], tail=tail, junk={after_tail: 1}), "after the tail"),
            (PageSpec(4096, keys=[key], tail=tail), "tail of 0"),
            (PageSpec(4095, keys=[key], tail=tail), "tail of -1"),
            (PageSpec(8192, keys=[key], tail=tail), "tail of 4096"),
            (PageSpec(4096 + 3968, keys=[key]), None, b"x" * 4096 + bytes(3968)),
            (PageSpec(1 << 63), "size of"),
            (PageSpec(117 * 4096 - 1, keys=[key] * 116, tail=tail), "next page"),
            (PageSpec(4096, fid, 0, keys=[key]), "of no session"),
            (PageSpec(4096, fid, 0, sequence=1, keys=[key]), "of no session"),
            (PageSpec(4096, bytes(16), CLOSED, keys=[key]), "session 1 without a file id"),
            (PageSpec(4096, bytes(16), 0, sequence=1, keys=[key]), "without a file id has"),
            (PageSpec(4096, pending={0}, keys=[key]), "without a file id has"),
            (PageSpec(4096, sparse=True, keys=[key]), "without a file id has"),
            (PageSpec(4096, cut=True, keys=[key]), "without a file id has"),
            (PageSpec(4096, fid, (1 << 32) - 1, sequence=(1 << 32) - 1, keys=[key]), None, b"x" * 4096),
        ):
            w.put_page(path, 0, page)
            with self.subTest(words=words):
                if words:
                    self.damaged(w, path, words)
                else:
                    self.assertEqual(self.read(w, path), content[0])

    def test_profiles(self) -> None:
        """Blocks that are stored plain, under the file's id, and by every cipher and hash; and the same while a file comes
        to another profile."""
        fid = b"i" * 16
        for suite in ("aes", "paper", "blake3", "chacha"):
            w = self.writer(suite, reserved=62)
            blocks = [noise(4096, 200 + n) for n in range(4)]

            def put(path: Path, n: int, number: int) -> bytes:
                method = method_of(number)
                key, cipher = w.block(blocks[n % 4], salt=fid if number & 4 else b"", method=method)
                if number & 1:
                    key, cipher = w.inner.plain_key(blocks[n % 4], method), blocks[n % 4]
                w.put(path, w.block_at(n), cipher)
                return key

            numbers = [n for n in range(32) if is_profile(n) and is_profile_of(w.suite, n)]
            self.assertEqual(len(numbers), {"aes": 20, "paper": 4, "blake3": 12, "chacha": 8}[suite])
            for number in numbers:
                path = w.dir / f"{number}"
                keys = [put(path, n, number) for n in range(3)]
                w.put_page(path, 0, PageSpec(3 * 4096, fid, CLOSED, keys=keys, more_flags=number << 3))
                self.assertEqual(self.read(w, path), b"".join(blocks[:3]))
                # Verified, whatever the profile says of reads.
                w.put(path, w.block_at(1) + 7, b"!")
                self.damaged(w, path, "does not match")
                # In no other form: bit 1 alone makes none.
                for wrong in (n for n in numbers if n & ~2 != number & ~2):
                    w.put_page(path, 0, PageSpec(3 * 4096, fid, CLOSED, keys=keys, more_flags=wrong << 3))
                    self.damaged(w, path, "does not match")
            path = w.dir / "changing"
            mixed = [put(path, n, number) for n, number in enumerate(numbers)]
            w.put_page(path, 0, PageSpec(len(mixed) * 4096, fid, CLOSED, keys=mixed, more_flags=1 << 3 | 1 << 15))
            self.assertEqual(self.read(w, path), b"".join(blocks[n % 4] for n in range(len(mixed))))

    def test_profiles_of_other_suites(self) -> None:
        """A page says nothing that its suite cannot keep."""
        for suite, number in (("paper", 4), ("paper", 8), ("paper", 16), ("chacha", 2), ("chacha", 8), ("blake3", 2)):
            w = self.writer(suite)
            path = w.dir / "f"
            key = w.put_block(path, 0, b"x" * 4096)
            w.put_page(path, 0, PageSpec(4096, b"i" * 16, CLOSED, keys=[key], more_flags=number << 3))
            self.damaged(w, path, f"profile {number}, which the suite cannot keep")

    def test_pages_of_another_profile(self) -> None:
        """They are older ones, unless page 0 says that the profile is being changed."""
        w = self.writer(reserved=62)
        size, fid = w.N * w.B + 1, b"i" * 16
        for zero, last, words in (
            (0, 1, "another profile"),
            (1, 0, "another profile"),
            (1, 1 | 1 << 12, "another profile"),
            (0, 8, "another profile"),
            (16, 24, "another profile"),
            (1 | 1 << 12, 0, None),
            (1 | 1 << 12, 1 | 1 << 12, None),
            (2, 2, None),
            (24, 24, None),
        ):
            path = w.dir / f"f{zero}.{last}"
            hole = [HOLE] * w.N
            w.put_page(path, 0, PageSpec(size, fid, CLOSED, keys=hole, sparse=True, more_flags=zero << 3))
            w.put_page(path, 1, PageSpec(size, fid, CLOSED, tail=b"t", more_flags=last << 3))
            with self.subTest(zero=zero, last=last):
                if words:
                    self.damaged(w, path, words)
                else:
                    self.assertEqual(self.read(w, path), bytes(w.N * w.B) + b"t")

    def test_tail_too_long(self) -> None:
        """A tail that does not fit beside the keys."""
        w = self.writer()
        path = w.dir / "f"
        w.put_page(path, 0, PageSpec(2 * 4096 + 3930, keys=[HOLE, HOLE], junk={56 + 32: 1, 88 - 56: 1}))
        self.damaged(w, path, "tail of 3930")

    def test_flags_past_page_0(self) -> None:
        """`sparse` and `cut` are of page 0 alone."""
        w = self.writer(reserved=62)
        for flags in (2, 4):
            path = w.dir / f"f{flags}"
            w.put_page(path, 0, PageSpec(1, b"i" * 16, 1))
            w.put_page(path, 1, PageSpec(w.N * w.B + 1, b"i" * 16, 1, more_flags=flags))
            self.last_damaged(w, path, "other than page 0")

    def test_made_up_last_page(self) -> None:
        """With the last page damaged an absent page is a hole below the floor alone, and where page 0 says so."""
        w = self.writer(reserved=62)
        path = w.dir / "f"
        floor = 2 * w.N * w.B + 5
        w.put_page(path, 0, PageSpec(floor, b"i" * 16, 1, sparse=True))
        w.put(path, w.page_at(4), noise(4096, 3))
        with self.file(w, path) as f:
            self.assertEqual([str(d).split(": ")[1].split(" (")[0] for d in f.damages()], ["page 2", "page 3", "page 4"])
            self.assertEqual(f.block(w.N), bytes(4096))
            with self.assertRaisesRegex(lr.Damage, "unknown"):
                f.block(2 * w.N)

    def test_foreign_page(self) -> None:
        """A page of another file, and the same page elsewhere."""
        w = self.writer(reserved=62)
        a, b, size = w.dir / "a", w.dir / "b", 2 * 62 * 4096
        w.write_file(a, noise(size, 1))
        w.write_file(b, noise(size, 2))
        at = w.page_at(1)
        w.put(a, at, b.read_bytes()[at : at + 4096])
        self.damaged(w, a, "page 1 .*another file")
        w.put(b, at, b.read_bytes()[:4096])
        self.damaged(w, b, "page 1 .*no epoch")

    def test_zero_file_id(self) -> None:
        """A file of several pages has an id."""
        w = self.writer(reserved=62)
        path = w.dir / "f"
        w.put_page(path, 0, PageSpec(1))
        w.put_page(path, 1, PageSpec(w.N * w.B + 1))
        self.last_damaged(w, path, "page 1 .*other than page 0 without a file id")

    def test_flipped_bits(self) -> None:
        """Every part of a file is covered."""
        for suite in SUITES:
            w = self.writer(suite)
            path = w.dir / "f"
            w.write_file(path, noise(10000))
            good = path.read_bytes()
            for offset, words in (
                (0, "no epoch"),
                (30, "page is damaged"),
                (50, "no epoch"),
                (500, "page is damaged"),
                (4096, "block 0"),
                (8191, "block 0"),
                (9000, "block 1"),
            ):
                bad = bytearray(good)
                bad[offset] ^= 1
                path.write_bytes(bad)
                self.damaged(w, path, words)
            path.write_bytes(good[:-1])
            self.damaged(w, path, "block 1")
            path.write_bytes(good[:4095])
            self.damaged(w, path, "ends within")

    def test_compressed_mark(self) -> None:
        """A key with the last bit set verifies nothing where that bit is not part of the key."""
        for suite in ("aes", "blake3", "chacha"):
            w = self.writer(suite)
            path = w.dir / "f"
            key = w.put_block(path, 0, b"x" * 4096)
            w.put_page(path, 0, PageSpec(4096, keys=[key[:31] + bytes([key[31] | 1])]))
            self.damaged(w, path, "block 0 .*does not match")
            marked = key[:31] + bytes([key[31] | 1])
            self.assertEqual(self.read(w, self.pending(w, w.block(b"x" * 4096)[1], marked, key))[4096:8192], b"x" * 4096)
            self.assertEqual(self.read(w, self.pending(w, None, marked, None))[4096:8192], bytes(4096))

    def test_keys_past_the_size(self) -> None:
        """Ignored."""
        w = self.writer()
        path = w.dir / "f"
        key = w.put_block(path, 0, b"x" * 4096)
        w.put_page(path, 0, PageSpec(5, keys=[key, b"\xfe" * 32, b"\xff" * 32]))
        self.assertEqual(self.read(w, path), b"xxxxx")

    def test_all_damages(self) -> None:
        """Reading goes on after damage when asked to."""
        w = self.writer(reserved=62)
        path = w.dir / "f"
        w.write_file(path, noise(4 * 62 * 4096))
        w.put(path, w.page_at(1) + 100, b"!!!!")
        w.put(path, w.block_at(3), b"!!!!")
        w.put(path, w.block_at(200), b"!!!!")
        with self.file(w, path) as f:
            found = [str(d) for d in f.damages()]
        self.assertEqual(len(found), 3)
        self.assertRegex(found[0], "block 3 ")
        self.assertRegex(found[1], "page 1 ")
        self.assertRegex(found[2], "block 200 ")


class Tree(Temp):
    """Sections 5 to 7."""

    def fill(self, w: Writer, plain: Path | None) -> None:
        """The same small tree in a vault and in a plain directory."""
        long_name, longest = "ü" * 100, "x" * 255
        made = {"": w.dir}
        for parent, name in (("", "dir"), ("dir", long_name), (f"dir/{long_name}", "deep"), ("", longest)):
            path = f"{parent}/{name}".lstrip("/")
            made[path] = w.mkdir(made[parent], os.fsencode(name))
            made[path].chmod(0o750)
            if plain:
                (plain / path).mkdir()
                (plain / path).chmod(0o750)
        for n, parent in enumerate(made):
            for name, data in (("empty", b""), ("a b\n\\", b"hi"), ("y" * 200, noise(300000, n))):
                stored = w.name(made[parent], os.fsencode(name))
                w.write_file(stored, data)
                stored.chmod(0o640)
                if plain:
                    (plain / parent / name).write_bytes(data)
                    (plain / parent / name).chmod(0o640)
            for name, target in (("l", "t"), ("l2", "q" * 711), ("l3", "r" * 712), ("l4", "s" * 4095), ("z" * 190, "../x y")):
                w.symlink(made[parent], os.fsencode(name), os.fsencode(target))
                if plain:
                    os.symlink(target, plain / parent / name)
            os.mkfifo(w.name(made[parent], b"fifo"), 0o600)
            if plain:
                os.mkfifo(plain / parent / "fifo", 0o600)

    def problems(self, w: Writer) -> list[str]:
        """All that verification finds."""
        found: list[lr.LamassuError] = []
        lr.Vault(str(w.dir), KEY).verify(found.append)
        return [str(e) for e in found]

    def test_tree(self) -> None:
        """Encrypted and plain names, short and long name_max, every suite."""
        cases: dict[str, dict[str, Any]] = {
            "aes": {},
            "paper": {"name_max": 64},
            "blake3": {"name_max": 143, "records_as_files": True},
            "chacha": {"names": "plain", "block_size": 16384},
        }
        for n, (suite, options) in enumerate(cases.items()):
            w = self.writer(suite, outer_epochs=2, **options)
            plain = self.tmp / f"plain{n}"
            plain.mkdir()
            self.fill(w, plain)
            found = treehash.of_vault(lr.Vault(str(w.dir), KEY), self.fail)
            self.assertEqual(found, treehash.of_plain(str(plain)))
            self.assertEqual(len(found), 4 + 5 * 9)
            self.assertEqual(self.problems(w), [])

    def test_samples(self) -> None:
        """The sample vaults read as their plain trees, with every source."""
        vault = self.tmp / "v"
        lamassu_samples.vault("aes", vault, reserved=62, outer_epochs=2)
        for source in (KeySource(lamassu_samples.RAW), KeySource(b"correct horse\n", "passphrase")):
            found = treehash.of_vault(lr.Vault(str(vault / "vault"), source), self.fail)
            self.assertEqual(found, treehash.of_plain(str(vault / "plain")))

    def test_damaged_samples(self) -> None:
        """What looks like an interruption in a session that is not open is damage, and no write is said to be missing."""
        for suite in SUITES:
            (self.tmp / suite).mkdir()
            lamassu_samples.damaged_vault(suite, self.tmp / suite, reserved=62)
            wanted = json.loads((self.tmp / suite / "damaged.json").read_text())
            vault = lr.Vault(str(self.tmp / suite / "damaged"), KeySource(lamassu_samples.RAW))
            found = {}
            for entry in vault.walk():
                with vault.open_file(entry) as f:
                    (damage,) = f.damages()
                found[os.fsdecode(entry.path)] = str(damage).split(": ")[1].split(" (")[0]
            self.assertEqual(found, wanted)
            (notice,) = vault.notices
            self.assertRegex(notice, "of a session that the record does not know")

    def test_record_of_sessions(self) -> None:
        """Parsed strictly."""
        w = self.writer()
        path = os.fsencode(w.dir)

        def read() -> lr.Sessions:
            return sessions.load(load(w.dir / "lamassu.vault", KEY), path)

        top = (1 << 32) - 1
        for last, ranges in (
            (0, ()),
            (top, ()),
            (1, ((1, 1),)),
            (9, ((1, 3), (5, 5), (7, 9))),
            (top, ((1, top),)),
            (200, tuple((2 * n + 1, 2 * n + 1) for n in range(64))),
        ):
            w.put_sessions(w.sessions_content(last, *ranges))
            self.assertEqual(read(), lr.Sessions(last, ranges))
        w.put_sessions(w.sessions_content(9, (1, 3), (5, 5)))
        self.assertEqual([n for n in range(12) if read().is_open(n)], [1, 2, 3, 5])
        content = w.sessions_content
        for bad, words in (
            (b"", "of 0 bytes"),
            (content(1)[:7], "of 7 bytes"),
            (b"\2" + content(1)[1:], "version 2"),
            (content(1) + b"\0", "0 ranges of sessions in 9"),
            (content(1, (1, 1))[:-1], "1 ranges of sessions in 15"),
            (content(1, (1, 1)) + bytes(8), "1 ranges of sessions in 24"),
            (content(200, *((2 * n + 1, 2 * n + 1) for n in range(65))), "65 ranges"),
            (content(5, (0, 1)), "sessions 0 to 1 of 5"),
            (content(5, (3, 2)), "sessions 3 to 2 of 5"),
            (content(5, (3, 6)), "sessions 3 to 6 of 5"),
            (content(9, (1, 3), (4, 5)), "sessions 4 to 5 of 9"),
            (content(9, (1, 3), (3, 5)), "sessions 3 to 5 of 9"),
            (content(9, (5, 6), (1, 2)), "sessions 1 to 2 of 9"),
        ):
            w.put_sessions(bad)
            with self.assertRaisesRegex(lr.Damage, words):
                read()
        good = content(OPEN, (OPEN, OPEN))
        for kind, vault_id in ((7, bytes(16)), (7, b""), (1, w.id)):
            w.put_sessions(good, vault_id, kind)
            with self.assertRaisesRegex(lr.Damage, "no epoch opens"):
                read()

    def test_permissions_of_the_root(self) -> None:
        """Parsed strictly; the directory's own without a record."""
        for options in ({}, {"records_as_files": True}):
            w = self.writer(**options)
            header, path = load(w.dir / "lamassu.vault", KEY), os.fsencode(w.dir)
            self.assertIsNone(root.load(header, path))
            good = root.Permissions(0o2751, 1000, 4_000_000_000)
            content = le(1, 4) + le(good.mode, 4) + le(good.uid, 4) + le(good.gid, 4)
            w.put_root(content)
            self.assertEqual(root.load(header, path), good)
            for bad, words in (
                (content[:-1], "of 15 bytes"),
                (content + b"\0", "of 17 bytes"),
                (le(2, 2) + content[2:], "version 2"),
                (le(0x10001, 4) + content[4:], "no writer writes"),
                (content[:4] + le(0o10000, 4) + content[8:], "no writer writes"),
                (content[:8] + b"\xff" * 4 + content[12:], "no writer writes"),
                (content[:12] + b"\xff" * 4, "no writer writes"),
            ):
                w.put_root(bad)
                with self.assertRaisesRegex(lr.Damage, words):
                    root.load(header, path)
            w.put_root(content, kind=7)
            with self.assertRaisesRegex(lr.Damage, "no epoch opens"):
                root.load(header, path)

    def test_missing_record_of_sessions(self) -> None:
        """Then no session is open: it is said, and what is under way is not read."""
        for options in ({}, {"names": "plain"}, {"records_as_files": True}):
            w = self.writer(**options)
            old = noise(4096, 3)
            (kn, _), (ko, co) = w.block(noise(4096, 2)), w.block(old)
            path, settled = w.name(w.dir, b"under way"), w.name(w.dir, b"settled")
            w.write_file(settled, noise(480000))
            w.put(path, 4096, co)
            w.put_page(path, 0, PageSpec(4096, b"i" * 16, OPEN, pending={0}, previous={0: ko}, keys=[kn]))

            def read(name: bytes, w: Writer = w) -> tuple[bytes, list[str]]:
                vault = lr.Vault(str(w.dir), KEY)
                with vault.open_file(vault.find(name)) as f:
                    return b"".join(f.chunks()), vault.notices

            data, (notice,) = read(b"under way")
            self.assertEqual(data, old)
            self.assertIn("what was there before", notice)
            self.assertEqual(self.problems(w), [])
            record = w.dir / "lamassu.sessions" / "record"
            for spoil in ("cut", "unlinked", "no folder", "no folder but a file"):
                if spoil == "cut":
                    w.put_sessions(w.sessions_content(OPEN, (OPEN, OPEN + 1)))
                elif spoil == "unlinked":
                    record.unlink()
                elif spoil == "no folder":
                    record.parent.rmdir()
                else:
                    record.parent.touch()
                with self.subTest(spoil=spoil), self.assertRaisesRegex(lr.Damage, "does not match its key"):
                    read(b"under way")
                data, (notice,) = read(b"settled")
                self.assertEqual(data, noise(480000))
                self.assertIn("no session is taken for open", notice)
                self.assertEqual(len(self.problems(w)), 2)  # the record, and the block

    def test_cli(self) -> None:
        """The command line, with every exit status."""
        w = self.writer()
        plain = self.tmp / "plain"
        plain.mkdir()
        self.fill(w, plain)
        (self.tmp / "key").write_bytes(RAW)
        key = ["--key", f"raw:{self.tmp}/key"]

        def run(*args: str) -> tuple[int, bytes, bytes]:
            env = dict(os.environ, PYTHONPATH=str(HERE))
            done = subprocess.run([sys.executable, "-m", "lamassu_reader", *args], capture_output=True, env=env, check=False)
            return done.returncode, done.stdout, done.stderr

        code, out, err = run("tree-hash", *key, str(w.dir))
        self.assertEqual((code, err), (0, b""))
        self.assertEqual(run("tree-hash", "--plain", str(plain)), (0, out, b""))
        code, out, err = run("cat", *key, str(w.dir), "dir/" + "y" * 200)
        self.assertEqual((code, out, err), (0, (plain / "dir" / ("y" * 200)).read_bytes(), b""))
        store = w.name(w.dir, b"a b\n\\")
        self.assertEqual(run("cat", "--store", *key, str(w.dir), str(store)), (0, b"hi", b""))
        code, out, _ = run("ls", *key, str(w.dir), "dir")
        self.assertEqual(code, 0)
        self.assertIn(b"dir/l2 -> qqq", out)
        self.assertEqual(run("verify", *key, str(w.dir))[:2], (0, b"50 entries read, 0 damaged\n"))
        self.assertIn(b"suite aes", run("info", *key, str(w.dir))[1])
        ko, co = w.block(b"old")
        under_way = self.tmp / "under way"
        w.put(under_way, 4096, co)
        w.put_page(under_way, 0, PageSpec(3, b"i" * 16, OPEN, pending={0}, previous={0: ko}, keys=[w.block(b"new")[0]]))
        code, out, err = run("cat", "--store", *key, str(w.dir), str(under_way))
        self.assertEqual((code, out), (0, b"old"))
        self.assertRegex(err, b"^note: .*under way: block 0 .*what was there before is\n$")
        self.assertEqual(run("cat", *key, str(w.dir), "nothing")[0], 2)
        (self.tmp / "key").write_bytes(bytes(32))
        self.assertEqual(run("ls", *key, str(w.dir))[0], 2)
        (self.tmp / "key").write_bytes(RAW)
        store.write_bytes(b"junk")
        code, out, err = run("verify", *key, str(w.dir))
        self.assertEqual((code, out), (1, b"50 entries read, 1 damaged\n"))
        self.assertIn(b"page 0", err)

    def test_xattrs(self) -> None:
        """Names and values, over two epochs."""
        w = self.writer(outer_epochs=2)
        path = w.name(w.dir, b"f")
        w.write_file(path, b"x")
        try:
            os.setxattr(path, "user.plain", b"not shown")
        except OSError:
            self.skipTest("no user attributes here")
        w.epoch = 0
        w.xattr(path, b"user.old", b"1")
        w.xattr(path, b"user.twice", b"old")
        w.epoch = 1
        w.xattr(path, b"user.twice", b"new")
        stored = w.xattr(path, b"system.posix_acl_access", b"")
        vault = lr.Vault(str(w.dir), KEY)
        entry = vault.find(b"f")
        self.assertEqual(vault.xattrs(entry), {b"system.posix_acl_access": b"", b"user.old": b"1", b"user.twice": b"new"})
        value = os.getxattr(path, stored)
        other = w.xattr(path, b"user.other", b"2")
        os.setxattr(path, other, value)
        with self.assertRaisesRegex(lr.Damage, "no epoch opens"):
            vault.xattrs(entry)
        os.removexattr(path, other)
        os.setxattr(path, "user.lamassu.AAAA", b"")
        with self.assertRaisesRegex(lr.Damage, "does not open"):
            vault.xattrs(entry)

    def test_attributes_of_directories(self) -> None:
        """Bound to the directory's id, or, with plain names, to directories alone."""
        for names in ("encrypted", "plain"):
            w = self.writer(names=names)
            one, other, file = w.mkdir(w.dir, b"one"), w.mkdir(w.dir, b"other"), w.name(w.dir, b"file")
            w.write_file(file, b"x")
            try:
                stored = [w.xattr(path, b"user.of", path.name.encode()) for path in (w.dir, one, other, file)][0]
            except OSError:
                self.skipTest("no user attributes here")
            vault = lr.Vault(str(w.dir), KEY)
            for entry in (vault.root(), *vault.walk()):
                self.assertEqual(vault.xattrs(entry), {b"user.of": os.path.basename(entry.store)})
            exchanges = [(one, file), (file, one)] if names == "plain" else [(one, other), (one, file), (file, one)]
            for to, source in exchanges:
                before = os.getxattr(to, stored)
                os.setxattr(to, stored, os.getxattr(source, stored))
                entry = next(e for e in vault.walk() if e.store == os.fsencode(to))
                with self.assertRaisesRegex(lr.Damage, "no epoch opens"):
                    vault.xattrs(entry)
                os.setxattr(to, stored, before)

    def test_dataset_attributes(self) -> None:
        """Those of a dataset's root are sealed under its own keys; of a locked and of a destroyed one there are none."""
        w = self.writer()
        w.header["datasets"] = True
        for name, kind in ((b"inherits", "parent"), (b"locked", "raw"), (b"destroyed", "raw")):
            path = w.name(w.dir, name)
            d = Writer(path, "aes", seed=name)
            secret = noise(32, len(name))
            d.slot(kind, secret)
            if kind == "parent":
                d.header["slots"][0]["parent"] = w.record(6, d.id, secret).hex()
            if name == b"destroyed":
                d.header |= {"slots": [], "destroyed": {"time": 1700000000, "receipt": "00" * 16}}
            d.finish()
            try:
                d.xattr(path, b"user.of", name)
            except OSError:
                self.skipTest("no user attributes here")
        w.finish()
        vault = lr.Vault(str(w.dir), KEY)
        found = {entry.path: vault.xattrs(entry) for entry in vault.walk()}
        self.assertEqual(found, {b"inherits": {b"user.of": b"inherits"}, b"locked": {}, b"destroyed": {}})
        self.assertEqual(self.problems(w), [])
        lines = treehash.of_vault(vault, self.fail, attributes=True)
        self.assertEqual([line.split()[-2:] for line in lines if line.startswith("x")], [["inherits", "user.of"]])

    def test_damaged_names(self) -> None:
        """Names, companions and records that do not hold."""
        w = self.writer(name_max=64)
        w.write_file(w.name(w.dir, b"good"), b"1")
        sub = w.mkdir(w.dir, b"sub")
        long = w.name(sub, b"n" * 100)
        w.write_file(long, b"2")
        self.assertEqual(self.problems(w), [])
        companion = sub / long.name.replace("long", "name")

        text = os.readlink(companion)
        companion.unlink()
        self.assertRegex(self.problems(w)[0], "lamassu.name.*missing")
        for bad, words in ((text + "=", "alphabet"), (("B" if text[0] == "A" else "A") + text[1:], "hash")):
            os.symlink(bad, companion)
            self.assertRegex(self.problems(w)[0], words)
            companion.unlink()
        companion.write_text(text)
        self.assertEqual(self.problems(w), [])

        foreign = sub / w.name(w.dir, b"good").name
        foreign.write_bytes(b"")
        self.assertRegex(self.problems(w)[0], "does not open in this directory")
        foreign.unlink()
        (sub / "a.b").write_bytes(b"")
        self.assertRegex(self.problems(w)[0], "alphabet")
        (sub / "a.b").unlink()
        for name in (b".", b"..", b"a/b", b"a\0b", b"x" * 256):
            bad_path = w.name(sub, name)
            bad_path.write_bytes(b"")
            self.assertRegex(self.problems(w)[0], "not a file name")
            bad_path.unlink()

        record = sub / "lamassu.dir"
        target = os.readlink(record)
        record.unlink()
        self.assertRegex(self.problems(w)[0], "lamassu.dir: missing")
        record.write_text(target + "\n")
        self.assertRegex(self.problems(w)[0], "alphabet")
        record.unlink()
        for content, words in (
            (b"\2\0\0\0" + bytes(52), "version 2"),
            (b"\1\0\1\0" + bytes(52), "flags"),
            (b"\1\0\0\0" + bytes(53), "trailing"),
            (b"\1\0\0\0" + bytes(48) + b"\2\0\0\0!!", "properties"),
            (b"\1\0\0\0" + bytes(48) + b"\1\0\0\0\0", "profile 0"),
            (b"\1\0\0\0" + bytes(48) + b"\1\0\0\0\5", "profile 5"),
            (b"\1\0\0\0", "directory record of 4"),
        ):
            w.directory_record(sub, content)
            self.assertRegex(self.problems(w)[0], words)
            record.unlink()

    def test_name_length(self) -> None:
        """A name is kept short or long as its length says, so that it has one place in the store."""
        w = self.writer(name_max=64)
        w.name_max = 255
        w.write_file(w.name(w.dir, b"n" * 60), b"")
        self.assertRegex(self.problems(w)[0], "longer than name_max")
        w = self.writer(name_max=255)
        w.name_max = 64
        w.write_file(w.name(w.dir, b"n" * 60), b"")
        self.assertRegex(self.problems(w)[0], "short name")

    def test_damaged_links(self) -> None:
        """Link targets that do not hold."""
        w = self.writer()
        path = w.symlink(w.dir, b"l", b"t" * 4000)
        rest = next(p for p in w.dir.iterdir() if p.name.startswith("lamassu.link."))
        kept = rest.read_bytes()
        rest.unlink()
        self.assertRegex(self.problems(w)[0], "missing")
        rest.write_bytes(crypto.b64(w.record(4, bytes(16), b"x" * 3320)))
        self.assertRegex(self.problems(w)[0], "no epoch")
        rest.unlink()
        link_id = crypto.unb64(rest.name.removeprefix("lamassu.link.").encode())
        rest.write_bytes(crypto.b64(w.record(4, link_id, b"x" * 3321)))
        self.assertRegex(self.problems(w)[0], "4001 bytes, not 4000")
        rest.write_bytes(kept + b"\n")
        self.assertRegex(self.problems(w)[0], "alphabet")
        rest.write_bytes(kept.ljust(8192, b"A"))
        self.assertRegex(self.problems(w)[0], "longer than 8191")
        rest.unlink()
        os.symlink("AAAA", rest)
        self.assertRegex(self.problems(w)[0], "not a regular file")
        rest.unlink()
        rest.write_bytes(kept)
        self.assertEqual(self.problems(w), [])
        path.unlink()
        rest.unlink()
        rest.write_bytes(crypto.b64(w.record(4, link_id, b"x" * 31)))
        head = w.record(3, b"", link_id + (711).to_bytes(2, "little") + b"x" * 680)
        os.symlink(b"." + crypto.b64(head), os.fsencode(path))
        self.assertRegex(self.problems(w)[0], "711 bytes is not a long one")
        for text, words in (
            (crypto.b64(w.record(2, b"", b"")), "possible"),
            (crypto.b64(w.record(2, b"", b"a\0b")), "possible"),
            (crypto.b64(w.record(1, b"", b"a")), "no epoch"),
            (b"." + crypto.b64(w.record(3, b"", bytes(100))), "head"),
            (b"AAAA", "sealed record of 3"),
            (b"/etc/passwd", "alphabet"),
        ):
            path.unlink()
            os.symlink(text, os.fsencode(path))
            self.assertRegex(self.problems(w)[0], words)

    def test_never_in_the_tree(self) -> None:
        """What belongs to the format is not listed."""
        for names in ("encrypted", "plain"):
            w = self.writer(names=names)
            for name in ("lamassu.vault.new", "lamassu.vault.replacing.7", "lamassu.history.broken.7", "lamassu.unknown", "lamassu.name.x", "lamassu.link.x"):
                (w.dir / name).touch()
            (w.dir / "lamassu.staging" / "x").touch()
            (w.dir / "lamassu.lost").mkdir()
            vault = lr.Vault(str(w.dir), KEY)
            self.assertEqual(list(vault.walk()), [])
            self.assertEqual(vault.verify(self.fail), 1)
            self.assertEqual(len(vault.notices), 2, vault.notices)
            self.assertFalse([text for text in vault.notices if "sessions" in text])

    def test_history(self) -> None:
        """Entries that verify are read; every change of the chain is found."""
        w = self.writer()
        entries = w.history("created", "loaded", "slot-added")
        w.finish()
        path = w.dir / "lamassu.history"

        def events() -> list[str]:
            return [e["event"] for e in lr.Vault(str(w.dir), KEY).history().entries]

        self.assertEqual(events(), ["created", "loaded", "slot-added"])
        for order, words in (
            ((1, 2), "entry 1"),
            ((0, 2), "entry 2"),
            ((1, 0, 2), "entry 1"),
            ((0, 0, 1, 2), "entry 2"),
            ((0, 1), "cut off"),
            ((), "cut off"),
        ):
            path.write_bytes(b"".join(entries[i] for i in order))
            with self.assertRaisesRegex(lr.Damage, words):
                events()
            self.assertRegex(self.problems(w)[0], words)
        good = b"".join(entries)
        for at in range(0, len(good), 11):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with self.assertRaises(lr.Damage):
                events()
        path.unlink()
        with self.assertRaisesRegex(lr.Damage, "cut off"):
            events()
        # Behind the mark: what an append leaves that was interrupted.
        w.history("created", "loaded")
        w.finish()
        for tail in (entries[2][:3], entries[2][:70], bytes(300), entries[2]):
            path.write_bytes(b"".join(w.history("created", "loaded")) + tail)
            w.finish()
            self.assertEqual(lr.Vault(str(w.dir), KEY).history().torn, len(tail))
        del w.header["history"]
        w.history("created", mark=False)
        w.finish()
        self.assertEqual(events(), ["created"])

    def test_administrator(self) -> None:
        """A use slot opens a signed header; nothing in it can be changed without the seed."""
        seed, other = bytes(range(32)), bytes(range(1, 33))
        w = Writer(self.tmp / "signed", "aes")
        w.seed = seed
        w.slot("raw", RAW, "admin")
        w.slot("raw", other, "job", use_only=True)
        w.header["slots"][1]["expires"] = 1800000000
        w.finish()
        for key in (KEY, KeySource(other, "raw")):
            header = load(w.dir / "lamassu.vault", key)
            self.assertEqual([s.use_only for s in header.slots], [False, True])
            self.assertEqual(header.slots[1].expires, 1800000000)
        # An exchanged key, which the one before has signed.
        for signer, good in ((other, True), (seed, False)):
            earlier = Ed25519PrivateKey.from_private_bytes(other).public_key().public_bytes_raw()
            message = b"lamassu v1 admin successor" + w.id + crypto.ed25519_public(seed)
            w.before = [{"public": earlier.hex(), "signature": Ed25519PrivateKey.from_private_bytes(signer).sign(message).hex()}]
            w.finish()
            if good:
                self.assertEqual(load(w.dir / "lamassu.vault", KEY).admin, crypto.ed25519_public(seed))
            else:
                with self.assertRaisesRegex(lr.Refused, "has not signed the one after it"):
                    load(w.dir / "lamassu.vault", KEY)
        w.before = []
        w.seed = bytes(32)  # who has the file key signs with a key of their own
        w.finish()
        with self.assertRaisesRegex(lr.Refused, "another key"):
            load(w.dir / "lamassu.vault", KEY)
        w.seed = seed
        body = json.loads(w.header_bytes())
        body["created"] += 1
        del body["mac"]
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        body["mac"] = crypto.prf(crypto.hkdf(w.file_key, b"lamassu v1 header"), canonical).hex()
        (w.dir / "lamassu.vault").write_text(json.dumps(body))
        with self.assertRaisesRegex(lr.Refused, "signature does not verify"):
            load(w.dir / "lamassu.vault", KeySource(other, "raw"))

    def test_destroyed(self) -> None:
        """Said by a header of its own kind, after its signature, if it has one, has been verified."""
        for seed in (None, bytes(range(32))):
            w = Writer(self.tmp / f"destroyed-{seed is None}", "aes")
            w.seed = seed
            w.slot("raw", RAW)
            slots = w.header["slots"]
            w.header |= {"destroyed": {"time": 1700000001, "receipt": "ab" * 16}, "slots": []}
            w.finish()
            path = w.dir / "lamassu.vault"
            with self.assertRaisesRegex(lr.Destroyed, "at 1700000001, receipt abab"):
                load(path, KEY)
            good = json.loads(path.read_text())
            changed = [{"destroyed": {"time": 1}}, {"destroyed": {"time": 1, "receipt": "ab"}}, {"slots": slots}]
            if seed:
                changed += [{"created": 1}, {"destroyed": good["destroyed"] | {"time": 2}}]
            for change in changed:
                path.write_text(json.dumps(good | change))
                with self.assertRaises(lr.Refused):
                    load(path, KEY)
            del good["destroyed"]
            path.write_text(json.dumps(good))
            with self.assertRaisesRegex(lr.Refused, "not 1 to 64 slots"):
                load(path, KEY)


if __name__ == "__main__":
    unittest.main()
