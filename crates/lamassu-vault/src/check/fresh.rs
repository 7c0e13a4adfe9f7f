//! What a check of an anchored vault reports in addition: what is not the newest, missing, or not recorded.
//!
//! None of this is repaired: only a person decides that what the store shows is the newest (`Vault::accept`).

use super::{Checker, Found, Located, kind};
use crate::digests::object_kind;
use crate::error::io;
use crate::{Kind, Result};
use lamassu_anchor::judge::{self, EntryVerdict};
use lamassu_anchor::{Digest, EntryPlace, EntryRow, ObjectId, SealedPart, Token};
use lamassu_store::BackendDir;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

/// Entries that the anchor has of a directory and that were not met yet.
pub(super) type Left = BTreeMap<Token, EntryRow>;

impl Checker<'_> {
    /// What is recorded in a directory; nothing in an unanchored vault.
    pub(super) fn recorded_in(&self, at: &Located) -> Result<Left> {
        match (&self.vault.anchored, at.object) {
            (Some(anchored), Some(object)) => Ok(anchored.anchor.entries(object)?),
            _ => Ok(Left::new()),
        }
    }

    /// Whether a sealed part is the newest. If not, that is noted.
    pub(super) fn is_newest(&mut self, at: &Located, part: SealedPart, shown: Digest, what: &str) -> Result<bool> {
        let Some(object) = at.object.filter(|_| self.vault.anchored.is_some()) else { return Ok(true) };
        let is_newest = self.vault.is_newest(object, part, shown)?;
        if !is_newest {
            self.stale(at, &format!("{what} not the newest: the store shows another state"));
        }
        Ok(is_newest)
    }

    pub(super) fn stale(&mut self, at: &Located, text: &str) {
        self.note(at, kind::STALE, Found::Damage, format!("{text}; see `lamassu anchor accept`"));
    }

    /// Judges an entry of a directory. Returns its object (`None` inside: unanchored); `None`: do not look at it
    /// further.
    pub(super) fn judge(
        &mut self,
        dir: &Located,
        left: &mut Left,
        at: &Located,
        listed: Option<Kind>,
    ) -> Result<Option<Option<ObjectId>>> {
        let (Some(anchored), Some(object)) = (&self.vault.anchored, dir.object) else { return Ok(Some(None)) };
        let place = anchored.place(object, &at.name);
        let mut recorded = left.remove(&place.name);
        if let Some(lies_here) = self.moving.places.get(&place).copied() {
            self.unfinished(at);
            // What a move replaces is no longer recorded.
            if lies_here.is_none() {
                return Ok(None);
            }
            recorded = lies_here;
        }
        let shown = listed.or_else(|| at.dir.stat_entry(&at.name).ok().map(|st| st.kind));
        // An entry that cannot be read is reported where it is read.
        let Some(shown) = shown else { return Ok(Some(recorded.map(|entry| entry.object))) };
        match judge::entry(recorded.as_ref(), Some(object_kind(shown))) {
            EntryVerdict::Current => Ok(Some(recorded.map(|entry| entry.object))),
            EntryVerdict::OtherKind => {
                let text = "something else lies here than was put here last; see `lamassu anchor accept`";
                self.note(at, kind::OTHER_KIND, Found::Damage, text.to_owned());
                Ok(None)
            }
            // It was removed, and the store's removal is pending.
            EntryVerdict::Unrecorded if !anchored.anchor.may_make(&place) => Ok(None),
            // It may be what a move that could not be completed has yet to move.
            EntryVerdict::Unrecorded if anchored.must_stay(&place) => {
                self.unfinished(at);
                Ok(None)
            }
            EntryVerdict::Unrecorded | EntryVerdict::Nothing | EntryVerdict::Missing => {
                self.unrecorded(at);
                Ok(None)
            }
        }
    }

    /// Whether the anchor has an entry of this name, whatever lies there; `left`: what was not met yet.
    pub(super) fn is_recorded(&self, dir: &Located, left: &Left, at: &Located) -> bool {
        let (Some(anchored), Some(object)) = (&self.vault.anchored, dir.object) else { return false };
        let place = anchored.place(object, &at.name);
        left.contains_key(&place.name) || self.moving.places.contains_key(&place) || anchored.must_stay(&place)
    }

    /// A place of a move that was interrupted.
    fn unfinished(&mut self, at: &Located) {
        let text = "a rename that goes from or to here was interrupted: the next mount, or `lamassu check --repair`, \
                    completes it";
        self.note(at, kind::MISSING, Found::Harmless, text.to_owned());
    }

    /// An entry that the anchor does not have. After an interruption it may be one that was being made. It was never
    /// acknowledged as durable, and a repair moves it away. Users never see it.
    fn unrecorded(&mut self, at: &Located) {
        let (found, text) = match (self.vault.is_after_crash(), self.repair) {
            (false, _) => (
                Found::Damage,
                "it is not recorded, so it is not shown: the store put it back or made it up; see `lamassu anchor \
                 accept`",
            ),
            (true, false) => (
                Found::Harmless,
                "it is not recorded, so it is not shown: it was being made when an interruption came, or the store put \
                 it back; `lamassu check --repair` moves it to lamassu.lost",
            ),
            (true, true) => {
                let entry = at.stored.display().to_string();
                let moved = at.dir.stat_entry(&at.name).map_err(io("stat")).and_then(|st| {
                    self.copy_link_rest(at, &*self.vault.lost_dir()?)?;
                    self.vault.move_handle_to_lost(&*at.dir, &at.name, &st, &entry)
                });
                match moved {
                    Ok(()) => (Found::Mended, "it is not recorded: it was moved to lamassu.lost"),
                    Err(error) => {
                        let text = format!("it is not recorded, and it could not be moved to lamassu.lost: {error}");
                        return self.note(at, kind::UNRECORDED, Found::Damage, text);
                    }
                }
            }
        };
        self.note(at, kind::UNRECORDED, found, text.to_owned());
    }

    /// Entries that the store does not have. Their names are not known.
    pub(super) fn missing(&mut self, dir: &Located, left: &Left) {
        for (token, entry) in left {
            let place = dir.object.map(|object| EntryPlace { dir: object, name: *token });
            let moves = |place| self.moving.places.contains_key(place) && !self.moving.absent.contains(place);
            if place.as_ref().is_some_and(moves) {
                self.unfinished(dir);
                continue;
            }
            let text = format!(
                "something in this directory is missing (object {} of the anchor): the store removed it, or gave it \
                 another name",
                entry.object
            );
            self.note(dir, kind::MISSING, Found::Damage, text);
        }
    }

    /// The object at a path in the store, if it is recorded.
    pub(super) fn object_of(&self, stored: &Path) -> Result<Option<ObjectId>> {
        let Some(anchored) = &self.vault.anchored else { return Ok(None) };
        let mut object = ObjectId::ROOT;
        for part in stored {
            let place = anchored.place(object, part);
            let entry = match self.moving.places.get(&place) {
                Some(lies_here) => *lies_here,
                None => anchored.anchor.entry(&place)?,
            };
            let Some(entry) = entry else { return Ok(None) };
            object = entry.object;
        }
        Ok(Some(object))
    }

    /// Whether the record of a directory is the newest, before the directory is walked.
    pub(super) fn is_record_newest(&mut self, at: &Located, dir: &dyn BackendDir) -> Result<bool> {
        if self.vault.anchored.is_none() || at.object.is_none() {
            return Ok(true);
        }
        let shown = match self.vault.record_text(dir) {
            Ok(text) => text.map_or(Digest::NONE, |text| crate::digests::digest_of_text(&text)),
            Err(crate::record::RecordFault::Missing | crate::record::RecordFault::NotARecord) => Digest::NONE,
            // The error is reported where the record is opened.
            Err(_) => return Ok(true),
        };
        self.is_newest(at, SealedPart::Content, shown, "its directory record is")
    }

    /// Whether the attributes of a directory's entry, or of the directory itself, are the newest.
    pub(super) fn are_attrs_newest(
        &mut self,
        at: &Located,
        dir: &dyn BackendDir,
        name: Option<&OsStr>,
    ) -> Result<bool> {
        let (Some(anchored), Some(object)) = (&self.vault.anchored, at.object) else { return Ok(true) };
        let _still = anchored.attrs_of(object).read();
        let look = || match name {
            Some(name) => {
                let held = dir.hold(name).map_err(crate::error::io("hold"))?;
                crate::anchored::shown_attrs(|| held.list_xattr(), |attr| held.get_xattr(attr))
            }
            None => crate::anchored::shown_attrs(|| dir.list_xattr(), |attr| dir.get_xattr(attr)),
        };
        match look() {
            Ok(attrs) => {
                let shown = crate::digests::digest_of_attributes(&attrs);
                self.is_newest(at, SealedPart::Attributes, shown, "its attributes are")
            }
            Err(error) => {
                self.note_io(at, "its attributes cannot be read", &error);
                Ok(false)
            }
        }
    }
}
