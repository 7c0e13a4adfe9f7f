"""Running commands, saying what goes on, and undoing everything at the end.

Whatever the demo makes is pushed on one `Undo` stack at once, so that a normal end, an error, SIGINT and SIGTERM all
take the same way out.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

STARTED = time.monotonic()


class DemoError(Exception):
    """Something outside the demo's control failed; the message says what and what to do."""


def say(text):
    """One line of progress on standard error."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def have(command):
    return shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def run(*argv, check=True, stdin=None, env=None):
    """Runs a command, collecting its output; failure says the command and its last lines."""
    argv = [str(a) for a in argv]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    result = subprocess.run(
        argv, input=stdin, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
        env={**os.environ, "PATH": path, "LC_ALL": "C.UTF-8", **(env or {})},
    )
    if check and result.returncode != 0:
        tail = "\n".join((result.stderr + result.stdout).strip().splitlines()[-8:])
        raise DemoError(f"{' '.join(argv)}\nended with status {result.returncode}:\n{tail}")
    return result


def as_root(*argv, check=True):
    """Runs a command that needs root: directly, or by sudo where that asks nothing."""
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    return run(*prefix, *argv, check=check)


def unmount(mountpoint, command):
    """Unmounts, and does not give up while something still looks at the mount."""
    for attempt in range(10):
        if not os.path.ismount(mountpoint):
            return
        if command(mountpoint).returncode == 0:
            continue
        time.sleep(0.2 * (attempt + 1))
    as_root("umount", "-l", mountpoint, check=False)


class Judge:
    """Counts what was promised and what came true."""

    def __init__(self):
        self.passed = self.failed = 0

    def __call__(self, passed, text):
        self.passed += bool(passed)
        self.failed += not passed
        print(f"{'  ok ' if passed else 'FAIL '} {text}", flush=True)


class Undo(contextlib.ExitStack):
    """An ExitStack that no second Ctrl-C can interrupt half-way."""

    def __exit__(self, *details):
        previous = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return super().__exit__(*details)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def stop_on_signals():
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does."""

    def stop(number, _frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
