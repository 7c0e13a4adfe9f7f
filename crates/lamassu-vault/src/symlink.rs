//! Targets of symbolic links (`docs/format.md` §7): sealed, the long ones with their rest in a companion of the same
//! directory.

use crate::digests::{ShownLink, digest_of_link};
use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found};
use crate::event::IntegrityKind;
use crate::record::{self, read_text};
use crate::{Ino, Kind, Result, Vault, VaultError};
use lamassu_anchor::Digest;
use lamassu_crypto::KeyRing;
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::ring::OpenError;
use lamassu_format::name::{decode, encode, encoded_len, link_rest_name};
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;

/// Longest plain target, as in Linux.
const TARGET_MAX: usize = 4095;
/// Longest stored target that every store takes (XFS: 1023 bytes).
const TEXT_MAX: usize = 1023;
/// Bytes a sealed record adds.
const RECORD_OVERHEAD: usize = 56;
/// Bytes of a long target that its head holds.
const HEAD_PART: usize = 680;
/// Bytes of a head: id, total length, first part.
const HEAD_LEN: usize = 16 + 2 + HEAD_PART;
/// Length of a stored long target: a dot, then the head. Some short target has this length too.
const HEAD_TEXT_LEN: u64 = 1 + encoded_len(RECORD_OVERHEAD + HEAD_LEN) as u64;
const _: () = assert!(HEAD_TEXT_LEN <= TEXT_MAX as u64);
/// The first byte of a long target's text; never part of b64.
const LONG_MARK: u8 = b'.';

/// A target as it is stored.
pub(crate) struct StoredTarget {
    text: String,
    rest: Option<(OsString, String)>,
}

/// Why a target does not open.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkFault {
    #[error("{0}")]
    Io(#[from] stdio::Error),
    #[error("it is not base64url")]
    Text,
    #[error("{0}")]
    Seal(OpenError),
    #[error("it breaks the format")]
    Format,
    #[error("its rest is missing or does not open")]
    Rest,
}

/// Seals a target of 1 to 4095 bytes.
pub(crate) fn seal(ring: &KeyRing, target: &[u8]) -> Result<StoredTarget> {
    if encoded_len(RECORD_OVERHEAD + target.len()) <= TEXT_MAX {
        let sealed = ring.outer().seal_record(RecordKind::Symlink, &[], target)?;
        return Ok(StoredTarget { text: encode(&sealed), rest: None });
    }
    let mut id = [0; 16];
    lamassu_crypto::random(&mut id)?;
    let (first, rest) = target.split_at(HEAD_PART);
    let mut head = Vec::with_capacity(HEAD_LEN);
    head.extend_from_slice(&id);
    head.extend_from_slice(&(target.len() as u16).to_le_bytes());
    head.extend_from_slice(first);
    let head = ring.outer().seal_record(RecordKind::SymlinkHead, &[], &head)?;
    let rest = ring.outer().seal_record(RecordKind::SymlinkRest, &id, rest)?;
    let rest = (link_rest_name(&id).into(), encode(&rest));
    Ok(StoredTarget { text: format!("{}{}", char::from(LONG_MARK), encode(&head)), rest: Some(rest) })
}

impl StoredTarget {
    /// The text of the link itself.
    pub fn text(&self) -> &OsStr {
        OsStr::new(&self.text)
    }

    /// The digest of all of it.
    pub fn digest(&self) -> Digest {
        digest_of_link(self.text.as_bytes(), self.rest.as_ref().map(|(_, text)| text.as_bytes()))
    }

    /// Makes the rest of a long target, unless it exists.
    pub fn create_rest(&self, dir: &dyn BackendDir) -> stdio::Result<()> {
        let Some((rest, text)) = &self.rest else { return Ok(()) };
        match record::write_file(dir, rest, text) {
            Err(e) if e.kind() != stdio::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        }
    }

    /// Removes the rest of a link that could not be made.
    pub fn remove_rest(&self, dir: &dyn BackendDir) {
        if let Some((rest, _)) = &self.rest {
            record::remove_companion(dir, rest);
        }
    }
}

/// A long target's head: the id of its rest, the target's length, its first part.
struct Head {
    id: [u8; 16],
    total: usize,
    first: Vec<u8>,
}

fn open_head(ring: &KeyRing, text: &[u8]) -> std::result::Result<Head, LinkFault> {
    let sealed = decode(text).ok_or(LinkFault::Text)?;
    let content = ring.open_record(RecordKind::SymlinkHead, &[], &sealed).map_err(LinkFault::Seal)?;
    let (id, more) = content.split_first_chunk::<16>().ok_or(LinkFault::Format)?;
    let (total, first) = more.split_first_chunk::<2>().ok_or(LinkFault::Format)?;
    let total = usize::from(u16::from_le_bytes(*total));
    if first.len() != HEAD_PART || !(HEAD_PART + 1..=TARGET_MAX).contains(&total) {
        return Err(LinkFault::Format);
    }
    Ok(Head { id: *id, total, first: first.to_vec() })
}

/// Whether all of a stored target is under the newest key.
pub(crate) fn is_newest(ring: &KeyRing, dir: &dyn BackendDir, text: &[u8]) -> bool {
    let newest = Some(ring.newest().1);
    let sealed_newest = |text: &[u8], kind, context: &[u8]| {
        decode(text).is_some_and(|sealed| ring.record_epoch(kind, context, &sealed) == newest)
    };
    match text.strip_prefix(&[LONG_MARK]) {
        None => sealed_newest(text, RecordKind::Symlink, &[]),
        Some(head) => {
            let rest_is_newest = || {
                let id = open_head(ring, head).ok()?.id;
                let rest = read_text(dir, OsStr::new(&link_rest_name(&id))).ok()?;
                Some(sealed_newest(&rest, RecordKind::SymlinkRest, &id))
            };
            sealed_newest(head, RecordKind::SymlinkHead, &[]) && rest_is_newest() == Some(true)
        }
    }
}

/// The target that a directory shows under a name, as it is stored; with its rest, if its head opens and the rest
/// exists.
pub(crate) fn shown(ring: &KeyRing, dir: &dyn BackendDir, name: &OsStr) -> stdio::Result<ShownLink> {
    let text = dir.read_link(name)?.into_encoded_bytes();
    Ok(ShownLink { rest: rest_text(ring, dir, &text), text })
}

fn rest_text(ring: &KeyRing, dir: &dyn BackendDir, text: &[u8]) -> Option<Vec<u8>> {
    let head = open_head(ring, text.strip_prefix(&[LONG_MARK])?).ok()?;
    read_text(dir, OsStr::new(&link_rest_name(&head.id))).ok()
}

/// Opens the target stored as `text` in `dir`.
pub(crate) fn open(ring: &KeyRing, dir: &dyn BackendDir, text: &[u8]) -> std::result::Result<Vec<u8>, LinkFault> {
    open_shown(ring, &ShownLink { text: text.to_vec(), rest: rest_text(ring, dir, text) })
}

/// Opens a stored target.
pub(crate) fn open_shown(ring: &KeyRing, link: &ShownLink) -> std::result::Result<Vec<u8>, LinkFault> {
    let target = match link.text.strip_prefix(&[LONG_MARK]) {
        None => {
            let sealed = decode(&link.text).ok_or(LinkFault::Text)?;
            ring.open_record(RecordKind::Symlink, &[], &sealed).map_err(LinkFault::Seal)?
        }
        Some(head) => {
            let mut head = open_head(ring, head)?;
            let rest = link.rest.as_deref().and_then(decode).ok_or(LinkFault::Rest)?;
            let rest = ring.open_record(RecordKind::SymlinkRest, &head.id, &rest).map_err(|_| LinkFault::Rest)?;
            head.first.extend_from_slice(&rest);
            if head.first.len() != head.total {
                return Err(LinkFault::Format);
            }
            head.first
        }
    };
    if target.is_empty() || target.len() > TARGET_MAX || target.contains(&0) {
        Err(LinkFault::Format)
    } else {
        Ok(target)
    }
}

/// The name of the rest of the link `stored`, if that is a symbolic link with a long target that opens.
pub(crate) fn rest_of(ring: &KeyRing, dir: &dyn BackendDir, stored: &OsStr, st: &Stat) -> Option<OsString> {
    if st.kind != Kind::Symlink || st.len != HEAD_TEXT_LEN {
        return None;
    }
    let text = dir.read_link(stored).ok()?;
    Some(link_rest_name(&rest_id(ring, text.as_bytes())?).into())
}

/// The id of the rest of a link with this text, if that is a long target whose head opens.
pub(crate) fn rest_id(ring: &KeyRing, text: &[u8]) -> Option<[u8; 16]> {
    Some(open_head(ring, text.strip_prefix(&[LONG_MARK])?).ok()?.id)
}

/// Copies the rest of a long target to another directory before its link is moved there. It may exist there already.
pub(crate) fn copy_rest(rest: &OsStr, from: &dyn BackendDir, to: &dyn BackendDir) -> Result<()> {
    let text = match read_text(from, rest) {
        Ok(text) => text,
        // The link is damaged as it is; it can still be moved.
        Err(e) if is_not_found(&e) => return Ok(()),
        Err(e) => return Err(io("read a companion")(e)),
    };
    let text = std::str::from_utf8(&text).map_err(|_| VaultError::Invalid)?;
    match record::write_file(to, rest, text) {
        Err(e) if e.kind() != stdio::ErrorKind::AlreadyExists => Err(io("create a companion")(e)),
        _ => Ok(()),
    }
}

/// Whether a directory has a name of this symbolic link; to be asked while no name can be added. True if that cannot be
/// determined, so that no needed rest is removed.
pub(crate) fn is_named_in(dir: &dyn BackendDir, link: &Stat) -> bool {
    let is_it = |name: &OsStr| match dir.stat_entry(name) {
        Ok(st) => st.is_same(link),
        Err(e) => !is_not_found(&e),
    };
    match dir.read_dir() {
        Ok(entries) => entries.iter().any(|e| e.kind.is_none_or(|kind| kind == Kind::Symlink) && is_it(&e.name)),
        Err(_) => true,
    }
}

impl Vault {
    /// Length of a link's plain target: from the stored length alone, except for the one length that short and long
    /// targets share. In an anchored vault from the target, once that is verified as the newest.
    ///
    /// # Errors
    /// Those of [`Vault::stored_link_of`], in an anchored vault.
    pub(crate) fn link_size(&self, ino: Ino, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<u64> {
        let stored_len = if self.anchored.is_some() {
            let link = self.stored_link_of(ino, dir, stored)?;
            if let Ok(target) = open_shown(&self.ctx.ring, &link) {
                return Ok(target.len() as u64);
            }
            link.text.len() as u64
        } else {
            st.len
        };
        if stored_len == HEAD_TEXT_LEN
            && let Ok(text) = dir.handle.read_link(stored)
            && let Some(head) = text.as_bytes().strip_prefix(&[LONG_MARK])
            && let Ok(head) = open_head(&self.ctx.ring, head)
        {
            return Ok(head.total as u64);
        }
        Ok((stored_len * 3 / 4).saturating_sub(RECORD_OVERHEAD as u64))
    }

    /// The plain target of a symbolic link.
    ///
    /// # Errors
    /// [`VaultError::Invalid`] if it is none, [`VaultError::Damaged`] if it does not open, [`VaultError::Outdated`] if
    /// it is not the newest, those of the store.
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        self.read_current(|| self.target_of_link(ino))
    }

    fn target_of_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let _tree = self.tree.read();
        if self.nodes.lock().kind(ino).ok_or(VaultError::Stale)? != Kind::Symlink {
            return Err(VaultError::Invalid);
        }
        let (dir, name, _) = self.place(ino)?;
        let link = self.stored_link_of(ino, &dir, &name)?;
        open_shown(&self.ctx.ring, &link).map_err(|fault| match fault {
            LinkFault::Io(e) => io("read a link")(e),
            fault => {
                let stored = self.path_in(dir.ino, &name).display().to_string();
                let text = format!("the target of a symbolic link does not open: {fault}");
                self.tell(IntegrityKind::LinkTarget.at(&*stored, text).of_inode(ino));
                VaultError::Damaged { what: "link target", stored }
            }
        })
    }

    pub(crate) fn check_target(target: &[u8]) -> Result<()> {
        match target {
            [] => Err(errno("symlink", libc::ENOENT)),
            t if t.len() > TARGET_MAX => Err(VaultError::NameTooLong),
            t if t.contains(&0) => Err(VaultError::Invalid),
            _ => Ok(()),
        }
    }
}
