"""Mounting for a measured pass, timing it, and reading what the serving process used."""

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass

from demolib.shell import DemoError, Undo, as_root, run, unmount

MOUNT_SECONDS_MAX = 60
END_SECONDS_MAX = 120
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Used:
    """What the serving process used from the mount's being usable to its end; of a store used directly: nothing."""

    cpu_s: float = 0.0
    rss_peak_mib: float = 0.0


class Mount:
    """A served mount point. `used` is filled in when it has ended, and `said`: what it wrote to standard error."""

    def __init__(self, path, process):
        self.path, self.process, self.used, self.said = path, process, Used(), ""
        self._cpu_before = self._cpu() if process else 0.0
        if process:
            # proc_pid_clear_refs(5): 5 resets the peak, so that what deriving a key needs is not counted.
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/clear_refs", "w") as file:
                file.write("5")

    def _cpu(self):
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def read_peak(self):
        if self.process:
            with open(f"/proc/{self.process.pid}/status") as file:
                peaks = [line.split()[1] for line in file if line.startswith("VmHWM:")]
            self.used.rss_peak_mib = int(peaks[0]) / 1024 if peaks else 0.0

    def ended(self, usage):
        self.used.cpu_s = usage.ru_utime + usage.ru_stime - self._cpu_before


@contextlib.contextmanager
def mounted(system, store, work):
    """Serves `store` for a while; a `system` of None means the store itself."""
    if system is None:
        yield Mount(store, None)
        return
    with Undo() as undo:
        path = tempfile.mkdtemp(prefix="mnt-", dir=work)
        undo.callback(os.rmdir, path)
        process = system.start(store, path)
        undo.callback(end, process)
        undo.callback(unmount, path, system.umount)
        wait_until_mounted(system, process, path)
        mount = Mount(path, process)
        yield mount
        mount.read_peak()
        unmount(path, system.umount)
        mount.ended(reap(process))
        os.set_blocking(process.stderr.fileno(), False)
        mount.said = (process.stderr.read() or b"").decode(errors="replace")


def wait_until_mounted(system, process, path):
    deadline = time.monotonic() + MOUNT_SECONDS_MAX
    while not os.path.ismount(path):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            said = process.stderr.read().decode(errors="replace")[-500:]
            raise DemoError(f"{system.name} did not mount: {said}")
        time.sleep(0.01)


def reap(process):
    """Waits for a process that was told to end; its resource usage (all its threads, to the last write)."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage
        if time.monotonic() > deadline:
            raise DemoError(f"process {process.pid} ({process.args[0]}) did not end after its mount was gone")
        time.sleep(0.005)


def end(process):
    """The way out after an error: nothing of ours may stay."""
    if process.returncode is None:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    process.stderr.close()


class Quiet:
    """Commands around each measured pass, e.g. to pause other work on a shared machine."""

    def __init__(self, before, after):
        self.before, self.after = (shlex.split(c or "") for c in (before, after))

    @contextlib.contextmanager
    def __call__(self):
        with Undo() as undo:
            if self.after:
                undo.callback(run, *self.after, check=False)
            if self.before:
                run(*self.before)
            yield


def drop_caches(sync=False):
    """Empties the page cache of what is clean; with `sync`, makes everything clean before."""
    if sync:
        run("sync")
    as_root("sh", "-c", "echo 3 > /proc/sys/vm/drop_caches", check=False)


def back_memory():
    """Touches most of the memory that is free, and frees it. A hypervisor takes free memory back and gives it anew page by page, at 1 to 2 s a GiB
    here: who ran longer got slower memory, and files of a few GiB, which three page caches hold, took most of their time for that.
    """
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) >> 10 for line in file if line.startswith("MemFree:"))
    size = (free * 4 // 5) << 20
    run("python3", "-c", f"import mmap; mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)")


def fio(directory, rw, block, size_mib, *more, filename="bench.dat", run=run):
    """One job of psync I/O; fio's own account of it. Writes end with fsync, whose time counts. Without `filename`, a file for each of its threads.
    `run`: another way to run a program, e.g. on another host."""
    options = ["--name=job", f"--directory={directory}", *([f"--filename={filename}"] if filename else []), f"--size={size_mib}M", f"--bs={block}",
               f"--rw={rw}", "--ioengine=psync", "--thread", "--fallocate=none", "--unlink=0", "--output-format=json", *more]
    if rw not in ("read", "randread"):
        # Fresh bytes for every block, as real data has few equal ones; and others in each pass: a block overwritten with what it holds keeps its key,
        # and takes no second barrier.
        options += ["--end_fsync=1", "--refill_buffers", "--randrepeat=0"]
    job = json.loads(run("fio", *options).stdout)["jobs"][0]
    if job["error"]:
        raise DemoError(f"fio {rw} {block} ended with error {job['error']}")
    return job


def mb_per_s(job, direction):
    """10^6 bytes a second."""
    return job[direction]["bw_bytes"] / 1e6


def seconds_of(*argv, run=run, **more):
    """Wall-clock seconds of a command. `run`: another way to run it, e.g. on another host."""
    begun = time.monotonic()
    run(*argv, **more)
    return time.monotonic() - begun


def alternating(names, runs, minutes=None):
    """(run, name): each run in another order, so that no system always has the machine's best minute. No run begins after `minutes`."""
    begun = time.monotonic()
    for number in range(runs):
        if number and minutes and time.monotonic() - begun > 60 * minutes:
            return
        turned = names[number % len(names):] + names[: number % len(names)]
        for name in turned if number % 2 == 0 else reversed(turned):
            yield number, name
