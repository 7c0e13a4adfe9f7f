"""The system calls of a mount, from its start through a use of everything that makes or changes entries: no entry is changed by its name.

What is looked for is a property, not an attack: a call that changes owner, mode, times or attributes acts on a descriptor, on "" beside one, or on the magic
link /proc/self/fd/N of one; what is made is nobody else's at first.
"""

import os
import re
import shutil
import subprocess
import time

from lab import Failure, Lab, call, is_mounted, program

# Debian's strace does not know fchmodat2(2) yet; the one place that makes it gives it no name.
CALLS = "chmod,fchmod,fchmodat,?fchmodat2,chown,lchown,fchown,fchownat,utimensat,setxattr,lsetxattr,fsetxattr,removexattr,lremovexattr,link,linkat,open,openat,creat,mkdir,mkdirat,mknod,mknodat"
LINE = re.compile(r"^\d+\s+(\w+)\((.*)\)\s+= (-?\d+)")
HELD = re.compile(r'^(AT_FDCWD, )?"/proc/self/fd/\d+"')
# Files of the vault's root that are no entries of the tree.
OWN_FILES = ("lamassu.lock", "lamassu.history", "lamassu.vault.new", "lamassu.vault", "lamassu.vault.replacing")
# What lies outside of the store: the daemon's own notes, and the kernel's.
ELSEWHERE = re.compile(r'^AT_FDCWD, "/(?!proc/self/fd/)')
# Each must be seen, or nothing was looked at.
EXPECTED = {"fchmod", "fchown", "fchownat", "utimensat", "setxattr", "linkat", "openat", "mkdirat", "mknodat"}


def mode_of(arguments):
    """The last number of a call that makes something, octal."""
    return int(re.findall(r"0[0-7]*", arguments)[-1], 8)


def offends(name, arguments, store):
    """Why this call changes or makes something by a name that somebody could have exchanged; None if it does not."""
    is_elsewhere = ELSEWHERE.match(arguments) and f'"{store}' not in arguments
    if is_elsewhere or any(f'{before}{own}"' in arguments for own in OWN_FILES for before in '"/'):
        return None
    if name in ("fchmod", "fchown", "fsetxattr"):
        return None
    if name in ("setxattr", "removexattr", "chmod", "chown"):
        return None if HELD.match(arguments) else "by name"
    if name in ("fchmodat", "fchmodat2", "fchownat", "utimensat"):
        empty = re.match(r'^\d+, (""|NULL)', arguments)
        return None if empty or HELD.match(arguments) else "by name"
    if name == "linkat":
        return None if HELD.match(arguments) and "AT_SYMLINK_FOLLOW" in arguments else "by name"
    if name == "openat" and "O_CREAT" in arguments:
        if "O_EXCL" not in arguments:
            return "made, or whatever is there"
        return None if mode_of(arguments) & ~0o600 == 0 else "made with more than its owner's bits"
    if name == "mkdirat":
        # The record of sessions may be read by whoever may read the vault.
        allowed = 0o755 if '"lamassu.sessions"' in arguments else 0o700
        return None if mode_of(arguments) & ~allowed == 0 else "made with more than its owner's bits"
    if name == "mknodat":
        return None if int(re.search(r"\|(0[0-7]*)", arguments)[1], 8) & ~0o600 == 0 else "made with more than its owner's bits"
    if name in ("lchown", "lsetxattr", "lremovexattr", "link", "creat", "mkdir", "mknod"):
        return "by name"
    return None


def use(mnt):
    """Everything that makes or changes an entry."""
    (mnt / "d").mkdir(mode=0o2775)
    file = mnt / "d" / "file"
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o4755))
    file.write_bytes(b"x" * 10_000)
    os.mkfifo(mnt / "d" / "fifo", 0o644)
    os.symlink("t" * 900, mnt / "d" / "link")
    os.link(file, mnt / "d" / "linked")
    for name in ("file", "fifo", "link", "."):
        place = mnt / "d" / name
        os.chown(place, 1, 1, follow_symlinks=False)
        os.utime(place, (5, 6), follow_symlinks=False)
        if name != "link":
            place.chmod(0o700)
    for name in ("file", "."):
        os.setxattr(mnt / "d" / name, "user.note", b"value")
        os.removexattr(mnt / "d" / name, "user.note")
        os.setxattr(mnt / "d" / name, "user.kept", b"value")
    os.truncate(file, 5)
    os.rename(mnt / "d" / "fifo", mnt / "fifo")
    os.rename(mnt / "d", mnt / "e")
    os.unlink(mnt / "e" / "linked")
    (mnt / "gone").mkdir()
    (mnt / "gone").rmdir()
    os.sync()


def scan(lines, store):
    seen, found = set(), []
    for line in lines:
        match = LINE.match(line)
        if match and int(match[3]) >= 0:
            seen.add(match[1])
            why = offends(match[1], match[2], store)
            if why:
                found.append(f"{why}: {match[1]}({match[2]})")
    return seen, found


def run(_seed, _seconds):
    if shutil.which("strace") is None:
        raise Failure("strace is not installed: run make setup")
    with Lab() as lab:
        vault = lab.vault("v")
        trace = lab.path / "trace"
        command = ["strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={CALLS}", program(), "mount", "-f", "-q"]
        command += ["-k", lab.source, "-o", "allow_other", str(vault.dir), str(vault.mnt)]
        with open(vault.log, "ab") as log:
            vault.daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 60
        while not is_mounted(vault.mnt):
            if vault.daemon.poll() is not None or time.monotonic() > until:
                raise Failure(f"mount under strace: {vault.log_tail()}")
            time.sleep(0.01)
        use(vault.mnt)
        call(program(), "key", "rotate", "--outer", "-k", lab.source, str(vault.dir))
        call(program(), "rekey", "--outer", "-k", lab.source, str(vault.dir))
        vault.umount()
        seen, found = scan(trace.read_text(errors="replace").splitlines(), lab.store)
        if found:
            raise Failure("entries are changed by name:\n" + "\n".join(found[:20]))
        if EXPECTED - seen:
            raise Failure(f"never seen, so nothing was looked at: {', '.join(sorted(EXPECTED - seen))}")
        vault.check()
        return f"{len(seen)} kinds of call, none by name"
