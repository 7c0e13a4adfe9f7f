//! Deletes trees, bit by bit if need be. Every directory is compared with the listing in which it was found.

use crate::Kind;
use crate::error::is_not_found;
use crate::stored::PRIVATE;
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::sync::Arc;

/// A directory that is being deleted: its open handle, its name, its device, and the directories left in it, by name
/// and inode number.
struct Emptied {
    dir: Arc<dyn BackendDir>,
    name: OsString,
    dev: u64,
    left: Vec<(OsString, u64)>,
}

/// Deletes a directory with everything in it, in bounded memory. Directories without the permission to be emptied are
/// given it. `goes_on` is asked before each entry. False: it has said no, and the rest is left.
///
/// # Errors
/// Those of the store. `ESTALE` if a directory is not the one that was listed, or lies on another device: nothing in it
/// was deleted.
pub(crate) fn delete_tree(
    parent: &dyn BackendDir,
    name: &OsStr,
    goes_on: &mut dyn FnMut() -> bool,
) -> stdio::Result<bool> {
    let top = parent.stat_entry(name)?;
    // Directories on the way down.
    let mut open = Vec::new();
    match emptied_of_files(parent, name, (top.dev, top.ino), goes_on)? {
        Some(top) => open.push(top),
        None => return Ok(false),
    }
    while let Some(Emptied { dir, name, dev, left }) = open.last_mut() {
        if let Some((below, ino)) = left.pop() {
            let Some(below) = emptied_of_files(&**dir, &below, (*dev, ino), goes_on)? else { return Ok(false) };
            open.push(below);
            continue;
        }
        if !goes_on() {
            return Ok(false);
        }
        let name = std::mem::take(name);
        open.pop();
        match open.last() {
            Some(above) => above.dir.remove_dir(&name)?,
            None => parent.remove_dir(&name)?,
        }
    }
    Ok(true)
}

/// Opens a directory, which has this device and number, and deletes everything in it except directories. `None`: not
/// all of it.
fn emptied_of_files(
    parent: &dyn BackendDir,
    name: &OsStr,
    listed: (u64, u64),
    goes_on: &mut dyn FnMut() -> bool,
) -> stdio::Result<Option<Emptied>> {
    let dir = enter(parent, name, listed)?;
    let mut left = Vec::new();
    for e in dir.read_dir()? {
        let kind = match e.kind {
            Some(kind) => kind,
            None => dir.stat_entry(&e.name)?.kind,
        };
        match kind {
            Kind::Dir => left.push((e.name, e.ino)),
            _ if !goes_on() => return Ok(None),
            _ => match dir.unlink(&e.name) {
                Err(e) if !is_not_found(&e) => return Err(e),
                _ => {}
            },
        }
    }
    Ok(Some(Emptied { dir, name: name.to_owned(), dev: listed.0, left }))
}

pub(super) fn stale() -> stdio::Error {
    stdio::Error::from_raw_os_error(libc::ESTALE)
}

/// Opens a directory that is to be emptied, which has this device and number.
fn enter(parent: &dyn BackendDir, name: &OsStr, listed: (u64, u64)) -> stdio::Result<Arc<dyn BackendDir>> {
    let is_listed = |st: &Stat| (st.dev, st.ino, st.kind) == (listed.0, listed.1, Kind::Dir);
    let held = parent.hold(name)?;
    let st = held.stat()?;
    if !is_listed(&st) {
        return Err(stale());
    }
    if st.mode & PRIVATE != PRIVATE {
        held.set_mode(PRIVATE)?;
    }
    let dir = parent.open_dir(name)?;
    if is_listed(&dir.stat()?) { Ok(dir) } else { Err(stale()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_store::Backend;
    use lamassu_store::backend::MemoryBackend;

    #[test]
    fn only_the_directory_that_was_listed_is_entered() {
        let root = MemoryBackend::new().root();
        let name = OsStr::new("d");
        root.make_dir(name, 0o100).unwrap();
        let st = root.stat_entry(name).unwrap();
        for listed in [(st.dev, st.ino + 1), (st.dev + 1, st.ino)] {
            assert_eq!(enter(&*root, name, listed).err().unwrap().raw_os_error(), Some(libc::ESTALE));
            assert_eq!(root.stat_entry(name).unwrap().mode, 0o100, "nothing was lent");
        }
        assert!(enter(&*root, name, (st.dev, st.ino)).is_ok());
    }

    /// Goes on from where it was stopped.
    #[test]
    fn a_tree_is_deleted_bit_by_bit() {
        let root = MemoryBackend::new().root();
        let mut dir = root.clone();
        for depth in 0..3 {
            (0..5).for_each(|number| drop(dir.create_file(OsStr::new(&format!("f{number}"))).unwrap()));
            let name = if depth == 0 { "top" } else { "below" };
            dir.make_dir(OsStr::new(name), PRIVATE).unwrap();
            dir = dir.open_dir(OsStr::new(name)).unwrap();
        }
        let mut calls = 0;
        loop {
            let mut asked = 0;
            let mut goes_on = || {
                asked += 1;
                asked <= 2
            };
            calls += 1;
            if delete_tree(&*root, OsStr::new("top"), &mut goes_on).unwrap() {
                break;
            }
        }
        // Two levels of five files, and three directories.
        assert_eq!(calls, 7);
        assert_eq!(root.read_dir().unwrap().len(), 5);
    }
}
