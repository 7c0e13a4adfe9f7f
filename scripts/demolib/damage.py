"""Comparing what comes back with what went in, and what one flipped bit does."""

import errno
import json
import os
import stat
import subprocess
from dataclasses import dataclass

from .blocks import BLOCK
from .shell import DemoError, run, say

CHECK_FOUND_DAMAGE = 26  # docs/cli.md, exit codes


def entries(root):
    """Relative paths of everything below `root`."""
    found = ["."]
    for folder, folders, names in os.walk(root):
        found += [os.path.relpath(os.path.join(folder, n), root) for n in folders + names]
    return sorted(found)


def same_content(one, other):
    with open(one, "rb") as a, open(other, "rb") as b:
        while True:
            left, right = a.read(1 << 20), b.read(1 << 20)
            if left != right:
                return False
            if not left:
                return True


def differences(source, copy):
    """(what differs, how many entries were compared): kind, mode, owner, size, mtime, link target and every byte."""
    names, wrong = entries(source), []
    if names != entries(copy):
        wrong.append("the lists of names differ")
    for name in names:
        one, other = os.path.join(source, name), os.path.join(copy, name)
        try:
            a, b = os.lstat(one), os.lstat(other)
            fields = [f for f in ("st_mode", "st_uid", "st_gid", "st_mtime_ns") if getattr(a, f) != getattr(b, f)]
            if stat.S_ISREG(a.st_mode) and not (a.st_size == b.st_size and same_content(one, other)):
                fields.append("content")
            elif stat.S_ISLNK(a.st_mode) and os.readlink(one) != os.readlink(other):
                fields.append("target")
            if fields:
                wrong.append(f"{name}: {', '.join(fields)}")
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
    return wrong, len(names)


@dataclass
class Victim:
    name: str  # path in the tree
    stored: str  # path of the ciphertext
    block: int  # which data block gets the flipped bit


def choose_victim(lamassu, source):
    """The first file of at least eight blocks, and where its ciphertext lies."""
    for name in entries(source):
        path = os.path.join(source, name)
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) >= 8 * BLOCK:
            break
    else:
        raise DemoError("no file of eight blocks in the data set")
    vault = lamassu.folders[0]
    stored = run(lamassu.program, "path", "--key", lamassu.keys[0], vault, name).stdout.strip()
    return Victim(name, os.path.join(vault, stored), 5)


def flip_bit(victim):
    """Flips a bit in the middle of the block. docs/format.md section 8: block b < 116 lies at (1 + b) * 4096."""
    offset = (1 + victim.block) * BLOCK + 1234
    with open(victim.stored, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def blocks_in_error(plain, damaged):
    """(numbers of the blocks that give EIO, numbers of those that read wrong)."""
    failing, wrong = [], []
    with open(plain, "rb") as good, open(damaged, "rb", buffering=0) as bad:
        os.posix_fadvise(bad.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead over the damage
        for index in range((os.path.getsize(plain) + BLOCK - 1) // BLOCK):
            try:
                if os.pread(bad.fileno(), BLOCK, index * BLOCK) != os.pread(good.fileno(), BLOCK, index * BLOCK):
                    wrong.append(index)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                failing.append(index)
    return failing, wrong


def show_damage(lamassu, source, work, judge):
    """Flips one bit of ciphertext; `judge(passed, text)` hears what follows from it."""
    victim = choose_victim(lamassu, source)
    say(f"flipping one bit in the ciphertext of block {victim.block} of {victim.name}")
    flip_bit(victim)
    with lamassu.opened(0, work) as mountpoint:
        path = os.path.join(mountpoint, victim.name)
        cat = subprocess.run(["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
                             env={**os.environ, "LC_ALL": "C"})
        print(f"$ cat {victim.name}\n{cat.stderr.strip()}")
        judge(cat.returncode != 0 and "Input/output error" in cat.stderr, "`cat` of the damaged file ends with an I/O error")
        failing, wrong = blocks_in_error(os.path.join(source, victim.name), path)
        judge(failing == [victim.block] and not wrong, f"only block {victim.block} is lost, every other block reads right"
              f" (I/O error: {failing}, wrong: {wrong})")
    check = run(lamassu.program, "check", "--json", "--key", lamassu.keys[0], lamassu.folders[0], check=False)
    try:
        problems = json.loads(check.stdout)["problems"]
    except (ValueError, KeyError):
        problems = []
    print("$ lamassu check")
    for problem in problems:
        print(f"{problem['path']}, block {problem['block']}: {problem['text']}")
    named = [(str(p["path"]).lstrip("/"), p["block"]) for p in problems]
    judge(check.returncode == CHECK_FOUND_DAMAGE and named == [(victim.name, victim.block)],
          f"`lamassu check` names the file and the block, and ends with status {check.returncode}")
    flip_bit(victim)
    mended = run(lamassu.program, "check", "--key", lamassu.keys[0], lamassu.folders[0], check=False)
    judge(mended.returncode == 0, "with the bit flipped back `lamassu check` finds nothing wrong")
