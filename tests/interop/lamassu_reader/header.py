"""The vault header, the zone file, key slots and the keychain: section 4."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from argon2 import Type
from argon2.low_level import ARGON2_VERSION, hash_secret_raw

from . import records
from . import strictjson as sj
from .crypto import SUITES, TAG, OpenFailed, Suite, ed25519_public, ed25519_verify, hkdf, prf, same, xaes_open
from .errors import Destroyed, LamassuError, NoKey, Refused, Where, show

LIMIT = 1 << 20
ARGON2_WORK = 64 << 20  # KiB of memory times passes, of all slots together
PASSPHRASE_LIMIT = 4096
SOURCE_KINDS = ("raw", "hex", "passphrase")
DOMAINS = ("family", "file", "none")  # and `zone`, which is left out
KINDS = (*SOURCE_KINDS, "recovery", "recovery-shares", "pkcs11", "parent")
PARENT_RECORD = 88
TOKEN_MECHANISMS = ("rsa-oaep-sha256", "rsa-oaep-sha1", "aes-gcm")
TOKEN_SIGNING = {"rsa-pss-sha256", "rsa-pkcs1-sha256"}

_ZONE = {"format", "version", "features", "id", "suite", "block_size", "created", "next_slot", "slots", "keychain", "mac"}
_VAULT = _ZONE | {"zone", "reserved_slots", "names", "name_max", "small_files"}
_SLOT = {"id", "kind", "label", "created", "salt", "nonce", "wrapped"}
# members that a vault may have
_OF_VAULTS = {"admin", "domain", "history", "read_only", "datasets", "anchored", "integrity", "cache", "compression", "destroyed"}
_OF_ZONES = {"compression", "pins"}  # members that a zone may have
_OF_SLOTS = {"expires"}  # members that a slot may have


@dataclass(frozen=True)
class KeySource:
    """The bytes of a key source, and how they are meant (None: in every way they can be)."""

    data: bytes
    kind: str | None = None

    @staticmethod
    def parse(text: str) -> KeySource:
        """`raw:FILE`, `hex:FILE`, `passphrase:FILE`, or `FILE` to try it on every slot."""
        kind, colon, path = text.partition(":")
        if not colon or kind not in SOURCE_KINDS:
            kind, path = "", text
        with open(path, "rb") as f:
            return KeySource(f.read(LIMIT), kind or None)

    def keys(self) -> list[bytes]:
        """The 32-byte keys this source can be; they are tried on `raw` and `hex` slots alike."""
        found = []
        if self.kind in (None, "raw") and len(self.data) == 32:
            found.append(self.data)
        digits = _drop_line_end(self.data)
        if self.kind in (None, "hex") and re.fullmatch(rb"[0-9a-fA-F]{64}", digits):
            found.append(bytes.fromhex(digits.decode()))
        return found

    def passphrases(self) -> list[bytes]:
        """The passphrase this source can be: 1 to 4096 bytes of UTF-8."""
        text = _drop_line_end(self.data)
        if self.kind not in (None, "passphrase") or not 1 <= len(text) <= PASSPHRASE_LIMIT:
            return []
        try:
            text.decode()
        except UnicodeDecodeError:
            return []
        return [text]


def _drop_line_end(data: bytes) -> bytes:
    if data.endswith(b"\r\n"):
        return data[:-2]
    return data[:-1] if data.endswith(b"\n") else data


@dataclass(frozen=True)
class ParentKeys:
    """The keychain of the vault that a dataset lies in, as a key source: it opens parent slots alone."""

    suite: Suite
    outer: tuple[bytes, ...]

    def secret(self, record: bytes, header_id: bytes) -> bytes | None:
        """The secret of a parent slot, or None where no key of the parent opens it."""
        with contextlib.suppress(LamassuError):
            return records.open_record(self.suite, self.outer, records.PARENT_SLOT, header_id, record, "a parent slot")
        return None


@dataclass(frozen=True)
class Slot:
    """One key slot."""

    id: int
    kind: str
    label: str
    salt: bytes
    argon2: tuple[int, int, int] | None
    parent: bytes | None
    use_only: bool
    expires: int | None
    nonce: bytes
    wrapped: bytes

    def _secrets(self, source: KeySource | ParentKeys, header_id: bytes) -> Iterator[bytes]:
        """What this source can be to this slot. The secret of a token's slot is known to the token alone."""
        if isinstance(source, ParentKeys):
            secret = source.secret(self.parent, header_id) if self.parent else None
            if secret is not None:
                yield secret
            return
        if self.kind in ("pkcs11", "parent"):
            return
        if self.argon2 is None:
            yield from source.keys()
            return
        memory, passes, lanes = self.argon2
        for text in source.passphrases():
            yield hash_secret_raw(text, self.salt, passes, memory, lanes, 32, Type.ID, ARGON2_VERSION)

    def open(self, source: KeySource | ParentKeys, header_id: bytes) -> bytes | None:
        """The file key and, behind it, the signing seed of an administrator's slot, or None when this slot is not opened by this source."""
        aad = b"lamassu v1 slot" + header_id + self.id.to_bytes(4, "little")
        for secret in self._secrets(source, header_id):
            wrapping = hkdf(secret, b"lamassu v1 slot", salt=self.salt)
            with contextlib.suppress(OpenFailed):
                return xaes_open(wrapping, self.nonce, self.wrapped[:TAG], self.wrapped[TAG:], aad)
        return None


@dataclass(frozen=True)
class Header:
    """A vault header or a zone file whose MAC has been verified, with its keychain.

    `inner` and `outer` are the K_in and K_out of all epochs, newest first.
    """

    is_zone: bool
    id: bytes
    zone: bytes
    suite: Suite
    block_size: int
    reserved_slots: int
    plain_names: bool
    name_max: int
    convergent: bool
    domain: str
    created: int
    slots: tuple[Slot, ...]
    opened_slot: int
    inner: tuple[bytes, ...]
    outer: tuple[bytes, ...]
    oblivious: frozenset[bytes]
    """Those of `inner` whose epochs are oblivious."""
    history_key: bytes
    history: tuple[int, bytes] | None
    admin: bytes | None
    pins: dict[bytes, bytes]
    datasets: bool


def _optional(value: Any, names: set[str]) -> set[str]:
    """Those of `names` that are there."""
    return {name for name in names if name in value} if isinstance(value, dict) else set()


def _slot(value: Any, signed: bool, where: str) -> Slot:
    of_kind = value.get("kind") if isinstance(value, dict) else None
    passphrase = of_kind == "passphrase"
    more = {"passphrase": {"argon2"}, "pkcs11": {"token"}, "parent": {"parent"}}.get(of_kind, set()) if isinstance(of_kind, str) else set()
    more |= _optional(value, _OF_SLOTS | {"role"} if signed else _OF_SLOTS)
    m = sj.members(value, _SLOT | more, where)
    kind = sj.string(m["kind"], f"{where}.kind")
    if kind not in KINDS:
        raise Refused(f"{where}.kind", f"unknown kind {kind!r}")
    label = sj.string(m["label"], f"{where}.label")
    if len(label.encode()) > 255 or any(unicodedata.category(c) == "Cc" for c in label):
        raise Refused(f"{where}.label", "longer than 255 bytes, or with control characters")
    argon2 = None
    if passphrase:
        a = sj.members(m["argon2"], {"memory_kib", "passes", "lanes"}, f"{where}.argon2")
        lanes = sj.integer(a["lanes"], 1, 16, f"{where}.argon2.lanes")
        argon2 = (
            sj.integer(a["memory_kib"], 8 * lanes, 4194304, f"{where}.argon2.memory_kib"),
            sj.integer(a["passes"], 1, 64, f"{where}.argon2.passes"),
            lanes,
        )
    if kind == "pkcs11":
        t = sj.members(m["token"], {"mechanism", "sealed"} | _optional(m["token"], {"signature"}), f"{where}.token")
        if sj.string(t["mechanism"], f"{where}.token.mechanism") not in TOKEN_MECHANISMS:
            raise Refused(f"{where}.token.mechanism", f"unknown mechanism {t['mechanism']!r}")
        sealed = sj.string(t["sealed"], f"{where}.token.sealed")
        if not re.fullmatch(r"([0-9a-f]{2}){1,2048}", sealed):
            raise Refused(f"{where}.token.sealed", "not 1 to 2048 bytes in lower-case hex")
        if "signature" in t:
            s = sj.members(t["signature"], {"mechanism", "value"}, f"{where}.token.signature")
            if sj.string(s["mechanism"], f"{where}.token.signature.mechanism") not in TOKEN_SIGNING:
                raise Refused(f"{where}.token.signature.mechanism", f"unknown mechanism {s['mechanism']!r}")
            if not re.fullmatch(r"([0-9a-f]{2}){1,2048}", sj.string(s["value"], f"{where}.token.signature.value")):
                raise Refused(f"{where}.token.signature.value", "not 1 to 2048 bytes in lower-case hex")
    sj.integer(m["created"], 0, sj.U64, f"{where}.created")
    use_only = "role" in m
    if use_only and sj.string(m["role"], f"{where}.role") != "use":
        raise Refused(f"{where}.role", f"unknown role {m['role']!r}")
    return Slot(
        id=sj.integer(m["id"], 1, (1 << 32) - 2, f"{where}.id"),
        kind=kind,
        label=label,
        salt=sj.hexbytes(m["salt"], 32, f"{where}.salt"),
        argon2=argon2,
        parent=sj.hexbytes(m["parent"], PARENT_RECORD, f"{where}.parent") if kind == "parent" else None,
        use_only=use_only,
        expires=sj.integer(m["expires"], 0, sj.U64, f"{where}.expires") if "expires" in m else None,
        nonce=sj.hexbytes(m["nonce"], 24, f"{where}.nonce"),
        wrapped=sj.hexbytes(m["wrapped"], 80 if signed and not use_only else 48, f"{where}.wrapped"),
    )


def _epochs(value: Any, least: int, where: str) -> tuple[tuple[bytes, ...], frozenset[bytes]]:
    """The keys of a tier, newest first, and those among them whose epochs are oblivious."""
    keys: list[bytes] = []
    oblivious: list[bytes] = []
    before = 0
    for i, item in enumerate(sj.array(value, where)):
        place = f"{where}[{i}]"
        m = sj.members(item, {"created", "epoch", "key"} | _optional(item, {"oblivious", "zone"}), place)
        if m.get("zone", True) is not True:
            raise Refused(f"{place}.zone", "not true")
        sj.integer(m["created"], 0, sj.U64, f"{place}.created")
        before = sj.integer(m["epoch"], before + 1, sj.U64, f"{place}.epoch")
        keys.append(sj.hexbytes(m["key"], 32, f"{place}.key"))
        if "oblivious" in m:
            oblivious.append(keys[-1])
            server = sj.members(m["oblivious"], {"key", "public", "server"}, f"{place}.oblivious")
            sj.string(server["key"], f"{place}.oblivious.key")
            sj.string(server["server"], f"{place}.oblivious.server")
            sj.hexbytes(server["public"], 32, f"{place}.oblivious.public")
    if len(keys) < least:
        raise Refused(where, "no epoch")
    return tuple(reversed(keys)), frozenset(oblivious)


def _compression(m: dict[str, object], place: str) -> None:
    """How writers compress blocks. A reader only refuses what no writer may say."""
    named = m["compression"]
    levels = {"level"} if isinstance(named, dict) and "level" in named else set()
    c = sj.members(named, {"codec", "version", "round"} | levels, place)
    codec = sj.string(c["codec"], f"{place}.codec")
    if (codec, bool(levels)) not in (("lz4", False), ("zstd", True)):
        raise Refused(place, f"no codec with or without a level: {codec!r}")
    if levels:
        sj.integer(c["level"], 1, 19, f"{place}.level")
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", sj.string(c["version"], f"{place}.version")):
        raise Refused(place, "a version is three numbers")
    size = sj.integer(m["block_size"], 4096, 1 << 20, "block_size")
    step = sj.integer(c["round"], 512, size // 2, f"{place}.round")
    if step & (step - 1) or m["suite"] == "paper":
        raise Refused(place, "the round is no power of two, or the suite is paper")


def parse(data: bytes, source: KeySource | ParentKeys, where: Where) -> Header:
    """Parse, get the file key, verify the MAC, open the keychain."""
    w = show(where)
    if len(data) > LIMIT:
        raise Refused(w, "longer than 1 MiB")
    obj = sj.parse(data, w)
    form = obj.get("format")
    if form not in ("lamassu-vault", "lamassu-zone"):
        raise Refused(f"{w}: format", f"neither a vault nor a zone: {form!r}")
    is_zone = form == "lamassu-zone"
    if sj.integer(obj.get("version"), 0, sj.U64, f"{w}: version") != 1:
        raise Refused(f"{w}: version", f"version {obj['version']}, this reader knows 1")
    m = sj.members(obj, _ZONE | _optional(obj, _OF_ZONES) if is_zone else _VAULT | _optional(obj, _OF_VAULTS), w)
    for flag in ("read_only", "datasets", "anchored"):
        if m.get(flag, True) is not True:
            raise Refused(f"{w}: {flag}", "neither true nor left out")
    for name, values in (("integrity", ("full", "metadata")), ("cache", ("mount", "none"))):
        if name in m and sj.string(m[name], f"{w}: {name}") not in values:
            raise Refused(f"{w}: {name}", f"unknown value {m[name]!r}")
    if "compression" in m:
        _compression(m, f"{w}: compression")
    features = [sj.string(feature, f"{w}: features") for feature in sj.array(m["features"], f"{w}: features")]
    for feature in features:
        if feature != "oblivious":
            raise Refused(f"{w}: features", f"unknown feature {feature!r}")
    if len(features) > 1 or (features and m["suite"] == "paper"):
        raise Refused(f"{w}: features", "named twice, or oblivious in suite paper")

    vault_id = sj.hexbytes(m["id"], 16, f"{w}: id")
    signed = "admin" in m
    slots = tuple(_slot(s, signed, f"{w}: slots[{i}]") for i, s in enumerate(sj.array(m["slots"], f"{w}: slots")))
    least, most = (0, 0) if "destroyed" in m else (1, 64)
    if not least <= len(slots) <= most or len({s.id for s in slots}) != len(slots):
        raise Refused(f"{w}: slots", f"not {least} to {most} slots with distinct ids")
    if sum(s.argon2[0] * s.argon2[1] for s in slots if s.argon2) > ARGON2_WORK:
        raise Refused(f"{w}: slots", "Argon2id would have to fill more than 64 GiB for all of them together")
    if sum(s.kind == "parent" for s in slots) > 1:
        raise Refused(f"{w}: slots", "more than one parent slot")
    if max((s.id for s in slots), default=0) >= sj.integer(m["next_slot"], 1, (1 << 32) - 1, f"{w}: next_slot"):
        raise Refused(f"{w}: next_slot", "not above the id of every slot")
    mac = sj.hexbytes(m["mac"], 32, f"{w}: mac")
    body = {name: value for name, value in obj.items() if name != "mac"}
    if "destroyed" in m:
        mark = sj.members(m["destroyed"], {"time", "receipt"}, f"{w}: destroyed")
        time = sj.integer(mark["time"], 0, sj.U64, f"{w}: destroyed.time")
        receipt = sj.hexbytes(mark["receipt"], 16, f"{w}: destroyed.receipt")
        if signed:  # before it is believed
            _admin(m["admin"], body, b"", vault_id, f"{w}: admin")
        raise Destroyed(w, f"its keys were destroyed at {time}, receipt {receipt.hex()}")

    for slot in sorted(slots, key=lambda s: s.kind == "passphrase"):  # cheap ones first
        opened = slot.open(source, vault_id)
        if opened is not None:
            file_key, seed = opened[:32], opened[32:]
            break
    else:
        raise NoKey(w, "no slot is opened by this key source")

    if not same(mac, prf(hkdf(file_key, b"lamassu v1 header"), sj.canonical(body))):
        raise Refused(w, "the MAC does not verify: the header was changed")
    admin = _admin(m["admin"], body, seed, vault_id, f"{w}: admin") if signed else None
    pins = _pins(m["pins"], f"{w}: pins") if "pins" in m else {}
    history = None
    if "history" in m:
        mark = sj.members(m["history"], {"count", "head"}, f"{w}: history")
        history = (
            sj.integer(mark["count"], 1, sj.U64, f"{w}: history.count"),
            sj.hexbytes(mark["head"], 32, f"{w}: history.head"),
        )

    suite_name = sj.string(m["suite"], f"{w}: suite")
    if suite_name not in SUITES:
        raise Refused(f"{w}: suite", f"unknown suite {suite_name!r}")
    size = sj.integer(m["block_size"], 4096, 1 << 20, f"{w}: block_size")
    if size & (size - 1):
        raise Refused(f"{w}: block_size", f"{size} is not a power of two")
    names, small = "plain", "random"
    if not is_zone:
        names, small = sj.string(m["names"], f"{w}: names"), sj.string(m["small_files"], f"{w}: small_files")
        if names not in ("encrypted", "plain"):
            raise Refused(f"{w}: names", f"unknown value {names!r}")
        if small not in ("convergent", "random"):
            raise Refused(f"{w}: small_files", f"unknown value {small!r}")
    domain = _domain(m, suite_name, small, f"{w}: domain")

    inner, outer, oblivious = _keychain(m["keychain"], file_key, vault_id, is_zone, f"{w}: keychain")
    if bool(oblivious) != bool(features):
        raise Refused(f"{w}: features", "not what the keychain has")
    return Header(
        is_zone=is_zone,
        id=vault_id,
        zone=vault_id if is_zone else sj.hexbytes(m["zone"], 16, f"{w}: zone"),
        suite=SUITES[suite_name],
        block_size=size,
        reserved_slots=0 if is_zone else sj.integer(m["reserved_slots"], 1, 62, f"{w}: reserved_slots"),
        plain_names=names == "plain",
        name_max=0 if is_zone else sj.integer(m["name_max"], 64, 255, f"{w}: name_max"),
        convergent=small == "convergent",
        domain=domain,
        created=sj.integer(m["created"], 0, sj.U64, f"{w}: created"),
        slots=slots,
        opened_slot=slot.id,
        inner=inner,
        outer=outer,
        oblivious=oblivious,
        history_key=hkdf(file_key, b"lamassu v1 history"),
        history=history,
        admin=admin,
        pins=pins,
        datasets="datasets" in m,
    )


def _domain(m: dict[str, Any], suite: str, small_files: str, where: str) -> str:
    """The deduplication domain, section 4."""
    if "domain" not in m:
        return "zone"
    domain = sj.string(m["domain"], where)
    if domain not in DOMAINS:
        raise Refused(where, f"unknown value {domain!r}")
    if domain != "family" and (suite == "paper" or small_files != "random"):
        raise Refused(where, f"{domain!r} with suite {suite} and small files {small_files}")
    return domain


def _admin(value: Any, body: dict[str, Any], seed: bytes, vault_id: bytes, where: str) -> bytes:
    """The administrator's public key, after verifying the signature."""
    m = sj.members(value, {"public", "signature"} | _optional(value, {"before"}), where)
    public = sj.hexbytes(m["public"], 32, f"{where}.public")
    if seed and ed25519_public(seed) != public:
        raise Refused(where, "another key than the one whose seed the administrator's slot holds")
    signed = {name: value for name, value in m.items() if name != "signature"}
    message = b"lamassu v1 admin" + sj.canonical(body | {"admin": signed})
    if not ed25519_verify(public, message, sj.hexbytes(m["signature"], 64, f"{where}.signature")):
        raise Refused(where, "the signature does not verify: the header was changed")
    if "before" in m:
        _successions(m["before"], public, vault_id, f"{where}.before")
    return public


def _successions(value: Any, public: bytes, vault_id: bytes, where: str) -> None:
    """Earlier keys of the administrator, each of which has signed the next."""
    before = [sj.members(v, {"public", "signature"}, where) for v in sj.array(value, where)]
    if not 1 <= len(before) <= 64:
        raise Refused(where, "not 1 to 64 keys")
    for m in reversed(before):
        earlier = sj.hexbytes(m["public"], 32, where)
        if not ed25519_verify(earlier, b"lamassu v1 admin successor" + vault_id + public, sj.hexbytes(m["signature"], 64, where)):
            raise Refused(where, "a key has not signed the one after it")
        public = earlier


def _pins(value: Any, where: str) -> dict[bytes, bytes]:
    """The administrators that a zone file pins, by vault."""
    found = [sj.members(v, {"vault", "admin"}, where) for v in sj.array(value, where)]
    pins = {sj.hexbytes(m["vault"], 16, where): sj.hexbytes(m["admin"], 32, where) for m in found}
    if not 1 <= len(found) <= 4096 or len(pins) != len(found):
        raise Refused(where, "not 1 to 4096 pins of distinct vaults")
    return pins


def _keychain(value: Any, file_key: bytes, vault_id: bytes, is_zone: bool, where: str) -> tuple[tuple[bytes, ...], tuple[bytes, ...], frozenset[bytes]]:
    m = sj.members(value, {"nonce", "sealed"}, where)
    nonce = sj.hexbytes(m["nonce"], 24, f"{where}.nonce")
    sealed = sj.hexbytes(m["sealed"], None, f"{where}.sealed")
    key = hkdf(file_key, b"lamassu v1 keychain")
    try:
        plain = xaes_open(key, nonce, sealed[:TAG], sealed[TAG:], b"lamassu v1 keychain" + vault_id)
    except (OpenFailed, ValueError):
        raise Refused(where, "does not open under the file key") from None
    chain = sj.members(sj.parse(plain, where), {"inner", "outer"}, where)
    inner, oblivious = _epochs(chain["inner"], 1, f"{where}.inner")
    outer, of_outer = _epochs(chain["outer"], 0 if is_zone else 1, f"{where}.outer")
    if of_outer:
        raise Refused(f"{where}.outer", "an epoch of K_out is never oblivious")
    return inner, outer, oblivious


def load(path: Where, source: KeySource | ParentKeys) -> Header:
    """Read and open the header or zone file at `path`."""
    with open(path, "rb") as f:
        return parse(f.read(LIMIT + 1), source, path)


def load_vault(directory: Where, source: KeySource | ParentKeys) -> Header:
    """The header of the vault in `directory`."""
    header = load(os.path.join(os.fsencode(directory), b"lamassu.vault"), source)
    if header.is_zone:
        raise Refused(directory, "lamassu.vault is a zone file")
    return header
