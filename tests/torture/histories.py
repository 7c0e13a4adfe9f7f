"""Whether what several hosts saw of one file system can be explained by one order of their calls.

Blocks are registers whose every write has a value of its own. Names are a small tree. Times are those of one clock. A call that failed may
have had its effect, or have it yet; one that succeeded had it while it ran. What a host wrote without a sync may be lost if the host's
session ended: from when on that is possible, the caller says (`losses`).
"""

import bisect
import dataclasses
import math

from lab import Failure

NEVER = math.inf


@dataclasses.dataclass
class Write:
    """Of one block. `durable`: from when on no crash can undo it."""

    value: str
    host: str
    begun: float
    ended: float = NEVER  # never: it failed
    durable: float = NEVER  # never: nobody has synced it


@dataclasses.dataclass
class Read:
    """Of one block."""

    value: str
    host: str
    begun: float
    ended: float


def judge_block(writes, reads, losses):
    """Raises `Failure` if a read returned what it cannot have.

    `losses`: for each host the spans in which it may lose what it has not synced. `writes` begin with the value at first, which is durable.
    """
    known = {write.value: write for write in writes}
    for read in sorted(reads, key=lambda read: read.ended):
        write = known.get(read.value)
        if write is None:
            raise Failure(f"{read} returned what nobody wrote since the hosts last agreed")
        if write.begun > read.ended:
            raise Failure(f"{read} returned what was written later: {write}")
        # What another host has read was committed: it had the vault in between.
        if read.host != write.host:
            write.durable = min(write.durable, read.ended)
    overwritten = Overwritten(writes, losses)
    for read in reads:
        old = known[read.value]
        if newer := overwritten.by(old, read):
            raise Failure(f"{read} is stale: it returned {old}, which had been overwritten by {newer}")
    for begun, ended in between(sorted(span for spans in losses.values() for span in spans)):
        judge_zones(writes, reads, begun, ended)


class Overwritten:
    """Which write had replaced another one before a read began, so that no crash could undo it until the read had ended."""

    def __init__(self, writes, losses):
        self.losses = losses
        self.synced = Earliest([(write.begun, write.durable, write) for write in writes])
        by_host = {}
        for write in writes:
            by_host.setdefault(write.host, []).append((write.begun, write.ended, write))
        self.of_host = {host: Earliest(entries) for host, entries in by_host.items()}

    def by(self, old, read):
        found = [self.synced.since(old.ended, old)]
        for host, entries in self.of_host.items():
            # Only what began behind the last time at which the host may have lost something.
            lost = max((ended for begun, ended in self.losses.get(host, ()) if begun <= read.ended), default=-NEVER)
            found.append(entries.since(max(old.ended, lost), old))
        return next((write for when, write in found if write is not None and when <= read.begun), None)


class Earliest:
    """Of entries (begin, when, write): the earliest `when` of all that begin at some time or later."""

    def __init__(self, entries):
        entries = sorted(entries, key=lambda entry: entry[0])
        self.begins, self.best = [entry[0] for entry in entries], []
        best = (NEVER, None)
        for _, when, write in reversed(entries):
            best = min(best, (when, write), key=lambda pair: pair[0])
            self.best.append(best)
        self.best.reverse()

    def since(self, time, old):
        """`old` itself, which may begin when it ends, is not meant."""
        at = bisect.bisect_left(self.begins, time)
        while at < len(self.best) and self.best[at][1] is old:
            at += 1
        return self.best[at] if at < len(self.best) else (NEVER, None)


def between(spans):
    """The spans of time between these, which are sorted by their begin."""
    free = -NEVER
    for begun, ended in spans:
        if begun > free:
            yield free, begun
        free = max(free, ended)
    yield free, NEVER


def judge_zones(writes, reads, begun, ended):
    """The block from `begun` to `ended`, when nothing can be lost: linearizable (Gibbons and Korach, 1997, section 4.1).

    A value is there at least from the first moment at which a call that wrote or returned it had ended to the last one at which such a call
    had not begun. If the first is earlier, no other value is there in between.
    """
    inside = [read for read in reads if read.begun >= begun and read.ended <= ended]
    seen = {}
    for read in inside:
        seen.setdefault(read.value, []).append(read)
    forward, backward = [], []
    for write in writes:
        calls = seen.get(write.value, [])
        if write.ended <= begun:
            if not calls:
                continue
            first, last = begun, max(read.begun for read in calls)
        else:
            if write.begun >= ended or (not calls and not (write.begun >= begun and write.ended <= ended)):
                continue
            first = min([write.ended, *(read.ended for read in calls)])
            last = max([write.begun, *(read.begun for read in calls)])
        (forward if first < last else backward).append((min(first, last), max(first, last), write))
    forward.sort(key=lambda zone: zone[:2])
    for (_, end, one), (start, _, other) in zip(forward, forward[1:]):
        if start < end:
            raise Failure(f"a block was two things at once: {one} and {other}, read as {calls_of(seen, one, other)}")
    for start, end, one in backward:
        for low, high, other in forward:
            if low < start and end < high:
                raise Failure(f"a block was {other} before and after {one}, read as {calls_of(seen, other, one)}")


def calls_of(seen, *writes):
    return [seen.get(write.value, [])[:6] for write in writes]


# --- names

PLACES = ("0", "1")  # two directories that stay
NEAR = 2000  # calls, by their begin, among which those under way at once are looked for
NAMES = tuple(f"{place}/{name}" for place in PLACES for name in "abc")


@dataclasses.dataclass
class Call:
    """Of a name. `result`: an errno's name, `ok`, a link's target or a list of names; None: it failed for a fault, with or without effect."""

    host: str
    what: tuple
    begun: float
    ended: float
    result: object


def play(tree, what):
    """What a file system does: the result and the new tree. The result None accepts every error."""
    kind, path = what[0], what[1]
    there = tree.get(path)
    if kind == "list":
        return sorted(name[2:] for name in tree if name.startswith(path + "/")), tree
    if kind in ("symlink", "create", "mkdir"):
        if there is not None:
            return "EEXIST", tree
        return "ok", tree | {path: (kind, *what[2:])}
    if there is None:
        return "ENOENT", tree
    if kind == "readlink":
        return (there[1] if there[0] == "symlink" else "EINVAL"), tree
    if kind == "unlink" and there[0] == "mkdir":
        return "EISDIR", tree
    if kind == "rmdir" and there[0] != "mkdir":
        return "ENOTDIR", tree
    rest = {name: value for name, value in tree.items() if name != path}
    if kind == "rename":
        target = tree.get(what[2])
        if target is not None and path != what[2] and (target[0] == "mkdir") != (there[0] == "mkdir"):
            return ("EISDIR" if target[0] == "mkdir" else "ENOTDIR"), tree
        return "ok", rest | {what[2]: there}
    return "ok", rest


def explains(call, result):
    """The kernel looks both names of a rename up before it asks for the rename: so it may refuse what no single moment forbids."""
    return call.result == result or (call.what[0] == "rename" and call.result != "ok" and str(call.result).startswith("E"))


def may_be_void(calls, n):
    """A rename that succeeds without effect: the kernel found one file under both names, since another rename moved it between the look-ups."""
    call = calls[n]
    if call.what[0] != "rename" or call.result != "ok":
        return False
    return any(
        other is not call and other.what[0] == "rename" and other.what[2] == call.what[2] and other.result in ("ok", None)
        and other.begun < call.ended and call.begun < other.ended
        for other in calls[max(0, n - NEAR):n + NEAR]
    )


def judge_names(calls, first):
    """Raises `Failure` unless one order explains all calls: each host has few at a time, and nothing is lost.

    Just-in-time linearization (Lowe, 2017): a set of possible states, each with the calls under way that have had their effect in it.
    """
    calls = sorted(calls, key=lambda call: call.begun)
    events = sorted([(call.begun, 0, n) for n, call in enumerate(calls)] + [(call.ended, 1, n) for n, call in enumerate(calls) if call.result is not None])
    states, pending = {(frozenset(first.items()), frozenset())}, set()
    for _, is_end, n in events:
        if not is_end:
            pending.add(n)
            continue
        states = {after for state in states for after in ways(calls, state, pending, n)}
        pending.discard(n)
        if not states:
            near = [call for call in calls if call.ended > calls[n].begun - 1 and call.begun < calls[n].ended]
            near = "\n  ".join(str(call) for call in sorted(near, key=lambda call: call.begun))
            raise Failure(f"no order of the calls explains {calls[n]}; those around it:\n  {near}")
    return states


def ways(calls, state, pending, wanted):
    """The states in which the call `wanted` has had its effect, which is over now."""
    found, left, tried = set(), [state], set()
    while left:
        tree, done = now = left.pop()
        if now in tried:
            continue
        tried.add(now)
        if wanted in done:
            found.add((tree, done - {wanted}))
            continue
        for n in pending - done:
            result, after = play(dict(tree), calls[n].what)
            if calls[n].result is None or explains(calls[n], result):
                # An accepted error of a rename has no effect.
                after = tree if calls[n].result not in (None, result) else frozenset(after.items())
                left.append((after, done | {n}))
            if may_be_void(calls, n):
                left.append((tree, done | {n}))
    return found


# --- the checks themselves


def refused(judge, *args):
    try:
        judge(*args)
    except Failure:
        return True
    return False


def check_the_checks():
    """Histories that are wrong must be refused, and their right neighbours not."""
    old, new = Write("0", "a", -1, -1, -1), Write("1", "a", 1, 2)
    late = Write("2", "b", 5, 6)

    def block(*reads, losses=None, writes=(old, new, late)):
        return refused(judge_block, [dataclasses.replace(write) for write in writes], [Read(*read) for read in reads], losses or {})

    verdicts = [
        (False, block(("0", "b", 0, 3), ("1", "b", 3, 4), ("1", "b", 5, 6), ("2", "a", 7, 8))),
        (True, block(("0", "b", 3, 4))),
        (True, block(("2", "b", 3, 4))),
        (True, block(("7", "b", 3, 4))),
        # New, then old, while the write is under way.
        (True, block(("1", "b", 1.1, 1.2), ("0", "c", 1.3, 1.4))),
        # Lost with the host, but not if it was synced, or seen by another.
        (False, block(("0", "b", 3.5, 4), losses={"a": [(3, 4)]})),
        (True, block(("0", "b", 2.5, 2.9), losses={"a": [(3, 4)]})),
        (True, block(("1", "b", 2.5, 2.9), ("0", "c", 3.5, 4), losses={"a": [(3, 4)]})),
        (True, block(("0", "b", 3.5, 4), losses={"a": [(3, 4)]}, writes=(old, dataclasses.replace(new, durable=2.5)))),
        # A write that failed may come late, but not go again.
        (False, block(("0", "b", 3, 4), ("1", "b", 4.5, 4.6), writes=(old, dataclasses.replace(new, ended=NEVER)))),
        (True, block(("1", "b", 3, 4), ("0", "b", 4.5, 4.6), writes=(old, dataclasses.replace(new, ended=NEVER)))),
        (True, block(("1", "b", 1.1, 1.2), ("2", "b", 1.3, 1.4), ("1", "c", 1.5, 1.6), writes=(old, new, Write("2", "b", 1, 2)))),
    ]

    def names(*calls):
        return refused(judge_names, [Call(*call) for call in calls], {"0/a": ("symlink", "x")})

    verdicts += [
        (False, names(("a", ("unlink", "0/a"), 0, 2, "ok"), ("b", ("readlink", "0/a"), 1, 3, "x"), ("b", ("list", "0"), 4, 5, []))),
        (True, names(("a", ("unlink", "0/a"), 0, 1, "ok"), ("b", ("readlink", "0/a"), 2, 3, "x"))),
        (True, names(("a", ("unlink", "0/a"), 0, 2, "ok"), ("b", ("unlink", "0/a"), 1, 3, "ok"))),
        (True, names(("a", ("symlink", "0/b", "y"), 0, 2, "ok"), ("b", ("symlink", "0/b", "z"), 1, 3, "ok"))),
        (False, names(("a", ("rename", "0/a", "1/a"), 0, 2, None), ("b", ("readlink", "1/a"), 3, 4, "x"), ("b", ("list", "0"), 4.5, 5, []))),
        (True, names(("a", ("rename", "0/a", "1/a"), 0, 2, "ok"), ("b", ("readlink", "1/a"), 1, 1.5, "x"), ("b", ("readlink", "0/a"), 1.6, 1.8, "x"))),
        (True, names(("a", ("rename", "0/a", "1/a"), 0, 2, "ok"), ("b", ("list", "0"), 3, 4, ["a"]))),
        (False, names(("a", ("rename", "0/a", "1/a"), 0, 2, "ok"), ("b", ("rename", "0/a", "1/a"), 1, 3, "ok"), ("b", ("list", "0"), 4, 5, []))),
        (True, names(("a", ("rename", "0/a", "1/a"), 0, 2, "ok"), ("b", ("rename", "0/a", "1/a"), 2.5, 3, "ok"))),
        (False, names(("a", ("rename", "0/a", "1/a"), 0, 2, "ESTALE"), ("b", ("list", "0"), 3, 4, ["a"]))),
    ]
    wrong = [number for number, (expected, found) in enumerate(verdicts) if expected != found]
    if wrong:
        raise AssertionError(f"histories {wrong} are judged wrongly")
