//! Permissions that are checked again in the turn of a change.
//!
//! The kernel decides by what earlier requests showed. Between such a request and the change, another host may have had
//! the vault. For most calls that is what POSIX promises: the permission was there at some moment of the call. Two
//! checks need the moment of the change itself, and on a local file system the kernel's locks give it:
//!
//! * In a sticky directory, the owner of an entry decides who may remove or replace it. By then another entry may have
//!   the name.
//! * Only the owner may set modes, groups, times and access control lists. Through an open descriptor the kernel asks
//!   for no attributes first, so it may remember an owner of long ago.
//!
//! Root may do all of this. Capabilities of other callers are not known here, so `CAP_FOWNER` does not count.

use super::Shared;
use super::acl::Caller;
use super::reply::is_not_found;
use lamassu_vault::{EntryRef, FileSystem, HandleId, Ino, Permissions, Result, SetAttr, SetTime, VaultError};
use std::ffi::OsStr;

fn not_permitted(op: &'static str) -> VaultError {
    VaultError::Io { op, source: std::io::Error::from_raw_os_error(libc::EPERM) }
}

impl<F: FileSystem> Shared<F> {
    /// Whether a caller's rights must be checked again.
    fn is_checked(&self, caller: Caller) -> bool {
        !caller.is_root() && self.fs.hosts_take_turns()
    }

    /// Refuses to remove, move or replace the entry that has this name now, if the directory is sticky and neither it
    /// nor the entry is the caller's.
    pub(super) fn check_sticky(&self, dir: Ino, name: &OsStr, caller: Caller) -> Result<()> {
        if !self.is_checked(caller) {
            return Ok(());
        }
        let Permissions { mode, uid: owner, .. } = self.fs.permissions(dir)?;
        if mode & libc::S_ISVTX == 0 || owner == caller.uid() {
            return Ok(());
        }
        let entry = match EntryRef::find(&*self.fs, dir, name) {
            Err(error) if is_not_found(&error) => return Ok(()),
            found => found?,
        };
        if entry.attr().uid == caller.uid() { Ok(()) } else { Err(not_permitted("change a sticky directory")) }
    }

    /// Refuses a change of attributes that only the present owner may make.
    pub(super) fn check_setattr(
        &self,
        ino: Ino,
        handle: Option<HandleId>,
        set: &SetAttr,
        caller: Caller,
    ) -> Result<()> {
        let is_time = |time: Option<SetTime>| matches!(time, Some(SetTime::At(..)));
        let is_more = set.uid.is_some() || set.gid.is_some() || is_time(set.atime) || is_time(set.mtime);
        match set.mode {
            None if !is_more => Ok(()),
            mode => self.check_owner(ino, handle, mode.filter(|_| !is_more), caller),
        }
    }

    /// Refuses what only the present owner may do. `mode`: it is to set this mode and nothing else.
    pub(super) fn check_owner(
        &self,
        ino: Ino,
        handle: Option<HandleId>,
        mode: Option<u32>,
        caller: Caller,
    ) -> Result<()> {
        if !self.is_checked(caller) {
            return Ok(());
        }
        let attr = self.fs.getattr(ino, handle)?;
        // Kernels that leave the clearing of set-id bits to themselves send it in the name of whoever writes.
        let cleared = attr.mode & !(libc::S_ISUID | libc::S_ISGID);
        let only_clears = mode.is_some_and(|mode| mode & !attr.mode == 0 && mode & cleared == cleared);
        if attr.uid == caller.uid() || only_clears {
            return Ok(());
        }
        self.forget_attributes(ino);
        Err(not_permitted("change attributes"))
    }
}
