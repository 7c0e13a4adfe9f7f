//! Access control lists.
//!
//! Under `FUSE_POSIX_ACL` the kernel (`fs/fuse/acl.c`) checks whether the caller may set a list and whether it is well
//! formed, and enforces it. The file system stores and inherits the list, and keeps the mode consistent with it
//! (`lamassu-vault`). This module refuses lists if the kernel does not enforce them, and clears the set-group-id bit
//! when a caller outside the group sets an access list.
//!
//! The kernel asks for that by `FUSE_SETXATTR_ACL_KILL_SGID`, a member of the request's longer form
//! (`FUSE_SETXATTR_EXT`) that `fuser` 0.18 does not decode. So the caller's groups are looked up here.

use super::Shared;
use crate::control::groups_of;
use fuser::{Errno, Request};
use lamassu_vault::{FileSystem, Ino, Owner, Result, SetAttr, SetXattr};
use std::ffi::OsStr;
use std::sync::atomic::Ordering;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
/// File capabilities.
pub(super) const CAPABILITY: &str = "security.capability";

/// The sender of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    uid: u32,
    gid: u32,
    pid: u32,
}

impl Caller {
    pub fn of(req: &Request) -> Self {
        Caller { uid: req.uid(), gid: req.gid(), pid: req.pid() }
    }

    #[cfg(test)]
    pub const fn some(uid: u32) -> Self {
        Caller { uid, gid: uid, pid: 0 }
    }

    pub fn uid(self) -> u32 {
        self.uid
    }

    pub fn is_root(self) -> bool {
        self.uid == 0
    }

    /// Whether the caller belongs to a group, and so keeps its bits. A caller whose groups cannot be read (of another
    /// process namespace, or gone) counts as outside.
    pub fn is_in_group(self, group: u32) -> bool {
        if self.is_root() || self.gid == group {
            return true;
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        groups_of(&status).any(|g| g == group)
    }
}

impl<F: FileSystem> Shared<F> {
    /// Refuses a list that would be kept and not enforced.
    pub(super) fn refuse_acl(&self, name: &OsStr) -> std::result::Result<(), Errno> {
        if (name == ACCESS || name == DEFAULT) && !self.acls.load(Ordering::Relaxed) {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(())
    }

    /// The owner of a new entry. If lists are not enforced, the kernel has already applied the umask.
    pub(super) fn owner(&self, req: &Request, umask: u32) -> Owner {
        let umask = if self.acls.load(Ordering::Relaxed) { umask } else { 0 };
        Owner { uid: req.uid(), gid: req.gid(), umask }
    }

    pub(super) fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr, caller: Caller) -> Result<()> {
        if name == ACCESS || name == DEFAULT {
            self.check_owner(ino, None, None, caller)?;
        }
        let done = self.fs.set_xattr(ino, name, value, mode);
        if name == CAPABILITY {
            let mut without = self.without_capability.lock();
            self.capabilities_set.fetch_add(1, Ordering::SeqCst);
            without.remove(&ino);
        }
        done?;
        if name == ACCESS {
            let attr = self.fs.getattr(ino, None)?;
            if attr.mode & libc::S_ISGID != 0 && !caller.is_in_group(attr.gid) {
                let mode = Some(attr.mode & !libc::S_ISGID);
                self.fs.setattr(ino, None, &SetAttr { mode, ..SetAttr::default() })?;
            }
        }
        Ok(())
    }

    pub(super) fn remove_xattr(&self, ino: Ino, name: &OsStr, caller: Caller) -> Result<()> {
        if name == ACCESS || name == DEFAULT {
            self.check_owner(ino, None, None, caller)?;
        }
        self.fs.remove_xattr(ino, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_from_status() {
        let status = "Name:\tsh\nGid:\t7\t7\t7\t7\nFDSize:\t64\nGroups:\t4 24 1000 \nNStgid:\t1\n";
        assert_eq!(groups_of(status).collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(groups_of("Groups:\t \n").count(), 0);
        assert_eq!(groups_of("").count(), 0);
        let outsider = Caller { uid: 1, gid: 2, pid: 0 };
        assert!(outsider.is_in_group(2) && !outsider.is_in_group(3));
    }
}
