//! Files: opened for changes, committed (`docs/freshness.md`, section 3).

use super::names::held_of;
use super::state::State;
use super::{Anchor, Result};
use crate::queue::{EntryMark, held_key};
use crate::row::{Cut, FileRow, Open, Row};
use crate::table::Space;
use crate::types::WINDOWS_MAX;
use crate::{AnchorError, Digest, Digests, ObjectId, RecordNo, Window, Windows};
use lamassu_format::{FileId, PageNo, Profile};
use std::collections::{BTreeMap, HashSet};

/// A file whose recorded pages are about to change (A1).
pub struct Opening {
    /// the file
    pub object: ObjectId,
    /// the id that new pages carry
    pub file: FileId,
    /// this session, and the highest sequence that it has used so far
    pub window: Window,
    /// every tree record with a leaf that will change, under the committed root
    pub held: Vec<(RecordNo, Digests)>,
    /// the first page that a shrink is about to remove; page 0 is then the next page of the file that is written
    pub cut: Option<PageNo>,
    /// whether no page 0 records the shrink that the row notes: then `cut` takes its place, or nothing. To be set
    /// before another page 0 is written, which would be taken for that of the shrink
    pub drops_cut: bool,
    /// if there is no room for another window: the session whose window is dropped for it. No page that the file has
    /// is of that session, and a barrier has covered this
    pub drops_window: Option<u32>,
}

/// The state of a file as of a barrier (A4).
pub struct FileCommit {
    /// the file
    pub object: ObjectId,
    /// its root
    pub root: Digest,
    /// its size
    pub size: u64,
    /// the protection of its blocks
    pub profile: Profile,
    /// the digest of a second page 0 with the same content
    pub twin: Option<Digest>,
    /// the root over its blocks, if it has one and the file is clean
    pub blocks: Option<Digest>,
    /// the session that last wrote its pages, and the highest sequence that the barrier covered; `None`: no page with a
    /// stamp was written since the row was read, so the file is clean
    pub window: Option<Window>,
    /// tree records to hold from now on, under the new root: those that have changed, and may change again
    pub held: Vec<(RecordNo, Digests)>,
    /// whether no page was written after that sequence: then the file is clean (A7)
    pub is_clean: bool,
    /// whether no page 0 records the shrink that the row notes: then it voids no mark
    pub drops_cut: bool,
}

impl Anchor {
    /// Notes durably that recorded pages of files are about to change (A1). Does not wait for what is durable already.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`], [`AnchorError::Order`]; those of the table. No page may be written then.
    pub fn open_files(&self, openings: &[Opening]) -> Result<()> {
        let mut objects = HashSet::new();
        {
            let state = &mut *self.state.lock();
            for opening in openings {
                if self.queue_opening(state, opening)? {
                    objects.insert(opening.object);
                }
            }
        }
        // Includes changes that another thread has queued and not committed yet.
        if objects.is_empty() { Ok(()) } else { self.commit_objects(&objects, EntryMark(0)) }
    }

    /// Queues an opening. True: it must become durable before pages are written.
    fn queue_opening(&self, state: &mut State, opening: &Opening) -> Result<bool> {
        let object = opening.object;
        let mut row = self.known(state, object)?;
        let file = row.file_mut().ok_or(AnchorError::Unknown { object })?;
        let has_changed = open_window(file, opening)?;
        let cut = file.open.as_ref().and_then(|open| open.cut);
        if has_changed {
            state.queue_row(object, row);
        }
        // What is in flight may not become durable, and what is durable may be about to change.
        let recorded = [flying_row(state, object), self.durable_row(object)?];
        let is_recorded = recorded.iter().any(Option::is_some);
        if let Some(nameless) = state.nameless.get_mut(&object) {
            for (record, digests) in &opening.held {
                nameless.held.entry(*record).or_insert_with(|| digests.clone());
            }
            return Ok(is_recorded); // once its removal is durable, nobody asks for its pages
        }
        // A2: a file that is not recorded may have a root in the queue, which any commit may take. So its row must
        // never become durable without the records held under its root. Only the wait is left out.
        let is_held = self.queue_held(state, opening)?;
        let is_noted = |row: &Row| {
            let open = row.file().and_then(|file| file.open.as_ref());
            // If the file was clean in between, it has another id: an earlier opening does not accept pages with the
            // new one.
            let open = open.filter(|open| open.file == opening.file && open.window(opening.window.session).is_some());
            open.is_some_and(|open| match opening.drops_cut {
                true => open.cut == cut,
                false => holds_cut(open, opening.cut),
            })
        };
        Ok(is_recorded && (!is_held || !recorded.iter().flatten().all(is_noted)))
    }

    /// Queues those tree records of an opening that are not held. True: all are held durably, and stay so.
    fn queue_held(&self, state: &mut State, opening: &Opening) -> Result<bool> {
        let object = opening.object;
        let mut is_held = true;
        for (record, digests) in &opening.held {
            let queued = state.layers().into_iter().flatten().find_map(|layer| layer.held.get(&(object, *record)));
            let is_durable = self.table.get(Space::Held, &held_key(object, *record))?.is_some();
            let is_going = queued.is_some_and(|digests| digests.is_none());
            if queued.is_none_or(|digests| digests.is_none()) && (!is_durable || is_going) {
                state.queued.held.insert((object, *record), Some(digests.clone()));
            }
            is_held &= is_durable && !is_going;
        }
        Ok(is_held)
    }

    /// The row of an object that is durable or in flight: then an opening has to wait for its commit.
    pub(super) fn recorded_row(&self, state: &State, object: ObjectId) -> Result<Option<Row>> {
        // An object whose removal is in flight still exists if that commit fails.
        flying_row(state, object).map_or_else(|| self.durable_row(object), |row| Ok(Some(row)))
    }

    /// Queues the digest of a file's first page, which is convergent and about to be written (A6). False: the row is
    /// durable or in flight, and the page must carry a stamp.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table.
    pub fn note_first_page(&self, object: ObjectId, twin: Digest, size: u64) -> Result<bool> {
        let state = &mut *self.state.lock();
        let mut row = self.known(state, object)?;
        let is_recorded = self.recorded_row(state, object)?.is_some();
        let Some(file) = row.file_mut() else { return Err(AnchorError::Unknown { object }) };
        if is_recorded || !file.root.is_none() || file.twin.is_some() || file.open.is_some() {
            return Ok(false);
        }
        (file.twin, file.size) = (Some(twin), size);
        state.queue_row(object, row);
        Ok(true)
    }

    /// Whether a digest is durably recorded as that of a second page 0 of a file, which may be written without a stamp
    /// (A6).
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn has_twin(&self, object: ObjectId, twin: Digest) -> Result<bool> {
        let row = self.durable_row(object)?;
        Ok(row.as_ref().and_then(Row::file).is_some_and(|file| file.twin == Some(twin)))
    }

    /// Queues the state of a file as of a barrier that has returned (A4). It is durable with the next commit that
    /// includes it.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; [`AnchorError::Order`] if that would lower a sequence (A8); those of the table.
    pub fn commit_file(&self, commit: FileCommit) -> Result<()> {
        let object = commit.object;
        let state = &mut *self.state.lock();
        let mut row = self.known(state, object)?;
        let file = row.file_mut().ok_or(AnchorError::Unknown { object })?;
        refuse_disorder(file, &commit)?;
        (file.root, file.size, file.twin) = (commit.root, commit.size, commit.twin);
        file.profile = commit.profile;
        file.blocks = commit.blocks.filter(|_| commit.is_clean);
        let mut held = BTreeMap::new();
        if commit.is_clean {
            file.open = None;
        } else {
            let windows = Windows::from_iter(commit.window);
            file.open.iter_mut().for_each(|open| (open.windows, open.cut) = (windows.clone(), None));
            held.extend(commit.held);
        }
        match state.nameless.get_mut(&object) {
            Some(nameless) => nameless.held = held,
            None => {
                // Other held records belong to an earlier root.
                let earlier = held_of(&*self.table, state, object)?;
                state.queued.held.extend(earlier.into_iter().map(|record| ((object, record), None)));
                let held = held.into_iter().map(|(record, digests)| ((object, record), Some(digests)));
                state.queued.held.extend(held);
            }
        }
        state.queue_row(object, row);
        Ok(())
    }
}

/// The row of an object that is in flight.
fn flying_row(state: &State, object: ObjectId) -> Option<Row> {
    state.flying.as_ref()?.objects.get(&object)?.clone()
}

/// Refuses a commit that the rules do not allow.
fn refuse_disorder(file: &FileRow, commit: &FileCommit) -> Result<()> {
    let order = |rule| Err(AnchorError::Order { object: commit.object, rule });
    let Some(window) = commit.window else {
        return if commit.is_clean { Ok(()) } else { order("A7: pages without a stamp alone, and not clean") };
    };
    let Some(open) = &file.open else { return order("A1: committed without having been opened") };
    match open.window(window.session) {
        None => order("A1: committed without having been opened"),
        Some(noted) if noted.covered > window.covered => order("A8: a commit would lower a sequence"),
        Some(_) if !commit.drops_cut && open.cut.is_some_and(|cut| cut.after >= window) => {
            order("A9: a shrink voids a mark that came before it")
        }
        Some(_) => Ok(()),
    }
}

/// Whether a shrink to this page is noted.
fn holds_cut(open: &Open, cut: Option<PageNo>) -> bool {
    cut.is_none_or(|from| open.cut.is_some_and(|noted| noted.from <= from))
}

/// Adds a window of this session to a file, unless it has one, and a shrink. True: the row has changed.
fn open_window(file: &mut FileRow, opening: &Opening) -> Result<bool> {
    let order = |rule| AnchorError::Order { object: opening.object, rule };
    let cut = opening.cut.map(|from| Cut { after: opening.window, from });
    let Some(open) = &mut file.open else {
        file.open = Some(Open { file: opening.file, windows: Windows::from_iter([opening.window]), cut });
        return Ok(true);
    };
    if open.file != opening.file {
        return Err(order("A1: a file that is open keeps its id"));
    }
    let mut changed = false;
    if open.window(opening.window.session).is_none() {
        if open.windows.len() == WINDOWS_MAX {
            let is_dropped = |window: &Window| Some(window.session) == opening.drops_window;
            let Some(at) = open.windows.iter().position(is_dropped) else {
                return Err(order("too many sessions have left it open: recover it"));
            };
            open.windows.remove(at);
        }
        open.windows.push(opening.window);
        open.windows.sort_unstable();
        changed = true;
    }
    if opening.drops_cut {
        changed |= open.cut != cut;
        open.cut = cut;
    } else if !holds_cut(open, opening.cut) {
        if open.cut.is_some() {
            return Err(order("A1: a second shrink, to less, before the first was committed"));
        }
        open.cut = cut;
        changed = true;
    }
    Ok(changed)
}
