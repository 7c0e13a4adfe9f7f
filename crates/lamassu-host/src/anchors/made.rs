//! A new anchor, for a vault that is being made.

use super::place::{make_dir_of, refuse_within, settled};
use super::{Access, Anchors, Open};
use crate::Result;
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::DiskTable;
use lamassu_anchor::{Anchor, AnchorError, Digest, ObjectId, Revision, Row, Token, TokenKey, VaultRow, export};
use lamassu_crypto::wrap;
use lamassu_format::header::{NameMode, VaultHeader};
use lamassu_format::name;
use lamassu_format::root::RootRecord;
use lamassu_store::{Backend, BackendDir};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Degree of trees unless a person says another: 16 children, 512 bytes a record.
pub const DEGREE_LOG2: u8 = 4;

/// What a new vault's anchor begins with.
#[derive(Clone, Copy, Debug)]
pub struct NewAnchor {
    /// the vault's id
    pub vault: [u8; 16],
    /// log2 of the trees' degree, 1 to 8
    pub degree_log2: u8,
    /// whether files have a root over their blocks, too
    pub blocks: bool,
    /// what the root of its tree says of itself
    pub root: RootRecord,
    /// the digest of the root's directory record
    pub record: Digest,
    /// the digest of the record of the root's permissions
    pub permissions: Digest,
}

impl NewAnchor {
    /// Of a vault whose tree was just made, empty.
    ///
    /// # Errors
    /// Those of the store.
    pub fn of(header: &VaultHeader, backend: &dyn Backend, root: RootRecord) -> Result<NewAnchor> {
        let record = match header.names() {
            NameMode::Encrypted => digest_in_root(backend, name::DIR_RECORD)?,
            // There is no record.
            NameMode::Plain => Digest::NONE,
        };
        let permissions = digest_in_root(backend, name::ROOT_RECORD)?;
        Ok(NewAnchor { vault: header.id(), degree_log2: DEGREE_LOG2, blocks: false, root, record, permissions })
    }
}

/// The digest of a record in the root, a sealed link target, or a file where the store has no links; of one that is not
/// there none.
fn digest_in_root(backend: &dyn Backend, record: &str) -> Result<Digest> {
    match text_of(&*backend.root(), OsStr::new(record)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Digest::NONE),
        Err(source) => Err(crate::Error::Backing { op: "read", path: record.into(), source }),
        Ok(text) => Ok(Digest(wrap::sha256(&[&[0x02], &text[..]].concat()))),
    }
}

/// The text of a record, whichever way the store keeps it.
fn text_of(dir: &dyn BackendDir, name: &OsStr) -> io::Result<Vec<u8>> {
    const TEXT_MAX: usize = 8192;
    match dir.read_link(name) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let mut text = vec![0; TEXT_MAX];
            let len = dir.open_file(name, false)?.read_at(0, &mut text)?;
            text.truncate(len);
            Ok(text)
        }
        read => read.map(OsStringExt::into_vec),
    }
}

/// An anchor that was just made. Dropped before it is [kept](Made::keep), it is taken back.
#[must_use = "it is taken back when it is dropped"]
pub struct Made {
    anchors: Anchors,
    vault: [u8; 16],
    path: PathBuf,
    /// `None` only while it is dropped
    anchor: Option<Arc<Anchor>>,
    is_kept: bool,
}

impl Made {
    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is for is done.
    pub fn keep(mut self) -> PathBuf {
        self.is_kept = true;
        self.path.clone()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.anchor = None;
        if !self.is_kept {
            // Nothing leads to it: what cannot be removed does no harm.
            let _ = std::fs::remove_file(&self.path);
            let _ = self.anchors.forget(&self.vault);
        }
    }
}

impl Anchors {
    /// Makes the anchor of a vault whose store is in `dir`, in a file that must not exist.
    ///
    /// # Errors
    /// [`AnchorError`]; [`crate::Error::AnchorInStore`], [`crate::Error::Local`], [`crate::Error::NoRandom`].
    pub fn make(&self, new: &NewAnchor, file: &Path, dir: &Path) -> Result<Made> {
        let is = |digest: Digest| if digest.is_none() { Sealed::Nothing } else { Sealed::Is(digest) };
        let tokens = TokenKey::random()?;
        let vault = VaultRow {
            vault: new.vault,
            revision: Revision(1),
            next_object: ObjectId(ObjectId::ROOT.0 + 1),
            next_intent: 1,
            session: 0,
            degree_log2: new.degree_log2,
            blocks: new.blocks,
            tokens,
            header: Sealed::Nothing,
            history: (0, Digest::NONE),
            root_permissions: is(new.permissions),
        };
        let content = Content::Dir { record: is(new.record), parent: ObjectId::ROOT, name: Token([0; 16]) };
        let RootRecord { mode, uid, gid } = new.root;
        let root = Row { mode, uid, gid, links: 1, content, attributes: Sealed::Nothing };
        self.made(new.vault, file, dir, |table| Anchor::create(table, vault, root))
    }

    /// Makes the anchor of a copy of a vault: the same objects, the same names.
    ///
    /// # Errors
    /// As [`Anchors::make`].
    pub fn make_copy(&self, of: &DiskTable, vault: [u8; 16], file: &Path, dir: &Path) -> Result<Made> {
        self.made(vault, file, dir, |table| {
            export::copy_to(of, &*table, vault)?;
            Anchor::open(table, &vault)
        })
    }

    pub(super) fn made(
        &self,
        vault: [u8; 16],
        file: &Path,
        dir: &Path,
        fill: impl FnOnce(Arc<DiskTable>) -> Result<Anchor, AnchorError>,
    ) -> Result<Made> {
        // A directory that a person names is a person's to make.
        if file.parent() == self.dir() {
            make_dir_of(file)?;
        }
        refuse_within(file, dir)?;
        let file = &settled(file)?;
        let table = DiskTable::create(file)?;
        let mut made = Made { anchors: self.clone(), vault, path: file.clone(), anchor: None, is_kept: false };
        let anchor = Arc::new(fill(Arc::new(table))?);
        self.remember(&vault, file)?;
        self.opened().insert(vault, Open { anchor: Arc::downgrade(&anchor), access: Access::Write });
        made.anchor = Some(anchor);
        Ok(made)
    }
}
