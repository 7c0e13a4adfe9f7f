//! Extended attributes (`docs/format.md` §7): names and values are sealed, whatever their namespace. Attributes of the
//! store itself are not shown. Access control lists go through `acl`, which keeps them consistent with the mode.

use crate::acl::Which;
use crate::attr_value::{Holder, open_name, open_value, seal_value};
use crate::digests::StoredAttrs;
use crate::error::{errno, io};
use crate::event::IntegrityKind;
use crate::target::Target;
use crate::{Ino, Kind, Result, SetXattr, Vault, VaultError};
use lamassu_crypto::ring::OpenError;
use lamassu_format::name::xattr_name;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;

/// Longest plain value, as in Linux.
const VALUE_MAX: usize = 65_536;
/// Longest name, plain or stored, as in Linux.
const NAME_MAX: usize = 255;

/// Namespaces of attributes, besides access control lists. Others that local file systems have (`system.nfs4_acl`,
/// `btrfs.compression`) act on that file system itself.
const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

/// As the kernel's `xattr_resolve_name` for a local file system: other namespaces are not supported, and a namespace
/// alone is no name.
fn check_namespace(name: &OsStr) -> Result<()> {
    match NAMESPACES.iter().find_map(|namespace| name.as_bytes().strip_prefix(*namespace)) {
        Some([]) => Err(VaultError::Invalid),
        Some(_) => Ok(()),
        None => Err(VaultError::Unsupported),
    }
}

/// Whether a list of names for this user includes an attribute: names of `trusted.` are listed for root alone, as on
/// local file systems.
pub fn is_listed_for(uid: u32, name: &[u8]) -> bool {
    uid == 0 || !name.starts_with(b"trusted.")
}

/// The error for an attribute that does not exist.
fn absent(name: &OsStr) -> VaultError {
    check_namespace(name).err().unwrap_or(VaultError::NoAttribute)
}

fn is_absent(e: &stdio::Error) -> bool {
    e.raw_os_error() == Some(libc::ENODATA)
}

impl Vault {
    /// The holder to which the attributes of `ino`, which is `target`, are bound. The caller holds the tree lock.
    pub(crate) fn holder(&self, target: &Target, ino: Ino) -> Result<Holder> {
        let dir = match target {
            Target::Root(dir, _) | Target::Dir(dir) => dir.clone(),
            Target::Entry { .. } if self.nodes.lock().kind(ino) == Some(Kind::Dir) => self.dir(ino)?,
            Target::Entry { .. } | Target::Open(_) => return Ok(Holder::File),
        };
        Ok(Holder::Dir(self.names(&dir)?.dir_id()))
    }

    /// The names `name` may be stored under, the newest epoch's first.
    fn stored_attrs(&self, name: &OsStr) -> Result<Vec<OsString>> {
        let plain = name.as_bytes();
        if plain.is_empty() || plain.contains(&0) {
            return Err(VaultError::InvalidName);
        }
        let stored: Vec<OsString> =
            self.ctx.ring.seal_xattr_names(plain).iter().map(|s| xattr_name(s).into()).collect();
        if plain.len() > NAME_MAX || stored.iter().any(|s| s.len() > NAME_MAX) {
            return Err(VaultError::NameTooLong);
        }
        Ok(stored)
    }

    /// The value of an attribute. One whose name has no known namespace may have been set by an earlier version.
    ///
    /// # Errors
    /// [`VaultError::NoAttribute`]; [`VaultError::Unsupported`] if there is none and the namespace is unknown;
    /// [`VaultError::Damaged`]; those of the store.
    pub fn get_xattr(&self, ino: Ino, name: &OsStr) -> Result<Vec<u8>> {
        self.read_current(|| self.xattr_of(ino, name))
    }

    fn xattr_of(&self, ino: Ino, name: &OsStr) -> Result<Vec<u8>> {
        let _tree = self.tree.read();
        // Those of a removed directory are gone with it. The kernel asks for its access list before it looks there.
        if self.nodes.lock().is_removed_dir(ino) {
            return Err(VaultError::NoAttribute);
        }
        let _still = self.attrs_still(ino);
        if let Some(which) = Which::of(name) {
            return self.get_acl(ino, which);
        }
        let (target, _) = self.target(ino)?;
        match self.sealed_attr(&target, ino, name) {
            Err(VaultError::NoAttribute) => Err(absent(name)),
            other => other,
        }
    }

    /// The value of an attribute as it was set.
    pub(crate) fn sealed_attr(&self, target: &Target, ino: Ino, name: &OsStr) -> Result<Vec<u8>> {
        let stored = match self.stored_attrs(name) {
            // No attribute can have so long a name.
            Err(VaultError::NameTooLong) if name.len() <= NAME_MAX => return Err(VaultError::NoAttribute),
            other => other?,
        };
        if let Some(attrs) = self.verified_attrs(target, ino)? {
            let found = stored.iter().find_map(|attr| attrs.get(attr).map(|value| (attr, value)));
            let (attr, value) = found.ok_or(VaultError::NoAttribute)?;
            let holder = self.holder(target, ino)?;
            return open_value(&self.ctx.ring, attr, holder, value).map_err(|e| self.damaged_attr(ino, attr, e));
        }
        for attr in &stored {
            match target.get_xattr(attr) {
                Ok(value) => {
                    let holder = self.holder(target, ino)?;
                    return open_value(&self.ctx.ring, attr, holder, &value)
                        .map_err(|e| self.damaged_attr(ino, attr, e));
                }
                Err(e) if is_absent(&e) => {}
                // The store has no attributes here at all (a symbolic link, a device), so not this one.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => {}
                // An owner other than root may list the attributes of a file of mode 000, but not read them. An
                // attribute that is not listed does not exist.
                Err(e) if e.raw_os_error() == Some(libc::EACCES) && !is_listed(target, attr) => {}
                Err(e) => return Err(io("get an attribute")(e)),
            }
        }
        Err(VaultError::NoAttribute)
    }

    fn damaged_attr(&self, ino: Ino, attr: &OsStr, e: OpenError) -> VaultError {
        let stored = format!("{}: {}", self.tag(ino), attr.to_string_lossy());
        let text = format!("the extended attribute {} does not open: {e}", attr.to_string_lossy());
        self.tell_at(ino, IntegrityKind::Attribute, text);
        VaultError::Damaged { what: "attribute", stored }
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// [`VaultError::Exists`] and [`VaultError::NoAttribute`] by `mode`; `E2BIG` for more than 64 KiB; those of the
    /// store, which refuses attributes of symbolic links and devices; [`VaultError::Invalid`] for a malformed access
    /// control list; [`VaultError::Unsupported`] for names other than those of `user.`, `trusted.`, `security.` and
    /// access control lists.
    pub fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr) -> Result<()> {
        let set = || self.with_room(|| self.set_xattr_once(ino, name, value, mode));
        self.with_names(ino, set, set)
    }

    fn set_xattr_once(&self, ino: Ino, name: &OsStr, value: &[u8], mode: SetXattr) -> Result<()> {
        let _pass = self.change_recorded()?;
        let _tree = self.tree.read();
        let _alone = self.attrs_alone(ino);
        if let Some(which) = Which::of(name) {
            return self.set_acl(ino, which, value, mode);
        }
        check_namespace(name)?;
        let (target, _) = self.target_to_change(ino, None)?;
        self.store_attr(&target, ino, name, value, mode)
    }

    /// Name and value as they are stored.
    pub(crate) fn seal_attr(&self, holder: Holder, name: &OsStr, value: &[u8]) -> Result<(OsString, Vec<u8>)> {
        let newest = self.stored_attrs(name)?.into_iter().next().ok_or(VaultError::NoAttribute)?;
        let sealed = seal_value(&self.ctx.ring, &newest, holder, value)?;
        Ok((newest, sealed))
    }

    pub(crate) fn store_attr(
        &self,
        target: &Target,
        ino: Ino,
        name: &OsStr,
        value: &[u8],
        mode: SetXattr,
    ) -> Result<()> {
        let stored = self.stored_attrs(name)?;
        if value.len() > VALUE_MAX {
            return Err(errno("set an attribute", libc::E2BIG));
        }
        let Some((newest, older)) = stored.split_first() else { return Err(VaultError::NoAttribute) };
        if let Some(attrs) = self.verified_attrs(target, ino)? {
            let sealed = seal_value(&self.ctx.ring, newest, self.holder(target, ino)?, value)?;
            return self.store_anchored(target, ino, attrs, (newest, older), &sealed, mode);
        }
        let is_older = older.iter().any(|attr| target.get_xattr(attr).is_ok());
        let flags = match (mode, is_older) {
            (SetXattr::Create, true) => return Err(VaultError::Exists),
            (SetXattr::Create, false) => libc::XATTR_CREATE,
            (SetXattr::Replace, false) => libc::XATTR_REPLACE,
            (SetXattr::Replace, true) | (SetXattr::Any, _) => 0,
        };
        let sealed = seal_value(&self.ctx.ring, newest, self.holder(target, ino)?, value)?;
        target.set_xattr(newest, &sealed, flags).map_err(io("set an attribute"))?;
        if is_older {
            for attr in older {
                remove_if_there(target, attr)?;
            }
        }
        Ok(())
    }

    /// The same in an anchored vault: each call of the store is a step of its own.
    fn store_anchored(
        &self,
        target: &Target,
        ino: Ino,
        mut attrs: StoredAttrs,
        (newest, older): (&OsString, &[OsString]),
        sealed: &[u8],
        mode: SetXattr,
    ) -> Result<()> {
        let older: Vec<&OsString> = older.iter().filter(|attr| attrs.contains_key(*attr)).collect();
        let is_there = attrs.contains_key(newest) || !older.is_empty();
        match mode {
            SetXattr::Create if is_there => return Err(VaultError::Exists),
            SetXattr::Replace if !is_there => return Err(VaultError::NoAttribute),
            SetXattr::Create | SetXattr::Replace | SetXattr::Any => {}
        }
        self.change_attr(ino, &mut attrs, (newest, Some(sealed)), || {
            target.set_xattr(newest, sealed, 0).map_err(io("set an attribute"))
        })?;
        for attr in older {
            self.change_attr(ino, &mut attrs, (attr, None), || remove(target, attr))?;
        }
        Ok(())
    }

    /// Plain names of all attributes, of which some are shown to privileged callers alone ([`is_listed_for`]). One
    /// whose name does not open is left out and logged; `check` lists it.
    ///
    /// # Errors
    /// Those of the store.
    pub fn list_xattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        self.read_current(|| self.xattrs_of(ino))
    }

    fn xattrs_of(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        let _tree = self.tree.read();
        if self.nodes.lock().is_removed_dir(ino) {
            return Ok(Vec::new());
        }
        let _still = self.attrs_still(ino);
        let (target, _) = self.target(ino)?;
        let raw = match self.verified_attrs(&target, ino)? {
            Some(attrs) => attrs.into_keys().collect(),
            None => match target.list_xattr() {
                Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => Vec::new(),
                other => other.map_err(io("list attributes"))?,
            },
        };
        let mut names = Vec::new();
        for attr in raw {
            match open_name(&self.ctx.ring, &attr) {
                Some(Ok(name)) if !names.contains(&name) => names.push(name),
                Some(Ok(_)) | None => {}
                Some(Err(e)) => {
                    self.damaged_attr(ino, &attr, e);
                }
            }
        }
        Ok(names)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// [`VaultError::NoAttribute`] (not for access control lists), [`VaultError::Unsupported`] as for
    /// [`Vault::get_xattr`], those of the store.
    pub fn remove_xattr(&self, ino: Ino, name: &OsStr) -> Result<()> {
        self.with_room(|| self.remove_xattr_once(ino, name))
    }

    fn remove_xattr_once(&self, ino: Ino, name: &OsStr) -> Result<()> {
        let _pass = self.change_recorded()?;
        let _tree = self.tree.read();
        let _alone = self.attrs_alone(ino);
        if let Some(which) = Which::of(name) {
            return self.remove_acl(ino, which);
        }
        let (target, _) = self.target_to_change(ino, None)?;
        if self.drop_attr(&target, ino, name)? { Ok(()) } else { Err(absent(name)) }
    }

    /// Removes an attribute. Returns whether there was one. The newest name goes last, so that a value of before is
    /// never shown.
    pub(crate) fn drop_attr(&self, target: &Target, ino: Ino, name: &OsStr) -> Result<bool> {
        let mut stored = self.stored_attrs(name)?;
        stored.reverse();
        let mut found = false;
        if let Some(mut attrs) = self.verified_attrs(target, ino)? {
            for attr in &stored {
                if attrs.contains_key(attr) {
                    self.change_attr(ino, &mut attrs, (attr, None), || remove(target, attr))?;
                    found = true;
                }
            }
            if found {
                return Ok(true);
            }
            // The store decides whether there can be one.
        }
        for attr in &stored {
            found |= remove_if_there(target, attr)?;
        }
        Ok(found)
    }
}

fn is_listed(target: &Target, attr: &OsStr) -> bool {
    target.list_xattr().map_or(true, |all| all.iter().any(|a| a == attr))
}

fn remove(target: &Target, attr: &OsStr) -> Result<()> {
    target.remove_xattr(attr).map_err(io("remove an attribute"))
}

fn remove_if_there(target: &Target, attr: &OsStr) -> Result<bool> {
    match target.remove_xattr(attr) {
        Ok(()) => Ok(true),
        Err(e) if is_absent(&e) => Ok(false),
        Err(e) => Err(io("remove an attribute")(e)),
    }
}
