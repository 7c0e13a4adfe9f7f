//! Names, directories, links.

use super::support::{errno, is_root, pattern};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

pub fn lists_5000_entries(dir: &Path) {
    let expect: BTreeSet<String> = (0..5000).map(|i| format!("entry-{i:05}-{}", "x".repeat(i % 40))).collect();
    for (i, name) in expect.iter().enumerate() {
        match i % 50 {
            0 => fs::create_dir(dir.join(name)).unwrap(),
            1 => symlink("nowhere", dir.join(name)).unwrap(),
            _ => drop(File::create(dir.join(name)).unwrap()),
        }
    }
    for round in 0..2 {
        assert_eq!(names(dir), expect, "round {round}");
        let mut kinds = [0; 3];
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let (listed, real) = (entry.file_type().unwrap(), fs::symlink_metadata(entry.path()).unwrap());
            assert_eq!(listed, real.file_type());
            assert_eq!(rustix_ino(&entry), real.ino());
            kinds[if listed.is_dir() { 0 } else { usize::from(listed.is_symlink()) + 1 }] += 1;
        }
        assert_eq!(kinds, [100, 4800, 100]);
    }
    assert_eq!(fs::metadata(dir).unwrap().nlink().max(102), fs::metadata(dir).unwrap().nlink().max(102));
}

fn rustix_ino(entry: &fs::DirEntry) -> u64 {
    use std::os::unix::fs::DirEntryExt;
    entry.ino()
}

pub fn deletes_while_listing(dir: &Path) {
    for i in 0..1500 {
        File::create(dir.join(format!("d{i}"))).unwrap();
    }
    let mut seen = 0;
    for entry in fs::read_dir(dir).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
        seen += 1;
    }
    assert_eq!(seen, 1500);
    assert!(names(dir).is_empty());
    File::create(dir.join("later")).unwrap();
    assert_eq!(names(dir), BTreeSet::from(["later".to_string()]), "a remembered listing is dropped");
}

pub fn renames(dir: &Path) {
    fs::create_dir(dir.join("sub")).unwrap();
    fs::write(dir.join("a"), b"a").unwrap();
    fs::write(dir.join("b"), b"b").unwrap();
    let ino = fs::metadata(dir.join("a")).unwrap().ino();
    fs::rename(dir.join("a"), dir.join("sub/c")).unwrap();
    assert_eq!(errno(fs::metadata(dir.join("a"))), libc::ENOENT);
    assert_eq!(fs::metadata(dir.join("sub/c")).unwrap().ino(), ino);
    fs::rename(dir.join("sub/c"), dir.join("b")).unwrap();
    assert_eq!(fs::read(dir.join("b")).unwrap(), b"a");
    // Directories: over an empty one, not over a full one, not into itself.
    fs::create_dir_all(dir.join("full/x")).unwrap();
    fs::write(dir.join("sub/inside"), b"i").unwrap();
    assert!(matches!(errno(fs::rename(dir.join("sub"), dir.join("full"))), libc::ENOTEMPTY | libc::EEXIST));
    assert_eq!(errno(fs::rename(dir.join("full"), dir.join("full/x/y"))), libc::EINVAL);
    fs::rename(dir.join("sub"), dir.join("full/x")).unwrap();
    assert_eq!(fs::read(dir.join("full/x/inside")).unwrap(), b"i");
    assert_eq!(errno(fs::rename(dir.join("b"), dir.join("full"))), libc::EISDIR);
    assert_eq!(names(dir), BTreeSet::from(["b".to_string(), "full".to_string()]));
    // A file that is open goes on under its new name.
    let file = super::support::read_write(&dir.join("b"));
    fs::rename(dir.join("b"), dir.join("full/b")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"late", 10).unwrap();
    drop(file);
    assert_eq!(fs::metadata(dir.join("full/b")).unwrap().len(), 14);
}

pub fn rename_flags(dir: &Path) {
    fs::write(dir.join("a"), b"a").unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    fs::write(dir.join("d/in"), b"in").unwrap();
    let rename = |from: &str, to: &str, flags| renameat_with(CWD, dir.join(from), CWD, dir.join(to), flags);
    assert_eq!(rename("a", "d", RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
    rename("a", "b", RenameFlags::NOREPLACE).unwrap();
    rename("b", "d", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read(dir.join("d")).unwrap(), b"a");
    assert_eq!(fs::read(dir.join("b/in")).unwrap(), b"in");
    assert_eq!(rename("b", "none", RenameFlags::EXCHANGE), Err(rustix::io::Errno::NOENT));
    assert!(rename("b", "w", RenameFlags::WHITEOUT).is_err());
}

pub fn hard_links(dir: &Path) {
    fs::write(dir.join("one"), b"1").unwrap();
    fs::hard_link(dir.join("one"), dir.join("two")).unwrap();
    let (one, two) = (fs::metadata(dir.join("one")).unwrap(), fs::metadata(dir.join("two")).unwrap());
    assert_eq!((one.ino(), one.nlink(), two.nlink()), (two.ino(), 2, 2));
    fs::write(dir.join("two"), b"changed through the other name").unwrap();
    assert_eq!(fs::metadata(dir.join("one")).unwrap().len(), 30);
    fs::remove_file(dir.join("one")).unwrap();
    assert_eq!(fs::metadata(dir.join("two")).unwrap().nlink(), 1);
    assert_eq!(errno(fs::hard_link(dir.join("two"), dir.join("two"))), libc::EEXIST);
    assert_eq!(errno(fs::hard_link(dir, dir.join("three"))), libc::EPERM);
}

pub fn symbolic_links(dir: &Path) {
    fs::write(dir.join("target"), b"t").unwrap();
    symlink("target", dir.join("link")).unwrap();
    assert_eq!(fs::read(dir.join("link")).unwrap(), b"t");
    assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("target"));
    let meta = fs::symlink_metadata(dir.join("link")).unwrap();
    assert!(meta.is_symlink());
    assert_eq!(meta.len(), 6, "the size of a link is the length of its target");
    let long = "é/".repeat(1200);
    symlink(&long, dir.join("long")).unwrap();
    assert_eq!(fs::read_link(dir.join("long")).unwrap().to_str().unwrap(), long);
    fs::remove_file(dir.join("link")).unwrap();
    assert!(dir.join("target").exists());
    if is_root() {
        std::os::unix::fs::lchown(dir.join("long"), Some(1234), Some(4321)).unwrap();
        let meta = fs::symlink_metadata(dir.join("long")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1234, 4321));
    }
}

pub fn special_files(dir: &Path) {
    use rustix::fs::{FileType, Mode, makedev, mknodat};
    let mode = Mode::from_raw_mode(0o640);
    mknodat(CWD, dir.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    assert!(fs::metadata(dir.join("fifo")).unwrap().file_type().is_fifo());
    let socket = std::os::unix::net::UnixListener::bind(dir.join("sock"));
    if socket.is_ok() {
        assert!(fs::metadata(dir.join("sock")).unwrap().file_type().is_socket());
    }
    mknodat(CWD, dir.join("plain"), FileType::RegularFile, mode, 0).unwrap();
    fs::write(dir.join("plain"), b"made by mknod").unwrap();
    if is_root() {
        match mknodat(CWD, dir.join("dev"), FileType::CharacterDevice, mode, makedev(300, 70_000)) {
            Ok(()) => {
                let meta = fs::metadata(dir.join("dev")).unwrap();
                assert!(meta.file_type().is_char_device());
                assert_eq!(meta.rdev(), makedev(300, 70_000));
            }
            Err(e) => assert_eq!(e, rustix::io::Errno::PERM, "in a container"),
        }
    }
}

pub fn long_names(dir: &Path) {
    for name in ["n".repeat(255), "é".repeat(127), "a".repeat(176), "b".repeat(200)] {
        fs::write(dir.join(&name), name.as_bytes()).unwrap();
        assert_eq!(fs::read(dir.join(&name)).unwrap(), name.as_bytes());
        let sub = dir.join(format!("{}d", &name[..name.len() - 2]));
        fs::create_dir(&sub).unwrap();
        fs::rename(dir.join(&name), sub.join(&name)).unwrap();
        assert_eq!(names(&sub), BTreeSet::from([name.clone()]));
        fs::remove_dir_all(&sub).unwrap();
    }
    assert_eq!(errno(fs::write(dir.join("n".repeat(256)), b"")), libc::ENAMETOOLONG);
    assert!(names(dir).is_empty());
    for odd in [".hidden", "with space", "new\nline", "-dash", "ünïcödé", "a.b.c", "=", "\u{1}"] {
        fs::write(dir.join(odd), b"").unwrap();
        assert!(names(dir).contains(odd));
    }
}

pub fn refusals(dir: &Path) {
    fs::create_dir(dir.join("d")).unwrap();
    fs::write(dir.join("d/f"), b"").unwrap();
    assert_eq!(errno(fs::remove_dir(dir.join("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_file(dir.join("d"))), libc::EISDIR);
    assert_eq!(errno(fs::remove_dir(dir.join("d/f"))), libc::ENOTDIR);
    assert_eq!(errno(fs::create_dir(dir.join("d"))), libc::EEXIST);
    assert_eq!(errno(fs::read_link(dir.join("d/f"))), libc::EINVAL);
    assert_eq!(errno(File::options().write(true).create_new(true).open(dir.join("d/f"))), libc::EEXIST);
    assert_eq!(errno(fs::metadata(dir.join("d/f/g"))), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_file(dir.join("none"))), libc::ENOENT);
    assert_eq!(errno(fs::write(dir.join("none/x"), b"")), libc::ENOENT);
    assert_eq!(errno(File::options().write(true).open(dir.join("d"))), libc::EISDIR);
    let nofollow = |path: &Path| File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    symlink("d/f", dir.join("l")).unwrap();
    assert_eq!(errno(nofollow(&dir.join("l"))), libc::ELOOP);
}

pub fn created_names_replace_remembered_absence(dir: &Path) {
    for i in 0..200 {
        let path = dir.join(format!("n{i}"));
        assert!(!path.exists());
        match i % 4 {
            0 => fs::write(&path, b"x").unwrap(),
            1 => fs::create_dir(&path).unwrap(),
            2 => symlink(dir, &path).unwrap(),
            _ => fs::rename(dir.join(format!("n{}", i - 3)), &path).unwrap(),
        }
        assert!(path.exists());
    }
    assert!(!dir.join("n0").exists());
}

pub fn programs_run(dir: &Path) {
    let program = dir.join("true");
    fs::copy("/bin/true", &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(std::process::Command::new(&program).status().unwrap().success());
}

pub fn running_programs_are_not_written(dir: &Path) {
    let program = dir.join("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut running = std::process::Command::new(&program).arg("600").spawn().unwrap();
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_RDONLY | libc::O_TRUNC] {
        let flags = rustix::fs::OFlags::from_bits_retain(flags as u32);
        let opened = rustix::fs::open(&program, flags, rustix::fs::Mode::empty());
        assert_eq!(opened.map(drop), Err(rustix::io::Errno::TXTBSY), "{flags:?}");
    }
    assert_eq!(errno(File::options().write(true).truncate(true).open(&program)), libc::ETXTBSY);
    assert!(fs::read(&program).unwrap() == fs::read("/bin/sleep").unwrap());
    running.kill().unwrap();
    running.wait().unwrap();
    File::options().write(true).truncate(true).open(&program).unwrap();
    assert_eq!(fs::metadata(&program).unwrap().len(), 0);
}

pub fn deep_directories(dir: &Path) {
    let mut path = dir.to_path_buf();
    for i in 0..60 {
        path.push(format!("level-{i:02}"));
    }
    fs::create_dir_all(&path).unwrap();
    let data = pattern(5000, 1);
    fs::write(path.join("leaf"), &data).unwrap();
    fs::rename(dir.join("level-00/level-01"), dir.join("moved")).unwrap();
    let leaf = dir.join("moved").join(path.strip_prefix(dir.join("level-00/level-01")).unwrap()).join("leaf");
    assert!(fs::read(leaf).unwrap() == data);
    fs::remove_dir_all(dir.join("moved")).unwrap();
    assert_eq!(names(dir), BTreeSet::from(["level-00".to_string()]));
}

/// What is removed stays to be looked at through what is open.
pub fn removed_directories_live_on(dir: &Path) {
    for replaced in [false, true] {
        let path = dir.join("d");
        fs::create_dir(&path).unwrap();
        let open = fs::File::open(&path).unwrap();
        let ino = open.metadata().unwrap().ino();
        if replaced {
            fs::create_dir(dir.join("other")).unwrap();
            fs::rename(dir.join("other"), &path).unwrap();
        } else {
            fs::remove_dir(&path).unwrap();
        }
        let meta = open.metadata().unwrap();
        assert_eq!((meta.nlink(), meta.ino(), meta.is_dir()), (0, ino, true), "replaced: {replaced}");
        if replaced {
            fs::remove_dir(&path).unwrap();
        }
    }
    std::os::unix::fs::symlink("target", dir.join("l")).unwrap();
    let link =
        fs::File::options().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(dir.join("l")).unwrap();
    fs::remove_file(dir.join("l")).unwrap();
    let meta = link.metadata().unwrap();
    assert!(meta.nlink() == 0 && meta.is_symlink());
}

/// One of them is removed and made again, the other replaced, while others open them: what was found opens, also where
/// it is gone by then. A kernel that is told of something stale looks once more and gives up, so that only a name which
/// comes back shows it.
pub fn directories_are_opened_while_they_go(dir: &Path) {
    use std::sync::atomic::{AtomicBool, Ordering};
    const ROUNDS: usize = 300;
    let (removed, replaced, beside) = (dir.join("removed"), dir.join("replaced"), dir.join("beside"));
    fs::create_dir(&replaced).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_done = &is_done;
        for path in [&removed, &replaced] {
            for _ in 0..2 {
                scope.spawn(move || {
                    while !is_done.load(Ordering::Relaxed) {
                        match fs::read_dir(path).map(Iterator::count) {
                            Ok(listed) => assert_eq!(listed, 0),
                            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOENT), "{}: {e}", path.display()),
                        }
                    }
                });
            }
        }
        let change = || {
            for _ in 0..ROUNDS {
                fs::create_dir(&removed)?;
                fs::remove_dir(&removed)?;
                fs::create_dir(&beside)?;
                fs::rename(&beside, &replaced)?;
            }
            Ok::<_, std::io::Error>(())
        };
        let changed = change();
        is_done.store(true, Ordering::Relaxed);
        changed.unwrap();
    });
}
