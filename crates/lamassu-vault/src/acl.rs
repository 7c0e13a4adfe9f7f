//! POSIX access control lists: extended attributes `system.posix_acl_access` and `system.posix_acl_default`, sealed
//! like any other (`docs/format.md` §7).
//!
//! The front-end's kernel enforces them. This module stores and inherits them, and keeps them consistent with the mode.
//! The backing entry's mode decides what the owner, the mask (without one: the owning group) and others may do. So
//! chmod is one change, and no crash leaves list and mode inconsistent: a read replaces these three entries of the
//! stored list by the mode.

use crate::attr_value::Holder;
use crate::dirs::Dir;
use crate::error::{errno, io};
use crate::event::IntegrityKind;
use crate::target::{Asks, Target};
use crate::{Ino, Kind, Result, SetXattr, Vault, VaultError};
use std::ffi::OsStr;
use std::io as stdio;
use std::sync::Arc;

pub(crate) const ACCESS: &str = "system.posix_acl_access";
pub(crate) const DEFAULT: &str = "system.posix_acl_default";

/// `POSIX_ACL_XATTR_VERSION` of the kernel's `posix_acl_xattr.h`; entries of 8 bytes follow: tag, permissions, id,
/// little-endian.
const VERSION: u32 = 2;
const ENTRY_LEN: usize = 8;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Which of the two lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Access,
    Default,
}

impl Which {
    pub fn of(name: &OsStr) -> Option<Which> {
        match name.to_str() {
            Some(ACCESS) => Some(Which::Access),
            Some(DEFAULT) => Some(Which::Default),
            _ => None,
        }
    }

    fn name(self) -> &'static OsStr {
        OsStr::new(match self {
            Which::Access => ACCESS,
            Which::Default => DEFAULT,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A list that keeps the kernel's rules (`posix_acl_valid`): one entry each for owner, owning group and others, a mask
/// if a user or group is named, in that order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl(Vec<AclEntry>);

impl Acl {
    /// `None`: not a list, or one that breaks a rule. An empty list is `Some(None)`: it means that there is none.
    fn parse(value: &[u8]) -> Option<Option<Acl>> {
        let (version, rest) = value.split_first_chunk::<4>()?;
        let (entries, tail) = rest.as_chunks::<ENTRY_LEN>();
        if u32::from_le_bytes(*version) != VERSION || !tail.is_empty() {
            return None;
        }
        if entries.is_empty() {
            return Some(None);
        }
        let entries = entries.iter().map(|&[t0, t1, p0, p1, i0, i1, i2, i3]| AclEntry {
            tag: u16::from_le_bytes([t0, t1]),
            perm: u16::from_le_bytes([p0, p1]),
            id: u32::from_le_bytes([i0, i1, i2, i3]),
        });
        let acl = Acl(entries.collect());
        acl.is_valid().then_some(Some(acl))
    }

    fn is_valid(&self) -> bool {
        let tags: Vec<u16> = self.0.iter().map(|e| e.tag).collect();
        let count = |tag| tags.iter().filter(|t| **t == tag).count();
        let known = tags.iter().all(|t| [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER].contains(t));
        let named = count(USER) + count(GROUP) > 0;
        let single = [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|t| count(*t) == 1);
        let masked = count(MASK) == 1 || (count(MASK) == 0 && !named);
        // The tags' numbers are in the order that the entries have to be in.
        known && single && masked && tags.is_sorted() && self.0.iter().all(|e| e.perm <= 7)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        for e in &self.0 {
            out.extend(e.tag.to_le_bytes());
            out.extend(e.perm.to_le_bytes());
            out.extend(e.id.to_le_bytes());
        }
        out
    }

    /// Whether a mode says the same.
    fn is_minimal(&self) -> bool {
        self.0.len() == 3
    }

    fn perm(&self, tag: u16) -> Option<u32> {
        self.0.iter().find(|e| e.tag == tag).map(|e| e.perm.into())
    }

    /// The nine permission bits it shows as.
    fn mode(&self) -> u32 {
        let group = self.perm(MASK).or(self.perm(GROUP_OBJ));
        let [user, group, other] = [self.perm(USER_OBJ), group, self.perm(OTHER)].map(Option::unwrap_or_default);
        user << 6 | group << 3 | other
    }

    /// The list with the permissions of `mode`.
    fn with_mode(mut self, mode: u32) -> Acl {
        let masked = self.perm(MASK).is_some();
        for e in &mut self.0 {
            let bits = match e.tag {
                USER_OBJ => mode >> 6,
                GROUP_OBJ if !masked => mode >> 3,
                MASK => mode >> 3,
                OTHER => mode,
                _ => continue,
            };
            e.perm = (bits & 7) as u16;
        }
        self
    }

    /// The list that a mode alone is.
    fn of_mode(mode: u32) -> Acl {
        let entry = |tag, shift: u32| AclEntry { tag, perm: (mode >> shift & 7) as u16, id: u32::MAX };
        Acl(vec![entry(USER_OBJ, 6), entry(GROUP_OBJ, 3), entry(OTHER, 0)])
    }

    /// Whether it grants all of `wanted` (bits as in a mode's last digit) to a user in some groups, by the rules of
    /// acl(5): the first class that the user belongs to decides; among groups one that grants it suffices.
    fn grants(&self, wanted: u32, (owner, group): (u32, u32), uid: u32, is_in_group: &dyn Fn(u32) -> bool) -> bool {
        let mask = self.perm(MASK).unwrap_or(7);
        let gives = |perm: u32| perm & wanted == wanted;
        if uid == owner {
            return self.perm(USER_OBJ).is_some_and(gives);
        }
        if let Some(named) = self.0.iter().find(|e| e.tag == USER && e.id == uid) {
            return gives(u32::from(named.perm) & mask);
        }
        let of_groups = self.0.iter().filter(|e| match e.tag {
            GROUP_OBJ => is_in_group(group),
            GROUP => is_in_group(e.id),
            _ => false,
        });
        let perms: Vec<u32> = of_groups.map(|e| u32::from(e.perm) & mask).collect();
        match perms.is_empty() {
            true => self.perm(OTHER).is_some_and(gives),
            false => perms.into_iter().any(gives),
        }
    }

    /// Group and other bits of a mode that grants no user more than the list does. Without the list a named user counts
    /// as a member of the owning group or as other, and a member of a named group as other.
    fn least_mode(&self) -> u32 {
        let mask = self.perm(MASK).unwrap_or(7);
        let least = |tags: &[u16]| {
            let named = self.0.iter().filter(|e| tags.contains(&e.tag));
            named.fold(7, |least, e| least & u32::from(e.perm) & mask)
        };
        let group = self.perm(GROUP_OBJ).unwrap_or_default() & mask & least(&[USER]);
        let other = self.perm(OTHER).unwrap_or_default() & least(&[USER, GROUP]);
        group << 3 | other
    }
}

/// What a new entry gets from the default list of its directory.
#[derive(Clone, Debug)]
pub(crate) struct Inherited {
    acl: Acl,
    kind: Kind,
}

impl Inherited {
    /// The mode of the new entry, from the mode asked for. The umask of the process is not applied.
    pub fn mode(&self, asked: u32) -> u32 {
        asked & (self.acl.mode() | !0o777)
    }

    /// Whether the list must be there before the group gets what `mode` gives it: without the list that is the mask's.
    pub fn is_more_than_mode(&self) -> bool {
        !self.acl.is_minimal()
    }

    /// Stores the lists by `set`. Returns the mode. If the store keeps no attributes (of fifos and devices, for
    /// example), the mode grants no user more than the list would.
    pub fn store(
        &self,
        vault: &Vault,
        holder: Holder,
        mode: u32,
        set: impl Fn(&OsStr, &[u8]) -> stdio::Result<()>,
    ) -> Result<u32> {
        let bytes = self.acl.to_bytes();
        let put = |which: Which| {
            let (stored, sealed) = vault.seal_attr(holder, which.name(), &bytes)?;
            set(&stored, &sealed).map_err(io("inherit an access control list"))
        };
        if self.kind == Kind::Dir {
            put(Which::Default)?;
        }
        if !self.is_more_than_mode() {
            return Ok(mode);
        }
        match put(Which::Access) {
            Ok(()) => Ok(mode),
            Err(VaultError::Unsupported) => Ok(self.mode_alone(mode)),
            Err(VaultError::Io { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {
                Ok(self.mode_alone(mode))
            }
            Err(error) => Err(error),
        }
    }

    fn mode_alone(&self, mode: u32) -> u32 {
        mode & (self.acl.least_mode() | !0o077)
    }
}

impl Vault {
    /// Whether access control lists are kept, inherited and held in step with the mode.
    pub fn keeps_acls(&self) -> bool {
        true
    }

    fn parse_stored(&self, ino: Ino, which: Which, value: &[u8]) -> Result<Option<Acl>> {
        Acl::parse(value).ok_or_else(|| {
            let stored = self.tag(ino);
            self.tell_at(ino, IntegrityKind::Attribute, "an access control list is none");
            VaultError::Damaged { what: if which == Which::Access { ACCESS } else { DEFAULT }, stored }
        })
    }

    /// The list of an entry, in the kernel's form.
    pub(crate) fn get_acl(&self, ino: Ino, which: Which) -> Result<Vec<u8>> {
        let (target, st) = self.target(ino)?;
        let value = self.sealed_attr(&target, ino, which.name())?;
        let acl = self.parse_stored(ino, which, &value)?.ok_or(VaultError::NoAttribute)?;
        Ok(if which == Which::Access { acl.with_mode(st.mode) } else { acl }.to_bytes())
    }

    /// Whether a user, who is not root, may make entries in a directory, by its mode and list: as the kernel decides
    /// for the mount.
    ///
    /// # Errors
    /// As [`Vault::may_search`].
    pub fn may_add(&self, dir: Ino, uid: u32, is_in_group: &dyn Fn(u32) -> bool) -> Result<bool> {
        const WRITE_AND_SEARCH: u32 = 3;
        self.may(WRITE_AND_SEARCH, dir, uid, is_in_group)
    }

    /// Whether a user, who is not root, may list a directory and look up what is in it, by its mode and list: as the
    /// kernel decides for the mount.
    ///
    /// # Errors
    /// [`VaultError::Damaged`] for a value that is not a list; those of the store.
    pub fn may_search(&self, dir: Ino, uid: u32, is_in_group: &dyn Fn(u32) -> bool) -> Result<bool> {
        const READ_AND_SEARCH: u32 = 5;
        self.may(READ_AND_SEARCH, dir, uid, is_in_group)
    }

    fn may(&self, wanted: u32, dir: Ino, uid: u32, is_in_group: &dyn Fn(u32) -> bool) -> Result<bool> {
        let _still = self.attrs_still(dir);
        let (target, st) = self.target(dir)?;
        let listed = match self.sealed_attr(&target, dir, Which::Access.name()) {
            Ok(value) => self.parse_stored(dir, Which::Access, &value)?,
            Err(VaultError::NoAttribute | VaultError::Unsupported) => None,
            Err(error) => return Err(error),
        };
        let acl = listed.map_or_else(|| Acl::of_mode(st.mode), |acl| acl.with_mode(st.mode));
        Ok(acl.grants(wanted, (st.uid, st.gid), uid, is_in_group))
    }

    /// Sets a list, and with the access list the mode. The caller holds the tree lock.
    pub(crate) fn set_acl(&self, ino: Ino, which: Which, value: &[u8], flags: SetXattr) -> Result<()> {
        let Some(acl) = Acl::parse(value).ok_or(VaultError::Invalid)? else { return self.remove_acl(ino, which) };
        let (target, st) = self.target_to_change(ino, None)?;
        match (which, st.kind) {
            (_, Kind::Symlink) => Err(VaultError::Unsupported),
            (Which::Default, Kind::Dir) => self.store_attr(&target, ino, which.name(), value, flags),
            (Which::Default, _) => Err(errno("set a default access control list", libc::EACCES)),
            (Which::Access, _) => self.set_access(ino, &target, st.mode, &acl, flags),
        }
    }

    /// Sets list and mode, or neither.
    fn set_access(&self, ino: Ino, target: &Target, old: u32, acl: &Acl, flags: SetXattr) -> Result<()> {
        // Before the list is stored, which would have to be undone.
        self.must_be_under_its_names(ino, target, Asks::to_set(old))?;
        let name = Which::Access.name();
        let before = match self.sealed_attr(target, ino, name) {
            Ok(value) => Some(Some(value)),
            Err(VaultError::NoAttribute) => Some(None),
            Err(VaultError::Damaged { .. }) => None,
            Err(error) => return Err(error),
        };
        self.replace_access(ino, target, old, acl, flags).inspect_err(|_| {
            // A damaged list cannot be put back, and keeps out every user that the mode does not name: without it no
            // user may get more.
            let Some(before) = &before else { return };
            let undone = match before {
                Some(value) => self.store_attr(target, ino, name, value, SetXattr::Any),
                None => self.drop_list(ino, target, Which::Access),
            };
            if let Err(error) = undone.and_then(|()| self.set_mode(ino, target, old)) {
                let text =
                    "an access control list could not be set, nor its mode put back: it may give less than before";
                tracing::warn!(entry = self.tag(ino), %error, "{text}");
            }
        })
    }

    /// In between, and so after a crash, no user has more rights than the old or the new list and mode grant.
    fn replace_access(&self, ino: Ino, target: &Target, old: u32, acl: &Acl, flags: SetXattr) -> Result<()> {
        let set_mode = |mode| self.set_mode(ino, target, mode);
        let new = old & !0o777 | acl.mode();
        let both = new & (old | !0o777);
        if both != old {
            set_mode(both)?;
        }
        if acl.is_minimal() {
            self.drop_list(ino, target, Which::Access)?;
        } else {
            self.store_attr(target, ino, Which::Access.name(), &acl.to_bytes(), flags)?;
        }
        if both == new { Ok(()) } else { set_mode(new) }
    }

    /// Removes a list. It is no error if there is none. The mode stays.
    pub(crate) fn remove_acl(&self, ino: Ino, which: Which) -> Result<()> {
        let (target, _) = self.target_to_change(ino, None)?;
        self.drop_list(ino, &target, which)
    }

    fn drop_list(&self, ino: Ino, target: &Target, which: Which) -> Result<()> {
        self.drop_attr(target, ino, which.name()).map(drop).or_else(|error| {
            match self.sealed_attr(target, ino, which.name()) {
                // Fifos and devices have no attributes in the store, and on some stores no entry has: the store refuses
                // any change, even one without effect.
                Err(VaultError::NoAttribute | VaultError::Unsupported) => Ok(()),
                _ => Err(error),
            }
        })
    }

    /// What entries made in `dir` inherit.
    pub(crate) fn inherited(&self, dir: &Arc<Dir>, kind: Kind) -> Result<Option<Inherited>> {
        let _still = self.attrs_still(dir.ino);
        let value = match self.sealed_attr(&Target::Dir(dir.clone()), dir.ino, Which::Default.name()) {
            Err(VaultError::NoAttribute) => return Ok(None),
            other => other?,
        };
        Ok(self.parse_stored(dir.ino, Which::Default, &value)?.map(|acl| Inherited { acl, kind }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl(entries.iter().map(|&(tag, perm, id)| AclEntry { tag, perm, id }).collect())
    }

    const NOBODY: u32 = u32::MAX;

    fn extended() -> Acl {
        acl(&[
            (USER_OBJ, 6, NOBODY),
            (USER, 7, 1000),
            (GROUP_OBJ, 4, NOBODY),
            (GROUP, 5, 7),
            (MASK, 6, NOBODY),
            (OTHER, 0, NOBODY),
        ])
    }

    #[test]
    fn lists_survive_both_ways() {
        let bytes = extended().to_bytes();
        // setfacl -m u:1000:rwx,g:7:rx,m:rw on a file of mode 640, as getfattr shows it.
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        let words = [
            "02000000",
            "01000600ffffffff",
            "02000700e8030000",
            "04000400ffffffff",
            "0800050007000000",
            "10000600ffffffff",
            "20000000ffffffff",
        ];
        assert_eq!(hex, words.concat());
        assert_eq!(Acl::parse(&bytes), Some(Some(extended())));
        assert_eq!(Acl::parse(&[2, 0, 0, 0]), Some(None));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let good = extended().to_bytes();
        for len in 0..good.len() {
            let whole = len >= 4 && (len - 4) % ENTRY_LEN == 0;
            let prefix = Acl::parse(&good[..len]);
            assert!(prefix.is_none() || (whole && len == 4), "{len}");
        }
        let [o, g, t] = [(USER_OBJ, 6, 0), (GROUP_OBJ, 4, 0), (OTHER, 4, 0)];
        let bad: [&[(u16, u16, u32)]; 8] = [
            &[g, o, t],
            &[o, g],
            &[o, o, g, t],
            &[o, (USER, 4, 5), g, t],
            &[o, g, (MASK, 4, 0), (MASK, 4, 0), t],
            &[o, g, (OTHER, 8, 0)],
            &[o, g, t, (0x40, 4, 0)],
            &[o, g, (GROUP, 1, 1), (USER, 1, 1), (MASK, 1, 0), t],
        ];
        for entries in bad {
            assert_eq!(Acl::parse(&acl(entries).to_bytes()), None, "{entries:?}");
        }
        assert!(Acl::parse(&acl(&[o, g, (MASK, 4, 0), t]).to_bytes()).is_some());
    }

    #[test]
    fn modes_and_lists_agree() {
        assert_eq!(extended().mode(), 0o660);
        let changed = extended().with_mode(0o100_751);
        assert_eq!(changed.mode(), 0o751);
        assert_eq!((changed.perm(GROUP_OBJ), changed.perm(USER)), (Some(4), Some(7)), "chmod leaves the others alone");
        let minimal = acl(&[(USER_OBJ, 0, 0), (GROUP_OBJ, 0, 0), (OTHER, 0, 0)]).with_mode(0o751);
        assert!(minimal.is_minimal() && minimal.mode() == 0o751);
        // acl(5), "Object creation and default ACLs".
        let inherited = Inherited { acl: extended(), kind: Kind::File };
        assert_eq!(inherited.mode(0o666), 0o660);
        assert_eq!(inherited.mode(0o6644), 0o6640);
        assert_eq!(inherited.mode_alone(0o660), 0o640);
    }
}
