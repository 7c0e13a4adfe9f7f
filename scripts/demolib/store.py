"""Stores to keep ciphertext on: a fresh XFS with reflink on a loop device, or a plain directory.

Each configuration of the demo gets a store of its own, so a difference of used blocks is exactly its doing.
"""

import os
import tempfile

from .blocks import BLOCK, share_equal_blocks, survey
from .shell import DemoError, Undo, as_root, have, run, say, unmount


# In disk images it shares block by block, which is slow; the exact pass after it finishes whatever it leaves.
DUPEREMOVE_SECONDS_MAX = 90


class LoopStore:
    """A fresh file system in an image, mounted. Space is what it says itself is in use, above the freshly made one."""

    def __init__(self, undo, work, size, suffix, make, options):
        self.options = f"loop,noatime{options}"
        self.image = tempfile.mktemp(suffix=suffix, dir=work)
        self.path = tempfile.mkdtemp(prefix="store-", dir=work)
        undo.callback(os.rmdir, self.path)
        with open(self.image, "wb") as file:
            file.truncate(size)
        undo.callback(os.unlink, self.image)
        run(*make, self.image)
        undo.callback(unmount, self.path, lambda at: as_root("umount", at, check=False))
        self._mount()
        as_root("chown", f"{os.geteuid()}:{os.getegid()}", self.path)
        self._empty = self._used_bytes()

    def _mount(self):
        as_root("mount", "-o", self.options, self.image, self.path)

    def used(self):
        """Bytes in use. A remount first settles what is reserved ahead of writers and freed in the background."""
        as_root("sync", "-f", self.path)
        unmount(self.path, lambda at: as_root("umount", at, check=False))
        self._mount()
        return self._used_bytes() - self._empty

    def deduplicate_all(self, of=BLOCK):
        refused = share_equal_blocks(self.path, of)
        if refused:
            raise DemoError(f"the kernel refused to share {refused} ranges of equal blocks")


class XfsStore(LoopStore):
    """XFS with reflink."""

    kind = "XFS with reflink on a loop device"

    def __init__(self, undo, work, size, exact=True):
        """`exact`: space is what matters here; else speed, with the options that people mount it with."""
        # Without allocsize XFS fills the holes of a sparse file with space it reserved ahead of the writer, and keeps it.
        super().__init__(undo, work, size, ".xfs", ("mkfs.xfs", "-q", "-m", "reflink=1,rmapbt=0"), f",allocsize={BLOCK}" if exact else "")

    def _used_bytes(self):
        found = os.statvfs(self.path)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def duperemove(self, hashes):
        """duperemove in blocks of 4 KiB over everything; false if its time ran out. `hashes`: a directory in memory.

        `--lookup-extents=no` makes it compare fixed blocks; else it compares whole extents as they happen to lie.
        It compares a file's blocks with other files' alone (0.11): `same` is about whole extents within a file.
        """
        with tempfile.TemporaryDirectory(dir=hashes) as folder:
            ended = run("timeout", DUPEREMOVE_SECONDS_MAX, "duperemove", "-drA", "-q", "-b", BLOCK, "--lookup-extents=no",
                        "--dedupe-options=same,nofiemap", f"--hashfile={folder}/hashes", self.path, check=False)
        if ended.returncode not in (0, 124):
            raise DemoError(f"duperemove ended with status {ended.returncode}: {ended.stderr[-300:]}")
        return ended.returncode == 0


class BtrfsStore(LoopStore):
    """btrfs that compresses."""

    kind = "btrfs with compress-force=zstd on a loop device"

    def __init__(self, undo, work, size):
        super().__init__(undo, work, size, ".btrfs", ("mkfs.btrfs", "-q", "-m", "single", "-d", "single"), ",compress-force=zstd")

    def _used_bytes(self):
        shown = as_root("btrfs", "filesystem", "df", "-b", self.path).stdout
        return sum(int(line.rsplit("used=", 1)[1]) for line in shown.splitlines() if line.startswith(("Data", "Metadata", "System")))


class PlainStore:
    """A plain directory, where equal blocks can only be counted."""

    kind = "a plain directory, counting distinct 4 KiB blocks instead of deduplicating them"

    def __init__(self, undo, work, size):
        del size
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=work))
        self.path = folder
        self._distinct = False

    def used(self):
        found = survey(self.path)
        return BLOCK * (len(found.distinct) if self._distinct else found.blocks)

    def duperemove(self, hashes):
        del hashes
        return None  # nothing to run: the figures are counted

    def deduplicate_all(self):
        self._distinct = True


def choose(work):
    """The best kind of store this machine allows; the reason is told when it is not XFS."""
    missing = [c for c in ("mkfs.xfs", "duperemove") if not have(c)]
    if missing:
        reason = f"{' and '.join(missing)} not installed (`make setup` installs them)"
    else:
        try:
            with Undo() as undo:
                XfsStore(undo, work, 1 << 29)
            return XfsStore
        except (DemoError, OSError) as error:
            reason = f"no XFS could be mounted here: {str(error).splitlines()[-1]}"
    say(f"NOTE: {reason}.")
    say(f"NOTE: falling back to {PlainStore.kind}.")
    return PlainStore
