//! Rows from what the store shows: for a new anchor, and for accepting. What does not open is damage, and gives no row.

use crate::attr_value::{Holder, open_name, open_value};
use crate::digests::{StoredAttrs, digest_of_attributes, digest_of_dataset, digest_of_text};
use crate::error::io;
use crate::walk::{has_header, header_id};
use crate::{Kind, Result, Vault, VaultError, symlink};
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::{Digest, ObjectId, Row, Token};
use lamassu_format::name::XATTR_PREFIX;
use lamassu_format::tree::Shape;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, File, FileContext};
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// Takes a vault's objects as they are.
pub(super) struct Taker<'a> {
    vault: &'a Vault,
    /// Files are opened as in a vault without an anchor.
    files: Arc<FileContext>,
    shape: Shape,
}

/// An entry as the store shows it.
pub(super) struct Taken {
    pub st: Stat,
    /// Without parent and name, which the caller sets.
    pub row: Row,
    /// A directory to enter; `None` for a dataset, which has an anchor of its own.
    pub dir: Option<Arc<dyn BackendDir>>,
}

pub(super) fn is(digest: Digest) -> Sealed {
    if digest.is_none() { Sealed::Nothing } else { Sealed::Is(digest) }
}

impl<'a> Taker<'a> {
    pub fn new(vault: &'a Vault, degree: usize) -> Taker<'a> {
        let ctx = &vault.ctx;
        let files = FileContext {
            ring: ctx.ring.clone(),
            geometry: ctx.geometry,
            engine: ctx.engine.clone(),
            integrity: ctx.integrity,
            durability: ctx.durability,
            domain: ctx.domain,
            compression: ctx.compression,
            convergent_small_files: ctx.convergent_small_files,
            read_only: ctx.read_only,
            approved_only: ctx.approved_only,
            sessions: ctx.sessions.clone(),
            anchored: None,
            report: ctx.report.clone(),
        };
        Taker { vault, files: Arc::new(files), shape: Shape::new(degree).unwrap_or_default() }
    }

    /// The entry under a name.
    ///
    /// # Errors
    /// [`VaultError::Damaged`], [`VaultError::Store`]; those of the store.
    pub fn entry(&self, dir: &Arc<dyn BackendDir>, name: &OsStr, stored: &Path) -> Result<Taken> {
        let st = dir.stat_entry(name).map_err(io("stat"))?;
        let mut opened = None;
        let (content, holder) = match st.kind {
            Kind::File => (Content::File(self.file(&**dir, name, &st, stored)?), Holder::File),
            Kind::Symlink => (Content::Link(self.link(&**dir, name, stored)?), Holder::File),
            Kind::CharDevice => (Content::Char(st.rdev), Holder::File),
            Kind::BlockDevice => (Content::Block(st.rdev), Holder::File),
            Kind::Fifo => (Content::Fifo, Holder::File),
            Kind::Socket => (Content::Socket, Holder::File),
            Kind::Dir => {
                let below = dir.open_dir(name).map_err(io("open a directory"))?;
                if self.vault.has_datasets() && has_header(&*below).map_err(io("look for a dataset's header"))? {
                    let id = header_id(&*below).map_err(io("read a dataset's header"))?;
                    let id = id.ok_or_else(|| damaged("dataset header", stored))?;
                    let content = dir_content(Sealed::Is(digest_of_dataset(&id)));
                    return Ok(Taken { st, row: row(&st, content, Sealed::Nothing), dir: None });
                }
                let (record, id) = self.record(&*below, stored)?;
                opened = Some(below);
                (dir_content(record), Holder::Dir(id))
            }
        };
        let attributes = self.attributes(&**dir, name, &st, holder, stored)?;
        Ok(Taken { st, row: row(&st, content, attributes), dir: opened })
    }

    /// The root's row.
    ///
    /// # Errors
    /// As [`Taker::entry`].
    pub fn root(&self) -> Result<Row> {
        let root = &self.vault.dirs.root().handle;
        let st = self.vault.root_permissions.shown().over(root.stat().map_err(io("stat the root"))?);
        let (record, id) = self.record(&**root, Path::new(""))?;
        let list = || root.list_xattr();
        let attrs = shown(list, |attr| root.get_xattr(attr))?;
        let attributes = self.verified(&attrs, Holder::Dir(id), Path::new(""))?;
        Ok(row(&st, dir_content(record), attributes))
    }

    fn file(&self, dir: &dyn BackendDir, name: &OsStr, st: &Stat, stored: &Path) -> Result<FileRow> {
        let opened = dir.open_same(name, st, !self.files.read_only).map_err(io("open"))?;
        let backing = opened.ok_or(VaultError::Stale)?;
        let file = File::open_with_len(self.files.clone(), backing, st.len, &stored.display().to_string())?;
        if st.len == 0 {
            file.inherit(self.vault.read_names(dir).map_err(|_| damaged("directory record", stored))?.profile())?;
        }
        let found = file.survey(self.shape)?;
        Ok(FileRow { root: found.root, size: found.size, profile: found.profile, ..FileRow::default() })
    }

    fn link(&self, dir: &dyn BackendDir, name: &OsStr, stored: &Path) -> Result<Sealed> {
        let ring = &self.vault.ctx.ring;
        let link = symlink::shown(ring, dir, name).map_err(io("read a link"))?;
        symlink::open_shown(ring, &link).map_err(|_| damaged("link target", stored))?;
        Ok(Sealed::Is(link.digest()))
    }

    /// The digest of a directory's record, and the id in it.
    fn record(&self, dir: &dyn BackendDir, stored: &Path) -> Result<(Sealed, Option<[u8; 16]>)> {
        let opened = self.vault.record_text(dir).and_then(|text| {
            let digest = text.as_deref().map_or(Digest::NONE, digest_of_text);
            Ok((digest, self.vault.names_of_text(text)?))
        });
        let (digest, names) = opened.map_err(|_| damaged("directory record", stored))?;
        Ok((is(digest), names.dir_id()))
    }

    fn attributes(&self, dir: &dyn BackendDir, name: &OsStr, st: &Stat, of: Holder, stored: &Path) -> Result<Sealed> {
        let held = dir.hold_same(name, st).map_err(io("hold"))?.ok_or(VaultError::Stale)?;
        let attrs = shown(|| held.list_xattr(), |attr| held.get_xattr(attr))?;
        self.verified(&attrs, of, stored)
    }

    fn verified(&self, attrs: &StoredAttrs, of: Holder, stored: &Path) -> Result<Sealed> {
        let ring = &self.vault.ctx.ring;
        let opens = |(attr, value): (&OsString, &Vec<u8>)| {
            matches!(open_name(ring, attr), Some(Ok(_))) && open_value(ring, attr, of, value).is_ok()
        };
        match attrs.iter().all(opens) {
            true => Ok(is(digest_of_attributes(attrs))),
            false => Err(damaged("attribute", stored)),
        }
    }
}

fn dir_content(record: Sealed) -> Content {
    Content::Dir { record, parent: ObjectId::ROOT, name: Token([0; 16]) }
}

fn row(st: &Stat, content: Content, attributes: Sealed) -> Row {
    Row { mode: st.mode & 0o7777, uid: st.uid, gid: st.gid, links: 1, content, attributes }
}

pub(super) fn damaged(what: &'static str, stored: &Path) -> VaultError {
    VaultError::Damaged { what, stored: stored.display().to_string() }
}

/// All sealed attributes in the store. One that is removed meanwhile is left out.
///
/// # Errors
/// Those of the store.
pub(crate) fn shown(
    list: impl FnOnce() -> stdio::Result<Vec<OsString>>,
    get: impl Fn(&OsStr) -> stdio::Result<Vec<u8>>,
) -> Result<StoredAttrs> {
    let listed = match list() {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => Vec::new(),
        listed => listed.map_err(io("list attributes"))?,
    };
    let mut attrs = StoredAttrs::new();
    for attr in listed.into_iter().filter(|attr| attr.as_bytes().starts_with(XATTR_PREFIX.as_bytes())) {
        match get(&attr) {
            Ok(value) => drop(attrs.insert(attr, value)),
            Err(e) if e.raw_os_error() == Some(libc::ENODATA) => {}
            Err(e) => return Err(io("get an attribute")(e)),
        }
    }
    Ok(attrs)
}
