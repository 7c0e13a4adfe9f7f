"""A vault that three hosts share under a server, while hosts, server, network and disks fail.

What hosts see of blocks is linearizable, what they see of names is what one tree explains, nothing that a sync acknowledged is lost, no call
takes longer than the terms that its faults cost (docs/sharing.md, section 7), and no call fails unless something did. Where each host may lose what it has not synced, docs/sharing.md says.
"""

import dataclasses
import errno
import hashlib
import os
import random
import sys
import time

import histories
from histories import Call, Read, Write
from lab import ROOT, Failure
from shared_host import BLOCK, FILES, PLACES_IN_FILE, block
from shared_lab import CONTINUE, PATIENCE, SLACK, STOP, TERM, SharedLab

sys.path.insert(0, str(ROOT / "scripts"))

from demolib.hosts import possible  # noqa: E402
from demolib.shell import DemoError, Undo, run as command  # noqa: E402

# What calls may end with while something fails: of Lamassu, of a mount whose daemon is gone, of one that is not there.
FAULTY = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENOSPC, errno.ESTALE, errno.ENOENT, errno.ENODEV, errno.EROFS}
# Of the handles of a mount whose daemon has ended.
DEAD = {errno.ENOTCONN, errno.ECONNABORTED}
# docs/sharing.md, section 7: in a directory, or of an entry, that another host has moved or removed.
MOVED = {errno.ESTALE}
# Alerts of what a session left that ended while its host was at work: no damage (docs/alerts.md).
LEFT = {"unrecorded", "unwritten", "reverted", "shortened"}
NEVER = histories.NEVER
LATE = 1.0  # seconds in which a host that was stopped drops what its kernel has cached
INITIAL = "first"


@dataclasses.dataclass
class Fault:
    """What goes wrong, with whom, and what that allows."""

    name: str
    hosts: set
    begin: object
    end: object
    loses: bool = True  # sessions may end
    sticks: bool = False  # calls wait as long as it lasts
    stops: bool = False  # a kernel may answer for its daemon
    terms: int = 1  # that a call of any host may wait for it, beside the time for which a call sticks
    began: float = NEVER
    ended: float = NEVER
    over: dict = dataclasses.field(default_factory=dict)  # from when on each host works again


class Run:
    """One server, three hosts, and what is known of them."""

    def __init__(self, undo, seed, kind, chosen):
        self.rng, self.seed, self.chosen = random.Random(seed), seed, chosen
        self.lab = SharedLab(undo, kind)
        self.machines = self.lab.machines
        self.story, self.begun = [], time.monotonic()
        self.counts = {"calls": 0, "increments": 0, "faults": 0, "errors": 0, "longest": {}}
        self.ledger, self.alerts = {}, {}
        self.counters = {"whole": 0, "range": 0}
        self.can_delay = have_netem()
        for machine in self.machines:
            if not machine.mount():
                raise Failure(f"mount: {machine.log.read_text()}")
        self.fill_tree()
        for machine in self.machines:
            machine.start_programs(seed)
        self.now_is()

    def tell(self, text):
        self.story.append(f"{time.monotonic():.2f} {text}")
        if os.environ.get("TORTURE_TRACE"):
            print(self.story[-1], file=sys.stderr, flush=True)

    def fill_tree(self):
        """By a program of the first host, in its namespaces."""
        top = self.machines[0].mnt / "t"
        # With an odd seed some of the directories are datasets, which hosts have in turns of their own.
        datasets = {"/r", "/n", "/c"} if self.seed % 2 else set()
        self.machines[0].host.run("mkdir", top)
        for name in sorted(datasets):
            self.machines[0].lamassu("dataset", "create", f"{top}{name}")
        plain = [name for name in ("/r", "/n", "/n/0", "/n/1", "/l", "/p", "/c") if name not in datasets]
        script = f"import os, sys\nfor name in {plain}: os.mkdir(sys.argv[1] + name)\n"
        script += "for name in ('whole', 'range'): open(f'{sys.argv[1]}/c/{name}', 'w').write('0')\n"
        script += "for number in range(int(sys.argv[2])):\n    fd = os.open(f'{sys.argv[1]}/r/{number}', os.O_CREAT | os.O_WRONLY, 0o600)\n"
        script += "    for place in sys.argv[3].split(): os.pwrite(fd, (b'first'.ljust(16, b'.') * 256), 4096 * int(place))\n    os.fsync(fd)\n"
        assert block(INITIAL) == b"first".ljust(16, b".") * 256 and BLOCK == 4096
        self.machines[0].host.run(sys.executable, "-c", script, top, FILES, " ".join(map(str, PLACES_IN_FILE)))
        now = time.monotonic()
        self.blocks = {(f"f{n}", at): Write(INITIAL, "", now, now, now) for n in range(FILES) for at in range(len(PLACES_IN_FILE))}
        self.names = {}

    # --- faults

    def draw(self):
        """One to three faults that go together."""
        kinds = {"kill": self.kill, "stop": self.stop, "link": self.link, "server": self.server, "full-server": self.full_server,
                 "full-store": self.full_store}
        if self.can_delay:
            kinds["delay"] = self.delay
        if self.lab.kind == "xfs":
            kinds["freeze"] = self.freeze
        if self.lab.kind == "sshfs":
            kinds["store-cut"] = self.store_cut
        chosen = [name for name in kinds if not self.chosen or name in self.chosen]
        count = min(self.rng.choice((1, 1, 1, 2, 2, 3)), len(chosen))
        machines, found = self.rng.sample(self.machines, len(self.machines)), []
        drawn = self.rng.sample(chosen, count)
        if {"server", "full-server"} <= set(drawn):
            drawn.remove("server")  # it could not start
        for name in drawn:
            found.append(kinds[name](machines))
        return found

    def kill(self, machines):
        machine = machines.pop()
        return Fault(f"kill of {machine.name}", {machine.name}, machine.kill, lambda: None), self.span(0, 1.5)

    def stop(self, machines):
        machine = machines.pop()
        return Fault(f"stop of {machine.name}", {machine.name}, lambda: machine.signal(STOP), lambda: machine.signal(CONTINUE), sticks=True,
                     stops=True), self.span(2.1, 3)

    def link(self, machines):
        machine = machines.pop()
        return Fault(f"link of {machine.name} down", {machine.name}, lambda: machine.host.link("down"), lambda: machine.host.link("up"), terms=2,
                     sticks=self.lab.kind == "sshfs"), self.span(0.3, 3)

    def server(self, _):
        return Fault("server", self.all(), self.lab.kill_server, self.lab.start_server, terms=2), self.span(0, 2.5)

    def full_server(self, _):
        return Fault("full-server", self.all(), lambda: self.lab.fill(True), lambda: self.lab.empty(True), terms=2), self.span(0.5, 2)

    def full_store(self, _):
        return Fault("full-store", self.all(), lambda: self.lab.fill(False), lambda: self.lab.empty(False)), self.span(0.5, 2)

    def freeze(self, _):
        return Fault("freeze", self.all(), lambda: self.lab.freeze(True), lambda: self.lab.freeze(False), sticks=True, terms=2), self.span(0.2, 3)

    def store_cut(self, machines):
        """Its store does not answer, the server does."""
        machine = machines.pop()
        return Fault(f"store-cut of {machine.name}", {machine.name}, lambda: machine.sshfs.send_signal(STOP),
                     lambda: machine.sshfs.send_signal(CONTINUE), sticks=True, terms=2), self.span(0.2, 3)

    def delay(self, machines):
        """Packets of a host are late. Nothing may fail."""
        machine = machines[0]

        def change(*rule):
            command("tc", "-n", self.lab.bridge.space, "qdisc", rule[0], "dev", machine.host.port, "root", *rule[1:], check=False)

        return Fault(f"delay of {machine.name}", set(), lambda: change("add", "netem", "delay", "40ms", "20ms"), lambda: change("del"),
                     loses=False, terms=0), self.span(0.5, 1.5)

    def span(self, least, most):
        return TERM * (least + (most - least) * self.rng.random())

    def all(self):
        return {machine.name for machine in self.machines}

    # --- a round

    def round(self, seconds):
        """All work; then something fails; then all works again, and hosts agree."""
        drawn = self.draw()
        for machine in self.machines:
            machine.tell("go")
        time.sleep(seconds)
        self.carry_out(drawn)
        self.recover([fault for fault, _ in drawn])
        time.sleep(0.5)
        self.halt()
        self.judge([fault for fault, _ in drawn])

    def carry_out(self, drawn):
        now = time.monotonic()
        events = []
        for fault, lasts in drawn:
            begins = now + self.rng.random() * TERM / 2
            events += [(begins, fault, True), (begins + lasts, fault, False)]
        for when, fault, is_begin in sorted(events, key=lambda event: event[0]):
            time.sleep(max(0, when - time.monotonic()))
            if is_begin:
                fault.began = time.monotonic()
                self.tell(f"{fault.name} begins")
                fault.begin()
                self.counts["faults"] += 1
            else:
                fault.end()
                fault.ended = time.monotonic()
                self.tell(f"{fault.name} ends")

    def recover(self, faults):
        """All hosts work again, and say so. A host that stood still may find out only then that its session has ended: it is asked twice."""
        begun = time.monotonic()
        for is_last in (False, True) if any(fault.sticks for fault in faults) else (True,):
            for machine in self.machines:
                self.wait_for(machine, begun)
            if not is_last:
                time.sleep(TERM / 2)
        now = time.monotonic()
        for fault in faults:
            fault.over = dict.fromkeys(fault.hosts, now)
        self.tell(f"all work again after {time.monotonic() - begun:.1f} s")

    def wait_for(self, machine, begun):
        said = "not mounted"
        while True:
            if machine.daemon is not None and machine.daemon.poll() is not None:
                raise Failure(f"the daemon of {machine.name} ended by itself with {machine.daemon.returncode}\n{machine.log.read_text()[-3000:]}")
            if machine.daemon is not None or machine.mount():
                said = machine.tell("probe")
            if said == "well":
                return
            if time.monotonic() - begun > PATIENCE:
                raise Failure(f"{machine.name} does not work again {PATIENCE:.0f} s after the faults: {said}\n{machine.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def halt(self):
        for machine in self.machines:
            machine.ask("halt")
        for machine in self.machines:
            left = machine.answer("halt")
            if left:
                raise Failure(f"calls of {machine.name} hang: {left}; {machine.hanging()}")
        for machine in self.machines:
            machine.tell("read")

    # --- the verdict

    def judge(self, faults):
        losses = {name: [(fault.began, fault.over[name]) for fault in faults if fault.loses and name in fault.hosts] for name in self.all()}
        calls = [call | {"host": machine.name} for machine in self.machines for call in machine.calls()]
        self.counts["calls"] += len(calls)
        for call in calls:
            self.judge_call(call, faults)
        self.judge_blocks(calls, losses, faults)
        self.judge_names(calls, faults)
        self.judge_ledger(calls)
        self.judge_counters(calls)
        self.now_is()
        found = self.lab.logs()
        if found:
            raise Failure(f"logs: {found[:10]}")
        # The rounds go on; the end fails for it.
        for line in self.lab.alerts():
            number, _, _, kind, _ = line.split("  ", 4)
            if kind not in LEFT and number not in self.alerts:
                self.alerts[number] = line
                self.tell(f"an alert: {line}")

    def judge_call(self, call, faults):
        """Errors and long times have their faults."""
        name = call["host"]
        hit = [fault for fault in faults if name in fault.hosts]
        took = call["ended"] - call["begun"]
        stuck = sum(max(0, min(fault.ended, call["ended"]) - max(fault.began, call["begun"])) for fault in hit if fault.sticks)
        terms = sum(fault.terms for fault in faults if fault.began <= call["ended"] and call["begun"] <= max(fault.over.values(), default=NEVER))
        longest = self.counts["longest"]
        longest[terms] = max(longest.get(terms, 0), took - stuck)
        if took - stuck > TERM * terms + SLACK:
            raise Failure(f"a call took {took:.1f} s, of which faults explain {stuck:.1f} and {terms} terms: {call}")
        code = call["errno"]
        if code == 0 or (call["kind"] == "name" and code not in FAULTY - {errno.ENOENT}):
            return
        if call["kind"] == "name" and code in MOVED and call["what"][0] in ("rename", "list"):
            return
        self.counts["errors"] += 1
        # A handle tells its loss when it is used next, and one of a daemon that was killed fails whenever it is used.
        lasts = call["kind"] in ("write", "sync", "close", "locked") or code in DEAD
        since = call.get("since", call["begun"]) if lasts else call["begun"]
        if code not in FAULTY or not any(since <= fault.over[name] and call["ended"] >= fault.began for fault in hit):
            said = next(machine.log.read_text()[-3000:] for machine in self.machines if machine.name == name)
            raise Failure(f"a call failed without a reason ({errno.errorcode.get(code, code)}): {call}\n{said}")

    def judge_blocks(self, calls, losses, faults):
        blocks = {place: ([dataclasses.replace(write)], []) for place, write in self.blocks.items()}
        syncs = {}
        for call in sorted((call for call in calls if call["kind"] == "sync" and not call["errno"]), key=lambda call: call["begun"]):
            syncs.setdefault(call["fd"], []).append(call)
        for call in calls:
            if call["kind"] == "write":
                write = Write(call["value"], call["host"], call["begun"])
                if not call["errno"]:
                    write.ended = call["ended"]
                    write.durable = next((sync["ended"] for sync in syncs.get(call["fd"], ()) if sync["begun"] >= call["ended"]), NEVER)
                blocks[tuple(call["what"])][0].append(write)
            elif call["kind"] == "read" and not call["errno"] and not self.is_cached(call, faults):
                blocks[tuple(call["what"])][1].append(Read(call["result"], call["host"], call["begun"], call["ended"]))
        for place, (writes, reads) in blocks.items():
            try:
                histories.judge_block(writes, reads, losses)
            except Failure as failure:
                raise Failure(f"block {place}: {failure}") from None
            last = max(reads, key=lambda read: read.ended)
            self.blocks[place] = Write(last.value, "", last.ended, last.ended, last.ended)

    @staticmethod
    def is_cached(call, faults):
        """A kernel may answer for a daemon that is stopped."""
        return any(fault.stops and call["host"] in fault.hosts and call["begun"] < fault.ended + LATE and call["ended"] > fault.began for fault in faults)

    def judge_names(self, calls, faults):
        """Exactly until the first host may lose something; afterwards by what was synced, and by what hosts see in the end."""
        until = min((fault.began for fault in faults if fault.loses), default=NEVER)
        found = []
        for call in calls:
            if call["kind"] == "name" and call["begun"] < until:
                code = call["errno"]
                result = call.get("result", "ok") if code == 0 else None if code in FAULTY - {errno.ENOENT, errno.ESTALE} else errno.errorcode[code]
                # What ends later has an unknown result, and perhaps none.
                result = None if call["ended"] > until else result
                if result is None and call["what"][0] in ("readlink", "list"):
                    continue
                if result == "ESTALE" and call["what"][0] != "rename":
                    continue
                found.append(Call(call["host"], tuple(call["what"]), call["begun"], call["ended"], result))
        histories.judge_names(found, self.names)

    def judge_ledger(self, calls):
        for call in sorted((call for call in calls if call["kind"] == "ledger"), key=lambda call: call["begun"]):
            what, name, step = call["what"]
            if step == "begun":
                continue
            is_synced = step == "synced" and not call["errno"]
            self.ledger[name] = "there" if is_synced and what == "made" else "gone" if is_synced else "unknown"

    def judge_counters(self, calls):
        """No number comes twice, and one that ended before another began is the smaller one. (They need not end in their order: the answer to a sync
        that was carried out may come when the host has lost the lock, and another one has gone on from its number.)"""
        done = [call for call in calls if call["kind"] == "locked" and call["what"][1] == "increment" and not call["errno"]]
        for kind, before in self.counters.items():
            last, begun = before, 0
            for number, call in sorted(((int(c["result"]), c) for c in done if c["what"][0] == kind), key=lambda found: found[0]):
                if number <= last or call["ended"] < begun:
                    raise Failure(f"counter {kind}: {number} after {last}: two had the lock, or an increment was lost: {call}")
                last, begun = number, max(begun, call["begun"])
            self.counters[kind] = last
        self.counts["increments"] += len(done)

    def now_is(self):
        """What all hosts see, which must be one thing, and have what was acknowledged."""
        trees = []
        for machine in self.machines:
            tree = machine.tell("tree")
            if "error" in tree:
                raise Failure(f"{machine.name} cannot read everything when all is well: {tree['error']}")
            trees.append(tree)
        for machine, tree in zip(self.machines[1:], trees[1:]):
            differs = sorted(path for path in trees[0].keys() | tree.keys() if trees[0].get(path) != tree.get(path))
            if differs:
                shown = [(path, trees[0].get(path), tree.get(path)) for path in differs[:5]]
                raise Failure(f"{self.machines[0].name} and {machine.name} see different things: {shown}")
        tree = trees[0]
        self.names = {path[2:]: tuple(what[:2] if what[0] == "symlink" else what[:1]) for path, what in tree.items() if path.startswith("n/") and len(path) > 3}
        for name, state in self.ledger.items():
            found = tree.get(f"l/{name}")
            if (state == "there") > (found is not None) or (state == "gone" and found is not None):
                raise Failure(f"ledger: {name} must be {state}, and is {found}")
            if found is not None and state == "there" and found[1] != digest(name):
                raise Failure(f"ledger: {name} was synced, and has another content: {found}")
        # What failed half-way stays out of it.
        seen = {name: tree.get(f"l/{name}") for name in self.ledger}
        self.ledger = {name: "gone" if what is None else "there" for name, what in seen.items() if what is None or what[1] == digest(name)}

    def end(self):
        for machine in self.machines:
            machine.umount()
        self.lab.check()
        if self.alerts:
            raise Failure(f"the server has {len(self.alerts)} alerts, although the store is honest: {list(self.alerts.values())[:5]}")


def have_netem():
    """Whether this kernel can have packets come late."""
    rule = ("qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    return command("unshare", "--net", "tc", *rule, check=False).returncode == 0


def digest(name):
    return hashlib.sha256(block(name)).hexdigest()[:16]


def run(seed, seconds):
    """Rounds of some seconds of calm and one to three faults."""
    histories.check_the_checks()
    if not possible():
        return "left out, it takes root and network namespaces"
    kind = os.environ.get("TORTURE_STORE", "dir")
    chosen = set(filter(None, os.environ.get("TORTURE_FAULTS", "").split(",")))
    until, rounds = time.monotonic() + seconds, 0
    with Undo() as undo:
        one = None
        try:
            one = Run(undo, seed, kind, chosen)
            rng = random.Random(seed)
            while rounds == 0 or time.monotonic() < until:
                one.round(rng.choice((1, 2, 4)))
                rounds += 1
            one.end()
        except (Failure, DemoError, OSError) as failure:
            kept = f"\nkept: {one.lab.keep(os.environ['TORTURE_KEEP'])}" if one and os.environ.get("TORTURE_KEEP") else ""
            story = "\n".join(one.story[-12:]) if one else ""
            raise Failure(f"store {kind}, round {rounds + 1}: {type(failure).__name__}: {failure}\n{story}{kept}") from failure
    counts = one.counts
    longest = ", ".join(f"{seconds:.1f} s of {TERM * terms + SLACK:.0f} with {terms} terms" for terms, seconds in sorted(counts["longest"].items()))
    return (f"store {kind}, {rounds} rounds, {counts['faults']} faults, {counts['calls']} calls, {counts['errors']} of them failed for a fault, "
            f"{counts['increments']} increments under locks, the longest calls beside what stood still: {longest}")
