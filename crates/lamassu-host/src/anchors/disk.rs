//! Whether a file can be the anchor of a vault. A place that the store's owner can restore to an older state protects
//! nothing.

use crate::{Error, Result, store_kind};
use lamassu_store::mount_table::{MountLine, at};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file system type of this program's mounts in the mount table, unless the user chose another.
pub const MOUNT_TYPE: &str = "fuse.lamassu";

/// The nearest existing directory above a file, without links.
fn nearest_dir(file: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(file)?;
    let above = absolute.ancestors().skip(1).find(|dir| dir.is_dir());
    above.ok_or(io::ErrorKind::NotFound)?.canonicalize()
}

/// Refuses a place in the vault, below a mount of this program, or on the network or FUSE file system that the store
/// lies on.
///
/// # Errors
/// [`Error::AnchorInStore`], [`Error::Local`], [`Error::NotADirectory`].
pub fn check(file: &Path, vault: &Path) -> Result<()> {
    let failed = |source| Error::Local { op: "find the directory of", path: file.into(), source };
    let dir = nearest_dir(file).map_err(failed)?;
    let store = vault.canonicalize().map_err(|source| Error::NotADirectory { dir: vault.into(), source })?;
    let refused = |within: PathBuf| Err(Error::AnchorInStore { path: file.into(), within });
    if dir.starts_with(&store) {
        return refused(store);
    }
    if let Some(mount) = mount_of(&dir).filter(|mount| mount.fs_type == MOUNT_TYPE) {
        return refused(mount.mountpoint.clone());
    }
    let is_served = store_kind::of(&store).is_some_and(|kind| kind.is_served());
    match is_served && is_one_file_system(&dir, &store) {
        true => refused(mount_of(&store).map_or(store, |mount| mount.mountpoint.clone())),
        false => Ok(()),
    }
}

/// A warning if others could replace the anchor's file: a directory on the way that they may write to, or that belongs
/// to a user other than this one and root.
pub fn open_to_others(file: &Path) -> Option<String> {
    const STICKY: u32 = 0o1000;
    let nearest = nearest_dir(file).ok()?;
    let own = rustix::process::geteuid().as_raw();
    nearest.ancestors().find_map(|dir| {
        let st = dir.metadata().ok()?;
        let (what, remedy) = if st.uid() != own && st.uid() != 0 {
            ("the user that it belongs to", "chown")
        } else if st.mode() & 0o022 != 0 && st.mode() & STICKY == 0 {
            ("others", "chmod go-w")
        } else {
            return None;
        };
        Some(format!(
            "{what} may write to {}, and so remove the anchor, or put an older copy in its place: `{remedy}` that directory, or \
             choose another (`lamassu anchor move`)",
            dir.display()
        ))
    })
}

/// The mount that contains a path without links.
fn mount_of(path: &Path) -> Option<MountLine> {
    path.ancestors().find_map(at)
}

/// A warning about a place that is allowed, but on the store's own disk.
pub fn warning(file: &Path, vault: &Path) -> Option<String> {
    let (dir, store) = (nearest_dir(file).ok()?, vault.canonicalize().ok()?);
    is_one_file_system(&dir, &store).then(|| {
        format!(
            "the anchor {} lies on the same file system as the vault: it shows what others change in the store, but not when that whole disk is put back; --anchor FILE names another disk",
            file.display()
        )
    })
}

fn is_one_file_system(one: &Path, other: &Path) -> bool {
    let device = |path: &Path| path.metadata().map(|st| st.dev()).ok();
    device(one).is_some() && device(one) == device(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_the_vault_is_refused_also_where_its_directory_is_not_there_yet() {
        let dir = tempfile::tempdir().unwrap();
        let vault = dir.path().join("v");
        std::fs::create_dir(&vault).unwrap();
        std::os::unix::fs::symlink(&vault, dir.path().join("link")).unwrap();
        for within in ["v/anchor", "v/deep/er/anchor", "link/anchor"] {
            assert!(check(&dir.path().join(within), &vault).is_err(), "{within}");
        }
        for beside in ["anchor", "v.anchors/new/anchor"] {
            check(&dir.path().join(beside), &vault).unwrap();
            assert!(warning(&dir.path().join(beside), &vault).is_some_and(|text| text.contains("same file system")));
        }
    }
}
