"""A backup of a vault in use: frozen, its ciphertext copied by rsync, thawed; restored elsewhere, as a whole and a single file.

Four writers go on all the while. Each writes numbered files, each file all of one number: in the restored copy every file has to be whole, and
what was written before the freeze has to be there. The second run of rsync moves what has changed and little else.
"""

import multiprocessing
import os
import pathlib
import random
import re
import shutil
import time

from lab import Failure, Lab, call, program

WRITERS = 3
SIZE = 300_000


def content(n):
    return random.Random(n).randbytes(4096) * (SIZE // 4096)


def write_files(top, first, done, stop):
    """Writes numbered files and renames over one name; tells what is complete."""
    n = first
    while not stop.is_set():
        temporary = top / f"new{first}"
        with open(temporary, "wb") as file:
            file.write(n.to_bytes(8, "little") + content(n))
        os.rename(temporary, top / f"w{first}-{n % 5}")
        done.value = n
        n += 1
        time.sleep(0.01)


def verify(top, least):
    """Every file whole, and the last complete one of each writer there or replaced by a later one."""
    newest = dict.fromkeys(least, -1)
    for path in sorted(top.iterdir()):
        data = path.read_bytes()
        if path.name.startswith("new"):
            continue  # being written when the vault froze
        if not path.name.startswith("w"):
            continue
        first = int(path.name[1:].split("-")[0])
        n = int.from_bytes(data[:8], "little")
        if data[8:] != content(n):
            raise Failure(f"{path.name}, number {n}, is not whole in the backup")
        newest[first] = max(newest[first], n)
    for first, n in least.items():
        if newest[first] < n:
            raise Failure(f"writer {first} had completed {n} before the freeze, the backup has {newest[first]}")


def rsync(source, target):
    """Bytes that were moved, and all bytes there are."""
    # Times to the nanosecond: by whole seconds, files that are replaced within one look unchanged.
    options = ("-aHAX", "--inplace", "--no-whole-file", "--modify-window=-1", "--delete", "--stats")
    said = call("rsync", *options, f"{source}/", f"{target}/").stdout
    number = lambda what: int(re.search(rf"{what}: ([\d,.]+)", said).group(1).replace(",", "").replace(".", ""))
    return number("Literal data"), number("Total file size")


def backup(rng, cache):
    with Lab() as lab:
        vault = lab.vault("v")
        vault.mount("-c", cache)
        still = vault.mnt / "still"
        still.mkdir()
        for n in range(20):
            (still / f"f{n}").write_bytes(rng.randbytes(1 << 20))
        live = vault.mnt / "live"
        live.mkdir()
        stop = multiprocessing.Event()
        done = {first * 1_000_000: multiprocessing.Value("q", -1) for first in range(1, WRITERS + 1)}
        writers = [multiprocessing.Process(target=write_files, args=(live, first, value, stop)) for first, value in done.items()]
        for writer in writers:
            writer.start()
        copy = lab.path / "copy"
        copy.mkdir()
        moved = []
        try:
            for _ in range(2):
                while any(value.value < first for first, value in done.items()):
                    time.sleep(0.05)
                time.sleep(0.5)
                least = {first: value.value for first, value in done.items()}
                call(program(), "freeze", str(vault.mnt))
                try:
                    moved.append(rsync(vault.dir, copy))
                finally:
                    call(program(), "thaw", str(vault.mnt))
                restored(lab, copy, least, still)
            after = {first: value.value for first, value in done.items()}
            time.sleep(0.3)
            if any(value.value <= after[first] for first, value in done.items()) and not any(w.is_alive() for w in writers):
                raise Failure("the writers do not go on after the thaw")
        finally:
            stop.set()
            for writer in writers:
                writer.join(60)
                writer.kill()
        (first_moved, first_total), (second_moved, _) = moved
        if first_moved < first_total * 0.9:
            raise Failure(f"the first backup moved {first_moved} of {first_total} bytes")
        # The files of `still` are 20 MiB; those of `live` are rewritten all the time.
        if second_moved > WRITERS * 6 * (SIZE + 20_000) + (1 << 20):
            raise Failure(f"the second backup moved {second_moved} bytes, {first_total} there are")
        vault.umount()
        vault.check()
        return second_moved / first_moved


def restored(lab, copy, least, still):
    """The copy is put elsewhere, checked, and read through a mount; one file also without a mount."""
    elsewhere = lab.path / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    call("cp", "-a", str(copy), str(elsewhere))
    call(program(), "check", "-q", "-k", lab.source, str(elsewhere))
    mnt = lab.path / "mnt-elsewhere"
    mnt.mkdir(exist_ok=True)
    call(program(), "mount", "-q", "-k", lab.source, str(elsewhere), str(mnt))
    try:
        verify(mnt / "live", least)
        for path in still.iterdir():
            if path.read_bytes() != (mnt / "still" / path.name).read_bytes():
                raise Failure(f"{path.name} in the backup is another")
    finally:
        call(program(), "umount", str(mnt))
    # One file, by its ciphertext's path, from the backup itself.
    stored = call(program(), "path", "-q", "-k", lab.source, "--absolute", str(copy), "still/f3").stdout.strip()
    call(program(), "cp", "-q", "-k", lab.source, "--orphan", str(copy), stored, str(lab.path / "single"))
    if (lab.path / "single").read_bytes() != (still / "f3").read_bytes():
        raise Failure("a single file restored from its ciphertext is another")
    pathlib.Path(lab.path / "single").unlink()


def run(seed, seconds):
    if shutil.which("rsync") is None:
        return "left out, there is no rsync"
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    times, parts = 0, []
    while times == 0 or time.monotonic() < until:
        cache = ("writeback", "through", "none")[times % 3]
        try:
            parts.append(backup(rng, cache))
        except Failure as failure:
            raise Failure(f"cache={cache}, seed {seed}: {failure}") from None
        times += 1
    return f"{times} times, the second backup moved {max(parts):.0%} of the first at most"
