"""Command line: python -m lamassu_reader ls|cat|tree-hash|verify|info …

Exit status: 0 all is well, 1 damage was found, 2 the request, the key or the header is refused.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys

from . import header, treehash
from .errors import Damage, LamassuError, Refused
from .vault import Entry, Vault


class _Problems:
    """Prints problems as they are found, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, error: LamassuError) -> None:
        self.count += 1
        print(f"damaged: {error}", file=sys.stderr)


def _arguments() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="lamassu_reader", description="An independent reader of Lamassu vaults.")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, key: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "--key",
            required=key,
            metavar="SOURCE",
            help="raw:FILE, hex:FILE, passphrase:FILE, or FILE to try it on every slot",
        )
        return sub

    ls = command("ls", "list the tree, or what is below PATH")
    ls.add_argument("directory")
    ls.add_argument("path", nargs="?", default="")
    cat = command("cat", "write a file's content to standard output")
    cat.add_argument("--store", action="store_true", help="PATH is the encrypted file itself, anywhere in the store")
    cat.add_argument("directory")
    cat.add_argument("path")
    tree = command("tree-hash", "one line per entry: type mode size sha256-or-target path", key=False)
    tree.add_argument("--plain", action="store_true", help="DIRECTORY is a plain tree")
    tree.add_argument("--xattrs", action="store_true", help="extended attributes too")
    tree.add_argument("directory")
    verify = command("verify", "read everything and report what is damaged")
    verify.add_argument("directory")
    verify.add_argument("path", nargs="?", default="")
    info = command("info", "open a vault header or a zone file and say what it is")
    info.add_argument("file", help="a vault directory, a header file or a zone file")
    return top


def _ls_line(vault: Vault, entry: Entry) -> list[str]:
    size: object = "-"
    suffix = ""
    if entry.type == "f":
        with vault.open_file(entry) as f:
            size = f.size if f.summary.exact else f"~{f.size}"
    elif entry.type == "l":
        target = vault.target(entry)
        size, suffix = len(target), " -> " + treehash.escape(target)
    path = treehash.escape(entry.path) or "."
    lines = [f"{entry.type} {stat.S_IMODE(entry.stat.st_mode):04o} {size:>12} {path}{suffix}"]
    for name, value in vault.xattrs(entry).items():
        lines.append(f"x {'-':>4} {len(value):>12} {path} {treehash.escape(name)}={treehash.escape(value)}")
    return lines


def _ls(vault: Vault, path: str, problems: _Problems) -> None:
    top = vault.find(os.fsencode(path))
    for entry in [top, *vault.walk(top, problems)]:
        try:
            print("\n".join(_ls_line(vault, entry)))
        except LamassuError as e:
            problems(e)


def _info(path: str, source: header.KeySource) -> None:
    h = header.load(os.path.join(path, "lamassu.vault") if os.path.isdir(path) else path, source)
    print("zone" if h.is_zone else "vault", h.id.hex())
    print("suite", h.suite.name, "block size", h.block_size, "opened by slot", h.opened_slot, "of", len(h.slots))
    if not h.is_zone:
        print("zone", h.zone.hex(), "reserved slots", h.reserved_slots, "name_max", h.name_max)
        print("names", "plain" if h.plain_names else "encrypted", "small files", h.convergent and "convergent" or "random", "domain", h.domain)
    print("epochs", len(h.inner), "inner", len(h.outer), "outer")


def _run(args: argparse.Namespace, problems: _Problems) -> None:
    if args.command == "tree-hash" and args.plain:
        sys.stdout.writelines(line + "\n" for line in treehash.of_plain(args.directory, args.xattrs))
        return
    if args.key is None:
        raise Refused("--key", "needed")
    source = header.KeySource.parse(args.key)
    if args.command == "info":
        _info(args.file, source)
        return
    vault = Vault(args.directory, source)
    try:
        _read(vault, args, problems)
    finally:
        for text in vault.notices:
            print(f"note: {text}", file=sys.stderr)


def _read(vault: Vault, args: argparse.Namespace, problems: _Problems) -> None:
    """The commands that read a vault."""
    if args.command == "ls":
        _ls(vault, args.path, problems)
    elif args.command == "cat":
        opened = vault.open_stored(os.fsencode(args.path)) if args.store else vault.open_file(vault.find(os.fsencode(args.path)))
        with opened as f:
            for chunk in f.chunks():
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    elif args.command == "tree-hash":
        sys.stdout.writelines(line + "\n" for line in treehash.of_vault(vault, problems, args.xattrs))
    else:
        seen = vault.verify(problems, vault.find(os.fsencode(args.path)))
        print(f"{seen} entries read, {problems.count} damaged")


def main() -> int:
    """The command line."""
    args = _arguments().parse_args()
    problems = _Problems()
    try:
        _run(args, problems)
    except Damage as e:
        problems(e)
    except (LamassuError, OSError) as e:
        print(f"lamassu_reader: {e}", file=sys.stderr)
        return 2
    return 1 if problems.count else 0


if __name__ == "__main__":
    sys.exit(main())
