//! Files: opened for changes, committed (`docs/freshness.md`, section 3).

use super::names::held_of;
use super::{Anchor, Result, State};
use crate::queue::{Mark, held_key};
use crate::row::{Cut, FileRow, Open};
use crate::table::Space;
use crate::types::WINDOWS_MAX;
use crate::{AnchorError, Digest, Digests, ObjectId, RecordNo, Window, Windows};
use lamassu_format::{FileId, PageNo};
use std::collections::HashSet;

/// A file whose recorded pages are about to change (A1).
pub struct Opening {
    /// Which.
    pub object: ObjectId,
    /// The id that new pages carry.
    pub file: FileId,
    /// This session, and the highest sequence that it has given so far.
    pub window: Window,
    /// Every tree record with a leaf that will change, under the committed root.
    pub held: Vec<(RecordNo, Digests)>,
    /// The first page that a shrink is about to take away. Page 0 is the next page of the file that is written.
    pub cut: Option<PageNo>,
}

/// What a file is as of a barrier (A4).
pub struct FileCommit {
    /// Which.
    pub object: ObjectId,
    /// Its root.
    pub root: Digest,
    /// Its size.
    pub size: u64,
    /// A second page 0 that is as good.
    pub twin: Option<Digest>,
    /// This session, and the highest sequence that the barrier covered.
    pub window: Window,
    /// Tree records in `held` that have changed, under the new root.
    pub held: Vec<(RecordNo, Digests)>,
    /// Whether no page was written after that sequence: the file is clean then (A7).
    pub is_clean: bool,
}

impl Anchor {
    /// Notes durably that recorded pages of files are about to change (A1). What is durable already costs nothing.
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
        // Also what somebody else has queued and not committed yet.
        if objects.is_empty() { Ok(()) } else { self.commit_objects(&objects, Mark(0)) }
    }

    /// True: something is to be made durable.
    fn queue_opening(&self, state: &mut State, opening: &Opening) -> Result<bool> {
        let object = opening.object;
        let mut row = self.known(state, object)?;
        let file = row.file_mut().ok_or(AnchorError::Unknown { object })?;
        if open_window(file, opening)? {
            state.queue_row(object, row);
        }
        let durable = self.durable_row(object)?;
        let durable = durable.as_ref().and_then(|row| row.file()?.open.as_ref());
        let durable = durable.filter(|open| open.window(opening.window.session).is_some());
        let mut needs_commit = durable.is_none_or(|open| !holds_cut(open, opening.cut));
        for (record, digests) in &opening.held {
            let queued = state.layers().into_iter().flatten().find_map(|layer| layer.held.get(&(object, *record)));
            let is_durable = self.table.get(Space::Held, &held_key(object, *record))?.is_some();
            let is_going = queued.is_some_and(|digests| digests.is_none());
            if queued.is_none_or(|digests| digests.is_none()) && (!is_durable || is_going) {
                state.queued.held.insert((object, *record), Some(digests.clone()));
            }
            needs_commit |= !is_durable || is_going;
        }
        Ok(needs_commit && !state.nameless.contains_key(&object))
    }

    /// Queues what a file is as of a barrier that has returned (A4): durable with the next commit that takes it.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; [`AnchorError::Order`] where that would lower a sequence (A8); those of the table.
    pub fn commit_file(&self, commit: FileCommit) -> Result<()> {
        let object = commit.object;
        let state = &mut *self.state.lock();
        let mut row = self.known(state, object)?;
        let file = row.file_mut().ok_or(AnchorError::Unknown { object })?;
        let window = file.open.as_ref().and_then(|open| open.window(commit.window.session));
        let Some(window) = window else {
            return Err(AnchorError::Order { object, rule: "A1: committed without having been opened" });
        };
        if window.covered > commit.window.covered {
            return Err(AnchorError::Order { object, rule: "A8: a commit would lower a sequence" });
        }
        let cut = file.open.as_ref().and_then(|open| open.cut);
        if cut.is_some_and(|cut| cut.after >= commit.window) {
            return Err(AnchorError::Order { object, rule: "A9: a shrink voids a mark that came before it" });
        }
        (file.root, file.size, file.twin) = (commit.root, commit.size, commit.twin);
        let held: Vec<_> = if commit.is_clean {
            file.open = None;
            let held = held_of(&*self.table, state, object)?;
            held.into_iter().map(|record| (record, None)).collect()
        } else {
            let windows = Windows::from_iter([commit.window]);
            file.open.iter_mut().for_each(|open| (open.windows, open.cut) = (windows.clone(), None));
            commit.held.into_iter().map(|(record, digests)| (record, Some(digests))).collect()
        };
        if !state.nameless.contains_key(&object) {
            state.queued.held.extend(held.into_iter().map(|(record, digests)| ((object, record), digests)));
        }
        state.queue_row(object, row);
        Ok(())
    }
}

/// Whether a shrink to this page is noted.
fn holds_cut(open: &Open, cut: Option<PageNo>) -> bool {
    cut.is_none_or(|from| open.cut.is_some_and(|noted| noted.from <= from))
}

/// Adds a window to a file, if it has none of this session, and a shrink. True: the row has changed.
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
            return Err(order("too many sessions have left it open: recover it"));
        }
        open.windows.push(opening.window);
        open.windows.sort_unstable();
        changed = true;
    }
    if !holds_cut(open, opening.cut) {
        if open.cut.is_some() {
            return Err(order("A1: a second shrink, to less, before the first was committed"));
        }
        open.cut = cut;
        changed = true;
    }
    Ok(changed)
}
