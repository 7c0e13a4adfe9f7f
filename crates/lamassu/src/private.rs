//! Whether a vault directory is its owner's alone, as a mount for other users requires.
//!
//! A user who can search the vault directory owns some of the entries below it, and can exchange them while the daemon
//! works on them. Permissions of parent directories do not count: they may be changed later.

use crate::fault::Fault;
use crate::mounts;
use lamassu_host::Error as HostError;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Search permission of the group and of others. If there is an access control list, the group's bit is the list's
/// mask.
pub const SEARCH_BY_OTHERS: u32 = 0o011;
const MODE_BITS: u32 = 0o7777;

/// The owner and mode that decide.
#[derive(Clone, Copy)]
pub struct Access {
    pub mode: u32,
    pub uid: u32,
}

impl Access {
    fn of(dir: &Path) -> std::io::Result<Access> {
        dir.metadata().map(|meta| Access { mode: meta.mode() & MODE_BITS, uid: meta.uid() })
    }

    fn is_own(self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }

    fn is_private(self) -> bool {
        self.is_own() && self.mode & SEARCH_BY_OTHERS == 0
    }
}

/// Refuses a vault that users other than root and the one of this process can search. `opened`: owner and mode of the
/// open directory, if it is open already; the path can lead elsewhere later.
///
/// A dataset is also private if the directory of a vault that it lies in is.
pub fn check(dir: &Path, opened: Option<Access>) -> Result<(), Fault> {
    let unusable = |source| HostError::NotADirectory { dir: dir.into(), source };
    let access = opened.map_or_else(|| Access::of(dir).map_err(unusable), Ok)?;
    let is_below_private = || {
        let above = dir.ancestors().skip(1).filter(|above| mounts::has_vault(above));
        above.filter_map(|above| Access::of(above).ok()).any(Access::is_private)
    };
    if access.is_private() || is_below_private() {
        return Ok(());
    }
    let chmod = format!("`chmod 700 {}`", dir.display());
    let mend = match access.is_own() {
        true => chmod,
        false => format!("`chown {} {}` and {chmod}", rustix::process::geteuid().as_raw(), dir.display()),
    };
    Err(Fault::OpenStore { dir: dir.into(), mode: access.mode, uid: access.uid, mend })
}
