"""Flipped bits and full stores: what an application meets, what the log and `lamassu check` say, and what must stay whole."""

import errno
import os
import random
import time

from lab import DAMAGED, Failure, Lab, some_bytes

BLOCK = 4096
PAGE_BLOCKS = 116  # at the default 8 reserved slots, docs/format.md section 8


def stored_file(vault, least):
    """The one backing file of at least so many bytes."""
    files = [p for p in vault.dir.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size >= least]
    if len(files) != 1:
        raise Failure(f"{len(files)} files in the store where one was written")
    return files[0]


def block_offset(block):
    """Where a block lies in the store, for blocks of 4 KiB."""
    return (block // PAGE_BLOCKS) * (PAGE_BLOCKS + 1) * BLOCK + BLOCK + (block % PAGE_BLOCKS) * BLOCK


def flip(path, offset, bit):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 1 << bit,)))


def readable(path, blocks, direct):
    """Which of the file's blocks can be read one by one, and their contents."""
    found = {}
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        for block in range(blocks):
            try:
                found[block] = os.pread(fd, BLOCK, block * BLOCK)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise Failure(f"block {block}: {error} instead of EIO") from error
    finally:
        os.close(fd)
    return found


def damage_once(rng, suite, cache):
    with Lab() as lab:
        vault = lab.vault("v", "-s", suite)
        blocks = rng.randrange(250, 400)
        content = rng.randbytes(blocks * BLOCK)
        vault.mount()
        (vault.mnt / "secret").write_bytes(content)
        vault.umount()
        stored = stored_file(vault, blocks * BLOCK)
        if content[BLOCK : BLOCK + 32] in stored.read_bytes():
            raise Failure("plaintext in the store")
        if rng.random() < 0.7:
            hit = rng.randrange(blocks)
            lost = {hit}
            flip(stored, block_offset(hit) + rng.randrange(BLOCK), rng.randrange(8))
            words = ("segment", "block-hash")
        else:
            page = rng.randrange(1, (blocks - 1) // PAGE_BLOCKS)  # neither the first nor the last: those tell id and size
            lost = set(range(page * PAGE_BLOCKS, (page + 1) * PAGE_BLOCKS))
            flip(stored, block_offset(page * PAGE_BLOCKS) - rng.randrange(1, BLOCK + 1), rng.randrange(8))
            words = ("segment", "page-")
        report = vault.check(expect=(DAMAGED,))
        named = {(problem["path"], problem["block"]) for problem in report["problems"]}
        if len(lost) == 1 and named != {("secret", hit)} or {path for path, _ in named} != {"secret"}:
            raise Failure(f"check names {named}, damaged is {sorted(lost)}")
        vault.mount("-c", cache)
        for direct in (False, True, False):
            found = readable(vault.mnt / "secret", blocks, direct)
            if set(range(blocks)) - found.keys() != lost:
                raise Failure(f"{blocks} blocks, damaged {sorted(lost)}, not readable {sorted(set(range(blocks)) - found.keys())}")
            wrong = [b for b, got in found.items() if got != content[b * BLOCK : (b + 1) * BLOCK]]
            if wrong:
                raise Failure(f"wrong content in blocks {wrong}")
        vault.umount()
        log = vault.log.read_text(errors="replace")  # a page damaged is named once, and many reads after it
        if not all(word in log for word in words) or stored.name not in log:
            raise Failure(f"the log does not say what is damaged:\n{log}")


def damage(seed, seconds):
    """Bits flipped in blocks and pages of vaults of every suite."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    times = 0
    while times < 4 or time.monotonic() < until:
        suite = ("aes", "paper", "blake3", "chacha")[times % 4]
        try:
            damage_once(rng, suite, ("writeback", "through", "none")[times % 3])
        except Failure as failure:
            raise Failure(f"damage {times}, suite {suite}, seed {seed}: {failure}") from None
        times += 1
    return f"{times} files damaged"


def fill(path, piece):
    """Writes and syncs piece by piece until the store is full; what was synced must stay. Returns the synced pieces."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    synced = 0
    try:
        while True:
            os.write(fd, piece)
            os.fsync(fd)
            synced += 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise Failure(f"a full store answers {error}") from error
    finally:
        try:
            os.close(fd)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise Failure(f"close over a full store answers {error}") from error
    return synced


def overwrite(path, content, data):
    """Overwrites every second block for a while; on a full store some may fail. Each block must be its old or its new self."""
    fd = os.open(path, os.O_RDWR)
    try:
        for block in range(0, 200, 2):
            os.pwrite(fd, data, block * BLOCK)
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise Failure(f"overwriting in a full store answers {error}") from error
    finally:
        try:
            os.close(fd)
        except OSError:
            pass
    verify_overwritten(path, content, data)


def verify_overwritten(path, content, data):
    got = path.read_bytes()
    if len(got) != len(content):
        raise Failure(f"{len(got)} bytes, {len(content)} were written and synced")
    for at in range(0, len(got), BLOCK):
        may = (content[at : at + BLOCK], data) if at < 200 * BLOCK and at % (2 * BLOCK) == 0 else (content[at : at + BLOCK],)
        if got[at : at + BLOCK] not in may:
            raise Failure(f"block {at // BLOCK} is neither old nor new")


def full_once(rng, cache, options):
    with Lab("xfs", megabytes=320) as lab:
        vault = lab.vault("v", *options)
        vault.mount("-c", cache)
        content, piece, data = some_bytes(rng, 20 << 20), some_bytes(rng, 3 << 20), rng.randbytes(BLOCK)
        (vault.mnt / "keep").write_bytes(content)
        os.sync()
        synced = fill(vault.mnt / "fill", piece)
        overwrite(vault.mnt / "keep", content, data)
        with open(vault.mnt / "fill", "rb") as file:
            if any(file.read(len(piece)) != piece for _ in range(synced)):
                raise Failure("what was synced before the store was full is not there")
        os.unlink(vault.mnt / "fill")
        again = vault.mnt / "again"
        again.write_bytes(content)
        fd = os.open(again, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        vault.umount()
        vault.check()
        vault.mount("-c", cache)
        if again.read_bytes() != content:
            raise Failure("what was written after space came back is not there")
        verify_overwritten(vault.mnt / "keep", content, data)
        vault.umount()


def full(seed, seconds):
    """A store that is filled up, and then has space again."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    times = 0
    while times == 0 or time.monotonic() < until:
        cache, options = (("writeback", ()), ("through", ("-b", "64K", "--compress", "lz4")), ("none", ("-R", "2")))[times % 3]
        try:
            full_once(rng, cache, options)
        except Failure as failure:
            raise Failure(f"full store, cache={cache} {' '.join(options)}, seed {seed}: {failure}") from None
        times += 1
    return f"{times} stores filled"
