"""Virtual machines' disks in a mount: raw and qcow2 images under qemu-io, with O_DIRECT, discards and flushes.

Each written range has a pattern of its own, and is read back with that pattern verified by qemu itself, while the image is in use and
in a later mount. `qemu-img check`, `qemu-img compare` and `lamassu check` have the last word.
"""

import random
import time

from lab import Failure, Lab, call

DISK = 64 << 20
UNIT = 4096
COMMANDS = 60


def script(rng, model):
    """qemu-io commands, and the pattern of each unit after them; 0: reads as zeros."""
    lines = []
    for _ in range(COMMANDS):
        count = rng.choice((1, 1, 3, 16, 100, 300))
        first = rng.randrange(DISK // UNIT - count)
        at, length = first * UNIT, count * UNIT
        what = rng.random()
        if what < 0.55:
            pattern = rng.randrange(1, 256)
            lines.append(f"write -P {pattern} {at} {length}")
            model.update(dict.fromkeys(range(first, first + count), pattern))
        elif what < 0.65:
            lines.append(f"write -z {at} {length}")
            model.update(dict.fromkeys(range(first, first + count), 0))
        elif what < 0.75:
            # What a discarded range holds is the image format's choice: both overwrite it before it is read again.
            pattern = rng.randrange(1, 256)
            lines += [f"discard {at} {length}", f"write -P {pattern} {at} {length}"]
            model.update(dict.fromkeys(range(first, first + count), pattern))
        elif what < 0.85:
            lines.append("flush")
        else:
            lines += reads(model, range(first, first + count))
    return lines


def reads(model, units):
    """Reads of runs of one pattern."""
    lines, first = [], None
    units = [*units, None]
    for unit, following in zip(units, units[1:]):
        first = unit if first is None else first
        if following is None or model.get(following, 0) != model.get(unit, 0):
            lines.append(f"read -P {model.get(unit, 0)} {first * UNIT} {(unit + 1 - first) * UNIT}")
            first = None
    return lines


def qemu_io(image, kind, cache, lines):
    arguments = [word for line in [*lines, "flush"] for word in ("-c", line)]
    said = call("qemu-io", "-f", kind, "-t", cache, "-d", "unmap", *arguments, str(image))
    for text in (said.stdout, said.stderr):
        if "failed" in text or "error" in text.lower():
            raise Failure(f"qemu-io, {kind}, cache={cache}: {text[-1000:]}")


def images(rng, mount_cache, options):
    with Lab() as lab:
        vault = lab.vault("v", *options)
        vault.mount("-c", mount_cache)
        disks = {kind: (vault.mnt / f"disk.{kind}", {}) for kind in ("raw", "qcow2")}
        for kind, (image, model) in disks.items():
            call("qemu-img", "create", "-q", "-f", kind, str(image), str(DISK))
            for cache in ("none", "directsync", "writeback"):
                qemu_io(image, kind, cache, script(rng, model))
                qemu_io(image, kind, cache, reads(model, sorted(model)))
        vault.umount()
        vault.check()
        vault.mount("-c", mount_cache)
        for kind, (image, model) in disks.items():
            qemu_io(image, kind, "none", reads(model, sorted(model)))
        image = disks["qcow2"][0]
        call("qemu-img", "check", "-q", str(image))
        call("qemu-img", "convert", "-t", "none", "-T", "none", "-O", "raw", str(image), str(vault.mnt / "converted"))
        call("qemu-img", "compare", "-q", "-f", "qcow2", "-F", "raw", str(image), str(vault.mnt / "converted"))
        vault.umount()
        vault.check()


def run(seed, seconds):
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    times = 0
    while times == 0 or time.monotonic() < until:
        cache, options = (("writeback", ()), ("none", ("-b", "64K")), ("through", ("-s", "paper", "-R", "1")))[times % 3]
        try:
            images(rng, cache, options)
        except Failure as failure:
            raise Failure(f"cache={cache} {' '.join(options)}, seed {seed}: {failure}") from None
        times += 1
    return f"{times} times a raw and a qcow2 disk"
