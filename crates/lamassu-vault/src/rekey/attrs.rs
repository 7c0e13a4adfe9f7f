//! Extended attributes, access control lists among them: the new one is set before the old one goes, so that a crash
//! leaves one or both. One attribute may be stored under the names of several epochs, with different values: a change
//! that was cut off leaves the value of before under an older name. The newest name counts, here as for readers. The
//! others are removed, never sealed anew.

use super::RekeyRun;
use crate::attr_value::{open_name, open_value, value_epoch};
use crate::digests::StoredAttrs;
use crate::error::io;
use crate::event::IntegrityKind;
use crate::target::Target;
use crate::{Ino, Kind, Result, VaultError};
use lamassu_format::name::xattr_name;
use std::ffi::{OsStr, OsString};
use std::io as stdio;

/// What has to be done about one stored attribute.
enum Todo {
    Nothing,
    /// It exists under a newer name too: a crash, or a change between two rotations, left this one.
    Remove,
    Reseal {
        newest: OsString,
        sealed: Vec<u8>,
    },
}

impl RekeyRun<'_> {
    /// Seals those attributes of an inode anew that are under an older key.
    pub(super) fn attributes(&mut self, ino: Ino) -> Result<()> {
        let vault = self.vault;
        let is_old = {
            let _tree = vault.tree.read();
            let (target, st) = vault.target(ino)?;
            if st.kind == Kind::Symlink {
                return Ok(());
            }
            let all = stored(&target)?;
            all.iter().any(|attr| !matches!(self.todo(&target, ino, (attr, &all)), Ok(Todo::Nothing)))
        };
        if !is_old {
            return Ok(());
        }
        // Setting an attribute takes the tree lock shared, so none is set between the read here and the write.
        let _pass = vault.change()?;
        let _tree = vault.tree.write();
        let _alone = vault.attrs_alone(ino);
        let (target, st) = vault.target(ino)?;
        vault.must_be_its_own_to_rekey(ino, &target)?;
        let mut attrs = vault.verified_attrs(&target, ino)?.unwrap_or_default();
        let mut first = Ok(());
        let all = stored(&target)?;
        for attr in &all {
            let done = self.todo(&target, ino, (attr, &all)).and_then(|todo| match todo {
                Todo::Nothing => Ok(()),
                Todo::Remove => self.change(ino, &target, st.mode, &mut attrs, (attr, None)),
                Todo::Reseal { newest, sealed } => {
                    self.change(ino, &target, st.mode, &mut attrs, (&newest, Some(&sealed)))?;
                    self.walk.done.attributes += 1;
                    match newest == *attr {
                        true => Ok(()),
                        false => self.change(ino, &target, st.mode, &mut attrs, (attr, None)),
                    }
                }
            });
            first = first.and(done);
        }
        first
    }

    /// One step: sets or removes an attribute.
    fn change(
        &self,
        ino: Ino,
        target: &Target,
        mode: u32,
        attrs: &mut StoredAttrs,
        (attr, value): (&OsStr, Option<&[u8]>),
    ) -> Result<()> {
        let step = || {
            permitted(target, mode, || match value {
                Some(value) => target.set_xattr(attr, value, 0),
                None => target.remove_xattr(attr),
            })
        };
        match self.vault.anchored {
            Some(_) => self.vault.change_attr(ino, attrs, (attr, value), step),
            None => step(),
        }
    }

    /// What has to be done about `attr`, one of `all` that are stored.
    fn todo(&self, target: &Target, ino: Ino, (attr, all): (&OsStr, &[OsString])) -> Result<Todo> {
        let (vault, ring) = (self.vault, &self.vault.ctx.ring);
        let damaged = || {
            vault.tell_at(ino, IntegrityKind::Attribute, "an extended attribute does not open, and is not re-keyed");
            let stored = format!("{}: {}", vault.tag(ino), attr.to_string_lossy());
            VaultError::Damaged { what: "attribute", stored }
        };
        let Some(plain) = open_name(ring, attr) else { return Ok(Todo::Nothing) };
        let plain = plain.map_err(|_| damaged())?;
        let newest: OsString = xattr_name(&ring.outer().seal_xattr_name(&plain)).into();
        let names = ring.seal_xattr_names(&plain).into_iter().map(|sealed| OsString::from(xattr_name(&sealed)));
        if names.take_while(|name| name != attr).any(|newer| all.contains(&newer)) {
            return Ok(Todo::Remove);
        }
        let value = match target.get_xattr(attr) {
            Err(e) if e.raw_os_error() == Some(libc::ENODATA) => return Ok(Todo::Nothing),
            other => other.map_err(io("get an attribute"))?,
        };
        let holder = vault.holder(target, ino)?;
        if newest == attr && value_epoch(ring, attr, holder, &value) == Some(ring.newest().1) {
            return Ok(Todo::Nothing);
        }
        let value = open_value(ring, attr, holder, &value).map_err(|_| damaged())?;
        let sealed = crate::attr_value::seal_value(ring, &newest, holder, &value)?;
        Ok(Todo::Reseal { newest, sealed })
    }
}

fn stored(target: &Target) -> Result<Vec<OsString>> {
    match target.list_xattr() {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => Ok(Vec::new()),
        other => other.map_err(io("list attributes")),
    }
}

/// Changes an attribute of an entry whose mode denies writing to its owner, which is this process. The permission is
/// granted for the time of the change.
fn permitted(target: &Target, mode: u32, change: impl Fn() -> stdio::Result<()>) -> Result<()> {
    const LENT: u32 = 0o200;
    let done = match change() {
        Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied && mode & LENT == 0 => {
            let mode = match target {
                Target::Root(..) => mode,
                // Its own, without what only the row has.
                _ => target.stat().map_err(io("stat"))?.mode,
            };
            target.set_mode(mode | LENT).map_err(io("set the mode"))?;
            let done = change();
            target.set_mode(mode).map_err(io("set the mode"))?;
            done
        }
        other => other,
    };
    done.map_err(io("change an attribute"))
}
