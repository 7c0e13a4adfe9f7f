"""Real data in two versions: files of this machine's installed packages, as a tree and as a disk image.

Version 2 is version 1 without every eighth package, and with as many others. The choice depends on the installed
packages alone.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .shell import DemoError, run, say

LISTS = Path("/var/lib/dpkg/info")
IMAGE_UUID = "6c616d61-7373-7500-8000-000000000002"


@dataclass
class Package:
    name: str
    files: list  # regular files and symbolic links below /usr
    folders: list
    size: int


def installed_packages(largest):
    """Packages of at most `largest` bytes, in an order that mixes kinds but is the same each time."""
    lists = sorted(LISTS.glob("*.list"), key=lambda p: hashlib.sha256(p.stem.encode()).digest())
    if not lists:
        raise DemoError(f"no package lists under {LISTS}: the demo's data set is made of Debian's installed packages")
    for path in lists:
        files, folders, size = [], [], 0
        for name in path.read_text(errors="surrogateescape").splitlines():
            if not name.startswith("/usr/"):
                continue
            if os.path.islink(name):
                files.append(name)
            elif os.path.isdir(name):
                folders.append(name)
            elif os.path.isfile(name) and os.access(name, os.R_OK):
                files.append(name)
                size += os.path.getsize(name)
        if files and size <= largest:
            yield Package(path.stem, files, folders, size)


def choose(target):
    """(version 1, version 2): lists of packages of about `target` bytes each."""
    kept, left_out, added, sizes = [], [], [], [0, 0]
    for number, package in enumerate(installed_packages(target // 6)):
        if sum(sizes) > target and sum(p.size for p in added) >= sum(p.size for p in left_out):
            break
        if number % 8 == 0:
            left_out.append(package)
        elif number % 8 == 1:
            added.append(package)
        elif sum(sizes) <= target:
            kept.append(package)
        sizes = [sum(p.size for p in kept), sum(p.size for p in left_out)]
    return kept + left_out, kept + added


def copy_packages(packages, target):
    """Copies the packages' files to `target`, keeping modes, times, links and holes' absence as copy2 does."""
    for package in packages:
        for name in package.folders:
            os.makedirs(f"{target}{name}", exist_ok=True)
        for name in package.files:
            to = f"{target}{name}"
            os.makedirs(os.path.dirname(to), exist_ok=True)
            if not os.path.lexists(to):
                shutil.copy2(name, to, follow_symlinks=False)


def make_trees(work, target):
    """Makes `work`/tree-1 and `work`/tree-2."""
    versions = choose(target)
    paths = []
    for number, packages in enumerate(versions, 1):
        path = os.path.join(work, f"tree-{number}")
        os.mkdir(path)
        say(f"tree, version {number}: {len(packages)} packages, {sum(p.size for p in packages) / 1e6:.0f} MB")
        copy_packages(packages, path)
        paths.append(path)
    return paths


def make_images(work, target):
    """Makes an ext4 image of about `target` bytes, and a copy of it in which packages were removed and added."""
    versions = choose(target)
    first, second = (os.path.join(work, f"image-{n}", "disk.img") for n in (1, 2))
    for path in (first, second):
        os.mkdir(os.path.dirname(path))
    tree, raw = os.path.join(work, "image-tree"), os.path.join(work, "raw.img")
    os.mkdir(tree)
    copy_packages(versions[0], tree)
    size = sum(p.size for p in versions[0])
    say(f"disk image, version 1: mke2fs -d of {size / 1e6:.0f} MB of packages")
    make_ext4(tree, raw, first, size)
    say("disk image, version 2: the same image, packages removed and added in place with debugfs")
    run("cp", first, second)
    script = os.path.join(work, "image.debugfs")
    with open(script, "w", errors="surrogateescape") as file:
        file.writelines(line + "\n" for line in edit_script(*versions))
    run("debugfs", "-w", "-f", script, second)
    run("e2fsck", "-fn", second)
    return [os.path.dirname(first), os.path.dirname(second)]


def make_ext4(tree, raw, path, size):
    """An image at `path` of the files in `tree`, about `size` bytes of them; the tree is removed. `raw`: where it may lie meanwhile."""
    run("mke2fs", "-q", "-t", "ext4", "-b", 4096, "-J", "size=4", "-U", IMAGE_UUID, "-d", tree,
        "-E", f"hash_seed={IMAGE_UUID},lazy_itable_init=0,root_owner=0:0", raw, f"{size * 3 // 2 // 2**20 + 32}M")
    shutil.rmtree(tree)
    run("cp", "--sparse=always", raw, path)  # unused space as holes, as an image builder leaves it
    os.unlink(raw)


def make_pair(work, names):
    """Images of the same packages in two versions, from Debian's archives as apt is configured: each made afresh, as a builder makes it. An older one first."""
    paths = []
    known = {name: list(dict.fromkeys(line.split("|")[1].strip() for line in run("apt-cache", "madison", name).stdout.splitlines() if "Sources" not in line))
             for name in names}
    few = [name for name, versions in known.items() if len(versions) < 2]
    if few:
        raise DemoError(f"apt knows no two versions of {', '.join(few)} (apt-get update?)")
    for number in (1, 2):
        folder, tree = os.path.join(work, f"pair-{number}"), os.path.join(work, "pair-tree")
        os.mkdir(folder)
        os.mkdir(tree)
        for name, versions in known.items():
            # Newest first, as madison sorts its answer.
            run("sh", "-ec", 'cd "$1"; apt-get -qq -o APT::Sandbox::User=root download "$2"', "sh", folder, f"{name}={versions[2 - number]}")
        for file in sorted(os.listdir(folder)):
            run("dpkg-deb", "-x", os.path.join(folder, file), tree)
            os.unlink(os.path.join(folder, file))
        size = sum(os.lstat(os.path.join(f, n)).st_size for f, _, files in os.walk(tree) for n in files)
        say(f"disk image of {', '.join(names)}, version {number}: {size / 1e6:.0f} MB")
        path = os.path.join(folder, "disk.img")
        make_ext4(tree, os.path.join(work, "raw.img"), path, size)
        paths.append(path)
    return paths


def edit_script(before, after):
    """debugfs commands that turn an image of `before` into one of `after`."""
    removed = [p for p in before if p not in after]
    added = [p for p in after if p not in before]
    kept = {name for p in before if p in after for name in p.files}
    gone = sorted({name for p in removed for name in p.files} - kept)
    new = sorted({name for p in added for name in p.files} - kept - set(gone))
    there = {folder for p in before for name in p.files + [f + "/x" for f in p.folders] for folder in parents(name)}
    for name in gone:
        yield f'rm "{name}"'
    for name in new:
        for folder in parents(name):
            if folder not in there:
                there.add(folder)
                yield f'mkdir "{folder}"'
        yield f'cd "{os.path.dirname(name)}"'
        if os.path.islink(name):
            yield f'symlink "{os.path.basename(name)}" "{os.readlink(name)}"'
        else:
            yield f'write "{name}" "{os.path.basename(name)}"'


def parents(name):
    """/usr, /usr/share, … down to the folder that holds `name`."""
    parts = name.split("/")[1:-1]
    return ["/" + "/".join(parts[: i + 1]) for i in range(len(parts))]
