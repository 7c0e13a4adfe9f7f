"""Blocks of the files below a directory, of 4 KiB by default: counting the distinct ones, and sharing the equal ones.

`survey` knows nothing of the store and so checks the store's own figures; `share_equal_blocks` hands the kernel each
block that duperemove leaves (it skips files under one block and some blocks of partly shared extents). The kernel
compares the bytes itself before it shares anything.
"""

import fcntl
import hashlib
import os
import struct
from dataclasses import dataclass

BLOCK = 4096
READ = 1 << 20
LONGEST = 16 << 20  # a range that the kernel shares at once
# linux/fs.h: _IOWR(0x94, 54, struct file_dedupe_range), _IOWR('f', 11, struct fiemap)
FIDEDUPERANGE = 0xC0189436
FS_IOC_FIEMAP = 0xC020660B
FIEMAP_EXTENT_LAST = 1


def files_below(root):
    """Every regular file, in a fixed order."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


def data_blocks(fd, size, of=BLOCK):
    """(index, bytes) of each block outside holes; the last one may be short. Larger ones may have holes within them, which are zeros."""
    offset = 0
    while offset < size:
        try:
            data = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        offset = data // of * of
        end = min(size, -(-os.lseek(fd, data, os.SEEK_HOLE) // of) * of)
        while offset < end:
            piece = os.pread(fd, min(READ, end - offset), offset)
            for at in range(0, len(piece), of):
                yield (offset + at) // of, piece[at : at + of]
            offset += (len(piece) + of - 1) // of * of


def digest(block):
    """Equal for blocks that are equal once padded with zeros, as they lie on a disk."""
    return hashlib.blake2b(block.ljust(BLOCK, b"\0"), digest_size=16).digest()


@dataclass
class Survey:
    files: int
    logical: int  # bytes
    blocks: int  # of 4 KiB, outside holes
    distinct: set


def survey(root):
    """Counts what a store of deduplicated 4 KiB blocks would hold for `root`."""
    result = Survey(0, 0, 0, set())
    for path in files_below(root):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            result.files += 1
            result.logical += size
            for _, block in data_blocks(file.fileno(), size):
                result.blocks += 1
                result.distinct.add(digest(block))
    return result


def physical_blocks(fd):
    """Maps a file's block numbers to the store's."""
    found, start = {}, 0
    while True:
        count = 256
        request = bytearray(struct.pack("=QQLLLL", start, 2**64 - 1 - start, 1, 0, count, 0) + bytes(56 * count))
        fcntl.ioctl(fd, FS_IOC_FIEMAP, request)
        mapped = struct.unpack_from("=QQLLLL", request)[3]
        for i in range(mapped):
            logical, physical, length, _, _, flags = struct.unpack_from("=QQQQQL", request, 32 + 56 * i)
            for at in range(0, length, BLOCK):
                found[(logical + at) // BLOCK] = (physical + at) // BLOCK
            start = logical + length
        if mapped == 0 or flags & FIEMAP_EXTENT_LAST:
            return found


def dedupe_range(source, source_at, target, target_at, length):
    """Asks the kernel to share one range; true if it did."""
    request = bytearray(struct.pack("=QQHHL", source_at, length, 1, 0, 0) + struct.pack("=qQQlL", target, target_at, 0, 0, 0))
    fcntl.ioctl(source, FIDEDUPERANGE, request)
    done, status = struct.unpack_from("=Ql", request, 24 + 16)
    return status == 0 and done == length


def share_equal_blocks(root, of=BLOCK):
    """Shares every block below `root` with the first one equal to it. Returns how many ranges the kernel refused."""
    first, refused = {}, 0
    for path in files_below(root):
        fd = os.open(path, os.O_RDONLY)  # the owner may share blocks of a read-only file
        try:
            size = os.fstat(fd).st_size
            runs = repeated_runs(first, path, size, fd, of)
            for source, source_index, index, count in runs:
                length = min(count * of, size - index * of)
                source_fd = os.open(source, os.O_RDONLY)
                try:
                    refused += not dedupe_range(source_fd, source_index * of, fd, index * of, length)
                finally:
                    os.close(source_fd)
        finally:
            os.close(fd)
    return refused


def repeated_runs(first, path, size, fd, of):
    """Blocks of `path` seen before and not yet shared, as runs [source path, source index, index, count] of at most 16 MiB."""
    runs, physical = [], physical_blocks(fd)
    for index, block in data_blocks(fd, size, of):
        # A short last block can only be shared with one of the same length.
        seen = first.setdefault((digest(block), len(block)), (path, index, physical.get(index * of // BLOCK)))
        if seen[2] == physical.get(index * of // BLOCK):
            continue
        last = runs[-1] if runs else None
        if last and last[0] == seen[0] and last[1] + last[3] == seen[1] and last[2] + last[3] == index and last[3] * of < LONGEST:
            last[3] += 1
        else:
            runs.append([seen[0], seen[1], index, 1])
    return runs
