//! Directory records, sealed anew or with another profile, and the batch in which records and links are replaced:
//! staged, made durable together by one barrier, then renamed into place. Without its record a directory's names are
//! lost, so a new record is durable before it replaces the old one.

use super::RekeyRun;
use super::links::StagedLink;
use crate::digests::digest_of_text;
use crate::error::io;
use crate::event::IntegrityKind;
use crate::stored::replace;
use crate::{Ino, Result, Vault, VaultError};
use crate::{names, record};
use lamassu_anchor::{Digest, SealedPart};
use lamassu_crypto::SecretBytes;
use lamassu_crypto::outer::RecordKind;
use lamassu_format::name::{self, COMPANION_PREFIX, DIR_RECORD};
use lamassu_format::{DirRecord, Profile};
use lamassu_store::BackendDir;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// Replacements that share a barrier.
const BATCH_MAX: usize = 256;

/// A record that is made and not yet put into place. Holds a reference to its node.
pub(super) struct StagedRecord {
    ino: Ino,
    temp: OsString,
    /// The digests of the record that it replaces, and of itself.
    digests: (Digest, Digest),
    /// Its profile.
    profile: Profile,
}

enum Staged {
    Record(StagedRecord),
    Link(StagedLink),
}

impl Staged {
    fn ino(&self) -> Ino {
        match self {
            Staged::Record(record) => record.ino,
            Staged::Link(link) => link.ino,
        }
    }
}

/// Replacements that wait for the barrier.
#[derive(Default)]
pub(super) struct Batch {
    /// A directory below `lamassu.staging`, and its name there. What a crash leaves in it is cleared like everything
    /// there.
    dir: Option<(Arc<dyn BackendDir>, OsString)>,
    next: u64,
    records: Vec<StagedRecord>,
    links: Vec<StagedLink>,
}

impl Batch {
    pub fn is_full(&self) -> bool {
        self.records.len() + self.links.len() >= BATCH_MAX
    }

    /// The directory to stage in, and a fresh name there.
    pub fn place(&mut self, vault: &Vault) -> Result<(Arc<dyn BackendDir>, OsString)> {
        let dir = match &self.dir {
            Some((dir, _)) => dir.clone(),
            None => {
                let (dir, name) = vault.staged_dir()?;
                self.dir = Some((dir.clone(), name));
                dir
            }
        };
        self.next += 1;
        // A name of the kind that `staging` clears with a directory.
        Ok((dir, format!("{COMPANION_PREFIX}{}", self.next).into()))
    }

    pub fn add_link(&mut self, link: StagedLink) {
        self.links.push(link);
    }

    /// Drops the waiting replacements, and the directory.
    pub fn clear(&mut self, vault: &Vault) {
        for ino in self.records.drain(..).map(|record| record.ino).chain(self.links.drain(..).map(|l| l.ino)) {
            vault.forget(ino, 1);
        }
        if let Some((dir, name)) = self.dir.take() {
            drop(dir);
            vault.drop_staged_dir(&name);
        }
    }
}

impl RekeyRun<'_> {
    /// Seals the record of a directory anew if it is under an older key.
    pub(super) fn stage_record(&mut self, ino: Ino) -> Result<()> {
        let (vault, ring) = (self.vault, &self.vault.ctx.ring);
        let (sealed, old) = {
            let _tree = vault.tree.read();
            let dir = vault.dir(ino)?;
            let text = record::read_text(&*dir.handle, OsStr::new(DIR_RECORD)).map_err(io("read a record"))?;
            vault.verify_record(dir.object, Some(&text), &|| vault.tag(ino))?;
            (name::decode(&text).ok_or_else(|| damaged(vault, ino))?, digest_of_text(&text))
        };
        let is_newest = ring.record_epoch(RecordKind::Directory, &[], &sealed) == Some(ring.newest().1);
        if is_newest && self.choice.is_none() {
            return Ok(());
        }
        let content = ring.open_record(RecordKind::Directory, &[], &sealed).map_err(|_| damaged(vault, ino))?;
        let content = SecretBytes::new(content);
        let record = DirRecord::parse(content.expose()).map_err(|_| damaged(vault, ino))?;
        let profile = self.chosen(ino, record.profile)?;
        if is_newest && profile == record.profile {
            return Ok(());
        }
        let text = names::seal_record(ring, &DirRecord { profile, ..record })?;
        let _pass = vault.change()?;
        let (dir, temp) = self.batch.place(vault)?;
        record::write_text(&*dir, &temp, &text).map_err(io("create a directory record"))?;
        vault.nodes.lock().add_reference(ino);
        self.batch.records.push(StagedRecord { ino, temp, digests: (old, digest_of_text(text.as_bytes())), profile });
        Ok(())
    }

    /// Issues the barrier, and puts all waiting replacements into place.
    pub(super) fn flush(&mut self) -> Result<()> {
        let (records, links) = (std::mem::take(&mut self.batch.records), std::mem::take(&mut self.batch.links));
        if records.is_empty() && links.is_empty() {
            return Ok(());
        }
        let Some((staged, _)) = self.batch.dir.clone() else { return Ok(()) };
        let mut done = self.vault.change().and_then(|_pass| self.vault.sync_store());
        let each = records.into_iter().map(Staged::Record).chain(links.into_iter().map(Staged::Link));
        for replacement in each {
            let ino = replacement.ino();
            // After an error that ends the run, the rest only gives its references back.
            done = done.and_then(|()| {
                let placed = match replacement {
                    Staged::Record(record) => self.place_record(&*staged, &record),
                    Staged::Link(link) => self.place_link(&*staged, link),
                };
                self.note(ino, placed)
            });
            self.vault.forget(ino, 1);
        }
        done
    }

    fn place_record(&mut self, staged: &dyn BackendDir, record: &StagedRecord) -> Result<()> {
        let vault = self.vault;
        let _pass = vault.change()?;
        let _tree = vault.tree.write();
        let dir = vault.dir(record.ino)?;
        let step = || replace(staged, &record.temp, &*dir.handle, OsStr::new(DIR_RECORD));
        vault.replacing(dir.object, SealedPart::Content, record.digests, &|| vault.tag(record.ino), step)?;
        if self.choice.is_some() {
            vault.profile_changed(&dir, record.profile)?;
        }
        self.walk.done.records += 1;
        Ok(())
    }
}

fn damaged(vault: &Vault, ino: Ino) -> VaultError {
    vault.tell_at(ino, IntegrityKind::DirectoryRecord, "a directory record does not open, and is not re-keyed");
    VaultError::Damaged { what: "directory record", stored: vault.tag(ino) }
}
