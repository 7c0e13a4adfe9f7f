//! Trees that one host removes while programs of others are in them. These find nothing there any more, as on a local
//! file system: no call fails as stale.

use crate::common::*;
use crate::permissions::{self, ANN, as_user};
use crate::shared::{shared, unmounted_and_checked};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, mkdirat, openat, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Closed in programs that other tests start.
const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC);

fn open_dir(at: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    openat(at, name, READ | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
}

/// Names in a directory that is open. A listing of one that was removed has none, or says that it is not there.
fn names(dir: impl AsFd) -> rustix::io::Result<Vec<std::ffi::CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        match entry {
            Ok(entry) if [c".", c".."].contains(&entry.file_name()) => {}
            Ok(entry) => names.push(entry.file_name().to_owned()),
            Err(Errno::NOENT) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(names)
}

/// A directory that was removed, by a descriptor.
fn has_nothing(dir: &OwnedFd, other: &File) {
    let gone = |what: &str, done: rustix::io::Result<()>| assert_eq!(done, Err(Errno::NOENT), "{what}");
    let create = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    gone("stat", statat(dir, "f", AtFlags::empty()).map(drop));
    gone("open", openat(dir, "f", READ, Mode::empty()).map(drop));
    gone("create", openat(dir, "new", create, Mode::RUSR).map(drop));
    gone("create exclusively", openat(dir, "new", create | OFlags::EXCL, Mode::RUSR).map(drop));
    gone("mkdir", mkdirat(dir, "new", Mode::RWXU));
    gone("symlink", symlinkat("target", dir, "new"));
    gone("unlink", unlinkat(dir, "f", AtFlags::empty()));
    gone("rmdir", unlinkat(dir, "below", AtFlags::REMOVEDIR));
    gone("rename from", renameat(dir, "f", other, "to"));
    gone("rename to", renameat(other, "mine", dir, "to"));
    let st = fstat(dir).unwrap();
    assert_eq!((st.st_nlink, FileType::from_raw_mode(st.st_mode)), (0, FileType::Directory));
    assert_eq!((st.st_uid, st.st_mode & 0o7777), (ANN, 0o1770));
    assert_eq!(names(dir), Ok(Vec::new()), "by a descriptor of before");
    assert_eq!(names(open_dir(dir, ".").unwrap()), Ok(Vec::new()), "by a new one");
    open_dir(dir, "..").unwrap();
    rustix::fs::fsync(dir).unwrap();
}

/// Its caller waits in this directory.
fn shell_in(dir: &Path) -> Child {
    let script = "read go; ls; ls f; mkdir new; echo > new; rm -f f; rm -r -f below; echo out";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).current_dir(dir).env("LC_ALL", "C");
    shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn nothing_is_left_in_directories_that_another_host_has_removed() {
    let lab = Lab::new();
    let Some([a, b, c]) = permissions::shared(&lab) else { return };
    let tree = ["free/tree", "free/tree/below", "free/tree/below/deep"];
    as_user(ANN, || {
        fs::write(a.file("free/mine"), "mine").unwrap();
        for dir in tree {
            fs::create_dir(a.file(dir)).unwrap();
            fs::set_permissions(a.file(dir), std::os::unix::fs::PermissionsExt::from_mode(0o1770)).unwrap();
            fs::write(a.file(dir).join("f"), "f").unwrap();
        }
    });
    let open: Vec<OwnedFd> = tree.iter().map(|dir| File::open(a.file(dir)).unwrap().into()).collect();
    // Without a descriptor that lists it.
    let path = |dir| openat(CWD, a.file(dir), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let paths = tree.map(path);
    let shells: Vec<Child> = tree.iter().map(|dir| shell_in(&a.file(dir))).collect();
    let other = File::open(a.file("free")).unwrap();
    assert!(Command::new("rm").arg("-r").arg(b.file("free/tree")).status().unwrap().success());
    for _ in 0..2 {
        // Root, which owns none of them; their owner, who is asked about the sticky bit.
        open.iter().for_each(|dir| has_nothing(dir, &other));
        as_user(ANN, || open.iter().for_each(|dir| has_nothing(dir, &other)));
        for dir in &paths {
            assert_eq!(statat(dir, "f", AtFlags::empty()).map(drop), Err(Errno::NOENT));
            assert_eq!(fstat(dir).unwrap().st_nlink, 0);
        }
        // It stays so in later turns, whatever has the name.
        fs::create_dir(c.file(tree[0])).unwrap();
        fs::write(c.file(tree[0]).join("f"), "another").unwrap();
        assert_eq!(fs::read(a.file(tree[0]).join("f")).unwrap(), b"another");
        assert!(Command::new("rm").arg("-r").arg(c.file("free/tree")).status().unwrap().success());
    }
    for mut shell in shells {
        shell.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let done = Ran::from(shell.wait_with_output().unwrap());
        assert_eq!(done.out, "out\n", "{done:?}");
        assert!(done.err.contains("No such file or directory") && !done.err.contains("Stale"), "{done:?}");
    }
    drop((open, paths, other));
    unmounted_and_checked(&lab, &[a, b, c]);
}

/// Some directories below each other, with files.
fn make_tree(dir: &Path, depth: usize) {
    fs::create_dir(dir).unwrap();
    for name in ["f1", "f2", "f3"] {
        fs::write(dir.join(name), name).unwrap();
    }
    if depth > 0 {
        ["d1", "d2", "d3"].iter().for_each(|name| make_tree(&dir.join(name), depth - 1));
    }
}

/// Goes through a tree by descriptors alone, as fts(3) does without chdir(2), and counts what it meets.
fn walk(dir: &OwnedFd) -> rustix::io::Result<usize> {
    fstat(dir)?;
    let mut met = 0;
    for name in names(dir)? {
        let st = match statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => continue,
            st => st?,
        };
        met += 1;
        if FileType::from_raw_mode(st.st_mode) == FileType::Directory {
            met += match open_dir(dir, &name) {
                Err(Errno::NOENT) => continue,
                below => walk(&below?)?,
            };
        }
    }
    Ok(met)
}

#[test]
fn a_tree_that_two_hosts_remove_is_gone_and_programs_that_walk_through_it_go_on() {
    const ROUNDS: usize = 4;
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    let run = |host: Host<'_>, program: &str, args: &[&str]| -> Ran {
        let mut command = Command::new(program);
        command.args(args).arg(host.file("tree")).env("LC_ALL", "C").output().unwrap().into()
    };
    let never_stale = |ran: &Ran| assert!(!ran.err.contains("Stale"), "{ran:?}");
    for round in 0..ROUNDS {
        make_tree(&a.file("tree"), 3);
        let inside = ["tree", "tree/d2", "tree/d3/d1/d2"].map(|dir| OwnedFd::from(File::open(a.file(dir)).unwrap()));
        std::thread::scope(|scope| {
            let removing = [a, b].map(|host| scope.spawn(move || run(host, "rm", &["-r", "-f"])));
            scope.spawn(|| {
                for dir in inside.iter().cycle() {
                    let met = walk(dir).unwrap_or_else(|error| panic!("round {round}: {error}"));
                    let is_over = met == 0 && inside.iter().all(|dir| fstat(dir).unwrap().st_nlink == 0);
                    if is_over {
                        break;
                    }
                }
            });
            for host in [a, c] {
                scope.spawn(move || {
                    while fs::exists(host.file("tree")).unwrap() {
                        never_stale(&run(host, "find", &[]));
                    }
                });
            }
            for rm in removing {
                rm.join().unwrap().ok();
            }
        });
        assert!(hosts.iter().all(|host| !fs::exists(host.file("tree")).unwrap()), "round {round}");
    }
    unmounted_and_checked(&lab, &hosts);
}
