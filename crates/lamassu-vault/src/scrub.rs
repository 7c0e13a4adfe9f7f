//! A scrub without keys: the whole store is compared with the anchor (`docs/freshness.md`, section 6a).
//!
//! It has no key of the vault, so it sees only stored names, and their tokens. It compares every entry and its kind,
//! every directory record, link target and attribute by its digest, and every file with its row. Each finding is an
//! integrity event. It changes nothing and repairs nothing. Datasets have anchors of their own: it reports where they
//! lie, and does not enter them.
//!
//! Never: opens a seal, follows a link, takes what the store shows for the newest.

mod told;

pub use told::{RowDigest, ScrubFinding, ScrubWatch, Scrubbed};

use crate::anchored::TreeFiles;
use crate::digests::{
    StoredAttrs, digest_of_attributes, digest_of_dataset, digest_of_link, digest_of_text, object_kind,
};
use crate::error::{io, is_not_found};
use crate::event::{EventRange, Events, FoundBy, IntegrityEvent, IntegrityKind};
use crate::inode::StoreId;
use crate::record::read_text;
use crate::walk::{Failed, Met, Visit, has_header, header_id, is_entry, walk};
use crate::{Kind, Result};
use lamassu_anchor::judge::{self, EntryVerdict};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::{Anchor, AnchorError, Digest, EntryPlace, EntryRow, Intent, ObjectId, Row, Token};
use lamassu_crypto::name::NameKey;
use lamassu_format::header::{NameMode, VaultHeader};
use lamassu_format::name::{
    DIR_RECORD, LINK_PREFIX, ROOT_RECORD, Stored, XATTR_PREFIX, classify, companion_name, decode,
};
use lamassu_format::tree::Shape;
use lamassu_format::{BlockNo, PageNo};
use lamassu_store::backend::{Listed, Stat};
use lamassu_store::file::{FileScrub, ScrubContext, StaleRanges};
use lamassu_store::{BackendDir, BackendEntry, BackendFile};
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Compares the store below `root` with an anchor. The header is trusted as far as the anchor knows it. `events` gets
/// the findings, under the id of this vault.
///
/// # Errors
/// Those of the anchor and of the store's root. A failure in a directory or file is a finding of its own.
pub fn scrub(
    root: Arc<dyn BackendDir>,
    header: &VaultHeader,
    anchor: &Anchor,
    events: &Events,
    watch: &mut dyn ScrubWatch,
) -> Result<Scrubbed> {
    let shape = Shape::new(anchor.degree()).unwrap_or_default();
    let trees = Arc::new(TreeFiles::new(root.clone(), true));
    let intents = anchor.intents()?.into_values();
    let going = intents.filter_map(|intent| if let Intent::Remove { at, .. } = intent { Some(at) } else { None });
    let mut scrub = Scrub {
        anchor,
        names: header.names(),
        context: ScrubContext { geometry: header.geometry(), shape, trees },
        going: going.collect(),
        here: None,
        seen: HashSet::new(),
        events: events.of_vault(&header.id()),
        watch,
        done: Scrubbed::default(),
    };
    scrub.root_permissions(&*root);
    walk(Met::first(root, PathBuf::new(), Recorded { object: ObjectId::ROOT, at: None }), &mut scrub)?;
    Ok(scrub.done)
}

struct Scrub<'a> {
    anchor: &'a Anchor,
    names: NameMode,
    context: ScrubContext,
    /// Places of removals that the store has not carried out.
    going: HashSet<EntryPlace>,
    /// The current entry, and its place.
    here: Option<(EntryPlace, EntryRow)>,
    /// Files with several names that were verified, with the inode that the name leads to: the store can make a name
    /// lead to another inode.
    seen: HashSet<(ObjectId, StoreId)>,
    events: Events,
    watch: &'a mut dyn ScrubWatch,
    done: Scrubbed,
}

/// A directory as the anchor had it when its parent was walked.
#[derive(Clone, Copy)]
struct Recorded {
    object: ObjectId,
    /// Its entry; `None`: the root.
    at: Option<(EntryPlace, EntryRow)>,
}

impl Visit for Scrub<'_> {
    type Passed = Recorded;
    /// Recorded entries that were not found yet.
    type Here = BTreeMap<Token, EntryRow>;
    type Error = crate::VaultError;

    fn enter(&mut self, at: &Met<Recorded>, dir: &Arc<dyn BackendDir>) -> Result<Option<Self::Here>> {
        let object = at.passed.object;
        let Some(row) = self.row(object)? else { return Ok(None) };
        // Another directory may have been opened by this name by now, so its content is not compared with this row. A
        // writer records that a directory leaves before it leaves.
        if !self.is_still_there(&at.passed)? {
            self.done.unfinished += 1;
            return Ok(None);
        }
        self.here = at.passed.at;
        let gone_into = self.directory(at, dir, &row);
        self.here = None;
        if gone_into { Ok(Some(self.anchor.entries(object)?)) } else { Ok(None) }
    }

    fn entry(
        &mut self,
        at: &Met<Recorded>,
        dir: &Arc<dyn BackendDir>,
        here: &mut Self::Here,
        entry: &Listed,
    ) -> Result<Option<Recorded>> {
        if !is_entry(self.names, &entry.name) || self.watch.is_stopped() {
            return Ok(None);
        }
        let above = at.passed.object;
        let place = EntryPlace { dir: above, name: self.anchor.token(above, entry.name.as_bytes()) };
        let (recorded, path) = (here.remove(&place.name), at.stored.join(&entry.name));
        let st = match dir.stat_entry(&entry.name) {
            Ok(st) => st,
            Err(error) if is_not_found(&error) => {
                if let Some(recorded) = recorded.filter(|recorded| !self.has_gone(place, recorded)) {
                    self.tell_missing(path, &recorded);
                }
                return Ok(None);
            }
            Err(error) => {
                self.failed_at(path, &error);
                return Ok(None);
            }
        };
        match judge::entry(recorded.as_ref(), Some(object_kind(st.kind))) {
            EntryVerdict::Current => {}
            EntryVerdict::Unrecorded if self.going.contains(&place) => return Ok(None),
            EntryVerdict::Unrecorded | EntryVerdict::Nothing if self.is_unfinished(&place)? => return Ok(None),
            EntryVerdict::Unrecorded | EntryVerdict::Nothing => {
                self.tell(IntegrityKind::Unrecorded, path, "the anchor knows no such entry");
                return Ok(None);
            }
            EntryVerdict::OtherKind if recorded.is_some_and(|recorded| self.is_moving(&place, &recorded)) => {
                self.done.unfinished += 1;
                return Ok(None);
            }
            EntryVerdict::Missing | EntryVerdict::OtherKind => {
                self.tell(IntegrityKind::OtherKind, path, "another kind of thing is there");
                return Ok(None);
            }
        }
        let Some(recorded) = recorded else { return Ok(None) };
        self.done.entries += 1;
        if !self.has_name(&**dir, &entry.name) && self.anchor.entry(&place)? == Some(recorded) {
            let what = "its companion, which holds the long name, is missing or of another name";
            self.tell(IntegrityKind::Companion, path.clone(), what);
        }
        if st.kind == Kind::Dir {
            // The directory that lay here before would not match the row, nor would its content.
            let is_moving = self.is_moving(&place, &recorded);
            self.done.unfinished += u64::from(is_moving);
            self.done.unverified_dirs += u64::from(is_moving);
            let below = Recorded { object: recorded.object, at: Some((place, recorded)) };
            return Ok(Some(below).filter(|_| !is_moving));
        }
        self.here = Some((place, recorded));
        let Some(row) = self.row(recorded.object)? else { return Ok(None) };
        self.object(&**dir, &entry.name, (&path, &st), recorded.object, &row);
        self.here = None;
        Ok(None)
    }

    fn leave(&mut self, at: &Met<Recorded>, dir: &Arc<dyn BackendDir>, mut here: Self::Here) {
        // Not all entries were visited.
        if self.watch.is_stopped() {
            return;
        }
        let object = at.passed.object;
        // Entries that were elsewhere during the listing may have come back.
        if !here.is_empty() {
            for listed in dir.read_dir().unwrap_or_default() {
                here.remove(&self.anchor.token(object, listed.name.as_bytes()));
            }
        }
        for (token, entry) in here {
            if self.has_gone(EntryPlace { dir: object, name: token }, &entry) || self.has_left(&at.passed) {
                continue;
            }
            let name: String = token.0.iter().map(|byte| format!("{byte:02x}")).collect();
            self.tell_missing(at.stored.join(format!("?{name}")), &entry);
        }
    }

    fn failed(&mut self, at: &Met<Recorded>, _what: Failed, error: stdio::Error) -> Result<()> {
        if at.is_root() {
            return Err(io("list the vault")(error));
        }
        if !self.has_left(&at.passed) {
            self.failed_at(at.stored.clone(), &error);
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        self.watch.is_stopped()
    }
}

impl Scrub<'_> {
    /// Whether the anchor still has a directory where its entry was read.
    fn is_still_there(&self, dir: &Recorded) -> Result<bool> {
        let Some((place, entry)) = dir.at else { return Ok(true) };
        Ok(self.anchor.entry(&place)?.is_some_and(|now| now.object == entry.object))
    }

    /// Whether a directory has been removed or moved since its entry was read, or is being moved.
    fn has_left(&mut self, dir: &Recorded) -> bool {
        dir.at.is_some_and(|(place, entry)| self.has_gone(place, &entry))
    }

    /// Compares a directory with its row. False: do not enter it.
    fn directory(&mut self, at: &Met<Recorded>, dir: &Arc<dyn BackendDir>, row: &Row) -> bool {
        let object = at.passed.object;
        if !at.is_root() && has_header(&**dir).unwrap_or(false) {
            self.done.datasets += 1;
            let id = header_id(&**dir).ok().flatten();
            let shown = id.map_or(Digest::NONE, |id| digest_of_dataset(&id));
            match (id, &row.content) {
                (Some(id), Content::Dir { record, .. }) if record.is_current(shown) => {
                    self.watch.dataset(&at.stored, id);
                }
                _ => {
                    let what = "another dataset lies here, or one in a directory's place";
                    self.tell_stale(object, row, at.stored.clone(), what);
                }
            }
            return false;
        }
        if let Content::Dir { record, .. } = row.content {
            let shown = match read_text(&**dir, OsStr::new(DIR_RECORD)) {
                Ok(text) => digest_of_text(&text),
                Err(_) => Digest::NONE,
            };
            if !record.is_current(shown) {
                self.tell_stale(object, row, at.stored.join(DIR_RECORD), "the directory's record");
            }
        }
        let list = || dir.list_xattr();
        self.attributes(&at.stored, (object, row), list, |attr| dir.get_xattr(attr));
        true
    }

    /// Compares the record of the root's permissions. A writer may be replacing it.
    fn root_permissions(&mut self, root: &dyn BackendDir) {
        let known = || self.anchor.vault_now().map(|vault| vault.root_permissions);
        let before = known();
        let shown = read_text(root, OsStr::new(ROOT_RECORD)).map_or(Digest::NONE, |text| digest_of_text(&text));
        match before {
            Ok(before) if before.is_current(shown) => {}
            Ok(before) if known().is_ok_and(|now| now != before) => self.done.unfinished += 1,
            Ok(_) | Err(_) => {
                self.tell(IntegrityKind::Stale, ROOT_RECORD.into(), "the record of the root's permissions")
            }
        }
    }

    /// The row of an object that a recently read entry names. `None`: a writer has removed it since.
    fn row(&mut self, object: ObjectId) -> Result<Option<Row>> {
        match self.anchor.row(object) {
            Err(AnchorError::Unknown { .. }) if self.anchor.is_in_use_now()? => {
                self.done.unfinished += 1;
                Ok(None)
            }
            row => Ok(row.map(Some)?),
        }
    }

    fn tell_missing(&mut self, path: PathBuf, entry: &EntryRow) {
        let what = format!("an entry that the anchor knows is not there (object {})", entry.object);
        self.tell(IntegrityKind::Missing, path, what);
    }

    fn tell(&mut self, kind: IntegrityKind, path: PathBuf, what: impl Into<String>) {
        self.tell_range(kind, path, None, what);
    }

    fn tell_range(&mut self, kind: IntegrityKind, path: PathBuf, range: Option<EventRange>, what: impl Into<String>) {
        let what = what.into();
        self.done.findings += 1;
        let event = kind.at(path.display().to_string(), &*what).by(FoundBy::Scrub);
        self.events.found(IntegrityEvent { range, ..event });
        self.watch.found(&ScrubFinding { kind: Some(kind), path, what });
    }

    /// Reports an object that differs from its row, unless a writer has changed the row since it was read, or is moving
    /// an entry to or from there: the anchor records both before the store changes.
    fn tell_stale(&mut self, object: ObjectId, row: &Row, path: PathBuf, what: impl Into<String>) {
        self.tell_stale_range(object, row, path, None, what);
    }

    fn tell_stale_range(
        &mut self,
        object: ObjectId,
        row: &Row,
        path: PathBuf,
        range: Option<EventRange>,
        what: impl Into<String>,
    ) {
        let is_changing =
            self.anchor.is_in_use_now().unwrap_or(false) && !self.anchor.row(object).is_ok_and(|now| now == *row);
        match is_changing || self.here.is_some_and(|(place, entry)| self.is_moving(&place, &entry)) {
            true => self.done.unfinished += 1,
            false => self.tell_range(IntegrityKind::Stale, path, range, what),
        }
    }

    /// Whether an entry that was not recorded when its directory was listed may be a writer's. A writer records that it
    /// uses the vault before it makes anything, and records all entries before it ends. So this is asked after the
    /// entry was seen, and in this order.
    fn is_unfinished(&mut self, place: &EntryPlace) -> Result<bool> {
        let is_in_use = self.anchor.is_in_use_now()?;
        self.done.unfinished += u64::from(is_in_use);
        Ok(is_in_use || self.anchor.entry(place)?.is_some())
    }

    /// Whether an absent entry has been removed or moved meanwhile, or is about to be moved there: the anchor records
    /// both before the store changes.
    fn has_gone(&mut self, place: EntryPlace, entry: &EntryRow) -> bool {
        let now = self.anchor.entry(&place).unwrap_or(Some(*entry));
        if now.is_none_or(|now| now.object != entry.object) {
            return true;
        }
        let is_moving = self.is_moving(&place, entry);
        self.done.unfinished += u64::from(is_moving);
        is_moving
    }

    /// Whether a writer is moving an entry to or from a place, or was when it was interrupted.
    fn is_moving(&self, place: &EntryPlace, entry: &EntryRow) -> bool {
        let moves = |intent: Intent| matches!(intent, Intent::Move { from, to, .. } if from == *place || to == *place);
        let is_other = || self.anchor.entry(place).is_ok_and(|now| now != Some(*entry));
        self.anchor.is_in_use_now().unwrap_or(false)
            && (is_other() || self.anchor.intents().is_ok_and(|intents| intents.into_values().any(moves)))
    }

    /// Whether the companion of a long name fits the stored name. That takes no key: a hash binds the two.
    fn has_name(&self, dir: &dyn BackendDir, stored: &OsStr) -> bool {
        let Stored::Long(hash) = classify(self.names, stored.as_bytes()) else { return true };
        let text = read_text(dir, OsStr::new(&companion_name(&hash)));
        let sealed = text.ok().and_then(|text| decode(&text));
        sealed.is_some_and(|sealed| NameKey::hash(&sealed) == hash)
    }

    fn failed_at(&mut self, path: PathBuf, error: &stdio::Error) {
        self.done.failures += 1;
        self.watch.found(&ScrubFinding { kind: None, path, what: error.to_string() });
    }

    /// Compares an entry that is not a directory with its row.
    fn object(&mut self, dir: &dyn BackendDir, name: &OsStr, (path, st): (&Path, &Stat), object: ObjectId, row: &Row) {
        match &row.content {
            Content::File(file) => {
                let digest = RowDigest::of(row);
                let has_more = row.links > 1 && !self.seen.insert((object, StoreId::from(st)));
                if has_more || (row.links <= 1 && self.watch.is_verified(object, digest)) {
                    self.done.skipped += u64::from(!has_more);
                    return;
                }
                let before = self.done;
                let mut read = |bytes| match self.watch.is_stopped() {
                    true => Err(stdio::ErrorKind::Interrupted.into()),
                    false => {
                        self.watch.read(bytes);
                        Ok(())
                    }
                };
                let mut look = || {
                    let opened = dir.open_same(name, st, false)?;
                    let backing = opened.ok_or_else(|| stdio::Error::from_raw_os_error(libc::ESTALE))?;
                    let found = self.context.file(&*backing, object, file, &mut read)?;
                    Ok((backing, found))
                };
                let is_stale = |found: &FileScrub| found.stale_pages.count + found.stale_blocks.count > 0;
                let scrubbed = match look() {
                    // A writer may have been in the middle of a write.
                    Ok((_, found)) if is_stale(&found) && self.anchor.is_in_use_now().unwrap_or(false) => look(),
                    scrubbed => scrubbed,
                };
                match scrubbed {
                    Ok((backing, found)) => self.file(path, &*backing, (object, row), &found),
                    Err(_) if self.watch.is_stopped() => return,
                    Err(_) if self.here.is_some_and(|(place, entry)| self.is_moving(&place, &entry)) => {
                        self.done.unfinished += 1;
                    }
                    Err(error) => self.failed_at(path.to_owned(), &error),
                }
                if self.has_verified_all_since(&before) {
                    self.watch.verified(object, digest);
                }
            }
            Content::Link(target) => {
                let is_newest = self.link_digests(dir, name).iter().any(|digest| target.is_current(*digest));
                // A long target lies in two files. While a writer replaces both, they may belong to different targets.
                let is_replaced = matches!(target, Sealed::Becomes { .. });
                match is_newest {
                    true => {}
                    false if is_replaced && self.anchor.is_in_use_now().unwrap_or(false) => self.done.unfinished += 1,
                    false => self.tell_stale(object, row, path.to_owned(), "the target of the symbolic link"),
                }
            }
            Content::Char(device) | Content::Block(device) if *device != st.rdev => {
                self.tell(IntegrityKind::Stale, path.to_owned(), "the device number");
            }
            Content::Dir { .. } | Content::Char(_) | Content::Block(_) | Content::Fifo | Content::Socket => {
                if let Ok(held) = dir.hold(name) {
                    self.held_attributes(path, (object, row), &*held);
                }
            }
        }
    }

    fn file(&mut self, path: &Path, backing: &dyn BackendFile, (object, row): (ObjectId, &Row), found: &FileScrub) {
        let done = &mut self.done;
        done.files += 1;
        done.pages += found.pages;
        done.blocks += found.blocks;
        done.open_pages += found.open_pages;
        done.unverified_blocks += found.unverified_blocks;
        let is_open = row.file().is_some_and(|file| file.open.is_some());
        done.open_files += u64::from(is_open);
        done.files_without_blocks += u64::from(!found.has_blocks);
        let has_content = is_open || row.file().is_some_and(|file| !file.root.is_none());
        done.files_with_unverified_blocks += u64::from(!found.has_blocks && has_content && self.anchor.has_blocks());
        let geometry = &self.context.geometry;
        let pages = found.stale_pages.runs.first();
        let pages = pages.map(|(first, last)| EventRange::of_pages(geometry, PageNo(*first), PageNo(*last)));
        let blocks = found.stale_blocks.runs.first();
        let blocks = blocks.map(|(first, last)| EventRange::of_blocks(geometry, BlockNo(*first), BlockNo(*last)));
        for (what, stale, range) in [("page", &found.stale_pages, pages), ("block", &found.stale_blocks, blocks)] {
            if stale.count > 0 {
                self.tell_stale_range(object, row, path.to_owned(), range, shown_ranges(what, stale));
            }
        }
        self.attributes(path, (object, row), || backing.list_xattr(), |attr| backing.get_xattr(attr));
    }

    /// Whether everything verified since `before` matches the anchor.
    fn has_verified_all_since(&self, before: &Scrubbed) -> bool {
        let unverified_in = |done: &Scrubbed| {
            let unverified = (done.open_pages, done.unverified_blocks, done.files_with_unverified_blocks);
            (done.findings, done.failures, done.unfinished, unverified)
        };
        unverified_in(&self.done) == unverified_in(before)
    }

    fn held_attributes(&mut self, path: &Path, of: (ObjectId, &Row), held: &dyn BackendEntry) {
        self.attributes(path, of, || held.list_xattr(), |attr| held.get_xattr(attr));
    }

    fn attributes(
        &mut self,
        path: &Path,
        (object, row): (ObjectId, &Row),
        list: impl FnOnce() -> stdio::Result<Vec<std::ffi::OsString>>,
        get: impl Fn(&OsStr) -> stdio::Result<Vec<u8>>,
    ) {
        // A store without attributes has none.
        let listed = list().unwrap_or_default().into_iter();
        let own = listed.filter(|attr| attr.as_bytes().starts_with(XATTR_PREFIX.as_bytes()));
        let shown: StoredAttrs = own.filter_map(|attr| Some((attr.clone(), get(&attr).ok()?))).collect();
        if !judge::attributes(row, digest_of_attributes(&shown)) {
            self.tell_stale(object, row, path.to_owned(), "the extended attributes");
        }
    }

    /// The possible digests of a link target. The rest of a long target lies under a name that only keys reveal, so
    /// each rest in the directory is tried.
    fn link_digests(&self, dir: &dyn BackendDir, name: &OsStr) -> Vec<Digest> {
        let Ok(text) = read_text(dir, name) else { return Vec::new() };
        if text.first() != Some(&b'.') {
            return vec![digest_of_link(&text, None)];
        }
        let rests = dir.read_dir().unwrap_or_default().into_iter();
        let rests = rests.filter(|entry| entry.name.as_bytes().starts_with(LINK_PREFIX.as_bytes()));
        rests.filter_map(|rest| Some(digest_of_link(&text, Some(&read_text(dir, &rest.name).ok()?)))).collect()
    }
}

fn shown_ranges(what: &str, stale: &StaleRanges) -> String {
    let runs = stale.runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    let more = if stale.runs.len() < stale.count as usize && stale.runs.len() == 64 { " and more" } else { "" };
    format!("{} stale {what}s: {}{more}", stale.count, runs.collect::<Vec<_>>().join(", "))
}
