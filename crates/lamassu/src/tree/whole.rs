//! Makes an entry completely or not at all. It is made under a temporary name in the same directory, and renamed once
//! it is complete. Until then an existing entry stays, and no incomplete entry ever has the name. An error leaves
//! nothing behind; a kill leaves at most the temporary name, which is safe to delete.

use super::{Dir, Meta, Node, Output};
use crate::fault::{Fault, Result};
use lamassu_host::created::temporary_name;
use lamassu_vault::{Kind, VaultError};
use std::ffi::OsStr;

/// Makes the file `target`: `write` fills it, and `describe` sets its metadata, before it gets its name. An existing
/// file is replaced, and so is a link to a file or to nothing. The new contents are durable before that, so that a
/// power cut leaves the old file or the new one. Other entries are not replaced: /dev/null must not become a file.
pub fn write_whole<T>(
    dir: &dyn Dir,
    target: &OsStr,
    write: impl FnOnce(&dyn Output) -> Result<()>,
    describe: impl FnOnce(&dyn Node) -> Result<T>,
) -> Result<T> {
    let old = replaceable(dir, target)?;
    let create = |place: &OsStr| dir.create(place);
    make_whole(dir, target, old, create, |output| {
        write(&*output)?;
        output.flush(old.is_some())?;
        describe(&*output)
    })
}

/// Calls `link` to give a complete file the name `target` too, under the same conditions.
pub fn link_whole(dir: &dyn Dir, target: &OsStr, link: impl FnOnce(&OsStr) -> Result<()>) -> Result<()> {
    make_whole(dir, target, replaceable(dir, target)?, link, Ok)
}

/// The existing entry of this name, if a file may replace it; otherwise an error.
fn replaceable(dir: &dyn Dir, target: &OsStr) -> Result<Option<Meta>> {
    let old = dir.stat(target)?;
    let is_no_file = match old.map(|old| old.kind) {
        None | Some(Kind::File | Kind::Dir) => false,
        Some(Kind::Symlink) => dir.leads_to_no_file(target),
        Some(Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice) => true,
    };
    if is_no_file {
        return Err(Fault::NoRegularFile { path: dir.name(target) }.into());
    }
    Ok(old)
}

/// Makes `target` in place of `old`: `make` makes it under a temporary name, which it gets, and `fill` completes it.
/// Directories are not replaced.
pub fn make_whole<M, T>(
    dir: &dyn Dir,
    target: &OsStr,
    old: Option<Meta>,
    make: impl FnOnce(&OsStr) -> Result<M>,
    fill: impl FnOnce(M) -> Result<T>,
) -> Result<T> {
    if old.is_some_and(|old| old.kind == Kind::Dir) {
        return Err(dir.fault(target, VaultError::IsDirectory));
    }
    let place = temporary_name()?;
    let made = make(&place).and_then(|made| {
        let filled = fill(made);
        let renamed = filled.and_then(|value| dir.rename(&place, target, old.is_some()).map(|()| value));
        // Removes only an entry that was made here, so not after an error of `make`.
        renamed.inspect_err(|_| {
            let _ = dir.remove(&place);
        })
    });
    made.map_err(|error| match old {
        Some(_) => error.context(format!("{} stays as it was", dir.name(target))),
        None => error.context(dir.name(target)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::held::LocalDir;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn held(path: &Path) -> LocalDir {
        LocalDir::open(path).unwrap()
    }

    #[test]
    fn what_is_there_stays_until_the_file_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let names = || fs::read_dir(dir.path()).unwrap().count();
        // The longest possible name.
        let name = "n".repeat(255);
        let target = dir.path().join(&name);
        let write = |fails: bool, text: &'static [u8]| {
            let before = fs::read(&target).ok();
            write_whole(
                &held(dir.path()),
                name.as_ref(),
                |output| output.write_at(0, text),
                |_| {
                    let is_there = |e: fs::DirEntry| e.path() != target && fs::read(e.path()).unwrap() == text;
                    assert!(fs::read_dir(dir.path()).unwrap().any(|e| is_there(e.unwrap())), "beside it");
                    assert_eq!(fs::read(&target).ok(), before, "the name is not given before the file is complete");
                    if fails { Err(Fault::Other("torn").into()) } else { Ok(()) }
                },
            )
        };
        let error = crate::output::message(&write(true, b"half").unwrap_err());
        assert!(error.ends_with("nnn: torn"), "{error}");
        assert_eq!(names(), 0, "no half of a file");
        write(false, b"first").unwrap();
        fs::hard_link(&target, dir.path().join("link")).unwrap();
        let error = crate::output::message(&write(true, b"half").unwrap_err());
        assert!(error.contains("stays as it was: torn"), "{error}");
        assert_eq!((fs::read(&target).unwrap(), names()), (b"first".to_vec(), 2));
        write(false, b"2nd").unwrap();
        assert_eq!((fs::read(&target).unwrap(), names()), (b"2nd".to_vec(), 2));
        assert_eq!(fs::read(dir.path().join("link")).unwrap(), b"first", "replaced, not written over");
    }

    #[test]
    fn links_to_files_are_replaced_and_what_is_no_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (link, kept) = (dir.path().join("link"), dir.path().join("kept"));
        fs::write(&kept, b"kept").unwrap();
        let write = |target: &Path| {
            let parent = held(target.parent().unwrap());
            write_whole(&parent, target.file_name().unwrap(), |output| output.write_at(0, b"new"), |_| Ok(()))
        };
        for to in ["kept", "missing", "kept/missing"] {
            symlink(to, &link).unwrap();
            write(&link).unwrap();
            assert!(link.symlink_metadata().unwrap().is_file());
            assert_eq!((fs::read(&link).unwrap(), fs::read(&kept).unwrap()), (b"new".to_vec(), b"kept".to_vec()));
            fs::remove_file(&link).unwrap();
        }
        assert!(write(dir.path()).is_err());
        let socket = dir.path().join("socket");
        std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(crate::output::message(&write(&socket).unwrap_err()).contains("no regular file"));
        assert!(!socket.symlink_metadata().unwrap().is_file());
        for to in ["socket", ".", "link", "/dev/null"] {
            symlink(to, &link).unwrap();
            assert!(crate::output::message(&write(&link).unwrap_err()).contains("no regular file"), "{to}");
            assert_eq!(fs::read_link(&link).unwrap(), Path::new(to));
            fs::remove_file(&link).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_there_stays_where_something_else_cannot_be_made() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink("old", &link).unwrap();
        let make = |to: &'static str| {
            let held = held(dir.path());
            let old = held.stat("link".as_ref()).unwrap();
            make_whole(&held, "link".as_ref(), old, |place| held.make_symlink(place, to.as_ref()), |_| Ok(()))
        };
        // A link with an empty target cannot be made.
        let error = crate::output::message(&make("").unwrap_err());
        assert!(error.contains("stays as it was: cannot make link"), "{error}");
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("old"));
        make("new").unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("new"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_appears_meanwhile_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("f");
        let write = |output: &dyn Output| output.write_at(0, b"copied");
        let error =
            write_whole(&held(dir.path()), "f".as_ref(), write, |_| Ok(fs::write(&target, b"other")?)).unwrap_err();
        assert!(crate::output::message(&error).contains("exists"), "{error}");
        assert_eq!(fs::read(&target).unwrap(), b"other");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
