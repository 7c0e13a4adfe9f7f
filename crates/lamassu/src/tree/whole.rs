//! Writing a file whole or not at all: what has its name already stays until the file is complete, and half a file never has it for good.

use super::{Meta, Output, Tree};
use anyhow::Result;
use lamassu_vault::{Kind, VaultError};
use std::path::{Path, PathBuf};

/// Has `write` make the file `target`: it gets the file, empty, and the path that it has until then. A file or link that is there already is replaced once `write`
/// is done: the file is made under a temporary name beside it. After an error what was written is removed. Anything else stays: nobody means /dev/null to become
/// a file.
pub fn write_whole<T>(
    tree: &dyn Tree,
    target: &Path,
    write: impl FnOnce(Box<dyn Output + '_>, &Path) -> Result<T>,
) -> Result<T> {
    let (place, replaces) = match tree.stat(target)? {
        None => (target.to_path_buf(), false),
        Some(Meta { kind: Kind::Dir, .. }) => {
            return Err(anyhow::Error::from(VaultError::IsDirectory).context(tree.name(target)));
        }
        Some(Meta { kind: Kind::File | Kind::Symlink, .. }) => (temporary_beside(target)?, true),
        Some(_) => anyhow::bail!("{} is there already, and no regular file", tree.name(target)),
    };
    let written = tree.create(&place).and_then(|output| {
        let written = write(output, &place).and_then(|value| {
            if replaces {
                tree.rename(&place, target)?;
            }
            Ok(value)
        });
        // Only what was made here is removed, so not after an error of `create`.
        written.inspect_err(|_| {
            let _ = tree.remove(&place);
        })
    });
    written.map_err(|error| match replaces {
        true => error.context(format!("{} stays as it was", tree.name(target))),
        false => error,
    })
}

/// A name that nothing has, in the same directory. It is short: one made of the target's could be too long for the store.
fn temporary_beside(target: &Path) -> Result<PathBuf> {
    let mut number = [0; 4];
    lamassu_crypto::random(&mut number)?;
    Ok(target.with_file_name(format!(".lamassu-cp-{:08x}", u32::from_le_bytes(number))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::local::Local;
    use std::fs;

    #[test]
    fn what_is_there_stays_until_the_file_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let names = || fs::read_dir(dir.path()).unwrap().count();
        // As long as a name can be.
        let target = dir.path().join("n".repeat(255));
        let write = |fails: bool, text: &'static [u8]| {
            write_whole(&Local, &target, |output, place| {
                output.write_at(0, text)?;
                assert_eq!(place.parent(), target.parent());
                if fails { Err(anyhow::anyhow!("torn")) } else { output.finish() }
            })
        };
        assert_eq!(crate::output::message(&write(true, b"half").unwrap_err()), "torn");
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
    fn links_are_replaced_and_directories_and_sockets_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (link, kept) = (dir.path().join("link"), dir.path().join("kept"));
        fs::write(&kept, b"kept").unwrap();
        std::os::unix::fs::symlink("kept", &link).unwrap();
        let write = |target: &Path| {
            write_whole(&Local, target, |output, _| {
                output.write_at(0, b"new")?;
                output.finish()
            })
        };
        write(&link).unwrap();
        assert!(link.symlink_metadata().unwrap().is_file());
        assert_eq!((fs::read(&link).unwrap(), fs::read(&kept).unwrap()), (b"new".to_vec(), b"kept".to_vec()));
        assert!(write(dir.path()).is_err());
        let socket = dir.path().join("socket");
        std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(crate::output::message(&write(&socket).unwrap_err()).contains("no regular file"));
        assert!(!socket.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }
}
